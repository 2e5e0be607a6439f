# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's prefill wrapper over our caches, and which of its plans may stand in a CUDA graph.

A plan tells each CTA its tile. FlashInfer makes it on the host; a graph replays it at other lengths.
Only FA2 without split-KV plans from the query lengths alone: `flashinfer` uses that for batches with
one query length, eager or captured, and builds the pages' CSR on the device inside forward. The other
plans hold K/V lengths: they are made anew before every forward, and never captured.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dflash.attention.paged_csr import PagedCsr
from dflash.attention.spec import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CaptureLimits,
    LayerCache,
    Refusal,
    Support,
    refusal,
)
from dflash.errors import DflashError

MIN_VERSION = (0, 6, 13)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
MAX_UNIFORM_QUERY_LEN = 64
"""Query rows a request up to which equal lengths are a decode batch, not prompts that happen to be equally long."""


def missing() -> str | None:
    """What this machine lacks."""
    needed = ".".join(map(str, MIN_VERSION))
    if importlib.util.find_spec("flashinfer") is None:
        return f"flashinfer-python (>= {needed}) is not installed"
    try:
        version = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return "flashinfer is importable, but its version is unknown (no package metadata)"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < MIN_VERSION:
        return f"flashinfer-python {version} is older than {needed}"
    prebuilt = importlib.util.find_spec("flashinfer_jit_cache") is not None
    if not prebuilt and not _has_nvcc():
        return "FlashInfer compiles its kernels at first use, and there is no nvcc"
    return None


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists()


def _refused(spec: AttentionSpec, *more: str | bool) -> Refusal | None:
    return refusal(
        not spec.arch.startswith("sm_") and f"no kernel for {spec.arch}",
        spec.dtype not in DTYPES and f"dtype {spec.dtype} is not float16 or bfloat16",
        spec.kv_dtype != spec.dtype
        and f"a {spec.kv_dtype} cache (its scales would be read on the host)",
        spec.head_dim not in HEAD_DIMS and f"head_dim {spec.head_dim} is not one of {HEAD_DIMS}",
        spec.num_heads % spec.num_kv_heads != 0
        and f"{spec.num_heads} heads do not divide into {spec.num_kv_heads} K/V heads",
        spec.has_sinks and "no attention sinks",
        spec.batch_invariant and "its splits follow the batch",
        spec.window is not None
        and not spec.causal
        and "a non-causal window (there is no bound to the right of a query)",
        *more,
    )


def supports(spec: AttentionSpec) -> Support | Refusal:
    """FA2 without split-KV: any GQA ratio and page size."""
    return _refused(spec) or Support(replayable=True, in_one_graph=True)


def supports_split(spec: AttentionSpec) -> Support | Refusal:
    """FA2 with split-KV: not replayable."""
    reason = "a split-KV plan has chunks only for the lengths it was made for"
    return _refused(spec) or Support(False, False, reason)


def supports_fa3(spec: AttentionSpec) -> Support | Refusal:
    """FlashInfer's FA3 kernels: not replayable."""
    wrong_arch = spec.arch != "sm_90" and f"FA3 is for sm_90, not {spec.arch}"
    reason = "an FA3 plan holds the K/V lengths that the host gave it"
    return _refused(spec, wrong_arch) or Support(False, False, reason)


class _Wrapper:
    """One BatchPrefillWithPagedKVCacheWrapper and the arguments that follow from the spec."""

    def __init__(self, spec: AttentionSpec, workspace: torch.Tensor, kernel: str) -> None:
        flashinfer = importlib.import_module("flashinfer")

        self.inner: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=kernel
        )
        self._workspace = workspace
        self._spec = spec

    def plan(
        self,
        query_start_loc: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        **options: Any,
    ) -> None:
        spec = self._spec
        self.inner.plan(
            query_start_loc,
            indptr,
            indices,
            last_page_len,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.kv_block_size,
            causal=spec.causal,
            window_left=spec.window_left,
            sm_scale=spec.head_dim**-0.5,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv_dtype,
            **options,
        )

    def plan_fixed(self, csr: PagedCsr, reqs: int, blocks: int, query_len: int) -> None:
        """A plan for every K/V length; the CSR is read where `csr` keeps it."""
        spec = self._spec
        tiles = reqs * -(-query_len * spec.num_heads // (16 * spec.num_kv_heads))
        plan_bytes = 4096 + 4 * (3 * tiles + reqs)
        self.inner.reset_workspace_buffer(
            self._workspace,
            torch.empty(plan_bytes, dtype=torch.uint8, device=self._workspace.device),
        )
        # NOTE: use_cuda_graph pads the grid with CTAs whose tiles the plan leaves unwritten when it
        # does not split. Without it the grid is exact, and tensors of this device are kept, not copied.
        csr.fill(reqs, blocks)
        starts = torch.arange(reqs + 1, dtype=torch.int32, device=csr.indptr.device) * query_len
        self.plan(starts, *csr.views(reqs, blocks), disable_split_kv=True)
        kept = ("_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf")
        for name, ours in zip(kept, csr.views(reqs, blocks), strict=True):
            theirs = getattr(self.inner, name, None)
            if theirs is None or theirs.data_ptr() != ours.data_ptr():
                raise DflashError(
                    f"this FlashInfer copies {name.strip('_')}: a plan that reads it cannot be replayed; "
                    "take another attention backend"
                )

    def run(self, query: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        # NOTE: with programmatic dependent launch the kernel reads lengths before it waits for the
        # kernels that write them.
        output = torch.empty_like(query)
        return self.inner.run(query, (cache.key, cache.value), out=output, enable_pdl=False)


class _PlannedFlashInfer(AttentionBackend):
    """Plans before every forward, from lengths read on the host (one synchronisation)."""

    kernel = "auto"  # FA3 on sm_90, else FA2, with split-KV where that pays

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._workspace = torch.empty(
            _workspace_bytes(spec, device), dtype=torch.uint8, device=device
        )
        self._planned: _Wrapper | None = None
        self._planned_for: AttentionBatch | None = None
        self._planned_csr: PagedCsr | None = None
        self._dead_rows: torch.Tensor | None = None  # bool [T, 1, 1]

    def prepare(self, batch: AttentionBatch) -> None:
        if self._planned is None:
            self._planned = _Wrapper(self.spec, self._workspace, self.kernel)
        size, (reqs, blocks) = self.spec.kv_block_size, batch.block_table.shape
        csr = self._planned_csr
        if csr is None or not csr.fits(reqs, blocks):
            csr = self._planned_csr = PagedCsr(reqs, blocks, size, self.device)
        csr.build(batch)
        lengths = torch.cat((batch.query_start_loc, batch.seq_lens)).cpu()
        starts, seq_lens = lengths[: reqs + 1], lengths[reqs + 1 :].clamp(max=blocks * size)
        pages = (seq_lens + size - 1) // size
        indptr = torch.zeros(reqs + 1, dtype=torch.int32)
        torch.cumsum(pages, 0, dtype=torch.int32, out=indptr[1:])
        last_page_len = seq_lens - (pages - 1) * size
        self._planned.plan(starts, indptr, csr.indices[: int(indptr[-1])], last_page_len)
        self._planned_for = batch
        dead = torch.repeat_interleave(seq_lens == 0, starts.diff())
        self._dead_rows = dead.to(self.device)[:, None, None] if dead.any() else None

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._planned is None or self._planned_for is not batch:
            raise RuntimeError("flashinfer: prepare(batch) comes before the forward of that batch")
        output = self._planned.run(query, cache)
        # NOTE: FA3 leaves NaN in the rows of a request without keys.
        return output if self._dead_rows is None else output.masked_fill_(self._dead_rows, 0.0)


class SplitFlashInfer(_PlannedFlashInfer):
    """FA2 with split-KV."""

    kernel = "fa2"


class Fa3FlashInfer(_PlannedFlashInfer):
    """FA3."""

    kernel = "fa3"


class FlashInfer(_PlannedFlashInfer):
    """A fixed FA2 plan for each (requests, rows a request) of a decode batch; prompts are planned as they come."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._csr: PagedCsr | None = None
        self._limits: CaptureLimits | None = None
        self._fixed: dict[tuple[int, int, int], tuple[_Wrapper, PagedCsr]] = {}
        self._first_cache: LayerCache | None = None

    def init_capture(self, limits: CaptureLimits) -> None:
        size = self.spec.kv_block_size
        self._csr = PagedCsr(limits.max_reqs, limits.max_blocks_per_req, size, self.device)
        self._limits = limits

    def prepare(self, batch: AttentionBatch) -> None:
        self._first_cache = None
        key = _uniform_key(batch)
        if key is None:
            super().prepare(batch)
        elif key not in self._fixed:
            self._fixed[key] = self._fixed_plan(*key)

    def prepare_capture(self, batch: AttentionBatch) -> None:
        if self._limits is None:
            raise RuntimeError("flashinfer: init_capture comes before prepare_capture")
        if _uniform_key(batch) is None:
            raise ValueError("flashinfer replays only batches with one query length")
        self.prepare(batch)

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        key = _uniform_key(batch)
        if key is None:
            return super().forward(query, cache, batch, sinks)
        if key not in self._fixed:
            raise RuntimeError("flashinfer: prepare(batch) comes before the forward of that batch")
        wrapper, csr = self._fixed[key]
        # The group's first layer builds the CSR for all of them, inside the graph.
        if self._first_cache is None:
            self._first_cache = cache
        if self._first_cache is cache:
            csr.build(batch)
        return wrapper.run(query, cache)

    def _fixed_plan(self, reqs: int, query_len: int, blocks: int) -> tuple[_Wrapper, PagedCsr]:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("flashinfer: prepare_capture(batch) comes before the capture")
        csr = self._csr
        if csr is None or not csr.fits(reqs, blocks):
            csr = PagedCsr(reqs, blocks, self.spec.kv_block_size, self.device)
        wrapper = _Wrapper(self.spec, self._workspace, "fa2")
        wrapper.plan_fixed(csr, reqs, blocks, query_len)
        return wrapper, csr


def _uniform_key(batch: AttentionBatch) -> tuple[int, int, int] | None:
    """(requests, rows a request, blocks a request) of a decode batch, padded requests included."""
    (reqs, blocks), query_len = batch.block_table.shape, batch.max_query_len
    is_uniform = batch.positions.shape[0] == reqs * query_len
    return (reqs, query_len, blocks) if is_uniform and query_len <= MAX_UNIFORM_QUERY_LEN else None


def _workspace_bytes(spec: AttentionSpec, device: torch.device) -> int:
    """Partial results of the largest split: two CTAs an SM, each 128 rows of fp32 values and a sum."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    group = spec.num_heads // spec.num_kv_heads
    return 2 * sms * group * 128 * (spec.head_dim + 1) * 4 + (1 << 20)
