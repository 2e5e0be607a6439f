# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""K/V of the context rows in vLLM's DFlash model: norm, one GEMM, one store kernel for all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash.log import log_once
from dflash.ops.precompute_context_kv import precompute_context_kv

Slots = torch.Tensor | Sequence[torch.Tensor | None] | None


def install() -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    original = DFlashQwen3Model.precompute_and_store_context_kv
    if hasattr(original, "__wrapped__"):  # loaded twice in one process
        return
    DFlashQwen3Model.precompute_and_store_context_kv = with_fused_store(
        original, DFlashQwen3Model, FlashAttentionImpl.do_kv_cache_update
    )


@dataclass(frozen=True)
class Plan:
    """What a model's calls have in common."""

    cos_sin_cache: torch.Tensor  # float32 [max_positions, rotary_dim], vLLM's own rounded values
    value_scale: float
    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]
    places: list[tuple[int, int]]  # address and blocks of each cache


def with_fused_store(
    original: Callable[..., None], model_class: type, cache_update: Callable[..., None]
) -> Callable[..., None]:
    """vLLM's method; models and caches that are not served, and dummy runs, go the original's way.

    Args:
        model_class: whose projections are replaced; a subclass that overrides them is left alone.
        cache_update: of the attention implementation whose cache layout we know.
    """

    @functools.wraps(original)
    def precompute_and_store_context_kv(
        self: Any,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: Slots = None,
    ) -> None:
        slots = _per_layer(self, context_slot_mapping)
        plan = None
        if slots is not None:
            plan = _plan(self, context_states, model_class, cache_update)
        if slots is None or plan is None:
            return original(self, context_states, context_positions, context_slot_mapping)
        groups = {slot.data_ptr(): slot for slot in slots}
        order = list(groups)
        precompute_context_kv(
            context_states,
            self._hidden_norm_weight,
            self._rms_norm_eps,
            self._fused_kv_weight,
            self._fused_kv_bias,
            self._k_norm_weights,
            plan.cos_sin_cache,
            self._rope_is_neox,
            context_positions,
            list(groups.values()),
            [order.index(slot.data_ptr()) for slot in slots],
            plan.value_scale,
            None,
            None,
            plan.key_caches,
            plan.value_caches,
        )

    return precompute_and_store_context_kv


def _per_layer(model: Any, slots: Slots) -> list[torch.Tensor] | None:
    """A slot mapping a layer; None in a dummy run, which stores nothing, and before the buffers exist."""
    if slots is None or not hasattr(model, "_num_attn_layers"):
        return None
    if isinstance(slots, torch.Tensor):
        return [slots] * model._num_attn_layers
    present = [slot for slot in slots if slot is not None]
    return present if len(present) == model._num_attn_layers else None


def _plan(
    model: Any, states: torch.Tensor, model_class: type, cache_update: Callable[..., None]
) -> Plan | None:
    """The model's plan, made anew when its caches have moved; None where it is not served."""
    places = [(a.kv_cache.data_ptr(), a.kv_cache.shape[0]) for a in model._attn_layers]
    plan = model.__dict__.get("_dflash_plan")
    if plan is not None and plan.places == places:
        return plan
    if is_capturing(states):  # what graphs read must not be made inside one
        log_once("vLLM: context K/V is left in a graph captured before its first eager step")
        return None
    reason = _refusal(model, states, model_class, cache_update)
    if reason is not None:
        log_once(f"vLLM: context K/V of {type(model).__name__} is left: {reason}")
        return None
    keys, values = zip(
        *(split_cache(a.kv_cache, model._head_dim) for a in model._attn_layers), strict=True
    )
    scale = getattr(model.layers[0].self_attn, "v_scale", None)
    plan = Plan(
        model._rope_cos_sin_cache.float().contiguous(),
        1.0 if scale is None else float(scale),
        list(keys),
        list(values),
        places,
    )
    model.__dict__["_dflash_plan"] = plan
    return plan


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether the tensor's stream records a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def split_cache(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [blocks, slots, heads, head_dim] of vLLM's [blocks, heads, slots, 2 * head_dim]; views."""
    keys, values = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
    return keys, values


def _refusal(
    model: Any, states: torch.Tensor, model_class: type, cache_update: Callable[..., None]
) -> str | None:
    for name in ("_project_context_kv", "_normalize_context_k"):
        if getattr(type(model), name) is not getattr(model_class, name):
            return f"it has its own {name}"
    if model._fused_kv_weight is None:
        return "its weights are quantised"
    for attn in model._attn_layers:
        kind = type(attn.impl)
        if kind.do_kv_cache_update is not cache_update:
            return f"the cache layout of {kind.__name__} is not known"
        cache = attn.kv_cache
        if cache.dim() != 4 or cache.shape[3] != 2 * model._head_dim or cache.dtype != states.dtype:
            return f"a cache of {cache.dtype} {list(cache.shape)} is not served"
    return None
