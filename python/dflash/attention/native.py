# SPDX-License-Identifier: Apache-2.0
"""Our own kernel: every spec, no plan, replayable, in one graph."""

from __future__ import annotations

import torch

from dflash.attention.spec import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    LayerCache,
    Refusal,
    Support,
    refusal,
)
from dflash.ops.paged_attention import paged_attention

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INVARIANT_SPLITS = 8
"""Pieces of a row's keys where its bits must not depend on the batch: enough for a single request to fill a GPU."""

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
    ) or Support(replayable=True, in_one_graph=True, ragged=True)


class NativeAttention(AttentionBackend):
    """Calls paged_attention: one launch, nothing kept between launches."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._num_splits = INVARIANT_SPLITS if spec.batch_invariant else 0

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
            num_splits=self._num_splits,
        )
