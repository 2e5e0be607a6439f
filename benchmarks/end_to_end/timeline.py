# SPDX-License-Identifier: Apache-2.0
"""Where the time of one iteration goes, kernel by kernel: figures by kind, and a picture of the whole graph.

    python -m benchmarks.end_to_end.timeline [--batch 1 32] [--draft-quantization fp8] [--weights uniform]
        [--out FOLDER] [--plot FILE.png]

The same pair and settings as benchmarks.end_to_end.iteration, one replay under torch's profiler after a warm-up.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks import report
from benchmarks.end_to_end.iteration import NUM_WARMUP, PROMPT_LEN, make_core
from benchmarks.shapes import WEIGHTS

from dflash import SamplingParams
from dflash.engine.args import DRAFT_QUANTIZATIONS
from dflash.engine.core import Core

KINDS = (  # the first whose word a name has: a product with SwiGLU behind it is a product
    ("matrices", ("gemm", "nvjet", "cutlass", "splitk", "cublas")),
    ("attention", ("attention", "combine")),
    ("norm, RoPE, store, SwiGLU", ("norm", "rope", "store", "silu")),
    (
        "sampling and acceptance",
        ("scan", "finish", "accept", "residual", "logits_kernel", "advance"),
    ),
)
COLOURS = {
    "matrices": "#4477aa",
    "attention": "#ee6677",
    "norm, RoPE, store, SwiGLU": "#228833",
    "sampling and acceptance": "#ccbb44",
    "the rest": "#bbbbbb",
    "idle": "#ffffff",
}


@dataclass(frozen=True)
class Kernel:
    name: str
    start: float  # us from the first kernel
    duration: float  # us

    @property
    def kind(self) -> str:
        lower = self.name.lower()
        return next((k for k, words in KINDS if any(w in lower for w in words)), "the rest")


def one_iteration(core: Core, batch: int) -> list[Kernel]:
    """The kernels of one replay, in order."""
    params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    generator = torch.Generator().manual_seed(batch)
    requests = [
        core.add_request(
            torch.randint(1000, 100_000, (PROMPT_LEN,), generator=generator).tolist(), params
        )
        for _ in range(batch)
    ]
    while core.scheduler.waiting or core.scheduler.prefilling:
        core.step()
    for _ in range(NUM_WARMUP):
        core.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        core.step()
        torch.cuda.synchronize()
    for request in requests:
        core.abort(request)
    core.step()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # The copy in front of the replay was enqueued long before it: the graph begins with its rows.
    events = sorted((e for e in events if "Memcpy" not in e.name), key=lambda e: e.time_range.start)
    first = events[0].time_range.start
    return [Kernel(e.name, e.time_range.start - first, e.time_range.elapsed_us()) for e in events]


def by_kind(kernels: list[Kernel]) -> dict[str, dict[str, float]]:
    """Microseconds and launches of each kind; idle is what lies between kernels."""
    totals: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        totals[kernel.kind].append(kernel.duration)
    figures = {kind: {"us": round(sum(t), 1), "launches": len(t)} for kind, t in totals.items()}
    end = max(k.start + k.duration for k in kernels)
    busy = sum(k.duration for k in kernels)
    figures["idle"] = {"us": round(max(0.0, end - busy), 1), "launches": 0}
    figures["whole iteration"] = {"us": round(end, 1), "launches": len(kernels)}
    return figures


def write_picture(path: Path, runs: dict[int, list[Kernel]]) -> None:
    """One row a batch size, one bar a kernel."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(len(runs), 1, figsize=(11, 1.6 * len(runs) + 1.2), squeeze=False)
    for axis, (batch, kernels) in zip(axes[:, 0], runs.items(), strict=True):
        spans = defaultdict(list)
        for kernel in kernels:
            spans[kernel.kind].append((kernel.start / 1e3, kernel.duration / 1e3))
        for kind, bars in spans.items():
            axis.broken_barh(bars, (0, 1), facecolors=COLOURS[kind], linewidth=0)
        axis.set_yticks([])
        axis.set_ylabel(f"batch {batch}", rotation=0, ha="right", va="center")
        axis.set_xlim(0, max(k.start + k.duration for k in kernels) / 1e3)
        for side in ("top", "left", "right"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("ms from the first kernel of the replay")
    handles = [Patch(color=c, label=k) for k, c in COLOURS.items() if k != "idle"]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--draft-quantization", choices=DRAFT_QUANTIZATIONS, default=None)
    parser.add_argument("--weights", choices=WEIGHTS, default="normal")
    parser.add_argument("--out", default=None)
    parser.add_argument("--plot", type=Path, default=None)
    args = parser.parse_args()
    args.acceptance_length, args.max_model_len = 6.5, 2048
    args.no_draft = args.enforce_eager = False
    core = make_core(args)
    runs = {batch: one_iteration(core, batch) for batch in args.batch}
    rows = {str(batch): by_kind(kernels) for batch, kernels in runs.items()}
    for batch, row in rows.items():
        print(batch, row, flush=True)
    name = f"timeline_draft_{args.draft_quantization}" if args.draft_quantization else "timeline"
    print(report.write(name, {"weights": args.weights, "batches": rows}, args.out))
    if args.plot is not None:
        write_picture(args.plot, runs)


if __name__ == "__main__":
    main()
