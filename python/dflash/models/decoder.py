# SPDX-License-Identifier: Apache-2.0
"""The pre-norm transformer under both the target and the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dflash.attention.select import select_backend
from dflash.attention.spec import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CaptureLimits,
    LayerCache,
    Support,
)
from dflash.checkpoints.config import DecoderConfig, LayerAttention
from dflash.checkpoints.matrix import Matrix
from dflash.checkpoints.weights import LayerWeights
from dflash.models.linear import is_streamed, linear, linear_silu_mul
from dflash.models.rope import cos_sin_cache
from dflash.ops.add_rms_norm import add_rms_norm
from dflash.ops.qk_norm_rope_store import qk_norm_rope_store


@dataclass(frozen=True)
class Taps:
    """Where the residual stream after some layers goes: columns of one [rows, n * H] buffer."""

    layer_ids: tuple[int, ...]
    buffer: torch.Tensor

    def column(self, layer: int, rows: int) -> torch.Tensor | None:
        """The slice for the output of `layer`, or None when it is not tapped."""
        if layer not in self.layer_ids:
            return None
        size = self.buffer.shape[1] // len(self.layer_ids)
        start = self.layer_ids.index(layer) * size
        return self.buffer[:rows, start : start + size]


@dataclass(frozen=True)
class DecoderSettings:
    """What the engine decides about a decoder, the same for every layer."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_block_size: int
    max_model_len: int
    attention_backend: str = "auto"
    tile_rows: int | None = None  # see models/linear.py
    query_shape: Literal["ragged", "uniform", "one"] = "ragged"


class Decoder:
    """Layers, final norm, RoPE table, K/V caches and attention backends of one model.

    Layers with equal causality and window share one backend; caches are made last, from what memory is left.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[LayerWeights],
        norm: torch.Tensor,
        settings: DecoderSettings,
        value_scale: float = 1.0,
    ) -> None:
        self.config = config
        self.layers = list(layers)
        self.is_streamed = all(
            is_streamed(matrix)
            for layer in self.layers
            for matrix in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        )
        self.norm = norm
        self.value_scale = value_scale
        self.kv_dtype = settings.kv_dtype
        self.tile_rows = settings.tile_rows
        self.query_shape = settings.query_shape
        self.rope_table = cos_sin_cache(config.rope, settings.max_model_len, settings.device)
        self.caches: list[LayerCache] = []
        self.cache_scales: torch.Tensor | None = None  # float32 [L], of fp8 caches: K's and V's
        self.backend_names: dict[LayerAttention, str] = {}
        self.backends: dict[LayerAttention, AttentionBackend] = {}
        self.support: dict[LayerAttention, Support] = {}
        has_sinks = [layer.sinks is not None for layer in layers]
        arch = arch_of(settings.device)
        for group, spec in attention_specs(config, settings, arch, has_sinks).items():
            choice, backend = select_backend(spec, settings.attention_backend, settings.device)
            self.backend_names[group], self.backends[group] = choice.backend.name, backend
            self.support[group] = choice.support

    @property
    def eager_reason(self) -> str | None:
        """Why the forward cannot stand in the iteration graph; None when it can."""
        for group, support in self.support.items():
            if not (support.replayable and support.in_one_graph):
                return f"attention backend {self.backend_names[group]}: {support.reason}"
        return None

    @property
    def prompts_eager_reason(self) -> str | None:
        """Why a forward of prompts cannot stand in a graph; None when it can, or when none comes."""
        if self.query_shape != "ragged":
            return None
        for group, support in self.support.items():
            if not support.ragged:
                reason = support.reason or "captured for one query length only"
                return f"attention backend {self.backend_names[group]}: {reason}"
        return self.eager_reason

    def prepare(self, batch: AttentionBatch) -> None:
        """Host work of the backends before an eager forward."""
        for backend in self.backends.values():
            backend.prepare(batch)

    def init_capture(self, limits: CaptureLimits) -> None:
        """Once, before any graph: backends make what graphs will point at."""
        for backend in self.backends.values():
            backend.init_capture(limits)

    def prepare_capture(self, batch: AttentionBatch) -> None:
        """Before a bucket is captured.

        Raises:
            ValueError: a backend's launches may not be replayed; says why.
        """
        reason = self.eager_reason
        if reason is not None:
            raise ValueError(f"this forward cannot be captured: {reason}")
        for backend in self.backends.values():
            backend.prepare_capture(batch)

    def prepare_replay(self, batch: AttentionBatch) -> None:
        """Before each replay."""
        for backend in self.backends.values():
            backend.prepare_replay(batch)

    def cache_bytes(self, num_slots: int) -> int:
        """Bytes of all layers' K/V."""
        heads, size = self.config.num_kv_heads, self.config.head_dim
        return self.config.num_layers * 2 * num_slots * heads * size * self.kv_dtype.itemsize

    def allocate_cache(self, num_blocks: int, kv_block_size: int) -> None:
        """Makes the K/V caches, [L, 2, num_blocks, kv_block_size, num_kv_heads, head_dim]."""
        heads, size = self.config.num_kv_heads, self.config.head_dim
        shape = (self.config.num_layers, 2, num_blocks, kv_block_size, heads, size)
        device = self.norm.device
        # A backend may load slots that it masks: a NaN there, times a probability of 0, would spread.
        make = torch.zeros if device.type == "cuda" else torch.empty
        storage = make(shape, dtype=self.kv_dtype, device=device)
        if self.kv_dtype == torch.float8_e4m3fn:
            self.cache_scales = torch.ones(self.config.num_layers, device=device)
        for i, layer in enumerate(storage):
            scale = None if self.cache_scales is None else self.cache_scales[i : i + 1]
            self.caches.append(LayerCache(layer[0], layer[1], scale, scale))

    def forward(
        self, residual: torch.Tensor, batch: AttentionBatch, taps: Taps | None = None
    ) -> torch.Tensor:
        """Runs all layers over `residual` [T, H], which is updated in place.

        Returns:
            The final-normed hidden states [T, H]. Tapped layers' outputs (un-normed) go to `taps`.
        """
        rows = residual.shape[0]
        x = None
        for i, weights in enumerate(self.layers):
            tap = taps.column(i - 1, rows) if taps else None
            hidden = self._norm(x, residual, weights.input_layernorm, tap)
            hidden = self._attention(i, hidden, batch)
            hidden = self._norm(hidden, residual, weights.post_attention_layernorm)
            hidden = linear_silu_mul(hidden, weights.gate_up_proj, self.tile_rows)
            x = self.linear(hidden, weights.down_proj)
        tap = taps.column(len(self.layers) - 1, rows) if taps else None
        return self._norm(x, residual, self.norm, tap)

    def linear(
        self,
        x: torch.Tensor,
        weight: Matrix,
        bias: Matrix | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x @ weight^T + bias, as the settings ask."""
        return linear(x, weight, bias, self.tile_rows, output)

    def _norm(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        tap: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, self.config.rms_norm_eps, tap=tap)

    def _attention(self, i: int, hidden: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        weights, cache = self.layers[i], self.caches[i]
        qkv = self.linear(hidden, weights.qkv_proj, weights.qkv_bias)
        query = hidden.new_empty(hidden.shape[0], self.config.num_heads, self.config.head_dim)
        qk_norm_rope_store(
            qkv,
            q_norm_weight=weights.q_norm,
            k_norm_weight=weights.k_norm,
            rms_norm_eps=self.config.rms_norm_eps,
            cos_sin_cache=self.rope_table,
            is_neox=self.config.rope.is_neox,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            value_scale=self.value_scale,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            query=query,
            key_cache=cache.key,
            value_cache=cache.value,
        )
        backend = self.backends[self.config.layers[i]]
        output = backend.forward(query, cache, batch, weights.sinks)
        return self.linear(output.flatten(1), weights.o_proj, weights.o_bias)


def attention_specs(
    config: DecoderConfig, settings: DecoderSettings, arch: str, has_sinks: Sequence[bool]
) -> dict[LayerAttention, AttentionSpec]:
    """What attention each layer group needs; has_sinks by layer."""
    return {
        group: AttentionSpec(
            arch=arch,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            causal=group.causal,
            window=group.window,
            query_shape=settings.query_shape,
            kv_block_size=settings.kv_block_size,
            has_sinks=has_sinks[config.layers.index(group)],
            batch_invariant=settings.tile_rows is not None,
        )
        for group in dict.fromkeys(config.layers)
    }


def arch_of(device: torch.device) -> str:
    """ "cpu", or "sm_90" and the like."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
