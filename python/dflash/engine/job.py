# SPDX-License-Identifier: Apache-2.0
"""A prompt and its n sequences, between the core and whoever waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash.engine.core import Core, NewTokens
from dflash.engine.detokenizer import Detokenizer
from dflash.engine.outputs import CompletionOutput, Logprob, RequestOutput, StreamChunk
from dflash.engine.request import Request
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.statistics import Statistics

Prompt = str | Sequence[int]


@dataclass
class _Sequence:
    """One of a prompt's answers."""

    index: int
    request: Request
    detokenizer: Detokenizer
    logprobs: list[dict[int, Logprob]] | None
    output: CompletionOutput | None = None
    num_taken: int = 0  # tokens handed over


class Job:
    """What a caller has asked for and not taken yet.

    Args:
        prompt: text, or token ids.
        params: sampled n times.
        tokenizer: transformers' tokenizer.
    """

    def __init__(self, prompt: Prompt, params: SamplingParams, tokenizer: Any) -> None:
        self.prompt = prompt
        self.params = params
        self.sequences: list[_Sequence] = []
        self.chunks: deque[StreamChunk] = deque()
        self.error: Exception | None = None
        self.done = False  # nothing more will come: set when everything else is in its place
        self.dropped = False  # no one waits for it any more
        self.failing = False  # its end with an error was asked for
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._stop_ids: tuple[int, ...] = ()

    @property
    def finished(self) -> RequestOutput:
        """The outputs of a job that is done."""
        total = Statistics()
        for sequence in self.sequences:
            total.add(sequence.request.statistics)
        outputs = [s.output for s in self.sequences if s.output is not None]
        if not outputs:
            outputs = [CompletionOutput(0, "", [], "error", error=self.error)]
        number = self.sequences[0].request.request_id if self.sequences else -1
        text = self.prompt if isinstance(self.prompt, str) else None
        cached = self.sequences[0].request.statistics.num_cached_tokens if self.sequences else 0
        return RequestOutput(number, text, self._token_ids, outputs, total, cached)

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def start(self, core: Core) -> None:
        """Queues the sequences.

        Raises:
            ValueError: the prompt or the parameters cannot be served; nothing is left queued.
        """
        self._token_ids = self._encode(self.prompt)
        self._stop_ids = tuple(self.params.stop_token_ids)
        params = self.params
        for index in range(params.n):
            seed = None if params.seed is None else _wrapped(int(params.seed) + index)
            request = core.add_request(self._token_ids, params, seed)
            detokenizer = Detokenizer(
                self._tokenizer,
                params.stop_strings,
                params.include_stop_str_in_output,
                params.skip_special_tokens,
                params.min_tokens,
            )
            logprobs = None if params.logprobs is None else []
            self.sequences.append(_Sequence(index, request, detokenizer, logprobs))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            prompt.encode()  # a tokenizer does not say what it dislikes about half a character
            bos = self._tokenizer.bos_token
            has_bos = bool(bos) and prompt.startswith(bos)
            return self._tokenizer.encode(prompt, add_special_tokens=not has_bos)
        if hasattr(prompt, "tolist"):  # an array or a tensor
            prompt = prompt.tolist()  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return list(prompt)
        raise ValueError(f"a prompt must be text or a sequence of token ids, got {prompt!r}")

    def take(self, new: NewTokens) -> tuple[StreamChunk, list[_Sequence]]:
        """Turns new tokens into a chunk, for `hand_over`; and the sequences that end with it."""
        sequence = next(s for s in self.sequences if s.request is new.request)
        text = self._push(sequence, new)
        tokens, logprobs = new.token_ids, new.logprobs
        cut = len(sequence.request.output_token_ids) - sequence.detokenizer.num_tokens
        if sequence.detokenizer.stopped and cut:
            # A stop string may end inside an accepted run: what comes after it was never asked for.
            tokens = tokens[: len(tokens) - cut]
            logprobs = None if logprobs is None else logprobs[: len(tokens)]
            del sequence.request.output_token_ids[-cut:]
            sequence.request.statistics.take_back(cut, len(new.token_ids))
        sequence.num_taken += len(tokens)
        if sequence.logprobs is not None:
            sequence.logprobs += logprobs or []
        ended = sequence.detokenizer.stopped or new.finish_reason is not None
        if ended:
            sequence.output = self._output(sequence, new)
        last = all(s.output is not None for s in self.sequences)
        finished = self.finished if last else None
        chunk = StreamChunk(text, tokens, sequence.index, logprobs, finished)
        return chunk, [sequence] if ended else []

    def hand_over(self, chunk: StreamChunk) -> None:
        """Gives a chunk to whoever waits; the last one ends the job."""
        self.chunks.append(chunk)
        # A job that is to fail, because its callback did, ends with that.
        self.done = chunk.finished is not None and not self.failing

    @staticmethod
    def _push(sequence: _Sequence, new: NewTokens) -> str:
        last = new.finish_reason is not None
        if new.finish_reason != "stop":
            return sequence.detokenizer.push(new.token_ids, last)
        # The token that stopped the request is not part of the text.
        return sequence.detokenizer.push(new.token_ids[:-1], last)

    def _output(self, sequence: _Sequence, new: NewTokens) -> CompletionOutput:
        tokens, detokenizer = sequence.request.output_token_ids, sequence.detokenizer
        reason, stop_reason = new.finish_reason or "stop", None
        if detokenizer.stopped:
            reason, stop_reason = "stop", detokenizer.stop_string
        elif reason == "stop" and tokens[-1] in self._stop_ids:
            stop_reason = tokens[-1]
        return CompletionOutput(
            sequence.index, detokenizer.text, tokens, reason, stop_reason, sequence.logprobs
        )

    def fail(self, error: Exception) -> list[_Sequence]:
        """Gives every sequence its output; returns those that were still running. `end` follows."""
        running = [s for s in self.sequences if s.output is None]
        for s in self.sequences:
            if s.output is not None:
                s.output = replace(s.output, finish_reason="error", stop_reason=None, error=error)
                continue
            # Tokens whose text or logprobs could not be made were not handed over.
            tokens = s.request.output_token_ids[: s.num_taken]
            s.output = CompletionOutput(
                s.index, s.detokenizer.text, tokens, "error", None, s.logprobs, error
            )
        return running

    def end(self, error: Exception) -> None:
        """The job has failed, and whoever waits may know."""
        self.error = error
        self.done = True


def _wrapped(seed: int) -> int:
    """Into 64 signed bits."""
    return (seed + 2**63) % 2**64 - 2**63
