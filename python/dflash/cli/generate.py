# SPDX-License-Identifier: Apache-2.0
"""`dflash generate`: the answer on stdout as it comes, everything about it on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash._conflict import report_conflict

if TYPE_CHECKING:
    from dflash.cli.compare import Comparison

DEMO = "demo"
NO_DRAFT = "none"
DFLASH = "dflash"
MAX_THREADS = 1024  # far more than help; OpenMP crashes on a million


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads it from stdin.")
    ] = None,
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
        str,
        typer.Option(
            help="dflash, or autoregressive: --draft is a small model of the same tokens."
        ),
    ] = DFLASH,
    draft_quantization: Annotated[
        str | None,
        typer.Option(
            help="fp8: the drafter's matrices at half their bytes. Default: as the checkpoint has them."
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
    allow_long_drafts: Annotated[
        bool,
        typer.Option("--allow-long-drafts", help="Permit more drafts than the drafter's block."),
    ] = False,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Prompt and answer tokens at most. Default: what fits."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Mass of the most likely tokens to keep.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Most likely tokens to keep; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run without the drafter: speed-up, same tokens?")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_THREADS,
            help="CPU threads. Default: torch's; --compare measures the best.",
        ),
    ] = None,
) -> None:
    """Generate text from a prompt, and say how fast it came."""
    text = _read_prompt(prompt)
    draft = resolve_draft(model, draft, draft_method)
    if compare and draft is None:
        raise ValueError("--compare needs a drafter: give --draft")
    if report_conflict():
        raise typer.Exit(code=1)

    import torch

    import dflash

    if threads is not None:
        torch.set_num_threads(threads)
    engine: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "max_num_seqs": 1,
        "max_model_len": max_model_len,
        "enable_prefix_caching": False,  # a comparison computes its prompt every time
    }
    llm = dflash.LLM(
        model,
        draft,
        draft_method=draft_method if draft else DFLASH,
        draft_quantization=draft_quantization,
        num_speculative_tokens=num_speculative_tokens,
        allow_long_drafts=allow_long_drafts,
        **engine,
    )
    if not raw:
        text = llm.chat_prompt([{"role": "user", "content": text}])
    params = dflash.SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )

    output = _stream(llm, text, params)
    if not compare:
        _report(_summary(output.statistics, draft is not None), llm)
        return

    from dflash.cli import compare as comparing

    comparison = comparing.compare(llm.without_draft(), llm, text, params, threads=threads)
    _report(_compared(comparison), llm, comparison)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise ValueError("give a PROMPT, or - to read it from stdin")
    text = sys.stdin.read() if prompt is None or prompt == "-" else prompt
    if not text.strip():
        raise ValueError("the prompt is empty")
    if any("\ud800" <= c <= "\udfff" for c in text):  # bytes that were no UTF-8
        raise ValueError("the prompt is not UTF-8: convert it first")
    return text


def resolve_draft(model: str, draft: str | None, draft_method: str = DFLASH) -> str | None:
    """What --draft means, for every command; None: no drafter."""
    if draft is None and draft_method != DFLASH:
        raise ValueError(f"--draft-method {draft_method} needs a drafter: give --draft")
    if draft is None:
        return DEMO if model == DEMO else None
    return None if draft.lower() == NO_DRAFT else draft


def _stream(llm: Any, prompt: str, params: Any) -> Any:
    """Write the text as it comes; returns the finished request."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # a terminal that is not UTF-8 gets '?', not a traceback
        reconfigure(errors="replace")
    output = None
    for chunk in llm.stream(prompt, params):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        output = chunk.finished or output
    assert output is not None, "the stream ended without a finished request"
    if not output.outputs[0].text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    return output


def _summary(statistics: Any, drafted: bool) -> list[str]:
    parts = [f"{statistics.tokens_per_second:.1f} tok/s"]
    if drafted:
        parts.append(f"AL {statistics.acceptance_length:.2f}")
    return [*parts, f"{statistics.num_output_tokens} tokens"]


def _compared(comparison: Comparison) -> list[str]:
    same = (
        f"same {comparison.num_tokens} tokens"
        if comparison.first_difference is None
        else f"tokens DIFFER from number {comparison.first_difference + 1} on"
    )
    faster = (
        f"{comparison.speedup:.2f}x the {comparison.plain.tokens_per_second:.1f} tok/s without "
        f"drafter (medians of {comparison.num_runs} interleaved runs)"
        if comparison.plain.tokens_per_second > 0
        else "too short to compare speeds"
    )
    return [
        f"{comparison.draft.tokens_per_second:.1f} tok/s",
        f"AL {comparison.acceptance_length:.2f}",
        faster,
        same,
    ]


def _report(parts: list[str], llm: Any, comparison: Comparison | None = None) -> None:
    """The one line that ends a generation: figures, then dtype, device and threads."""
    import torch

    device = str(llm.facts.device)
    parts.append(f"{str(llm.facts.dtype).removeprefix('torch.')}, {device}")
    if device == "cpu":
        count = comparison.draft.threads if comparison else torch.get_num_threads()
        parts[-1] += f", {count} thread{'' if count == 1 else 's'}"
        if comparison and comparison.plain.threads != count:
            parts[-1] += f" ({comparison.plain.threads} without drafter)"
    print(" | ".join(parts), file=sys.stderr)
