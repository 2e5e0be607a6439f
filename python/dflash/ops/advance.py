# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import NamedTuple

import torch

RUNNING, STOP_TOKEN, LENGTH = 0, 1, 2
"""Values of `finished`."""


class AdvancedState(NamedTuple):
    """What advance changes."""

    seq_lens: torch.Tensor
    last_sampled: torch.Tensor
    tokens_left: torch.Tensor
    finished: torch.Tensor
    step: torch.Tensor
    output_ring: torch.Tensor
    token_counts: torch.Tensor | None = None


def advance(
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    stop_token_ids: torch.Tensor | None,
    seq_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    tokens_left: torch.Tensor,
    finished: torch.Tensor,
    step: torch.Tensor,
    output_ring: torch.Tensor,
    token_counts: torch.Tensor | None = None,
) -> None:
    """Commits what was sampled to the state, in place.

    For a request with num_sampled > 0: seq_lens += num_sampled, tokens_left -= num_sampled,
    last_sampled = its last token, finished = STOP_TOKEN if that token stops it, else LENGTH if no
    token is left, else RUNNING. num_sampled = 0 leaves the state as it is. Every live request's row
    of output_ring[step % ring] is written; the rows of padded requests are not. Then step += 1.

    Args:
        sampled_token_ids: [R, C] int64 (C = N + 1), any row stride.
        num_sampled: [R] int32, at most C; a stop token can only be the last of them.
        idx_mapping: [R] int32, batch row -> state row, each at most once; -1 = padded request.
        stop_token_ids: [S, K] int64, any row stride; -1 = unused.
        seq_lens: state, [S] int32: committed tokens whose K/V exist, the position of the bonus.
        last_sampled: state, [S] int64: the bonus.
        tokens_left: state, [S] int32: tokens the request may still commit.
        finished: state, [S] int32: RUNNING, STOP_TOKEN or LENGTH.
        step: state, [1] int64: steps taken.
        output_ring: state, [ring, S, 3 + C] int64: step, num_sampled, finished, then tokens padded
            with -1; any strides over a contiguous last dimension.
        token_counts: state, [S, V] int32, any row stride; [row, token] += 1 for each committed
            token. Bit 31 is left to process_logits.
    """
    torch.ops.dflash.advance(
        sampled_token_ids,
        num_sampled,
        idx_mapping,
        stop_token_ids,
        seq_lens,
        last_sampled,
        tokens_left,
        finished,
        step,
        output_ring,
        token_counts,
    )


@torch.library.register_fake("dflash::advance")
def _(
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    stop_token_ids: torch.Tensor | None,
    seq_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    tokens_left: torch.Tensor,
    finished: torch.Tensor,
    step: torch.Tensor,
    output_ring: torch.Tensor,
    token_counts: torch.Tensor | None = None,
) -> None:
    return None


def advance_reference(
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    stop_token_ids: torch.Tensor | None,
    seq_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    tokens_left: torch.Tensor,
    finished: torch.Tensor,
    step: torch.Tensor,
    output_ring: torch.Tensor,
    token_counts: torch.Tensor | None = None,
) -> AdvancedState:
    """A new state by the same rules in plain Python; never serves."""
    state = (seq_lens, last_sampled, tokens_left, finished, step, output_ring)
    counts = None if token_counts is None else token_counts.clone()
    new = AdvancedState(*(tensor.clone() for tensor in state), token_counts=counts)
    entry = new.output_ring[int(step) % len(output_ring)]
    for r, row in enumerate(idx_mapping.tolist()):
        if row < 0:
            continue
        tokens = sampled_token_ids[r, : int(num_sampled[r])].tolist()
        if tokens:
            stops = set() if stop_token_ids is None else set(stop_token_ids[row].tolist()) - {-1}
            new.seq_lens[row] += len(tokens)
            if counts is not None:
                for token in tokens:
                    counts[row, token] += 1
            new.tokens_left[row] -= len(tokens)
            new.last_sampled[row] = tokens[-1]
            out_of_tokens = LENGTH if new.tokens_left[row] <= 0 else RUNNING
            new.finished[row] = STOP_TOKEN if tokens[-1] in stops else out_of_tokens
        padding = [-1] * (sampled_token_ids.shape[1] - len(tokens))
        values = [int(step), len(tokens), int(new.finished[row]), *tokens, *padding]
        entry[row] = torch.tensor(values, device=entry.device)
    new.step.add_(1)
    return new
