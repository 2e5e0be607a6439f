# SPDX-License-Identifier: Apache-2.0
"""The demo pair beside vLLM on one GPU: tok/s and AL of dflash without and with the drafter, and of vLLM with it.

    python -m benchmarks.end_to_end.demo_vs_vllm [--num-prompts 64] [--max-num-seqs 32] [--out FOLDER]

Real weights, HumanEval through the chat template, bfloat16, N = 7, greedy, always 128 tokens; prompts one by one, and
all at once. Each engine has a process of its own. Where vLLM lives on a path of its own: --engine dflash --json OURS,
--engine vllm --asked OURS --json THEIRS (the same token ids, the same folders), then --compare OURS THEIRS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.end_to_end.peers import (
    ENGINES,
    Dflash,
    Engine,
    Vllm,
    in_own_process,
    read_both,
    save,
    synchronize,
)

N = 7
MAX_MODEL_LEN = 1024
NUM_WARMUP = 8  # prompts


class Run(NamedTuple):
    seconds: float
    num_tokens: int
    acceptance_length: float | None  # None: not to be seen from outside


Way = Callable[[list[list[int]], int], Run]
"""(prompts, how many the engine is given at once) to what it took."""


def streamed(max_tokens: int, engine: Engine, token_ids: list[list[int]], num_given: int) -> Run:
    """Tokens are taken as they come. Behind a request's first token each delivery is one verified block."""
    waiting, left = deque(enumerate(token_ids)), {}
    num_blocks = num_verified = 0
    synchronize()
    began = time.perf_counter()
    while waiting or left:
        while waiting and len(left) < num_given:
            key, ids = waiting.popleft()
            engine.add(key, ids, max_tokens)
            left[key] = max_tokens
        for key, count in engine.step():
            if not count:
                continue
            if left[key] < max_tokens:
                num_blocks, num_verified = num_blocks + 1, num_verified + count
            left[key] -= count
            if left[key] == 0:
                del left[key]
    seconds = time.perf_counter() - began
    engine.clear()
    return Run(seconds, max_tokens * len(token_ids), num_verified / num_blocks)


def offline(max_tokens: int, engine: Vllm, token_ids: list[list[int]], num_given: int) -> Run:
    """vLLM's own generate, which delivers at the end only."""
    synchronize()
    began = time.perf_counter()
    for first in range(0, len(token_ids), num_given):
        engine.generate(token_ids[first : first + num_given], max_tokens)
    return Run(time.perf_counter() - began, max_tokens * len(token_ids), None)


def measure_ways(
    ways: dict[str, Way], token_ids: list[list[int]], max_num_seqs: int, num_rounds: int
) -> Iterator[dict[str, Any]]:
    """A row a level and way; the ways take turns, so that a clock that falls slows all."""
    for concurrency, num_given in ((1, 1), (max_num_seqs, len(token_ids))):
        for way in ways.values():
            way(token_ids[: max(NUM_WARMUP, num_given)], num_given)
        rounds = [
            {name: way(token_ids, num_given) for name, way in ways.items()}
            for _ in range(num_rounds)
        ]
        for name in ways:
            yield {"concurrency": concurrency, "way": name} | summary([r[name] for r in rounds])


def summary(runs: list[Run]) -> dict[str, Any]:
    rates = [run.num_tokens / run.seconds for run in runs]
    lengths = [run.acceptance_length for run in runs if run.acceptance_length is not None]
    return {
        "tokens_per_second": round(statistics.median(rates), 1),
        "spread": [round(min(rates), 1), round(max(rates), 1)],
        "acceptance_length": round(statistics.mean(lengths), 3) if lengths else None,
    }


def make_dflash(args: argparse.Namespace) -> tuple[str, dict[str, Way], dict]:
    """Version, ways to answer, and what is asked."""
    # Not where vLLM runs: its packages need not be ours.
    from dflash import LLM
    from dflash.checkpoints.demo import demo_draft, demo_target

    llm = LLM(
        "demo",
        "demo",
        device="cuda",
        dtype="bfloat16",
        num_speculative_tokens=N,
        max_num_seqs=args.max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=4 << 30,
    )
    engines = {
        "without drafter": Dflash(llm.without_draft().core),
        "with drafter": Dflash(llm.core),
    }
    ways = {name: partial(streamed, args.max_tokens, engine) for name, engine in engines.items()}
    asked = {
        "target": str(demo_target()),
        "draft": str(demo_draft()),
        "token_ids": prompt_token_ids(llm, args.num_prompts),
    }
    return Dflash.version, ways, asked


def prompt_token_ids(llm: Any, num_prompts: int) -> list[list[int]]:
    from dflash.bench.prompts import HUMANEVAL, read_dataset

    questions = read_dataset(HUMANEVAL, num_prompts, random_input_len=0, seed=0)
    prompts = [question(llm, True) for question in questions]
    # The template has the special tokens already.
    return [llm.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]


def make_vllm(args: argparse.Namespace) -> tuple[str, dict[str, Way], dict]:
    asked = json.loads(args.asked.read_text())["asked"]
    engine = Vllm(
        Path(asked["target"]),
        {"model": asked["draft"], "num_speculative_tokens": N},
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=args.max_num_seqs,
    )
    how = {"with drafter, streamed": streamed, "with drafter, generate": offline}
    ways = {name: partial(way, args.max_tokens, engine) for name, way in how.items()}
    return engine.version, ways, asked


def measure(args: argparse.Namespace) -> None:
    """One engine, in this process."""
    make = make_dflash if args.engine == "dflash" else make_vllm
    version, ways, asked = make(args)
    rows = []
    for row in measure_ways(ways, asked["token_ids"], args.max_num_seqs, args.num_rounds):
        rows.append(row)
        print(args.engine, row, flush=True)
        save(args.json, args.engine, {"version": version, "asked": asked, "rows": rows})


def compare(ours: list[dict], theirs: list[dict]) -> list[dict[str, Any]]:
    """A row a level: dflash's ways and the faster of vLLM's, which both have the drafter."""
    levels = []
    for concurrency in dict.fromkeys(row["concurrency"] for row in [*ours, *theirs]):
        own = [row for row in ours if row["concurrency"] == concurrency]
        peers = [row for row in theirs if row["concurrency"] == concurrency]
        length = next((r["acceptance_length"] for r in peers if r["acceptance_length"]), None)
        if len(own) != 2 or length is None:
            raise SystemExit(f"concurrency {concurrency}: not measured to its end by both")
        plain, drafted = own
        best = max(row["tokens_per_second"] for row in peers)
        levels.append(
            {
                "concurrency": concurrency,
                "tokens_per_second": [
                    plain["tokens_per_second"], drafted["tokens_per_second"], best
                ],
                "acceptance_length": [drafted["acceptance_length"], length],
                "equal_acceptance": abs(drafted["acceptance_length"] / length - 1) <= 0.02,
                "faster_than_vllm_with_drafter": drafted["tokens_per_second"]
                > max(plain["tokens_per_second"], best),
            }
        )  # fmt: skip
    return levels


def verdict(level: dict[str, Any]) -> str:
    plain, drafted, peer = level["tokens_per_second"]
    lengths = " / ".join(f"{length:.3f}" for length in level["acceptance_length"])
    return (
        f"concurrency {level['concurrency']}: {plain} without drafter, {drafted} with, vLLM {peer} tok/s"
        + ("" if level["faster_than_vllm_with_drafter"] else " NOT FASTER")
        + f", AL {lengths}"
        + ("" if level["equal_acceptance"] else " NOT EQUAL")
    )


def measure_apart() -> list[Path]:
    """Each engine in a process of its own; files of their figures."""
    folder = Path(tempfile.mkdtemp())
    ours, theirs = files = [folder / f"{name}.json" for name in ENGINES]
    module = "benchmarks.end_to_end.demo_vs_vllm"
    in_own_process(module, "--engine", "dflash", "--json", ours)
    in_own_process(module, "--engine", "vllm", "--asked", ours, "--json", theirs)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("both", *ENGINES), default="both")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="of one engine's figures")
    parser.add_argument("--asked", type=Path, help="dflash's --json, for vLLM")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OURS", "THEIRS"))
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    if args.engine == "vllm" and args.asked is None:
        parser.error("--engine vllm needs --asked: the file that --engine dflash wrote")
    if args.engine != "both":
        return measure(args)
    ours, theirs = read_both(args.compare or measure_apart())
    levels = compare(ours["rows"], theirs["rows"])
    if not levels:
        raise SystemExit("--compare: the two have no figures")
    for level in levels:
        print(verdict(level))
    del ours["asked"], theirs["asked"]  # the prompts' token ids
    figures = {"levels": levels, "dflash": ours, "vllm": theirs}
    print(report.write("demo_vs_vllm", figures, args.out))


if __name__ == "__main__":
    main()
