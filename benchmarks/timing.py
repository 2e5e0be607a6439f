# SPDX-License-Identifier: Apache-2.0
"""GPU time of calls inside CUDA graphs, where launches cost what they cost an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, replayed once."""
    for call in calls[:2]:  # libraries make their handles outside the graph
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def graph_us(call: Callable[[], object]) -> float:
    """Median microseconds of one call in a graph of its own."""
    return median_us({"call": captured([call])}, 1)["call"]


def median_us(
    graphs: Mapping[str, torch.cuda.CUDAGraph], calls: int, replays: int = 20
) -> dict[str, float]:
    """Microseconds a call of each graph, replayed by turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}
