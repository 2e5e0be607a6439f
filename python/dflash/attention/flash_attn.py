# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3, where its flash_attn_interface is installed. Declared from its interface, not measured here."""

from __future__ import annotations

import importlib
import importlib.util

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

MODULE = "flash_attn_interface"
DTYPES = (torch.float16, torch.bfloat16)


def missing() -> str | None:
    """What this machine lacks."""
    if importlib.util.find_spec(MODULE) is None:
        return f"{MODULE} (FlashAttention 3) is not installed"
    return None


def supports(spec: AttentionSpec) -> Support | Refusal:
    """Lengths and page table are read on the device: a captured launch needs no new plan."""
    return refusal(
        spec.arch != "sm_90" and f"FlashAttention 3 is for sm_90, not {spec.arch}",
        spec.dtype not in DTYPES and f"dtype {spec.dtype} is not float16 or bfloat16",
        spec.kv_dtype != spec.dtype and f"a {spec.kv_dtype} cache under {spec.dtype} queries",
        (spec.head_dim % 8 != 0 or spec.head_dim > 256)
        and f"head_dim {spec.head_dim} is no multiple of 8 up to 256",
        spec.num_heads % spec.num_kv_heads != 0
        and f"{spec.num_heads} heads do not divide into {spec.num_kv_heads} K/V heads",
        spec.has_sinks and "no attention sinks",
        spec.batch_invariant and "its splits follow the batch",
    ) or Support(replayable=True, in_one_graph=True)


class FlashAttention(AttentionBackend):
    """Calls flash_attn_with_kvcache on the page table as it is."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._attend = importlib.import_module(MODULE).flash_attn_with_kvcache

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        causal = self.spec.causal
        return self._attend(
            q=query,
            k_cache=cache.key,
            v_cache=cache.value,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=self.scale,
            causal=causal,
            window_size=(self.spec.window_left, 0 if causal else self.spec.window_right),
        )
