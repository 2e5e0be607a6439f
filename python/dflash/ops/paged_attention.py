# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ragged query rows over a paged K/V cache.

    Row i of request r stands at position p = seq_lens[r] - query_len + i. It sees key k iff
    k < min(seq_lens[r], max_seq_len, block_table.shape[1] * kv_block_size); with causal k <= p;
    p - k <= window_left and k - p <= window_right. A row that sees nothing gives zeros.
    output = sum_k softmax_k(scale * q . k, sink) v, accumulated in fp32 and rounded once.

    Keys that no row of a request sees are never read. Lengths, offsets and the block table are read
    on the device: a captured call replays at any length within max_query_len and max_seq_len.

    Args:
        query: [T, Hq, D] float32, float16 or bfloat16, any row and head stride. D is 64, 96, 128 or
            256; on a CPU any multiple of 8 up to 256.
        key_cache: [num_blocks, kv_block_size, Hk, D] of the query's dtype or float8_e4m3fn, any
            strides over a contiguous last dimension. Hk divides Hq.
        value_cache: like key_cache.
        block_table: [R, max_blocks] int32, in batch order. An id outside the cache reads as zeros.
        seq_lens: [R] int32, keys of a request; 0 for a padded one.
        query_start_loc: [R + 1] int32. Rows of output past its last value are left as they are.
        max_query_len: host bound of the rows of a request; rows past it are not computed.
        max_seq_len: host bound of seq_lens.
        scale: multiplies q . k, usually D ** -0.5.
        causal: whether a row sees no key past its own position.
        window_left: keys seen before a row's position; -1 = all.
        window_right: keys seen after a row's position; -1 = all.
        sinks: [Hq] float32, one logit a head that joins the softmax and carries no value.
        k_scale: [1] float32, what a stored K is multiplied by; 1 when absent.
        v_scale: [1] float32, the same for V.
        num_splits: pieces that a row's keys are dealt to. 0 = as many as fill the device. 1, 2, 4
            or 8 = this many: the bits of a row then depend on its own query and visible keys alone,
            neither on later rows of its request nor on the batch. On a CPU all of these do so.
        output: [T, Hq, D], the query's dtype; allocated when absent.

    Returns:
        output.

    Raises:
        RuntimeError: an argument's shape, dtype, device or layout is not what is listed above; the
            message names it.
    """
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    torch.ops.dflash.paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        max_query_len,
        max_seq_len,
        scale,
        causal,
        window_left,
        window_right,
        sinks,
        k_scale,
        v_scale,
        num_splits,
        output,
    )
    return output


@torch.library.register_fake("dflash::paged_attention")
def _(*args: object) -> None:
    return None


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, in fp64; never serves. Rows of no request are zeros."""
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    kv_block_size = key_cache.shape[1]
    capacity = block_table.shape[1] * kv_block_size
    group = query.shape[1] // key_cache.shape[2]
    offsets = query_start_loc.tolist()
    for r, seq_len in enumerate(seq_lens.tolist()):
        begin, end = offsets[r], offsets[r + 1]
        num_keys = min(seq_len, max_seq_len, capacity)
        if end <= begin or num_keys <= 0:
            continue
        k = torch.arange(num_keys, device=query.device)
        p = torch.arange(seq_len - (end - begin), seq_len, device=query.device)[:, None]
        visible = torch.ones(end - begin, num_keys, dtype=torch.bool, device=query.device)
        if causal:
            visible &= k <= p
        if window_left >= 0:
            visible &= p - k <= window_left
        if window_right >= 0:
            visible &= k - p <= window_right
        blocks = block_table[r].long()[k // kv_block_size]
        used = visible.any(0)[:, None, None]
        keys = torch.where(used, key_cache[blocks, k % kv_block_size].double(), 0.0)
        values = torch.where(used, value_cache[blocks, k % kv_block_size].double(), 0.0)
        if k_scale is not None:
            keys = keys * k_scale.double()
        if v_scale is not None:
            values = values * v_scale.double()
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), keys) * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat([scores, sink], dim=2)
        probabilities = torch.softmax(scores, dim=2)[..., :num_keys]
        probabilities = torch.where(visible.any(1)[:, None], probabilities, 0.0)
        output[begin:end] = torch.einsum("hqk,khd->qhd", probabilities, values).to(query.dtype)
    return output
