# SPDX-License-Identifier: Apache-2.0
"""Our own kernel: every spec, no plan, replayable, in one graph."""

from __future__ import annotations

import torch

from dflash.attention.spec import AttentionBatch, AttentionSpec, LayerCache, Refusal, Support
from dflash.ops.paged_attention import paged_attention, paged_attention_workspace_size

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(spec: AttentionSpec) -> Support | Refusal:
    """Head dims and dtypes that the kernel is built for; fp8 caches too."""
    if spec.head_dim not in HEAD_DIMS:
        return Refusal(f"head_dim {spec.head_dim} is not one of {HEAD_DIMS}")
    if spec.dtype not in DTYPES:
        return Refusal(f"dtype {spec.dtype} is not float32, float16 or bfloat16")
    if spec.kv_dtype not in (spec.dtype, torch.float8_e4m3fn):
        return Refusal(f"a {spec.kv_dtype} cache under {spec.dtype} queries")
    if spec.num_heads % spec.num_kv_heads:
        return Refusal(f"{spec.num_heads} heads do not divide into {spec.num_kv_heads} K/V heads")
    return Support(replayable=True, in_one_graph=True)


class NativeAttention:
    """Calls paged_attention; one workspace per layer group of a model, as large as its largest batch."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.scale = spec.head_dim**-0.5
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, num_heads, head_dim], of queries of that shape; sinks [num_heads]."""
        return paged_attention(
            query,
            cache.key,
            cache.value,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=self.scale,
            causal=self.spec.causal,
            window_left=self.spec.window_left,
            window_right=self.spec.window_right,
            sinks=sinks,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            workspace=self._workspace_for(query, batch),
        )

    def _workspace_for(self, query: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        size = paged_attention_workspace_size(
            num_rows=query.shape[0],
            num_reqs=batch.seq_lens.shape[0],
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        if self._workspace.numel() < size or self._workspace.device != query.device:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=query.device)
        return self._workspace
