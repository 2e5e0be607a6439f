# SPDX-License-Identifier: Apache-2.0
"""What attention a layer group needs, what a backend can do, and the batch it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
    batch_invariant: bool = False  # a row's bits depend on its query and visible keys alone

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
    """The backend serves the spec.

    Batches with one query length are captured where both are True, prompts (ragged ones) where `ragged` is, too.
    """

    replayable: bool  # a captured launch is valid at other lengths
    in_one_graph: bool  # and needs nothing of the host between replays
    reason: str = ""  # why not, where one of them is False
    ragged: bool = False  # all this for any query lengths, and for rows of no request


@dataclass(frozen=True)
class Refusal:
    """The backend does not serve the spec, and why."""

    reason: str


def refusal(*reasons: str | bool | None) -> Refusal | None:
    """The reasons that are strings as one refusal (`is_wrong and "why"` is one or False); None without any."""
    given = [reason for reason in reasons if isinstance(reason, str)]
    return Refusal(", ".join(given)) if given else None


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


@dataclass(frozen=True)
class CaptureLimits:
    """The largest batch of any graph."""

    max_reqs: int
    max_rows: int
    max_query_len: int
    max_seq_len: int
    max_blocks_per_req: int


class AttentionBackend(ABC):
    """Runs the attention of a layer group; made for one spec. What needs no host work overrides forward alone."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.scale = spec.head_dim**-0.5

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, num_heads, head_dim], of queries of that shape; sinks [num_heads]."""

    def prepare(self, batch: AttentionBatch) -> None:  # noqa: B027
        """Host work before an eager forward of the group's layers; may read lengths."""

    def init_capture(self, limits: CaptureLimits) -> None:  # noqa: B027
        """Once, before any graph: makes everything whose address graphs will hold."""

    def prepare_capture(self, batch: AttentionBatch) -> None:  # noqa: B027
        """Before a bucket is captured; its lengths are not known yet."""

    def prepare_replay(self, batch: AttentionBatch) -> None:  # noqa: B027
        """Before each replay."""


@dataclass(frozen=True)
class Backend:
    """A row of the selection table."""

    name: str
    supports: Callable[
        [AttentionSpec], Support | Refusal
    ]  # by declared capability: no device needed
    make: Callable[[AttentionSpec, torch.device], AttentionBackend]
    missing: Callable[[], str | None] = lambda: None  # what this machine lacks
    is_automatic: bool = True  # "auto" may take it
