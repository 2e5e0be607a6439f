# SPDX-License-Identifier: Apache-2.0
"""What attention a layer group needs, what a backend can do, and the batch it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


@dataclass(frozen=True)
class AttentionSpec:
    """Everything a backend needs to know to say whether it can serve a group of layers."""

    arch: str  # "cpu" or "sm_90", "sm_100", ...
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    causal: bool
    window: int | None  # key visible iff q - k < window (and k - q < window when non-causal)
    query_shape: Literal["ragged", "uniform", "one"]
    kv_block_size: int
    has_sinks: bool = False

    @property
    def window_left(self) -> int:
        """Keys visible before the query, -1 for all."""
        return -1 if self.window is None else self.window - 1

    @property
    def window_right(self) -> int:
        """Keys visible after the query, -1 for no bound but causality."""
        return -1 if self.window is None or self.causal else self.window - 1


@dataclass(frozen=True)
class Support:
    """The backend serves the spec; replayable: a captured launch is valid at other lengths."""

    replayable: bool
    in_one_graph: bool


@dataclass(frozen=True)
class Refusal:
    """The backend does not serve the spec, and why."""

    reason: str


@dataclass
class AttentionBatch:
    """Ragged query rows over paged caches; all tensors on the device, lengths never read on the host.

    positions and slot_mapping are int64 [T]; block_table int32 [R, max_blocks] in batch order;
    seq_lens int32 [R] counts context and query; query_start_loc int32 [R + 1].
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class LayerCache:
    """One layer's K/V: [num_blocks, kv_block_size, num_kv_heads, head_dim] each; fp8 ones hold x / scale."""

    key: torch.Tensor
    value: torch.Tensor
    k_scale: torch.Tensor | None = None  # float32 [1]
    v_scale: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Runs one layer's attention; made for one spec."""

    def forward(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        cache: LayerCache,
        batch: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, num_heads, head_dim]; sinks [num_heads]."""
        ...


@dataclass(frozen=True)
class Backend:
    """A row of the selection table."""

    name: str
    supports: Callable[[AttentionSpec], Support | Refusal]
    make: Callable[[AttentionSpec], AttentionBackend]
