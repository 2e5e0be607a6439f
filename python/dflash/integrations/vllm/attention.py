# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Registers dflash's draft attention as vLLM's attention backend CUSTOM."""

from __future__ import annotations

from typing import Any

import torch

from dflash.integrations.vllm.context_kv import split_cache
from dflash.log import log_once
from dflash.ops.paged_attention import paged_attention

BACKEND = "dflash.integrations.vllm.backend.DFlashBackend"
HEAD_DIMS = (64, 96, 128, 256)


def install() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        raise RuntimeError("another plugin has registered the attention backend CUSTOM")
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def layer_refusal(impl: Any, decoder: Any) -> str | None:
    """Why a layer goes FlashAttention's way, from vLLM's implementation object; None when it is served.

    Args:
        decoder: vLLM's AttentionType.DECODER.
    """
    if impl.attn_type != decoder:
        return f"attention of type {impl.attn_type}"
    if tuple(impl.sliding_window) != (-1, -1):
        return "a sliding window"
    if impl.head_size not in HEAD_DIMS:
        return f"heads of {impl.head_size}"
    if impl.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        return f"a cache of {impl.kv_cache_dtype}"
    for name in ("alibi_slopes", "logits_soft_cap", "sinks"):
        value = getattr(impl, name)
        if value is not None and (isinstance(value, torch.Tensor) or value):
            return name
    if impl.batch_invariant_enabled:  # the number of splits follows the batch
        return "batch invariance"
    return "context parallelism" if impl.dcp_world_size > 1 else None


def batch_is_served(metadata: Any) -> bool:
    """Plain rows: one causality for all, no cascade, no multimodal or reference ranges, no window."""
    absent = (
        "mm_prefix_range_tensor",
        "mm_prefix_query_range_tensor",
        "rswa_prefix_lens",
        "sliding_window",
    )
    if any(getattr(metadata, name, None) not in (None, (-1, -1)) for name in absent):
        return False
    return isinstance(metadata.causal, bool) and not getattr(metadata, "use_cascade", False)


def attend(
    impl: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
) -> torch.Tensor:
    """paged_attention with vLLM's metadata of a batch; rows past num_actual_tokens stay as they are."""
    rows = metadata.num_actual_tokens
    paged_attention(
        query[:rows],
        *split_cache(kv_cache, impl.head_size),
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        metadata.max_query_len,
        metadata.max_seq_len,
        impl.scale,
        metadata.causal,
        output=output[:rows],
    )
    return output


def say_left(reason: str) -> None:
    log_once(f"vLLM: attention with {reason} is left to FlashAttention")
