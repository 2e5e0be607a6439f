# SPDX-License-Identifier: Apache-2.0
"""Our own kernel: every spec, no plan, replayable, in one graph."""

from __future__ import annotations

import torch

from dflash.attention.spec import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CaptureLimits,
    LayerCache,
    Refusal,
    Support,
    refusal,
)
from dflash.ops.paged_attention import paged_attention, paged_attention_workspace_size

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ARCHES = ("cpu", "sm_90", "sm_100", "sm_103")


def supports(spec: AttentionSpec) -> Support | Refusal:
    """Head dims and dtypes that the kernel is built for; fp8 caches too."""
    return refusal(
        spec.arch not in ARCHES and f"no kernel for {spec.arch}",
        spec.head_dim not in HEAD_DIMS and f"head_dim {spec.head_dim} is not one of {HEAD_DIMS}",
        spec.dtype not in DTYPES and f"dtype {spec.dtype} is not float32, float16 or bfloat16",
        spec.kv_dtype not in (spec.dtype, torch.float8_e4m3fn)
        and f"a {spec.kv_dtype} cache under {spec.dtype} queries",
        spec.num_heads % spec.num_kv_heads != 0
        and f"{spec.num_heads} heads do not divide into {spec.num_kv_heads} K/V heads",
    ) or Support(replayable=True, in_one_graph=True)


class NativeAttention(AttentionBackend):
    """Calls paged_attention. The workspace grows with the batches until init_capture fixes it."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._is_fixed = False

    def init_capture(self, limits: CaptureLimits) -> None:
        size = self._workspace_size(
            limits.max_rows, limits.max_reqs, limits.max_query_len, limits.max_seq_len
        )
        self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._is_fixed = True

    def prepare_capture(self, batch: AttentionBatch) -> None:
        # Poison: a graph that relied on what the workspace holds would show it at once.
        self._workspace.fill_(255)

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
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
        size = self._workspace_size(
            query.shape[0], batch.seq_lens.shape[0], batch.max_query_len, batch.max_seq_len
        )
        if self._workspace.numel() >= size:
            return self._workspace
        larger = torch.empty(size, dtype=torch.uint8, device=self.device)
        if not self._is_fixed:
            self._workspace = larger
        # NOTE: graphs hold the fixed one's address; a larger batch's lives as long as its forward.
        return larger

    def _workspace_size(
        self, num_rows: int, num_reqs: int, max_query_len: int, max_seq_len: int
    ) -> int:
        return paged_attention_workspace_size(
            num_rows=num_rows,
            num_reqs=num_reqs,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
