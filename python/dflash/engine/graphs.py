# SPDX-License-Identifier: Apache-2.0
"""The iteration as CUDA graphs: one for each number of requests and kind of sampling."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any

import torch
from rich.progress import track

from dflash.attention.spec import AttentionBatch, CaptureLimits
from dflash.engine.buffers import Batch, BatchBuffers, request_buckets, request_multiple
from dflash.engine.memory import gib
from dflash.engine.request import Variant
from dflash.engine.step import Flow, Part, Step
from dflash.log import log_once
from dflash.models.decoder import Decoder

logger = logging.getLogger("dflash")


@dataclass
class CapturedStep:
    """Parts over one padded batch: graphs of capturable runs, and the parts between them that are not.

    `flow` holds the tensors that pass between graphs and eager parts.
    """

    flow: Flow
    segments: list[torch.cuda.CUDAGraph | Part] = field(default_factory=list)

    @classmethod
    def capture(cls, parts: Sequence[Part], batch: Batch, pool: Any) -> CapturedStep:
        """Captures over inert rows; what a part computes eagerly here is thrown away."""
        captured = cls(Flow(batch))
        for eager, run in groupby(parts, key=lambda part: part.eager_reason is not None):
            if eager:
                for part in run:
                    part.run(captured.flow)
                    captured.segments.append(part)
                continue
            graph = torch.cuda.CUDAGraph()
            captured.flow.in_graph = True
            with torch.cuda.graph(graph, pool=pool):
                for part in run:
                    part.run(captured.flow)
            captured.flow.in_graph = False
            captured.segments.append(graph)
        if sum(isinstance(s, torch.cuda.CUDAGraph) for s in captured.segments) == 1:
            # NOTE: nothing outside the graph reads these: kept, no other graph could use their memory.
            captured.flow.hidden = captured.flow.logits = captured.flow.target_tokens = None
        return captured

    def replay(self, variant: Variant) -> Flow:
        """One iteration over the batch that the buffers hold."""
        flow = replace(self.flow, batch=replace(self.flow.batch, variant=variant))
        for segment in self.segments:
            if isinstance(segment, torch.cuda.CUDAGraph):
                segment.replay()
            else:
                segment.run(flow)
                self._keep_addresses(flow)
        return flow

    def _keep_addresses(self, flow: Flow) -> None:
        """What an eager part made goes where the graphs behind it read."""
        for f in fields(Flow):
            made, fixed = getattr(flow, f.name), getattr(self.flow, f.name)
            if isinstance(made, torch.Tensor) and made is not fixed and fixed is not None:
                fixed.copy_(made)
                setattr(flow, f.name, fixed)


def num_steps_ahead(device: torch.device) -> int:
    """Passes that may be enqueued before the host has read an earlier one."""
    return 1 if device.type == "cuda" else 0


class GraphRunner:
    """Runs iterations: padded to a bucket, replayed where it was captured, else the same callable eagerly.

    Args:
        step, buffers: what is captured, at their addresses.
        max_reqs: the largest batch.
        enforce_eager: capture nothing.
    """

    def __init__(
        self, step: Step, buffers: BatchBuffers, max_reqs: int, enforce_eager: bool
    ) -> None:
        self.step = step
        self.buffers = buffers
        device = step.state.step.device
        self.on_gpu = device.type == "cuda"
        self.num_steps_ahead = num_steps_ahead(device)
        multiple = request_multiple(buffers.num_query_per_req, buffers.tile_rows)
        pads = self.on_gpu or multiple > 1
        self.buckets = request_buckets(max_reqs, multiple) if pads else []
        self.captured: dict[tuple[int, bool], CapturedStep] = {}
        self.num_bytes = 0
        if self.on_gpu and not enforce_eager:
            self._capture()

    def bucket(self, num_reqs: int) -> int:
        """Requests that a batch of num_reqs is padded to; a CPU pads nothing unless it has to fill tiles."""
        return next((b for b in self.buckets if b >= num_reqs), num_reqs)

    def decode(self, batch: Batch) -> Flow:
        """One iteration of a padded batch."""
        captured = self.captured.get((batch.num_reqs, self.step.needs_all_logits(batch)))
        if captured is None:
            return self.step.decode(batch)
        with torch.inference_mode():
            for decoder, attention in self._captured_forwards(batch):
                decoder.prepare_replay(attention)
            return captured.replay(batch.variant)

    def _captured_forwards(self, batch: Batch) -> list[tuple[Decoder, AttentionBatch]]:
        return [f for f in self.step.forwards(batch) if f[0].eager_reason is None]

    def _capture(self) -> None:
        self._say_what_stays_eager()
        started, before = time.perf_counter(), _free_bytes()
        largest = self.buffers.verify_batch(self.buckets[-1], Variant())
        forwards = self.step.forwards(largest)
        for decoder in {id(decoder): decoder for decoder, _ in forwards}.values():
            decoder.init_capture(_limits([a for other, a in forwards if other is decoder]))
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones live in its memory.
        keys = [(b, processes) for b in reversed(self.buckets) for processes in (True, False)]
        for key in track(keys, "capturing CUDA graphs", transient=True, disable=not _visible()):
            captured = self._try_capture(*key, pool)
            if captured is not None:
                self.captured[key] = captured
                continue
            torch.cuda.empty_cache()
            logger.warning(
                "no memory for the CUDA graph of %d requests: batches of that size run eagerly; "
                "lower gpu_memory_utilization to leave room",
                key[0],
            )
        self.num_bytes = max(0, before - _free_bytes())
        logger.info(
            "captured %d CUDA graphs in %.1f s, %s: up to %d requests",
            len(self.captured), time.perf_counter() - started, gib(self.num_bytes),
            max((bucket for bucket, _ in self.captured), default=0),
        )  # fmt: skip

    def _try_capture(self, bucket: int, processes_logits: bool, pool: Any) -> CapturedStep | None:
        """None without memory for it; on return nothing holds what there was."""
        try:
            return self._capture_one(bucket, processes_logits, pool)
        except torch.cuda.OutOfMemoryError:
            return None

    @torch.inference_mode()
    def _capture_one(self, bucket: int, processes_logits: bool, pool: Any) -> CapturedStep:
        self.buffers.requests.send([], bucket)  # nobody: every row is inert
        batch = self.buffers.verify_batch(bucket, Variant(processes_logits))
        self.step.decode(batch)  # libraries make their handles and workspaces outside the graph
        for decoder, attention in self._captured_forwards(batch):
            decoder.prepare_capture(attention)
        torch.cuda.synchronize()
        return CapturedStep.capture(self.step.decode_parts, batch, pool)

    def _say_what_stays_eager(self) -> None:
        for part in self._eager_parts():
            log_once(
                f"the part {part.name!r} of the step is not captured: {part.eager_reason}",
                logging.INFO,
            )

    def _eager_parts(self) -> Iterator[Part]:
        return (part for part in self.step.decode_parts if part.eager_reason is not None)


def _limits(largest: Sequence[AttentionBatch]) -> CaptureLimits:
    """Of one decoder, which may run batches of several shapes."""
    num_reqs, num_blocks = largest[0].block_table.shape
    return CaptureLimits(
        max_reqs=num_reqs,
        max_rows=max(attention.positions.shape[0] for attention in largest),
        max_query_len=max(attention.max_query_len for attention in largest),
        max_seq_len=max(attention.max_seq_len for attention in largest),
        max_blocks_per_req=num_blocks,
    )


def _free_bytes() -> int:
    """What the driver has, once the allocator keeps nothing it does not need: a capture makes it let go too."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _visible() -> bool:
    """A progress bar is for somebody who waits at a terminal and asked for news."""
    return logger.isEnabledFor(logging.INFO)
