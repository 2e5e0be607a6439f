# SPDX-License-Identifier: Apache-2.0
"""The offline interface: two checkpoints in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import AutoTokenizer

from dflash.engine.build import EngineArgs, build_core
from dflash.engine.core import NewTokens
from dflash.engine.detokenizer import Detokenizer
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.scheduler import Request
from dflash.engine.statistics import Statistics

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. token_ids hold the stop token, text does not hold the stop string."""

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
        self.args = EngineArgs(model=model, draft=draft, **engine_args)
        engine = build_core(self.args)
        self.core, self.facts = engine.core, engine.facts
        self.tokenizer = AutoTokenizer.from_pretrained(engine.model_dir)
        self.statistics = Statistics()
        self._requests: dict[int, tuple[Request, str | None, Detokenizer]] = {}

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
        """Answers every prompt (text, or token ids), batched; results in the prompts' order."""
        many = _as_list(prompts)
        params = _params_for(many, sampling_params)
        added = self._add_all(many, params)
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(added):
            for request, chunk in self._step():
                if chunk.finished is not None:
                    outputs[request.request_id] = chunk.finished
        return [outputs[request.request_id] for request in added]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Yields the answer as it is committed; closing the iterator aborts the request."""
        (request,) = self._add_all([prompt], [sampling_params or SamplingParams()])
        try:
            while request.request_id in self._requests:
                yield from (chunk for owner, chunk in self._step() if owner is request)
        finally:
            self._drop(request)

    def _add_all(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[Request]:
        """Queues all requests, or none when one is refused."""
        added: list[Request] = []
        try:
            for prompt, param in zip(prompts, params, strict=True):
                added.append(self._add(prompt, param))
        except ValueError:
            for request in added:
                self._drop(request)
            raise
        return added

    def _add(self, prompt: Prompt, params: SamplingParams) -> Request:
        text = prompt if isinstance(prompt, str) else None
        # A chat template brings its own special tokens; a raw prompt is taken as it is written.
        ids = (
            self.tokenizer.encode(prompt, add_special_tokens=False)
            if isinstance(prompt, str)
            else prompt
        )
        request = self.core.add_request(ids, params)
        detokenizer = Detokenizer(self.tokenizer, params.stop_strings)
        self._requests[request.request_id] = (request, text, detokenizer)
        return request

    def _drop(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            self.core.abort(request)

    def _step(self) -> list[tuple[Request, StreamChunk]]:
        return [(new.request, self._chunk(new)) for new in self.core.step()]

    def _chunk(self, new: NewTokens) -> StreamChunk:
        request, prompt, detokenizer = self._requests[new.request.request_id]
        text = detokenizer.push(new.token_ids, last=new.finish_reason is not None)
        if not detokenizer.stopped and new.finish_reason is None:
            return StreamChunk(text, new.token_ids)
        reason = "stop" if detokenizer.stopped else new.finish_reason
        # A stop string may end inside an accepted run: what comes after it was never asked for.
        cut = len(request.output_token_ids) - detokenizer.num_tokens
        tokens = new.token_ids[: len(new.token_ids) - cut]
        del request.output_token_ids[detokenizer.num_tokens :]
        request.statistics.num_output_tokens -= cut
        self._drop(request)
        self.statistics.add(request.statistics)
        output = RequestOutput(
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=request.output_token_ids,
            text=detokenizer.text,
            finish_reason=reason or "stop",
            statistics=request.statistics,
        )
        return StreamChunk(text, tokens, output)


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
    if len(params) != len(prompts):
        raise ValueError(
            f"{len(params)} sampling_params for {len(prompts)} prompts: expected one each"
        )
    return list(params)
