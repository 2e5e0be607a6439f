# SPDX-License-Identifier: Apache-2.0
"""What an idle engine may not hold."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from dflash import LLM
from dflash.engine.job import Job
from dflash.engine.request import Request

MIB = 1 << 20


def left_over(llm: LLM) -> Iterator[str]:
    """What requests left behind."""
    scheduler = llm.core.scheduler
    pool, rows = scheduler.pool, len(scheduler._free_rows)
    if scheduler.has_work:
        yield f"the scheduler has work: {scheduler.waiting}, {scheduler.prefilling}, {scheduler.running}"
    if pool.num_free != pool.num_blocks - 1 or any(pool._num_owners):
        yield f"{pool.num_free} of {pool.num_blocks - 1} blocks are free"
    if rows != llm.args.max_num_seqs:
        yield f"{rows} of {llm.args.max_num_seqs} rows are free"
    if llm._jobs:
        yield f"{len(llm._jobs)} requests belong to jobs"


def live_requests() -> int:
    """Request and Job objects in this process."""
    gc.collect()
    return sum(type(thing) in (Request, Job) for thing in gc.get_objects())


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def memory_mib(device: torch.device) -> dict[str, float]:
    """RSS and the GPU's memory, once everything that can be given back is."""
    gc.collect()
    # Freed memory that malloc keeps for later is no leak.
    ctypes.CDLL(None).malloc_trim(0)
    memory = {"RSS": rss_mib()}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        memory["GPU allocated"] = torch.cuda.memory_allocated(device) / MIB
        memory["GPU reserved"] = torch.cuda.memory_reserved(device) / MIB
    return memory
