# SPDX-License-Identifier: Apache-2.0
"""Iterations and passes over short prompts as CUDA graphs: one a size, of iterations one a kind of sampling."""

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
from dflash.engine.args import EngineArgs
from dflash.engine.buckets import (
    PromptBucket,
    find_prompt_bucket,
    prompt_buckets,
    request_buckets,
    request_multiple,
)
from dflash.engine.buffers import Batch, BatchBuffers
from dflash.engine.memory import gib
from dflash.engine.request import PrefillChunk, Variant
from dflash.engine.step import Flow, Part, Step, run_parts
from dflash.log import log_once
from dflash.models.decoder import Decoder

logger = logging.getLogger("dflash")

Bucket = int | PromptBucket
"""Requests of an iteration, or what a prompt batch is padded to."""


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
        """The parts over the batch that the buffers hold."""
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


def choose_prompt_buckets(
    args: EngineArgs, device: torch.device, decoders: Sequence[Decoder], tile_rows: int | None
) -> list[PromptBucket]:
    """What prompts are padded to, captured or not: nothing on a CPU, or where a backend plans prompts on the host."""
    if device.type != "cuda":
        return []
    reasons = [decoder.prompts_eager_reason for decoder in decoders]
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        log_once(f"prompts are not captured: {reason}")
        return []
    return prompt_buckets(args.max_num_batched_tokens, args.max_num_seqs, tile_rows)


class GraphRunner:
    """Runs passes: padded to a bucket, replayed where it was captured, else the same callable eagerly.

    Args:
        step, buffers: what is captured, at their addresses.
        max_reqs: the largest batch.
        enforce_eager: capture nothing.
        prompt_buckets: what passes over the last rows of prompts are padded to, ascending; others run as they are.
    """

    def __init__(
        self,
        step: Step,
        buffers: BatchBuffers,
        max_reqs: int,
        enforce_eager: bool,
        prompt_buckets: Sequence[PromptBucket] = (),
    ) -> None:
        self.step = step
        self.buffers = buffers
        device = step.state.step.device
        self.on_gpu = device.type == "cuda"
        self.num_steps_ahead = num_steps_ahead(device)
        multiple = request_multiple(buffers.num_query_per_req, buffers.tile_rows)
        pads = self.on_gpu or multiple > 1
        self.buckets = request_buckets(max_reqs, multiple) if pads else []
        self.prompt_buckets = list(prompt_buckets)
        self.captured: dict[tuple[int, bool], CapturedStep] = {}
        self.captured_prompts: dict[PromptBucket, CapturedStep] = {}
        self.num_bytes = 0
        if self.on_gpu and not enforce_eager:
            self._capture()

    def bucket(self, num_reqs: int) -> int:
        """Requests that a batch of num_reqs is padded to; a CPU pads nothing unless it has to fill tiles."""
        return next((b for b in self.buckets if b >= num_reqs), num_reqs)

    def prompt_bucket(self, chunks: Sequence[PrefillChunk]) -> PromptBucket | None:
        """What a batch of chunks is padded to; None for more than any bucket holds, and for the middle of a prompt."""
        if not all(chunk.is_last for chunk in chunks):
            return None
        num_rows = sum(chunk.length for chunk in chunks)
        return find_prompt_bucket(self.prompt_buckets, num_rows, len(chunks))

    def decode(self, batch: Batch) -> Flow:
        """One iteration of a padded batch."""
        captured = self.captured.get((batch.num_reqs, self.step.needs_all_logits(batch)))
        return self.step.decode(batch) if captured is None else self._replay(captured, batch)

    def prefill(self, batch: Batch) -> Flow:
        """A prompt batch, padded where it has a bucket."""
        captured = None
        if batch.variant.drafts:
            captured = self.captured_prompts.get(PromptBucket(batch.num_rows, batch.num_reqs))
        return self.step.prefill(batch) if captured is None else self._replay(captured, batch)

    def _replay(self, captured: CapturedStep, batch: Batch) -> Flow:
        with torch.inference_mode():
            for decoder, attention in self._captured_forwards(batch):
                decoder.prepare_replay(attention)
            return captured.replay(batch.variant)

    def _captured_forwards(self, batch: Batch) -> list[tuple[Decoder, AttentionBatch]]:
        return [f for f in self.step.forwards(batch) if f[0].eager_reason is None]

    def _capture(self) -> None:
        self._say_what_stays_eager()
        started, before = time.perf_counter(), _free_bytes()
        # The largest first: the smaller ones live in its memory.
        buckets = sorted([*self.buckets, *self.prompt_buckets], key=self._size_of, reverse=True)
        forwards = [f for bucket in buckets for f in self.step.forwards(self._of_nobody(bucket))]
        for decoder in {id(decoder): decoder for decoder, _ in forwards}.values():
            decoder.init_capture(_limits([a for other, a in forwards if other is decoder]))
        pool = torch.cuda.graph_pool_handle()
        keys = [(bucket, processes) for bucket in buckets for processes in self._kinds(bucket)]
        for key in track(keys, "capturing CUDA graphs", transient=True, disable=not _visible()):
            self._try_capture(*key, pool)
        self.num_bytes = max(0, before - _free_bytes())
        logger.info(
            "captured %d CUDA graphs in %.1f s, %s: %d iterations of up to %d requests, "
            "%d passes over up to %d prompt tokens",
            len(self.captured) + len(self.captured_prompts),
            time.perf_counter() - started, gib(self.num_bytes),
            len(self.captured), max((bucket for bucket, _ in self.captured), default=0),
            len(self.captured_prompts),
            max((bucket.num_rows for bucket in self.captured_prompts), default=0),
        )  # fmt: skip

    def _try_capture(self, bucket: Bucket, processes_logits: bool, pool: Any) -> None:
        try:
            captured = self._capture_one(bucket, processes_logits, pool)
        except torch.cuda.OutOfMemoryError:
            captured = None  # past this block nothing holds what there was
        if captured is None:
            torch.cuda.empty_cache()
            logger.warning(
                "no memory for the CUDA graph of %s: batches of that size run eagerly; "
                "lower gpu_memory_utilization to leave room",
                bucket if isinstance(bucket, PromptBucket) else f"{bucket} requests",
            )
        elif isinstance(bucket, PromptBucket):
            self.captured_prompts[bucket] = captured
        else:
            self.captured[bucket, processes_logits] = captured

    @torch.inference_mode()
    def _capture_one(self, bucket: Bucket, processes_logits: bool, pool: Any) -> CapturedStep:
        is_prompt = isinstance(bucket, PromptBucket)
        parts = self.step.sample_parts if is_prompt else self.step.decode_parts
        batch = replace(self._of_nobody(bucket), variant=Variant(processes_logits))
        run_parts(parts, Flow(batch))  # libraries make handles and workspaces outside the graph
        for decoder, attention in self._captured_forwards(batch):
            decoder.prepare_capture(attention)
        torch.cuda.synchronize()
        return CapturedStep.capture(parts, batch, pool)

    def _kinds(self, bucket: Bucket) -> tuple[bool, ...]:
        """Which graphs a bucket has, see needs_all_logits: a prompt's few logits cost nothing beside its rows."""
        return (True,) if isinstance(bucket, PromptBucket) else (True, False)

    def _of_nobody(self, bucket: Bucket) -> Batch:
        """A batch of that size; every row is inert."""
        if isinstance(bucket, PromptBucket):
            return self.buffers.prefill([], bucket)
        return self.buffers.decode([], bucket)

    def _size_of(self, bucket: Bucket) -> tuple[int, int]:
        """Rows and requests."""
        if isinstance(bucket, PromptBucket):
            return bucket.num_rows, bucket.num_reqs
        return bucket * self.buffers.num_query_per_req, bucket

    def _say_what_stays_eager(self) -> None:
        for part in self._eager_parts():
            log_once(
                f"the part {part.name!r} of the step is not captured: {part.eager_reason}",
                logging.INFO,
            )

    def _eager_parts(self) -> Iterator[Part]:
        return (part for part in self.step.decode_parts if part.eager_reason is not None)


def _limits(batches: Sequence[AttentionBatch]) -> CaptureLimits:
    """Of one decoder."""
    return CaptureLimits(
        max_reqs=max(attention.block_table.shape[0] for attention in batches),
        max_rows=max(attention.positions.shape[0] for attention in batches),
        max_query_len=max(attention.max_query_len for attention in batches),
        max_seq_len=max(attention.max_seq_len for attention in batches),
        max_blocks_per_req=batches[0].block_table.shape[1],
    )


def _free_bytes() -> int:
    """What the driver has, once the allocator keeps nothing it does not need: a capture makes it let go too."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _visible() -> bool:
    """A progress bar is for somebody who waits at a terminal and asked for news."""
    return logger.isEnabledFor(logging.INFO)
