# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from dflash.ops import noise_reference


def sample_draft(
    logits: torch.Tensor,
    sample_positions: torch.Tensor,
    sample_idx_mapping: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    d2t: torch.Tensor | None = None,
    first_column: int = 0,
    draft_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draft tokens from the drafter's logits: argmax, or Gumbel-max with the draft stream.

    Row j drafts column i = j % N of state row s = sample_idx_mapping[j]. With
    l = logits[j] * logit_scale, o = first_column + i + 1 and anchor = sample_positions[j] - o:

        temperature 0: k = first argmax of l
        else:          k = first argmax of l / temperature + Gumbel(seed, anchor, o, target id)
        draft_tokens[s, i] = k + d2t[k]

    The noise is keyed by the id in the target's vocabulary. NaN counts as -inf; a row without a
    number gives k = 0. Source of the noise: Philox4x32-10 (Salmon et al., 2011).

    Args:
        logits: [R * N, >= vocab_size] float32, float16 or bfloat16, any row stride.
        sample_positions: [R * N] int64, the position of the token that a row predicts.
        sample_idx_mapping: [R * N] int32, state row, -1 = nothing is written.
        draft_tokens: [S, N] int64, written.
        temperatures: [S] float32; absent = argmax everywhere.
        seeds: [S] int64, required with temperatures.
        vocab_size: columns that count, padding excluded; all when absent.
        logit_scale: multiplies the logits.
        d2t: [vocab_size] int64, target id minus draft id.
        first_column: of the block, where draft_tokens and draft_logits are views of its columns
            from there on.
        draft_logits: [S, N, V_target] of any of the three dtypes, written at [s, i]: the scaled
            logits by target id, -inf outside the draft's vocabulary. A sampled row is drawn from
            the values as stored, so that softmax(draft_logits / temperature) is exactly the
            distribution it comes from.

    Returns:
        draft_tokens.

    Raises:
        ValueError: vocab_size is not within the columns of logits, or seeds are missing.
    """
    if vocab_size is None:
        vocab_size = logits.shape[-1]
    columns = logits.shape[-1]
    if not 1 <= vocab_size <= columns:
        raise ValueError(
            f"vocab_size: expected 1 to {columns} (the columns of logits), got {vocab_size}"
        )
    if temperatures is not None and seeds is None:
        raise ValueError("seeds: required with temperatures")
    torch.ops.dflash.sample_draft(
        logits,
        sample_positions,
        sample_idx_mapping,
        temperatures,
        seeds,
        vocab_size,
        logit_scale,
        d2t,
        first_column,
        draft_tokens,
        draft_logits,
    )
    return draft_tokens


@torch.library.register_fake("dflash::sample_draft")
def _(
    logits: torch.Tensor,
    sample_positions: torch.Tensor,
    sample_idx_mapping: torch.Tensor,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    vocab_size: int,
    logit_scale: float,
    d2t: torch.Tensor | None,
    first_column: int,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
) -> None:
    return None


def sample_draft_reference(
    logits: torch.Tensor,
    sample_positions: torch.Tensor,
    sample_idx_mapping: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    d2t: torch.Tensor | None = None,
    first_column: int = 0,
    draft_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, row by row; never serves."""
    num_drafts = draft_tokens.shape[1]
    num_ids = logits.shape[1] if vocab_size is None else vocab_size
    ids = torch.arange(num_ids, device=logits.device)
    target_ids = ids if d2t is None else ids + d2t
    for j, s in enumerate(sample_idx_mapping.tolist()):
        if s < 0:
            continue
        i = j % num_drafts
        row = logits[j, :num_ids].float() * logit_scale
        row = row.masked_fill(row.isnan(), -torch.inf)
        temperature = 0.0 if temperatures is None else float(temperatures[s])
        if draft_logits is not None:
            draft_logits[s, i] = -torch.inf
            draft_logits[s, i, target_ids] = row.to(draft_logits.dtype)
            if temperature > 0:
                row = draft_logits[s, i, target_ids].float()
        if temperature > 0:
            assert seeds is not None
            offset = first_column + i + 1
            anchor = int(sample_positions[j]) - offset
            stream, seed = noise_reference.DRAFT, int(seeds[s])
            noise = noise_reference.gumbel(stream, seed, anchor, offset, target_ids)
            row = row.double() / temperature + noise
        draft_tokens[s, i] = target_ids[first_argmax(row)]
    return draft_tokens


def first_argmax(row: torch.Tensor) -> int:
    """Index of the first maximum; 0 for a row of -inf."""
    return int((row == row.max()).nonzero()[0])
