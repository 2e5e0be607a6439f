# SPDX-License-Identifier: Apache-2.0
"""vLLM's DFlash without and with the plugin, in one process on one GPU.

    PYTHONPATH=SITE:python python -m benchmarks.end_to_end.vllm_plugin [--pairs demo qwen3] [--out FOLDER]

SITE holds vLLM 0.26.0. "demo": the demo pair's greedy output and acceptance length, prompts alone and together.
"qwen3": milliseconds of a draft step and of an iteration for Qwen3-8B's shape and its 5-layer drafter (random weights,
N = 15, synthetic acceptance of AL 6.5). Engines without the plugin are made and measured before it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks import report
from benchmarks.end_to_end.vs_vllm import dummy_configs, prompts

from dflash.integrations.vllm import SWITCH, install
from dflash.integrations.vllm.sources import find_vllm

SIDES = ("vllm", "plugin")
PROMPT_LEN, ACCEPTANCE_LENGTH = 128, 6.5
TOPICS = (
    "returns the sum of the even numbers in a list", "returns the n-th Fibonacci number", "reverses a string",
    "counts the words in a text", "checks whether a number is prime", "merges two sorted lists",
    "finds the largest element of a list", "removes duplicates from a list", "computes the factorial of a number",
    "checks whether a string is a palindrome", "sorts a list of names by length", "computes the mean of a list",
    "converts Celsius to Fahrenheit", "flattens a nested list", "finds the common elements of two lists",
    "counts the vowels in a string",
)  # fmt: skip


# Engines of one process share its groups and graphs' memory: none is collected while another runs.
KEPT: list[Any] = []


class Draft(NamedTuple):
    """One draft step."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    num_reqs: int


class Run(NamedTuple):
    seconds: float
    token_ids: list[list[int]]
    drafts: list[Draft]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def acceptance_length(self) -> float:
        """Tokens of a draft step and request; the first step of a request follows its prompt."""
        reqs = len(self.token_ids)
        return (self.num_tokens - reqs) / (sum(draft.num_reqs for draft in self.drafts) - reqs)


def set_environment() -> None:
    """Before vLLM is imported: its engine in this process, its second model runner, no plugin yet."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        SWITCH: "0",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def record_drafts() -> list[Draft]:
    """The list that every draft step of vLLM is appended to from here on."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import (  # pyright: ignore[reportMissingImports]
        DFlashSpeculator,
    )

    drafts, propose = [], DFlashSpeculator.propose

    def timed(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = propose(self, *args, **kwargs)
        end.record()
        batch = kwargs["input_batch"] if "input_batch" in kwargs else args[0]
        drafts.append(Draft(start, end, batch.num_reqs))
        return result

    DFlashSpeculator.propose = timed
    return drafts


def make_engine(
    side: str, model: Path, speculative: dict[str, Any], sizes: list[int], **options: Any
) -> Any:
    """vLLM with graphs of these numbers of requests; captures what is installed."""
    import vllm  # pyright: ignore[reportMissingImports]

    if side == "plugin":
        install_plugin()
        speculative = speculative | {"attention_backend": "CUSTOM"}
    rows = speculative["num_speculative_tokens"] + 1
    compilation = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [size * rows for size in sizes],
    } | options.pop("compilation", {})
    began = time.perf_counter()
    engine = vllm.LLM(
        str(model),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=max(sizes),
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=4 << 30,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
        speculative_config={"method": "dflash"} | speculative,
        compilation_config=compilation,
        **options,
    )
    KEPT.append(engine)
    print(f"{side}: engine in {time.perf_counter() - began:.0f} s", flush=True)
    return engine


def install_plugin() -> None:
    """Every part, or no figures: they would be vLLM's."""
    taken, left = install(*find_vllm())
    if left:
        raise SystemExit(f"not taken over: {'; '.join(left)}")
    print(f"plugin: {'; '.join(taken)}", flush=True)


def generate(engine: Any, token_ids: list[list[int]], max_tokens: int, drafts: list[Draft]) -> Run:
    """Greedy, always max_tokens tokens a prompt."""
    import vllm  # pyright: ignore[reportMissingImports]

    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    requests = [{"prompt_token_ids": ids} for ids in token_ids]
    drafts.clear()
    torch.cuda.synchronize()
    began = time.perf_counter()
    outputs = engine.generate(requests, params, use_tqdm=False)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return Run(seconds, [list(output.outputs[0].token_ids) for output in outputs], list(drafts))


def demo_pair() -> list[Path]:
    from dflash.checkpoints.demo import demo_draft, demo_target

    return [demo_target(), demo_draft()]


def demo_prompts(target: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    text = "<|im_start|>user\nWrite a Python function that {}.<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(text.format(topic), add_special_tokens=False).ids for topic in TOPICS]


def measure_demo(side: str, drafts: list[Draft], args: argparse.Namespace) -> dict[str, Run]:
    """Prompts one at a time, and all at once."""
    target, draft = args.demo or demo_pair()
    token_ids = demo_prompts(target)
    speculative = {"model": str(draft), "num_speculative_tokens": 7}
    sizes = [1, len(TOPICS)]
    # No compiler here: what is compared is tokens.
    engine = make_engine(side, target, speculative, sizes, compilation={"mode": 0})
    runs = [generate(engine, [ids], args.demo_tokens, drafts) for ids in token_ids]
    alone = Run(
        sum(run.seconds for run in runs),
        [run.token_ids[0] for run in runs],
        [draft for run in runs for draft in run.drafts],
    )
    return {"alone": alone, "together": generate(engine, token_ids, args.demo_tokens, drafts)}


def compare_demo(vllm: dict[str, Run], plugin: dict[str, Run]) -> list[dict[str, Any]]:
    return [{"how": how} | compare_runs(vllm[how], plugin[how]) for how in vllm]


def compare_runs(vllm: Run, plugin: Run) -> dict[str, Any]:
    pairs = list(zip(vllm.token_ids, plugin.token_ids, strict=True))
    first = [first_difference(*pair) for pair in pairs]
    lengths = [run.acceptance_length for run in (vllm, plugin)]
    return {
        "prompts": len(pairs),
        "tokens_each": len(pairs[0][0]),
        "equal_outputs": first.count(None),
        "first_differences": {i: at for i, at in enumerate(first) if at is not None},
        "acceptance_length": [round(length, 4) for length in lengths],
        "same": first.count(None) == len(pairs) and abs(lengths[1] / lengths[0] - 1) <= 0.02,
    }


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def measure_qwen3(side: str, drafts: list[Draft], args: argparse.Namespace) -> dict[int, dict]:
    """Figures of each batch size."""
    folder = Path(tempfile.mkdtemp())
    for name, config in dummy_configs().items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    speculative = {
        "model": str(folder / "draft"),
        "num_speculative_tokens": 15,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": ACCEPTANCE_LENGTH,
    }
    engine = make_engine(side, folder / "target", speculative, args.batch, load_format="dummy")
    figures = {}
    for batch in args.batch:
        figures[batch] = measure_batch(engine, batch, args.max_tokens, drafts)
        print(side, batch, figures[batch], flush=True)
    return figures


def measure_batch(
    engine: Any, batch: int, max_tokens: int, drafts: list[Draft]
) -> dict[str, float]:
    """A long run less a short one leaves prompts, start and the last, cut iteration out of an iteration's time."""
    token_ids = list(islice(prompts(batch, PROMPT_LEN), batch))
    generate(engine, token_ids, max_tokens // 4, drafts)
    long = generate(engine, token_ids, max_tokens, drafts)
    short = generate(engine, token_ids, max_tokens // 4, drafts)
    steps = len(long.drafts) - len(short.drafts)
    full = [draft for draft in long.drafts[2:] if draft.num_reqs == batch]
    milliseconds = [draft.start.elapsed_time(draft.end) for draft in full]
    return {
        "draft_ms": round(statistics.median(milliseconds), 4),
        "iteration_ms": round((long.seconds - short.seconds) / steps * 1e3, 3),
        "acceptance_length": round(long.acceptance_length, 3),
        "draft_steps": len(full),
    }


def compare_qwen3(vllm: dict[int, dict], plugin: dict[int, dict]) -> list[dict[str, Any]]:
    rows = [{"batch": batch, "vllm": vllm[batch], "plugin": plugin[batch]} for batch in vllm]
    return [row | {"faster": row["plugin"]["draft_ms"] < row["vllm"]["draft_ms"]} for row in rows]


def demo_line(run: dict[str, Any]) -> str:
    lengths = " / ".join(f"{length:.3f}" for length in run["acceptance_length"])
    outputs = f"{run['equal_outputs']} of {run['prompts']} outputs equal"
    verdict = "SAME" if run["same"] else f"NOT THE SAME {run['first_differences']}"
    return f"demo {run['how']}: {outputs}, AL {lengths} {verdict}"


def qwen3_line(row: dict[str, Any]) -> str:
    (old, new), names = (row["vllm"], row["plugin"]), ("draft_ms", "iteration_ms")
    draft, iteration = (f"{old[name]:.3f} / {new[name]:.3f} ms" for name in names)
    ratio = old["draft_ms"] / new["draft_ms"]
    verdict = "" if row["faster"] else " NOT FASTER"
    return f"batch {row['batch']:2}: draft {draft} ({ratio:.3f}x{verdict}), iteration {iteration}"


PAIRS = {
    "demo": (measure_demo, compare_demo, demo_line),
    "qwen3": (measure_qwen3, compare_qwen3, qwen3_line),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--demo", type=Path, nargs=2, metavar=("TARGET", "DRAFT"), help="folders")
    parser.add_argument("--demo-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    set_environment()
    import vllm  # pyright: ignore[reportMissingImports]

    drafts = record_drafts()
    measured = {
        side: {pair: PAIRS[pair][0](side, drafts, args) for pair in args.pairs} for side in SIDES
    }
    figures: dict[str, Any] = {"vllm": vllm.__version__, "gpu": torch.cuda.get_device_name()}
    for pair in args.pairs:
        _, compare, line = PAIRS[pair]
        figures[pair] = compare(*(measured[side][pair] for side in SIDES))
        for row in figures[pair]:
            print(line(row))
    print(report.write("vllm_plugin", figures, args.out))
    if not all(run["same"] for run in figures.get("demo", [])):
        raise SystemExit("the plugin changed answers or acceptance")


if __name__ == "__main__":
    main()
