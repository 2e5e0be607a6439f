# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import torch

IN_PROMPT = -(1 << 31)
"""Bit 31 of an entry of token_counts."""


def process_logits(
    logits: torch.Tensor,
    logits_start_loc: torch.Tensor,
    logits_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    draft_tokens: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
    repetition_penalties: torch.Tensor | None = None,
    frequency_penalties: torch.Tensor | None = None,
    presence_penalties: torch.Tensor | None = None,
    token_counts: torch.Tensor | None = None,
    logit_bias_ids: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    min_seq_lens: torch.Tensor | None = None,
    stop_token_ids: torch.Tensor | None = None,
    vocab_size: int | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits that the target's tokens are sampled from.

    Request r is state row s = idx_mapping[r] and owns the logits rows logits_start_loc[r] ..
    logits_start_loc[r + 1]; row i follows d_1 .. d_i = draft_tokens[s, :i], which count as
    generated. A row at position p samples the token at p + 1. Step by step, in float32:

        l += logit_bias[s, k] for token logit_bias_ids[s, k]
        l = -inf for stop_token_ids[s] while p + 1 < min_seq_lens[s]
        l = l / repetition if l > 0 else l * repetition, for a token in the prompt or generated
        l -= frequency * times generated
        l -= presence, for a token generated
        (a row of temperature 0 ends here)
        l /= temperature
        min_p: keeps the tokens with probability >= min_p * the largest
        top_k: keeps those not less than the k-th largest
        top_p: keeps those with less than top_p of the remaining mass strictly above them

    What is not kept is -inf; ties are kept, and always the maximum. NaN counts as -inf and +inf as
    the largest float. This is vLLM's order; each step alone is transformers' processor of that
    name, ties aside. A row's bits depend on that row and its request alone.

    Args:
        logits: [M, >= vocab_size] float32, float16 or bfloat16, any row stride.
        logits_start_loc: [R + 1] int32; a request may have 0 rows.
        logits_positions: [M] int64, positions of the rows' input tokens.
        idx_mapping: [R] int32, state row; -1 = padded, its rows are not written.
        draft_tokens: [S, N] int64; ids outside the vocabulary are no tokens.
        temperatures: [S] float32; 0 = greedy.
        top_ks: [S] int32; <= 0 or >= vocab_size = off.
        top_ps: [S] float32; >= 1 = off.
        min_ps: [S] float32; <= 0 = off.
        repetition_penalties: [S] float32; 1 = off.
        frequency_penalties: [S] float32; 0 = off.
        presence_penalties: [S] float32; 0 = off.
        token_counts: [S, >= vocab_size] int32, any row stride; bit 31 set iff the token is in the
            prompt, the low 31 bits = times generated. Required with penalties.
        logit_bias_ids: [S, B] int64; -1 = unused.
        logit_bias: [S, B] float32.
        min_seq_lens: [S] int64: a stop token may first stand at this position.
        stop_token_ids: [S, K] int64; -1 = unused. Required with min_seq_lens.
        vocab_size: columns that count, padding excluded; all when absent.
        output: [M, >= vocab_size] float32, any row stride, written; float32 logits may be given
            again. Columns past vocab_size are not written. Allocated when absent.

    Returns:
        output.

    Raises:
        ValueError: vocab_size outside the columns of logits, or one of two arguments that belong
            together is missing.
    """
    columns = logits.shape[-1]
    if vocab_size is None:
        vocab_size = columns
    if not 1 <= vocab_size <= columns:
        raise ValueError(
            f"vocab_size: expected 1 to {columns} (the columns of logits), got {vocab_size}"
        )
    penalties = (repetition_penalties, frequency_penalties, presence_penalties)
    if token_counts is None and any(penalty is not None for penalty in penalties):
        raise ValueError("token_counts: required by penalties")
    if (logit_bias_ids is None) != (logit_bias is None):
        raise ValueError("logit_bias: expected together with logit_bias_ids")
    if min_seq_lens is not None and stop_token_ids is None:
        raise ValueError("stop_token_ids: required by min_seq_lens")
    if output is None:
        output = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    torch.ops.dflash.process_logits(
        logits,
        logits_start_loc,
        logits_positions,
        idx_mapping,
        draft_tokens,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        repetition_penalties,
        frequency_penalties,
        presence_penalties,
        token_counts,
        logit_bias_ids,
        logit_bias,
        min_seq_lens,
        stop_token_ids,
        vocab_size,
        output,
    )
    return output


@torch.library.register_fake("dflash::process_logits")
def _(
    logits: torch.Tensor,
    logits_start_loc: torch.Tensor,
    logits_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    draft_tokens: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    repetition_penalties: torch.Tensor | None,
    frequency_penalties: torch.Tensor | None,
    presence_penalties: torch.Tensor | None,
    token_counts: torch.Tensor | None,
    logit_bias_ids: torch.Tensor | None,
    logit_bias: torch.Tensor | None,
    min_seq_lens: torch.Tensor | None,
    stop_token_ids: torch.Tensor | None,
    vocab_size: int,
    output: torch.Tensor,
) -> None:
    return None


def process_logits_reference(
    logits: torch.Tensor,
    logits_start_loc: torch.Tensor,
    logits_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    draft_tokens: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
    repetition_penalties: torch.Tensor | None = None,
    frequency_penalties: torch.Tensor | None = None,
    presence_penalties: torch.Tensor | None = None,
    token_counts: torch.Tensor | None = None,
    logit_bias_ids: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    min_seq_lens: torch.Tensor | None = None,
    stop_token_ids: torch.Tensor | None = None,
    vocab_size: int | None = None,
    output: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch, row by row, with a sort; never serves."""
    num_ids = logits.shape[1] if vocab_size is None else vocab_size

    def of_state(values: torch.Tensor | None, s: int, absent: float) -> float:
        return absent if values is None else float(values[s])

    for r, s in enumerate(idx_mapping.tolist()):
        if s < 0:
            continue
        begin, end = logits_start_loc[r : r + 2].tolist()
        for i, row in enumerate(range(begin, end)):
            x = _clean(logits[row, :num_ids].float())
            if logit_bias_ids is not None and logit_bias is not None:
                for token, bias in zip(logit_bias_ids[s].tolist(), logit_bias[s], strict=True):
                    if 0 <= token < num_ids:
                        x[token] += bias
                x = _clean(x)
            if min_seq_lens is not None and int(logits_positions[row]) + 1 < int(min_seq_lens[s]):
                assert stop_token_ids is not None
                for token in stop_token_ids[s].tolist():
                    if 0 <= token < num_ids:
                        x[token] = -torch.inf
            if token_counts is not None:
                generated = token_counts[s, :num_ids] & ~IN_PROMPT
                for token in draft_tokens[s, :i].tolist():
                    if 0 <= token < num_ids:
                        generated[token] += 1
                seen = (generated > 0) | (token_counts[s, :num_ids] < 0)
                repetition = of_state(repetition_penalties, s, 1.0)
                frequency = of_state(frequency_penalties, s, 0.0)
                presence = of_state(presence_penalties, s, 0.0)
                x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
                x = x - frequency * generated
                x = _clean(torch.where(generated > 0, x - presence, x))
            temperature = float(temperatures[s])
            if temperature > 0:
                x = _clean(x / temperature)
                top_k = num_ids if top_ks is None else int(top_ks[s])
                x = _keep(x, top_k, of_state(top_ps, s, 1.0), of_state(min_ps, s, 0.0))
            output[row, :num_ids] = x
    return output


def _clean(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)


def _keep(x: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """min_p, top_k and top_p of one row, in float64, over its distinct values in order."""
    if not (x > -torch.inf).any():
        return x
    exact = x.double()
    if min_p > 0:
        exact[exact - exact.max() < min(math.log(min_p), 0.0)] = -torch.inf
    if 0 < top_k < len(x):
        exact[exact < exact.topk(top_k).values[-1]] = -torch.inf
    if top_p < 1:
        values, inverse = exact.sort(descending=True).values.unique_consecutive(return_inverse=True)
        probabilities = exact.sort(descending=True).values.softmax(0)
        mass = torch.zeros_like(values).index_add_(0, inverse, probabilities)
        above = mass.cumsum(0) - mass
        above[0] = -1.0  # the maximum, whatever top_p is
        exact[exact < values[above < top_p].min()] = -torch.inf
    return x.masked_fill(exact == -torch.inf, -torch.inf)
