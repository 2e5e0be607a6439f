# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import NamedTuple

import torch


class VerifyRows(NamedTuple):
    """The outputs of build_verify."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


def build_verify(
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    block_table: torch.Tensor,
    kv_block_size: int,
    max_model_len: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    """Rows the target verifies: [bonus, d_1..d_N] of each request at positions s..s + N, Q = N + 1.

    Position p lies in slot block_table[r, p // kv_block_size] * kv_block_size + p % kv_block_size;
    -1 where p >= max_model_len, where the table has no such column, where the block is the null
    block (0), and in padded rows.

    Args:
        idx_mapping: [R] int32, batch row -> state row; -1 = padded request (inert).
        seq_lens: [S] int32, s: committed tokens whose K/V exist, the position of the bonus.
        last_sampled: [S] int64, the bonus.
        draft_tokens: [S, N] int64, any row stride, N may be 0; -1 = no draft there.
        block_table: [R, columns] int32 in batch order, any row stride.
        kv_block_size: slots of a block.
        max_model_len: positions a request may use.
        input_ids: output, [R * Q] int64: the bonus, then the drafts; 0 for an absent draft and in
            padded rows.
        positions: output, [R * Q] int64, clamped to max_model_len - 1; 0 in padded rows.
        slot_mapping: output, [R * Q] int64; -1 = not stored.
        query_seq_lens: output, [R] int32: s + Q, not clamped, so that causal alignment is right; 0
            for a padded request.
        query_start_loc: output, [R + 1] int32: r * Q, padded requests included.
    """
    torch.ops.dflash.build_verify(
        idx_mapping,
        seq_lens,
        last_sampled,
        draft_tokens,
        block_table,
        kv_block_size,
        max_model_len,
        input_ids,
        positions,
        slot_mapping,
        query_seq_lens,
        query_start_loc,
    )


@torch.library.register_fake("dflash::build_verify")
def _(
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    block_table: torch.Tensor,
    kv_block_size: int,
    max_model_len: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    return None


def build_verify_reference(
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    block_table: torch.Tensor,
    kv_block_size: int,
    max_model_len: int,
) -> VerifyRows:
    """The same in plain torch over whole tensors; never serves."""
    num_rows_per_req = draft_tokens.shape[1] + 1
    live = (idx_mapping >= 0)[:, None]  # [R, 1]
    state = idx_mapping.long().clamp(min=0)
    steps = torch.arange(num_rows_per_req, device=idx_mapping.device)
    positions = seq_lens[state].long()[:, None] + steps  # [R, Q]
    ids = torch.cat([last_sampled[state][:, None], draft_tokens[state]], dim=1).clamp(min=0)

    # Columns past the table and past max_model_len look up an appended null block.
    table = torch.nn.functional.pad(block_table.long(), (0, 1))
    columns = (positions // kv_block_size).clamp(max=table.shape[1] - 1)
    columns[positions >= max_model_len] = table.shape[1] - 1
    blocks = table.gather(1, columns)
    slots = blocks * kv_block_size + positions % kv_block_size
    return VerifyRows(
        input_ids=torch.where(live, ids, 0).flatten(),
        positions=torch.where(live, positions.clamp(max=max_model_len - 1), 0).flatten(),
        slot_mapping=torch.where(live & (blocks > 0), slots, -1).flatten(),
        query_seq_lens=torch.where(live[:, 0], seq_lens[state] + num_rows_per_req, 0).int(),
        query_start_loc=torch.arange(
            0,
            idx_mapping.shape[0] * num_rows_per_req + 1,
            num_rows_per_req,
            dtype=torch.int32,
            device=idx_mapping.device,
        ),
    )
