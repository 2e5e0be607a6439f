# SPDX-License-Identifier: Apache-2.0
"""torch's scaled_dot_product_attention on gathered K/V: any device, eager, the oracle of the others."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dflash.attention.spec import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    LayerCache,
    Refusal,
    Support,
    refusal,
)


def supports(spec: AttentionSpec) -> Support | Refusal:
    """Everything but sinks and caches of another dtype."""
    return refusal(
        spec.has_sinks and "attention sinks are not expressible",
        spec.batch_invariant and "its splits follow the batch",
        spec.kv_dtype != spec.dtype and f"a {spec.kv_dtype} cache under {spec.dtype} queries",
    ) or Support(False, False, "it reads the lengths on the host")


class SdpaAttention(AttentionBackend):
    """One call a request; reads the lengths on the host."""

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        starts = batch.query_start_loc.tolist()
        capacity = batch.block_table.shape[1] * cache.key.shape[1]
        for r, seq_len in enumerate(batch.seq_lens.tolist()):
            first, last = starts[r], starts[r + 1]
            num_keys = min(seq_len, batch.max_seq_len, capacity)
            if seq_len == 0 or first == last:
                continue
            key = self._gather(cache.key, batch.block_table[r], num_keys)
            value = self._gather(cache.value, batch.block_table[r], num_keys)
            mask = self._mask(seq_len, last - first, num_keys, query.device)
            output[first:last] = F.scaled_dot_product_attention(
                query[first:last].transpose(0, 1)[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return output

    @staticmethod
    def _gather(cache: torch.Tensor, blocks: torch.Tensor, num_keys: int) -> torch.Tensor:
        num_blocks = -(-num_keys // cache.shape[1])
        return cache[blocks[:num_blocks].long()].flatten(0, 1)[:num_keys]

    def _mask(
        self, seq_len: int, query_len: int, num_keys: int, device: torch.device
    ) -> torch.Tensor:
        q = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
        k = torch.arange(num_keys, device=device)[None, :]
        visible = torch.ones(query_len, num_keys, dtype=torch.bool, device=device)
        if self.spec.causal:
            visible &= k <= q
        if self.spec.window is not None:
            visible &= q - k < self.spec.window
            if not self.spec.causal:
                visible &= k - q < self.spec.window
        return visible
