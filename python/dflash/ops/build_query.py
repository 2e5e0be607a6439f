# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import NamedTuple

import torch


class QueryRows(NamedTuple):
    """The outputs of build_query."""

    context_positions: torch.Tensor
    context_slot_mappings: list[torch.Tensor]
    query_input_ids: torch.Tensor
    query_positions: torch.Tensor
    query_slot_mappings: list[torch.Tensor]
    query_seq_lens: torch.Tensor
    draft_query_start_loc: torch.Tensor
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    sample_idx_mapping: torch.Tensor


def build_query(
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    block_tables: list[torch.Tensor],
    kv_block_sizes: list[int],
    num_speculative_tokens: int,
    mask_token_id: int,
    max_model_len: int,
    sample_from_anchor: bool,
    context_positions: torch.Tensor,
    context_slot_mappings: list[torch.Tensor],
    query_input_ids: torch.Tensor,
    query_positions: torch.Tensor,
    query_slot_mappings: list[torch.Tensor],
    query_seq_lens: torch.Tensor,
    draft_query_start_loc: torch.Tensor,
    sample_rows: torch.Tensor,
    sample_positions: torch.Tensor,
    sample_idx_mapping: torch.Tensor,
) -> None:
    """Context rows and query block of the drafter, from the rows the target has just computed.

    Row t of request r is valid when t < query_start_loc[r + 1] - num_rejected[r]: it keeps its
    position and gets a slot in every K/V group. The query block [bonus, mask x N] of Q rows starts
    right after the last valid position. Q = N + 1, or N with sample_from_anchor. A slot is -1 past
    max_model_len, past the table and in the null block (0). A request is padded when its map is -1,
    when none of its rows is valid, or past the batch: the outputs have P >= R requests.

    Args:
        target_positions: [T] int64; rows from query_start_loc[R] on are a bucket's tail.
        query_start_loc: [R + 1] int32, offsets of the requests' rows; the last is at most T.
        num_sampled: [R] int32, tokens committed; 0 after a partial prefill chunk.
        num_rejected: [R] int32, rows at the end of the request that do not count.
        last_sampled: [S] int64, the bonus where num_sampled > 0.
        next_prefill_tokens: [S] int64 or int32, the prompt token after the chunk, the bonus
            elsewhere.
        idx_mapping: [R] int32, batch row -> state row; -1 = padded request (inert).
        block_tables: for each K/V group (1 to 8) [R, columns] int32 in batch order, any row stride.
        kv_block_sizes: slots of a block, for each group.
        num_speculative_tokens: N >= 1.
        mask_token_id: id of the positions to fill in.
        max_model_len: positions a request may use.
        sample_from_anchor: the block has N rows, and row j predicts the position after its own.
        context_positions: output, [T] int64; 0 in rejected, padded and tail rows.
        context_slot_mappings: outputs, [T] int64 for each group; -1 = not stored.
        query_input_ids: output, [P * Q] int64 or int32: the bonus, then masks; 0 in padded rows.
        query_positions: output, [P * Q] int64, clamped to max_model_len - 1; 0 in padded rows.
        query_slot_mappings: outputs, [P * Q] int64 for each group; -1 = not stored.
        query_seq_lens: output, [P] int32: min(last valid position + 1 + Q, max_model_len); 0 for a
            padded request.
        draft_query_start_loc: output, [P + 1] int32: r * Q, padded requests included.
        sample_rows: output, [P * N] int64: the query row to sample from, also in padded requests.
        sample_positions: output, [P * N] int64: the position of the token predicted, not clamped
            (it keys the noise); 0 in padded rows.
        sample_idx_mapping: output, [P * N] int32: the state row; -1 in padded rows.
    """
    torch.ops.dflash.build_query(
        target_positions,
        query_start_loc,
        num_sampled,
        num_rejected,
        last_sampled,
        next_prefill_tokens,
        idx_mapping,
        block_tables,
        kv_block_sizes,
        num_speculative_tokens,
        mask_token_id,
        max_model_len,
        sample_from_anchor,
        context_positions,
        context_slot_mappings,
        query_input_ids,
        query_positions,
        query_slot_mappings,
        query_seq_lens,
        draft_query_start_loc,
        sample_rows,
        sample_positions,
        sample_idx_mapping,
    )


@torch.library.register_fake("dflash::build_query")
def _(
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    block_tables: list[torch.Tensor],
    kv_block_sizes: list[int],
    num_speculative_tokens: int,
    mask_token_id: int,
    max_model_len: int,
    sample_from_anchor: bool,
    context_positions: torch.Tensor,
    context_slot_mappings: list[torch.Tensor],
    query_input_ids: torch.Tensor,
    query_positions: torch.Tensor,
    query_slot_mappings: list[torch.Tensor],
    query_seq_lens: torch.Tensor,
    draft_query_start_loc: torch.Tensor,
    sample_rows: torch.Tensor,
    sample_positions: torch.Tensor,
    sample_idx_mapping: torch.Tensor,
) -> None:
    return None


def build_query_reference(
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    block_tables: list[torch.Tensor],
    kv_block_sizes: list[int],
    num_speculative_tokens: int,
    mask_token_id: int,
    max_model_len: int,
    sample_from_anchor: bool,
    num_output_reqs: int | None = None,
) -> QueryRows:
    """The same in plain Python, request by request, over a padded bucket; never serves."""
    num_reqs, num_groups = num_output_reqs or len(idx_mapping), len(block_tables)
    num_query = num_speculative_tokens + (0 if sample_from_anchor else 1)
    sampled_rows = range(0 if sample_from_anchor else 1, num_query)
    starts, rejected = query_start_loc.tolist(), num_rejected.tolist()
    states, target = idx_mapping.tolist(), target_positions.tolist()
    tables = [table.tolist() for table in block_tables]

    def slots_of(r: int, positions: list[int], group: int) -> list[int]:
        owned = [
            block * kv_block_sizes[group] + offset if block > 0 else -1
            for block in tables[group][r]
            for offset in range(kv_block_sizes[group])
        ][:max_model_len]
        return [owned[p] if p < len(owned) else -1 for p in positions]

    context = [0] * len(target)
    context_slots = [[-1] * len(target) for _ in range(num_groups)]
    ids, positions = [0] * (num_reqs * num_query), [0] * (num_reqs * num_query)
    seq_lens = [0] * num_reqs
    slots = [[-1] * (num_reqs * num_query) for _ in range(num_groups)]
    sample_positions = [0] * (num_reqs * num_speculative_tokens)
    sample_states = [-1] * (num_reqs * num_speculative_tokens)
    for r, state in enumerate(states):
        valid = slice(starts[r], max(starts[r], starts[r + 1] - rejected[r]))
        kept = target[valid]
        if state < 0 or not kept:
            continue
        block = list(range(kept[-1] + 1, kept[-1] + 1 + num_query))
        query = slice(r * num_query, (r + 1) * num_query)
        sampled = slice(r * num_speculative_tokens, (r + 1) * num_speculative_tokens)
        bonus = last_sampled[state] if num_sampled[r] > 0 else next_prefill_tokens[state]
        context[valid] = kept
        ids[query] = [int(bonus)] + [mask_token_id] * (num_query - 1)
        positions[query] = [min(p, max_model_len - 1) for p in block]
        seq_lens[r] = min(block[-1] + 1, max_model_len)
        sample_positions[sampled] = [kept[-1] + 2 + j for j in range(num_speculative_tokens)]
        sample_states[sampled] = [state] * num_speculative_tokens
        for group in range(num_groups):
            context_slots[group][valid] = slots_of(r, kept, group)
            slots[group][query] = slots_of(r, block, group)

    def tensor(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=idx_mapping.device)

    return QueryRows(
        context_positions=tensor(context),
        context_slot_mappings=[tensor(group) for group in context_slots],
        query_input_ids=tensor(ids),
        query_positions=tensor(positions),
        query_slot_mappings=[tensor(group) for group in slots],
        query_seq_lens=tensor(seq_lens, torch.int32),
        draft_query_start_loc=tensor([r * num_query for r in range(num_reqs + 1)], torch.int32),
        sample_rows=tensor([r * num_query + row for r in range(num_reqs) for row in sampled_rows]),
        sample_positions=tensor(sample_positions),
        sample_idx_mapping=tensor(sample_states, torch.int32),
    )
