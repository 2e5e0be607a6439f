# SPDX-License-Identifier: Apache-2.0
"""Attention batches for every backend, and what sdpa in float32 makes of them."""

from dataclasses import replace

import torch

from dflash.attention.sdpa import SdpaAttention
from dflash.attention.spec import AttentionBatch, AttentionSpec, LayerCache

SPEC = AttentionSpec(
    arch="cpu", num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.float32, kv_dtype=torch.float32,
    causal=False, window=None, query_shape="uniform", kv_block_size=16,
)  # fmt: skip


class Pool:
    """A cache of random K/V and requests that hold blocks of it; block 0 is the null block.

    Args:
        max_seq_len: of a request; a block table has columns for it.
    """

    def __init__(self, spec, max_reqs, max_seq_len, device="cpu", seed=0):
        self.spec, self.device = spec, torch.device(device)
        self.max_seq_len = max_seq_len
        self.columns = -(-max_seq_len // spec.kv_block_size)
        self.generator = torch.Generator().manual_seed(seed)
        num_blocks = 1 + max_reqs * self.columns
        shape = (2, num_blocks, spec.kv_block_size, spec.num_kv_heads, spec.head_dim)
        storage = torch.randn(shape, device=device).to(spec.kv_dtype)
        storage[:, 0] = float("nan")
        self.cache = LayerCache(storage[0], storage[1])
        self.shuffle(max_reqs)

    def shuffle(self, max_reqs):
        """Requests leave and others join: every row of the table gets other blocks."""
        blocks = torch.randperm(max_reqs * self.columns, generator=self.generator) + 1
        self.tables = blocks.view(max_reqs, self.columns).int()

    def batch(self, lens):
        """(query, batch) of (query_len, seq_len) a request; columns past a sequence are the null block."""
        size, table = self.spec.kv_block_size, self.tables[: len(lens)].clone()
        for r, (_, seq_len) in enumerate(lens):
            table[r, -(-seq_len // size) :] = 0
        starts = [0]
        for query_len, _ in lens:
            starts.append(starts[-1] + query_len)
        rows = starts[-1]
        query = torch.randn(
            rows, self.spec.num_heads, self.spec.head_dim, generator=self.generator
        ).to(self.device, self.spec.dtype)

        def ints(values):
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        batch = AttentionBatch(
            positions=torch.zeros(rows, dtype=torch.int64, device=self.device),
            slot_mapping=torch.full((rows,), -1, device=self.device),
            block_table=table.to(self.device),
            seq_lens=ints([seq_len for _, seq_len in lens]),
            query_start_loc=ints(starts),
            max_query_len=max(query_len for query_len, _ in lens),
            max_seq_len=self.max_seq_len,
        )
        return query, batch

    def expected(self, query, batch):
        """The same attention in float32 through sdpa."""
        spec = replace(self.spec, dtype=torch.float32, kv_dtype=torch.float32)
        cache = LayerCache(self.cache.key.float(), self.cache.value.float())
        return SdpaAttention(spec, self.device).forward(query.float(), cache, batch, None)


def worst_row(actual, expected):
    """The largest ||actual - expected|| / ||expected|| of a row, over all heads; rows of zeros must be zeros."""
    a, e = actual.double().flatten(1), expected.double().flatten(1)
    silent = e.norm(dim=1) == 0
    assert (a[silent] == 0).all(), "a row that sees nothing is not zero"
    errors = (a - e).norm(dim=1) / e.norm(dim=1).clamp_min(1e-30)
    return float(errors[~silent].max())
