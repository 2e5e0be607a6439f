# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from dflash.ops import noise_reference
from dflash.ops.sample_draft import first_argmax, sample_draft_reference


def lm_head_sample(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    tokens: torch.Tensor,
    *,
    logits_start_loc: torch.Tensor | None = None,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    d2t: torch.Tensor | None = None,
    first_column: int = 0,
) -> torch.Tensor:
    """The tokens that rows sample from the head's logits, without the logits where `lm_head_sample_plan` says so.

    With l_j = logit_scale * hidden_states[j] @ weight[:vocab_size].T, summed in fp32 and not rounded, row j gives

        temperature 0: k = first argmax of l_j
        else:          k = first argmax of l_j / temperature + Gumbel noise

    and writes k + d2t[k]. Two kinds of rows:

    Draft rows, without logits_start_loc: idx_mapping, tokens and the noise are those of `sample_draft`: row j drafts
    column i = j % N of state row s = idx_mapping[j], o = first_column + i + 1, noise of the draft stream at
    (seed, positions[j] - o, o), written to tokens[s, i].

    Verified rows, with it: request r is state row idx_mapping[r] and owns the rows logits_start_loc[r] ..
    logits_start_loc[r + 1]; noise of the target stream at (seed, positions[j] + 1), written to tokens[j]: what
    `rejection_sample` draws from row j, and takes as target_tokens.

    The first of equal maxima wins. NaN counts as -inf; a row without a number gives k = 0. Rows of state -1, and rows
    of no request, write nothing.

    Args:
        hidden_states: [T, H] float32, float16 or bfloat16, any row stride.
        weight: [V, H], same dtype.
        positions: [T] int64, of the token that a row predicts; of verified rows: of their input.
        idx_mapping: [T] int32, or [R] with logits_start_loc; -1 = padded.
        tokens: [S, N] int64, or [T] with logits_start_loc; written.
        logits_start_loc: [R + 1] int32: the rows are verified ones.
        temperatures: [S] float32; absent = argmax everywhere.
        seeds: [S] int64, required with temperatures.
        vocab_size: rows of weight that count, padding excluded; all when absent.
        logit_scale: multiplies the logits.
        d2t: [vocab_size] int64, target id minus draft id; the noise is keyed by the target's.
        first_column: of the block, where tokens is a view of its columns from there on.

    Returns:
        tokens.

    Raises:
        ValueError: vocab_size is not within the rows of weight, or seeds are missing.
    """
    rows = weight.shape[0]
    vocab_size = rows if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= rows:
        raise ValueError(f"vocab_size: expected 1 to {rows} (the rows of weight), got {vocab_size}")
    if temperatures is not None and seeds is None:
        raise ValueError("seeds: required with temperatures")
    torch.ops.dflash.lm_head_sample(
        hidden_states,
        weight,
        positions,
        idx_mapping,
        logits_start_loc,
        temperatures,
        seeds,
        vocab_size,
        logit_scale,
        d2t,
        first_column,
        tokens,
    )
    return tokens


@torch.library.register_fake("dflash::lm_head_sample")
def _(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    logits_start_loc: torch.Tensor | None,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    vocab_size: int,
    logit_scale: float,
    d2t: torch.Tensor | None,
    first_column: int,
    tokens: torch.Tensor,
) -> None:
    return None


def lm_head_sample_plan(
    hidden_states: torch.Tensor, weight: torch.Tensor, vocab_size: int | None = None
) -> tuple[int, int, int] | None:
    """(rows, warpgroups, splits) of the streaming GEMM that samples in its epilogue; None: logits are made.

    On sm_90 it takes up to 128 rows of a vocabulary of more than 8448, and blocks of 128 (225 to 256 rows, 449 to 512)
    where the tiles of vocab_size (all of weight when absent) fill the SMs. A row's sums are the same in each.
    """
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    return tuple(torch.ops.dflash.lm_head_sample_plan(hidden_states, weight, vocab_size)) or None


@torch.library.register_fake("dflash::lm_head_sample_plan")
def _(hidden_states: torch.Tensor, weight: torch.Tensor, vocab_size: int) -> list[int]:
    return []


def lm_head_sample_reference(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    tokens: torch.Tensor,
    *,
    logits_start_loc: torch.Tensor | None = None,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    d2t: torch.Tensor | None = None,
    first_column: int = 0,
) -> torch.Tensor:
    """The same in plain torch, row by row, from sums in fp64; never serves."""
    num_ids = weight.shape[0] if vocab_size is None else vocab_size
    logits = hidden_states.double() @ weight[:num_ids].double().T
    if logits_start_loc is None:
        return sample_draft_reference(
            logits,
            positions,
            idx_mapping,
            tokens,
            temperatures=temperatures,
            seeds=seeds,
            logit_scale=logit_scale,
            d2t=d2t,
            first_column=first_column,
        )
    ids = torch.arange(num_ids, device=weight.device)
    target_ids = ids if d2t is None else ids + d2t
    for r, s in enumerate(idx_mapping.tolist()):
        for j in range(int(logits_start_loc[r]), int(logits_start_loc[r + 1])):
            if s < 0:
                continue
            row = logits[j] * logit_scale
            row = row.masked_fill(row.isnan(), -torch.inf)
            temperature = 0.0 if temperatures is None else float(temperatures[s])
            if temperature > 0:
                assert seeds is not None
                stream, position = noise_reference.TARGET, int(positions[j]) + 1
                noise = noise_reference.gumbel(stream, int(seeds[s]), position, 0, target_ids)
                row = row / temperature + noise
            tokens[j] = target_ids[first_argmax(row)]
    return tokens
