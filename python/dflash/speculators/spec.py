# SPDX-License-Identifier: Apache-2.0
"""What the step and the engine ask of a speculator."""

from __future__ import annotations

from typing import Protocol

import torch

from dflash.attention.spec import AttentionBatch
from dflash.engine.buffers import Batch, RequestState
from dflash.engine.sampling import SamplingState
from dflash.models.decoder import Decoder
from dflash.models.drafter import Drafter
from dflash.models.target import Target


class Speculator(Protocol):
    """The drafter's half of a step. Its K/V live in the slots of the target's block table.

    s' is the position of a request's bonus token once the target's pass is accepted. Both methods read lengths on the
    device only and make nothing that must outlive them: a graph captures them unless their reason says why not.
    """

    @property
    def num_speculative_tokens(self) -> int:
        """N, the drafts of a block."""
        ...

    @property
    def num_query_per_req(self) -> int:
        """Q = N + 1, the rows that the target verifies; propose writes at most as many slots, from s' on."""
        ...

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Layers of the target whose output observe reads; () = none."""
        ...

    @property
    def models(self) -> tuple[Drafter | Target, ...]:
        """Whose K/V caches the engine makes, and whose memory it counts."""
        ...

    @property
    def observe_eager_reason(self) -> str | None:
        """Why a graph cannot capture observe; None when it can."""
        ...

    @property
    def propose_eager_reason(self) -> str | None:
        """Why a graph cannot capture propose; None when it can."""
        ...

    def logits_bytes(self, max_reqs: int) -> int:
        """Of the logits that propose holds at once, for so many requests."""
        ...

    def forwards(self, batch: Batch) -> list[tuple[Decoder, AttentionBatch]]:
        """The decoder and the rows of every shape that observe and propose run it on."""
        ...

    def observe(
        self,
        batch: Batch,
        taps: torch.Tensor | None,
        state: RequestState,
        prepare: bool = True,
    ) -> None:
        """Stores the drafter's K/V of every row the target has just computed: at all positions < s' they exist then.

        Args:
            batch: prompt chunks, or verified blocks; num_sampled and num_rejected are known.
            taps: [>= T, n * H_target], the tapped layers' outputs; None without target_layer_ids.
            prepare: do the host work of an eager forward; not under capture.
        """
        ...

    def propose(
        self, batch: Batch, state: RequestState, sampling: SamplingState, prepare: bool = True
    ) -> None:
        """Writes N draft tokens behind every bonus token (and, when sampled, their logits) to the state.

        Args:
            batch: the one observed last; none of its requests is in the middle of its prompt.
            prepare: as for observe.
        """
        ...
