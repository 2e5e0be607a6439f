# SPDX-License-Identifier: Apache-2.0
"""The offline interface: two checkpoints in, text out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dflash.engine.args import EngineArgs
from dflash.engine.build import Engine, build_core, without_draft
from dflash.engine.core import NewTokens
from dflash.engine.detokenizer import Detokenizer
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.scheduler import Request
from dflash.engine.statistics import Statistics
from dflash.errors import DflashError

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. token_ids hold the stop token; text holds neither it nor the stop string."""

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    statistics: Statistics


@dataclass(frozen=True)
class StreamChunk:
    """What one iteration added; `finished` comes with the last chunk."""

    text: str
    token_ids: list[int]
    finished: RequestOutput | None = None


@dataclass
class _Live:
    """A request of this LLM: what its owner has not taken yet."""

    request: Request
    prompt: str | None
    detokenizer: Detokenizer
    chunks: deque[StreamChunk] = field(default_factory=deque)
    output: RequestOutput | None = None


class LLM:
    """A target and, optionally, its DFlash drafter.

    Args:
        model: target checkpoint: a folder of safetensors, a GGUF file, a hub id, or "demo".
        draft: DFlash checkpoint of the same kinds; None generates without a drafter.
        engine_args: see EngineArgs: dtype, device, num_speculative_tokens, max_model_len, max_num_seqs, ...

    Raises:
        ValueError: an argument or a pair of checkpoints that cannot be served.
        dflash.errors.DflashError: what is not the caller's argument: files, network, device.
    """

    def __init__(self, model: str, draft: str | None = None, **engine_args) -> None:
        args = EngineArgs(model=model, draft=draft, **engine_args)
        engine = build_core(args)
        assert engine.model_dir is not None
        self._start(args, engine, load_tokenizer(engine.model_dir))

    def _start(self, args: EngineArgs, engine: Engine, tokenizer: Any) -> None:
        self.args = args
        self.core, self.facts = engine.core, engine.facts
        self.tokenizer = tokenizer
        self.statistics = Statistics()
        self._engine = engine
        self._live: dict[int, _Live] = {}

    def without_draft(self) -> LLM:
        """An LLM on the same target weights, in the same memory, without the drafter."""
        plain = LLM.__new__(LLM)
        plain._start(self.args, without_draft(self.args, self._engine), self.tokenizer)
        return plain

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """The messages ({"role", "content"}) through the model's chat template, ready to answer."""
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.args.model} has no chat template: pass the prompt raw")
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers every prompt (text, or token ids), batched; results in the prompts' order.

        Text gets the tokenizer's special tokens unless it begins with its beginning-of-sequence token already.
        """
        many = _as_list(prompts)
        lives = self._add_all(many, _params_for(many, sampling_params))
        try:
            return [self._finish(live) for live in lives]
        finally:
            self._drop(lives)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Yields the answer as it is committed; closing the iterator aborts the request."""
        lives = self._add_all([prompt], _params_for([prompt], sampling_params))
        (live,) = lives
        try:
            while live.chunks or live.output is None:
                if live.chunks:
                    yield live.chunks.popleft()
                else:
                    self._step(live)
        finally:
            self._drop(lives)

    def _finish(self, live: _Live) -> RequestOutput:
        while live.output is None:
            self._step(live)
        return live.output

    def _add_all(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[_Live]:
        """Queues all requests, or none when one is refused."""
        added: list[_Live] = []
        try:
            for prompt, param in zip(prompts, params, strict=True):
                added.append(self._add(prompt, param))
        except BaseException:
            self._drop(added)
            raise
        return added

    def _add(self, prompt: Prompt, params: SamplingParams) -> _Live:
        request = self.core.add_request(self._token_ids(prompt), params)
        text = prompt if isinstance(prompt, str) else None
        live = _Live(request, text, Detokenizer(self.tokenizer, params.stop_strings))
        self._live[request.request_id] = live
        return live

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            bos = self.tokenizer.bos_token
            has_bos = bool(bos) and prompt.startswith(bos)
            return self.tokenizer.encode(prompt, add_special_tokens=not has_bos)
        if isinstance(prompt, Sequence):
            return prompt
        raise ValueError(f"a prompt must be text or a sequence of token ids, got {prompt!r}")

    def _drop(self, lives: list[_Live]) -> None:
        """Forgets requests; those that have not finished end here."""
        for live in lives:
            self._live.pop(live.request.request_id, None)
            self.core.abort(live.request)

    def _step(self, waiting: _Live) -> None:
        """One engine step; every request's owner finds its own chunks."""
        if waiting.request.finish_reason == "abort":
            raise RuntimeError("the request was aborted: a step of its batch failed")
        for new in self.core.step():
            live = self._live[new.request.request_id]
            live.chunks.append(self._chunk(live, new))

    def _chunk(self, live: _Live, new: NewTokens) -> StreamChunk:
        request, detokenizer = live.request, live.detokenizer
        # The token that stopped the request is not part of the text.
        shown = new.token_ids[:-1] if new.finish_reason == "stop" else new.token_ids
        text = detokenizer.push(shown, last=new.finish_reason is not None)
        if not detokenizer.stopped and new.finish_reason is None:
            return StreamChunk(text, new.token_ids)
        reason, tokens = new.finish_reason, new.token_ids
        if detokenizer.stopped:
            # A stop string may end inside an accepted run: what comes after it was never asked for.
            cut = len(request.output_token_ids) - detokenizer.num_tokens
            reason, tokens = "stop", tokens[: len(tokens) - cut]
            del request.output_token_ids[detokenizer.num_tokens :]
            request.statistics.num_output_tokens -= cut
        self.core.abort(request)
        self.statistics.add(request.statistics)
        live.output = RequestOutput(
            prompt=live.prompt,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=request.output_token_ids,
            text=detokenizer.text,
            finish_reason=reason or "stop",
            statistics=request.statistics,
        )
        return StreamChunk(text, tokens, live.output)


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a checkpoint folder.

    Raises:
        DflashError: there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DflashError(
            f"{folder} has no tokenizer that transformers can read ({first}): add the model's tokenizer files"
        ) from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, Sequence) or any(not isinstance(p, SamplingParams) for p in params):
        raise ValueError(
            f"sampling_params: expected SamplingParams, one or one a prompt, got {params!r}"
        )
    if len(params) != len(prompts):
        raise ValueError(
            f"{len(params)} sampling_params for {len(prompts)} prompts: expected one each"
        )
    return list(params)
