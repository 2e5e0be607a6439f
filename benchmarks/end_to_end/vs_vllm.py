# SPDX-License-Identifier: Apache-2.0
"""dflash beside vLLM on one GPU: milliseconds an iteration at equal AL, and latencies under Poisson arrivals.

    python -m benchmarks.end_to_end.vs_vllm [--engine both] [--no-draft] [--out FOLDER]

Qwen3-8B's shape and its 5-layer drafter with random weights, N = 15, synthetic acceptance of AL 6.5. Each engine has
a process of its own, one after the other. Needs vllm 0.26 beside torch 2.11.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from benchmarks import report
from benchmarks.end_to_end.iteration import NUM_WARMUP, PROMPT_LEN, N, draft_milliseconds, make_core

from dflash import SamplingParams

NUM_WINDOWS, WINDOW = 5, 30  # iterations timed together
MAX_MODEL_LEN = 4096
ENGINES = ("dflash", "vllm")


class Engine(Protocol):
    """Requests by number; `step` does one iteration or prefill and says who got how many tokens."""

    def add(self, key: int, token_ids: list[int], max_tokens: int) -> None: ...

    def step(self) -> list[tuple[int, int]]: ...

    def clear(self) -> None:
        """Ends all requests."""
        ...

    def draft_milliseconds(self, batch: int) -> float | None:
        """Of one draft step, context K/V included: vLLM's in its place in the iteration, ours in a graph of its own."""
        ...


class Dflash:
    def __init__(self, args: argparse.Namespace) -> None:
        self._core = make_core(args)
        self._requests, self._keys = {}, {}

    def add(self, key: int, token_ids: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = self._core.add_request(token_ids, params)
        self._requests[key], self._keys[id(request)] = request, key

    def step(self) -> list[tuple[int, int]]:
        return [(self._keys[id(new.request)], len(new.token_ids)) for new in self._core.step()]

    def clear(self) -> None:
        for request in self._requests.values():
            self._core.abort(request)
        self._requests, self._keys = {}, {}
        self._core.step()

    def draft_milliseconds(self, batch: int) -> float | None:
        return draft_milliseconds(self._core, batch)


class Vllm:
    """vLLM's engine in this process, CUDA graphs as it likes them."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "DFLASH_VLLM": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import vllm  # pyright: ignore[reportMissingImports]

        folder = Path(tempfile.mkdtemp())
        for name, config in dummy_configs().items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        speculative = {
            "method": "dflash",
            "model": str(folder / "draft"),
            "num_speculative_tokens": N,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": args.acceptance_length,
        }
        self._drafts: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if not args.no_draft:
            self._time_drafts()
        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            str(folder / "target"),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=args.max_model_len,
            max_num_seqs=max(args.batch),
            gpu_memory_utilization=0.6,
            enable_prefix_caching=False,
            **({} if args.no_draft else {"speculative_config": speculative}),
        ).llm_engine
        self._counts: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._num_added = itertools.count()

    def _time_drafts(self) -> None:
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import (  # pyright: ignore[reportMissingImports]
            DFlashSpeculator,
        )

        propose = DFlashSpeculator.propose

        def timed(*args, **kwargs):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            result = propose(*args, **kwargs)
            pair[1].record()
            self._drafts.append(pair)
            return result

        DFlashSpeculator.propose = timed

    def add(self, key: int, token_ids: list[int], max_tokens: int) -> None:
        name = str(next(self._num_added))
        params = self._params(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._names[name], self._counts[key] = key, 0
        self._engine.add_request(name, {"prompt_token_ids": token_ids}, params)

    def step(self) -> list[tuple[int, int]]:
        new = []
        for output in self._engine.step():
            key, count = self._names[output.request_id], len(output.outputs[0].token_ids)
            new.append((key, count - self._counts[key]))
            self._counts[key] = count
        return new

    def clear(self) -> None:
        self._engine.abort_request(list(self._names))
        self._names, self._counts = {}, {}
        for _ in range(3):
            self._engine.step()

    def draft_milliseconds(self, batch: int) -> float | None:
        torch.cuda.synchronize()
        recent = self._drafts[-WINDOW:]
        return statistics.median(a.elapsed_time(b) for a, b in recent) if recent else None


def dummy_configs() -> dict[str, dict]:
    """config.json of the two checkpoints of benchmarks/shapes.py."""
    shared = {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 40960,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
        "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16",
    }  # fmt: skip
    draft = {
        "architectures": ["DFlashDraftModel"], "num_hidden_layers": 5, "max_window_layers": 5,
        "layer_types": ["full_attention"] * 5, "block_size": 16, "num_target_layers": 36,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    }  # fmt: skip
    target = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "max_window_layers": 36,
    }
    return {"target": shared | target, "draft": shared | draft}


def prompts(seed: int, length: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(1000, 100_000, (length,), generator=generator).tolist()


def measure_iterations(engine: Engine, batch: int, with_draft: bool) -> dict:
    """Steady state: all requests run, nobody joins. Windows of iterations, each timed as one."""
    for key, token_ids in zip(range(batch), prompts(batch, PROMPT_LEN), strict=False):
        engine.add(key, token_ids, MAX_MODEL_LEN - PROMPT_LEN - 64)
    started: set[int] = set()
    while len(started) < batch:
        started |= {key for key, _ in engine.step()}
    for _ in range(NUM_WARMUP):
        engine.step()
    milliseconds, tokens = [], 0
    for _ in range(NUM_WINDOWS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(WINDOW):
            tokens += sum(count for _, count in engine.step())
        milliseconds.append((time.perf_counter() - began) * 1e3 / WINDOW)
    row = {
        "batch": batch,
        "iteration_ms": round(statistics.median(milliseconds), 3),
        "spread_ms": [round(min(milliseconds), 3), round(max(milliseconds), 3)],
        "acceptance_length": round(tokens / batch / NUM_WINDOWS / WINDOW, 2),
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


def measure(args: argparse.Namespace) -> dict:
    engine: Engine = Dflash(args) if args.engine == "dflash" else Vllm(args)
    rows = []
    for batch in args.batch:
        rows.append(measure_iterations(engine, batch, not args.no_draft))
        print(args.engine, rows[-1], flush=True)
    figures = {"iterations": rows}
    if args.num_requests:
        measure_arrivals(engine, argparse.Namespace(**(vars(args) | {"num_requests": 8})))
        figures["arrivals"] = measure_arrivals(engine, args)
        print(args.engine, figures["arrivals"], flush=True)
    return figures


def measure_apart(args: argparse.Namespace) -> dict[str, dict]:
    """Each engine in a process of its own."""
    results = {}
    for name in ENGINES:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "benchmarks.end_to_end.vs_vllm", *sys.argv[1:]]
            subprocess.run([*command, "--engine", name, "--json", file.name], check=True)
            results[name] = json.loads(Path(file.name).read_text())
    return results


def comparison(results: dict[str, dict]) -> Iterator[str]:
    """A line a batch size. The realised ALs are equal but for chance, of which small batches have more."""
    for ours, theirs in zip(*(results[name]["iterations"] for name in ENGINES), strict=True):
        ratio = theirs["iteration_ms"] / ours["iteration_ms"]
        difference = abs(ours["acceptance_length"] / theirs["acceptance_length"] - 1)
        allowed = 0.15 / ours["batch"] ** 0.5
        yield (
            f"batch {ours['batch']}: {ours['iteration_ms']} / {theirs['iteration_ms']} ms, {ratio:.2f}x, "
            f"AL {ours['acceptance_length']} / {theirs['acceptance_length']}"
            + (" NOT EQUAL" if difference > allowed else "")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("both", *ENGINES), default="both")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--no-draft", action="store_true")
    parser.add_argument("--acceptance-length", type=float, default=6.5)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--num-requests", type=int, default=80, help="0: no arrivals")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--json", type=Path, help="of one engine's figures")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    args.max_model_len, args.enforce_eager = MAX_MODEL_LEN, False
    args.draft_quantization = None
    if args.engine != "both":
        figures = measure(args)
        if args.json is not None:
            args.json.write_text(json.dumps(figures))
        return
    name = "vs_vllm_no_draft" if args.no_draft else "vs_vllm"
    results = measure_apart(args)
    for line in comparison(results):
        print(line)
    facts = {"arguments": vars(args) | {"json": None}, "vllm": importlib.metadata.version("vllm")}
    print(report.write(name, facts | results, args.out))


if __name__ == "__main__":
    main()
