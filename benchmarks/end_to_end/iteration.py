# SPDX-License-Identifier: Apache-2.0
"""Milliseconds an iteration, and what the GPU idles between two: Qwen3-8B's shape with random weights, synthetic AL.

    python -m benchmarks.end_to_end.iteration [--batch 1 4 8 16 32] [--no-draft | --draft-quantization fp8]
        [--weights uniform] [--enforce-eager] [--out FOLDER]

Prompts of 128 random tokens, N = 15, conditional acceptance rates chosen for AL 6.5. Steady state: all requests run
and nobody joins.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from benchmarks import report
from benchmarks.shapes import WEIGHTS, qwen3_8b, qwen3_8b_draft

from dflash import SamplingParams
from dflash.checkpoints.quantize import quantize_draft
from dflash.engine.args import DRAFT_QUANTIZATIONS, EngineArgs
from dflash.engine.build import assemble
from dflash.engine.core import Core
from dflash.engine.graphs import CapturedStep
from dflash.engine.request import Variant
from dflash.models.decoder import DecoderSettings
from dflash.models.drafter import Drafter
from dflash.models.target import Target

N = 15
PROMPT_LEN = 128
NUM_WARMUP = 8


def conditional_rate(acceptance_length: float, n: int) -> float:
    """The r with 1 + r + r^2 + ... + r^n = acceptance_length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        reached = sum(rate**i for i in range(n + 1)) >= acceptance_length
        low, high = (low, rate) if reached else (rate, high)
    return low


def make_core(args: argparse.Namespace) -> Core:
    device, dtype, n = torch.device("cuda"), torch.bfloat16, 0 if args.no_draft else N
    synthetic = {} if args.no_draft else {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": (conditional_rate(args.acceptance_length, N),) * N,
    }  # fmt: skip
    engine_args = EngineArgs(
        "random",
        None if args.no_draft else "random",
        max_num_seqs=max(args.batch),
        max_model_len=args.max_model_len,
        enable_prefix_caching=False,
        enforce_eager=args.enforce_eager,
        **synthetic,
    )
    settings = DecoderSettings(device, dtype, dtype, engine_args.kv_block_size, args.max_model_len)
    random = WEIGHTS[args.weights](dtype, device)
    target = Target(qwen3_8b(), random.target(qwen3_8b()), settings)
    drafter = None
    if not args.no_draft:
        weights = random.draft(qwen3_8b_draft())
        if args.draft_quantization:
            weights = quantize_draft(qwen3_8b_draft(), weights)
            torch.cuda.empty_cache()  # of what they were
        drafter = Drafter(qwen3_8b_draft(), weights, target.embed_tokens, target.lm_head, settings)
    return assemble(engine_args, target, drafter, n, settings).core


class Gaps:
    """Times between the end of one iteration and the start of the next on the GPU."""

    def __init__(self, core: Core) -> None:
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        runner, decode = core._runner, core._runner.decode

        def timed(batch):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            flow = decode(batch)
            pair[1].record()
            self.events.append(pair)
            return flow

        runner.decode = timed

    def milliseconds(self) -> tuple[list[float], list[float]]:
        """Durations of the iterations and of the gaps between them."""
        torch.cuda.synchronize()
        busy = [start.elapsed_time(end) for start, end in self.events]
        pairs = zip(self.events, self.events[1:], strict=False)
        return busy, [a[1].elapsed_time(b[0]) for a, b in pairs]


def draft_milliseconds(core: Core, batch: int, num_replays: int = 30) -> float:
    """One draft step, context K/V included, over the requests that run: its parts in a graph of their own."""
    parts = [part for part in core._step.decode_parts if part.name in ("observe", "propose")]
    rows = core._buffers.verify_batch(core._runner.bucket(batch), Variant())
    torch.cuda.synchronize()
    with torch.inference_mode():
        captured = CapturedStep.capture(parts, rows, torch.cuda.graph_pool_handle())
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        captured.replay(Variant())
        start.record()
        for _ in range(num_replays):
            captured.replay(Variant())
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / num_replays


def measure(core: Core, gaps: Gaps, batch: int, num_iterations: int) -> dict:
    params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    generator = torch.Generator().manual_seed(batch)
    requests = []
    for _ in range(batch):
        ids = torch.randint(1000, 100_000, (PROMPT_LEN,), generator=generator).tolist()
        requests.append(core.add_request(ids, params))
    while core.scheduler.waiting or core.scheduler.prefilling:
        core.step()
    for _ in range(NUM_WARMUP):
        core.step()
    torch.cuda.synchronize()
    gaps.events.clear()
    before = sum(len(r.output_token_ids) for r in requests)
    started = time.perf_counter()
    for _ in range(num_iterations):
        core.step()
    seconds = time.perf_counter() - started
    tokens = sum(len(r.output_token_ids) for r in requests) - before
    busy, idle = gaps.milliseconds()
    has_draft = core._step.speculator is not None
    draft = round(draft_milliseconds(core, batch), 3) if has_draft else None
    for request in requests:
        core.abort(request)
    core.step()
    milliseconds = 1e3 * seconds / num_iterations
    return {
        "batch": batch,
        "iteration_ms": round(milliseconds, 3),
        "gpu_ms": round(statistics.median(busy), 3),
        "draft_ms": draft,
        "idle_ms": round(statistics.median(idle), 4),
        "idle_share": round(statistics.median(idle) / milliseconds, 4),
        "acceptance_length": round(tokens / batch / num_iterations, 2),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--acceptance-length", type=float, default=6.5)
    parser.add_argument("--num-iterations", type=int, default=60)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--no-draft", action="store_true")
    parser.add_argument("--draft-quantization", choices=DRAFT_QUANTIZATIONS, default=None)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--weights", choices=WEIGHTS, default="normal")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    core = make_core(args)
    gaps = Gaps(core)
    rows = []
    for batch in args.batch:
        rows.append(measure(core, gaps, batch, args.num_iterations))
        print(rows[-1], flush=True)
    name = "iteration_no_draft" if args.no_draft else "iteration"
    if args.draft_quantization:
        name += f"_draft_{args.draft_quantization}"
    figures = {"rows": rows, "eager": args.enforce_eager, "weights": args.weights}
    print(report.write(name, figures, args.out))


if __name__ == "__main__":
    main()
