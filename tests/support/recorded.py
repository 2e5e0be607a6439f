# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs for a CPU: what a capture calls is written down, and called again at the same addresses.

As strict as a capture: nothing of the host comes in, and nothing is read there. Stricter in one thing: memory that is
allocated holds NaN at every replay.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash.engine import graphs
from dflash.engine.buckets import prompt_buckets, request_buckets, request_multiple
from dflash.engine.llm import LLM

FORBIDDEN = ("aten._local_scalar_dense", "aten.lift_fresh", "aten.nonzero", "aten.is_pinned")


class RecordedGraph:
    """In place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple, dict, list[torch.Tensor]]] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, results in self.calls:
            if "empty" in str(func):
                for result in results:
                    result.fill_(float("nan") if result.is_floating_point() else 1 << 20)
                continue
            again = tensors_of(func(*args, **kwargs))
            for result, new in zip(results, again, strict=True):
                if new.data_ptr() != result.data_ptr():  # neither a view nor written in place
                    result.copy_(new)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not str(func).startswith(FORBIDDEN), f"{func} under capture"
        results = func(*args, **(kwargs or {}))
        self._graph.calls.append((func, args, kwargs or {}, tensors_of(results)))
        return results


def tensors_of(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


@contextmanager
def record(graph: RecordedGraph, pool: Any = None):
    with _Recording(graph):
        yield


def capture(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pads an LLM's batches as a GPU would and records graphs of them."""
    stand_ins = {
        "CUDAGraph": RecordedGraph,
        "graph": record,
        "graph_pool_handle": lambda: None,
        "synchronize": lambda: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(graphs, "_free_bytes", lambda: 0)
    runner, args = llm.core._runner, llm.args
    tile_rows = runner.buffers.tile_rows
    multiple = request_multiple(runner.buffers.num_query_per_req, tile_rows)
    runner.buckets = request_buckets(args.max_num_seqs, multiple)
    runner.prompt_buckets = prompt_buckets(
        args.max_num_batched_tokens, args.max_num_seqs, tile_rows
    )
    runner._capture()
    llm.core._num_passes = int(runner.step.state.step)


def replays(llm: LLM) -> tuple[int, int]:
    """Of iterations and of prompt batches."""
    runner = llm.core._runner

    def count(table) -> int:
        segments = [segment for captured in table.values() for segment in captured.segments]
        return sum(s.num_replays for s in segments if isinstance(s, RecordedGraph))

    return count(runner.captured), count(runner.captured_prompts)
