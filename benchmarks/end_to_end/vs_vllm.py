# SPDX-License-Identifier: Apache-2.0
"""dflash beside vLLM on one GPU: milliseconds an iteration at equal AL, and latencies under Poisson arrivals.

    python -m benchmarks.end_to_end.vs_vllm [--contexts 128 8192 32768] [--no-draft] [--out FOLDER]

Qwen3-8B's shape and its 5-layer drafter with random weights, N = 15, synthetic acceptance of AL 6.5. Each engine has
a process of its own, one after the other. Needs vllm 0.26 beside torch 2.11. Where vLLM lives on a path of its own:
--engine dflash --json OURS, --engine vllm --json THEIRS, then --compare OURS THEIRS.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks import report
from benchmarks.end_to_end.iteration import NUM_WARMUP, PROMPT_LEN, N, make_core
from benchmarks.end_to_end.peers import (
    ENGINES,
    Dflash,
    Engine,
    Vllm,
    in_own_process,
    read_both,
    save,
    synchronize,
    write_dummy_checkpoints,
)
from benchmarks.shapes import WEIGHTS

NUM_WINDOWS, WINDOW = 5, 30  # iterations timed together
MAX_OUTPUT = 3904  # tokens of a request: who was prefilled first runs while the others are
MODEL_LEN_MARGIN = 64

KV_BYTES = 164 << 10  # of a token: 36 layers of the target, 5 of the drafter
KV_ROOM = 48 << 30  # that either engine has: vLLM takes 0.6 of the GPU
BYTES_PER_MS = 4.3e9
WEIGHTS_MS, ROW_MS = 4.32, 0.0232  # the floor of the matrices: read once, or multiplied with a row
LONG_CONTEXT_LEAD = 1.12


def make_engine(args: argparse.Namespace) -> Engine:
    if not torch.cuda.is_available():
        raise SystemExit("vs_vllm measures on a GPU, and torch sees none here")
    if args.engine == "dflash":
        return Dflash(make_core(args))
    target, draft = write_dummy_checkpoints()
    speculative = {
        "model": str(draft),
        "num_speculative_tokens": N,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": args.acceptance_length,
    }
    return Vllm(
        target,
        None if args.no_draft else speculative,
        time_drafts=not args.no_draft,
        load_format="dummy",
        max_model_len=args.max_model_len,
        max_num_seqs=max(args.batch),
    )


def prompts(seed: int, length: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(1000, 100_000, (length,), generator=generator).tolist()


def levels(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(context, batch) of each measurement: the batches whose K/V both engines have room for."""
    for context, batch in itertools.product(args.contexts, args.batch):
        if batch * context * KV_BYTES <= KV_ROOM:
            yield context, batch


def measure_iterations(engine: Engine, context: int, batch: int, with_draft: bool) -> dict:
    """Steady state: all requests run, nobody joins. Windows of iterations, each timed as one."""
    for key, token_ids in zip(range(batch), prompts(batch, context), strict=False):
        engine.add(key, token_ids, MAX_OUTPUT)
    tokens: Counter[int] = Counter()
    while len(tokens) < batch:
        tokens.update(dict(engine.step()))
    for _ in range(NUM_WARMUP):
        tokens.update(dict(engine.step()))
    milliseconds, before = [], tokens.total()
    for _ in range(NUM_WINDOWS):
        synchronize()
        began = time.perf_counter()
        for _ in range(WINDOW):
            tokens.update(dict(engine.step()))
        milliseconds.append((time.perf_counter() - began) * 1e3 / WINDOW)
    if max(tokens.values()) >= MAX_OUTPUT:
        raise SystemExit(f"a request ended after {MAX_OUTPUT} tokens: raise MAX_OUTPUT")
    row = {
        "context": context,
        "batch": batch,
        "iteration_ms": round(statistics.median(milliseconds), 3),
        "spread_ms": [round(min(milliseconds), 3), round(max(milliseconds), 3)],
        "acceptance_length": round((tokens.total() - before) / batch / NUM_WINDOWS / WINDOW, 2),
    }
    if with_draft:
        draft = engine.draft_milliseconds(batch)
        row["draft_ms"] = None if draft is None else round(draft, 3)
    engine.clear()
    return row


def measure_arrivals(engine: Engine, args: argparse.Namespace) -> dict:
    """Poisson arrivals; a gap is the time between two deliveries of tokens to one request."""
    uniform = torch.rand(args.num_requests, generator=torch.Generator().manual_seed(1))
    arrivals = (-torch.log1p(-uniform) / args.rate).cumsum(0).tolist()
    token_ids = list(itertools.islice(prompts(2, args.prompt_len), len(arrivals)))
    deliveries: list[list[float]] = [[] for _ in arrivals]
    left = [args.output_len] * len(arrivals)
    num_added, began = 0, time.perf_counter()
    while any(count > 0 for count in left):
        idle = all(count <= 0 for count in left[:num_added])
        if idle:
            time.sleep(max(0.0, arrivals[num_added] - (time.perf_counter() - began)))
        now = time.perf_counter() - began
        while num_added < len(arrivals) and arrivals[num_added] <= now:
            engine.add(num_added, token_ids[num_added], args.output_len)
            num_added += 1
        for key, count in engine.step():
            if count:
                deliveries[key].append(time.perf_counter() - began)
                left[key] -= count
    seconds = time.perf_counter() - began
    engine.clear()
    first = [times[0] - arrival for times, arrival in zip(deliveries, arrivals, strict=True)]
    gaps = [b - a for times in deliveries for a, b in itertools.pairwise(times)]
    return {
        "rate": args.rate,
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "requests": args.num_requests,
        "ttft_ms": percentiles(first),
        "itl_ms": percentiles(gaps),
        "tokens_per_second": round(len(arrivals) * args.output_len / seconds, 1),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": round(cuts[49] * 1e3, 2), "p99": round(cuts[98] * 1e3, 2)}


def measure(args: argparse.Namespace) -> None:
    """One engine, in this process."""
    engine, rows = make_engine(args), []
    figures = {
        "version": engine.version,
        "weights": args.weights if args.engine == "dflash" else "uniform",
        "max_model_len": args.max_model_len,
        "iterations": rows,
    }
    for context, batch in levels(args):
        rows.append(measure_iterations(engine, context, batch, not args.no_draft))
        print(args.engine, rows[-1], flush=True)
        save(args.json, args.engine, figures)
    if args.num_requests:
        measure_arrivals(engine, argparse.Namespace(**(vars(args) | {"num_requests": 8})))
        figures["arrivals"] = measure_arrivals(engine, args)
        print(args.engine, figures["arrivals"], flush=True)
        save(args.json, args.engine, figures)


def measure_apart() -> list[Path]:
    """Each engine in a process of its own; files of their figures."""
    folder = Path(tempfile.mkdtemp())
    files = [folder / f"{name}.json" for name in ENGINES]
    for name, file in zip(ENGINES, files, strict=True):
        in_own_process("benchmarks.end_to_end.vs_vllm", "--engine", name, "--json", file)
    return files


def comparison(ours: dict, theirs: dict) -> Iterator[str]:
    """A line a level. The realised ALs are equal but for chance, of which small batches have more."""
    others = {(row["context"], row["batch"]): row for row in theirs["iterations"]}
    own = {(row["context"], row["batch"]) for row in ours["iterations"]}
    for context, batch in sorted(others.keys() - own):
        yield f"context {context}, batch {batch}: dflash NOT MEASURED"
    for row in ours["iterations"]:
        context, batch = row["context"], row["batch"]
        level = f"context {context}, batch {batch}"
        if (context, batch) not in others:
            yield f"{level}: vLLM NOT MEASURED"
            continue
        other, lead = others[context, batch], expected_lead(context, batch)
        ratio = other["iteration_ms"] / row["iteration_ms"]
        difference = abs(row["acceptance_length"] / other["acceptance_length"] - 1)
        yield (
            f"{level}: {row['iteration_ms']} / {other['iteration_ms']} ms, {ratio:.3f}x"
            + (f" BELOW {lead:.2f}x" if ratio < lead else "")
            + f", AL {row['acceptance_length']} / {other['acceptance_length']}"
            + (" NOT EQUAL" if difference > 0.15 / batch**0.5 else "")
        )


def expected_lead(context: int, batch: int) -> float:
    """No slower than vLLM; at long contexts clearly faster where matrices outweigh K/V in the floor."""
    matrices_ms = max(WEIGHTS_MS, batch * (N + 1) * ROW_MS)
    kv_ms = batch * context * KV_BYTES / BYTES_PER_MS
    return LONG_CONTEXT_LEAD if context > PROMPT_LEN and kv_ms < matrices_ms else 1.0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("both", *ENGINES), default="both")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[PROMPT_LEN], help="tokens of the prompts"
    )
    parser.add_argument("--no-draft", action="store_true")
    # vLLM's weights are uniform always: the same on our side, so that the GPU's clock is the same.
    parser.add_argument("--weights", choices=WEIGHTS, default="uniform", help="dflash's")
    parser.add_argument("--acceptance-length", type=float, default=6.5)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--num-requests", type=int, default=80, help="0: no arrivals")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--json", type=Path, help="of one engine's figures")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OURS", "THEIRS"))
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    args.max_model_len = max(args.contexts) + MAX_OUTPUT + MODEL_LEN_MARGIN
    args.enforce_eager, args.draft_quantization = False, None
    return args


def main() -> None:
    args = parse_args()
    if args.engine != "both":
        return measure(args)
    ours, theirs = read_both(args.compare or measure_apart())
    if not ours["iterations"] or not theirs["iterations"]:
        raise SystemExit("--compare: one of the two has no figures")
    for line in comparison(ours, theirs):
        print(line)
    name = "vs_vllm" + ("_no_draft" if args.no_draft else "")
    name += "" if args.contexts == [PROMPT_LEN] else "_contexts"
    print(report.write(name, {"dflash": ours, "vllm": theirs}, args.out))


if __name__ == "__main__":
    main()
