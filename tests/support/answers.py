# SPDX-License-Identifier: Apache-2.0
"""What any answer must be like, whatever was asked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from dflash import SamplingParams
from dflash.engine.outputs import CompletionOutput, RequestOutput, StreamChunk


class Answer:
    """A stream's chunks put together again, by sequence."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = defaultdict(str)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list] = defaultdict(list)
        self.finished: RequestOutput | None = None

    def add(self, chunk: StreamChunk) -> None:
        assert self.finished is None, "a chunk came after the last one"
        self.texts[chunk.index] += chunk.text
        self.tokens[chunk.index] += chunk.token_ids
        self.logprobs[chunk.index] += chunk.logprobs or []
        self.finished = chunk.finished


def faults(
    answer: Answer, params: SamplingParams, max_model_len: int, eos: tuple[int, ...]
) -> Iterator[str]:
    """What is wrong with a finished answer."""
    finished = answer.finished
    if finished is None:
        yield "the stream ended without its last chunk"
        return
    if [output.index for output in finished.outputs] != list(range(params.n)):
        yield f"{len(finished.outputs)} sequences for n = {params.n}"
    room = max_model_len - len(finished.prompt_token_ids)
    for output in finished.outputs:
        i = output.index
        if answer.texts[i] != output.text:
            yield f"chunks say {answer.texts[i]!r}, the output {output.text!r}"
        if answer.tokens[i] != output.token_ids:
            yield f"chunks hold tokens {answer.tokens[i]}, the output {output.token_ids}"
        if answer.logprobs[i] != (output.logprobs or []):
            yield "chunks hold other logprobs than the output"
        yield from _end_faults(output, params, min(params.max_tokens, room), eos)
        yield from _logprob_faults(output, params.logprobs)


def _end_faults(
    output: CompletionOutput, params: SamplingParams, max_tokens: int, eos: tuple[int, ...]
) -> Iterator[str]:
    tokens, reason, stop = output.token_ids, output.finish_reason, output.stop_reason
    smallest = min(max(params.min_tokens, 1), max_tokens)
    if not smallest <= len(tokens) <= max_tokens:
        yield f"{len(tokens)} tokens, expected {smallest}..{max_tokens}"
        return
    if reason == "length":
        if len(tokens) != max_tokens or stop is not None:
            yield f"length after {len(tokens)} of {max_tokens} tokens, stop_reason {stop!r}"
    elif reason != "stop":
        yield f"finish_reason {reason}"
    elif isinstance(stop, str):
        if stop not in params.stop_strings:
            yield f"stopped by {stop!r}, asked for {params.stop_strings}"
        kept = params.include_stop_str_in_output
        # A copy of the stop string that came before min_tokens stays in the text.
        if (
            not output.text.endswith(stop)
            if kept
            else not params.min_tokens and stop in output.text
        ):
            yield f"stop string {stop!r} and text {output.text!r}"
    else:
        model_eos = () if params.ignore_eos else eos
        ends = model_eos if stop is None else tuple(params.stop_token_ids)
        if tokens[-1] not in ends or stop not in (None, tokens[-1]):
            yield f"stopped by {stop!r} at token {tokens[-1]}, expected one of {ends}"
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    if ends & {*tokens[:-1]}:
        yield f"went on behind one of {ends}: {tokens}"


def _logprob_faults(output: CompletionOutput, wanted: int | None) -> Iterator[str]:
    if wanted is None:
        if output.logprobs is not None:
            yield "logprobs that nobody asked for"
        return
    entries = output.logprobs or []
    if len(entries) != len(output.token_ids):
        yield f"{len(entries)} logprobs for {len(output.token_ids)} tokens"
        return
    for token, entry in zip(output.token_ids, entries, strict=True):
        if token not in entry or not max(wanted, 1) <= len(entry) <= wanted + 1:
            yield f"logprobs of {list(entry)} for token {token}, {wanted} asked for"
        if any(not math.isfinite(v.logprob) or v.logprob > 0 or v.rank < 1 for v in entry.values()):
            yield f"logprobs {entry}"
