# SPDX-License-Identifier: Apache-2.0
"""What the tests of ops that store K and V share: caches, slots, a RoPE table, one comparison."""

import torch

from .support import RELATIVE_ERROR, assert_close

FP8 = torch.float8_e4m3fn
POISON = 55.0
MAX_POSITIONS = 300


def make_cache(num_blocks, kv_block_size, num_kv_heads, head_dim, dtype, device, layout="NHD"):
    """A poisoned cache [num_blocks, kv_block_size, heads, D]: contiguous (NHD), heads before tokens
    (HND), or K of an interleaved K and V buffer (KV)."""
    if layout == "HND":
        shape = (num_blocks, num_kv_heads, kv_block_size, head_dim)
        return torch.full(shape, POISON, device=device).to(dtype).transpose(1, 2)
    shape = (num_blocks, 2 if layout == "KV" else 1, kv_block_size, num_kv_heads, head_dim)
    return torch.full(shape, POISON, device=device).to(dtype)[:, 0]


def make_slots(rows, kv_block_size, device, skip_every=4):
    """Distinct slots outside block 0, shuffled, every fourth row -1; and the blocks that need."""
    num_blocks = 2 + (rows + kv_block_size - 1) // kv_block_size
    slots = kv_block_size + torch.randperm((num_blocks - 1) * kv_block_size)[:rows]
    slots[skip_every - 1 :: skip_every] = -1
    return slots.to(device), num_blocks


def make_rope(rotary_dim, device, max_positions=MAX_POSITIONS):
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    angles = torch.outer(torch.arange(max_positions), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


def assert_cache_close(actual, expected, slots):
    """Stored rows are close to the reference's, every other byte is still the poison."""
    stored = torch.zeros(actual.shape[0] * actual.shape[1], dtype=torch.bool)
    stored[slots[slots >= 0].cpu()] = True
    a = actual.float().cpu().flatten(0, 1)
    e = expected.float().cpu().flatten(0, 1)
    assert (a[~stored] == torch.tensor(POISON).to(actual.dtype).float()).all(), "wrote elsewhere"
    tolerance = 1e-2 if actual.dtype == FP8 else RELATIVE_ERROR[actual.dtype]
    if stored.any():
        assert_close(a[stored], e[stored], tolerance)
