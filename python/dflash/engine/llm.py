# SPDX-License-Identifier: Apache-2.0
"""The offline interface: two checkpoints in, text out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dflash.engine.args import DFLASH, EngineArgs
from dflash.engine.build import Engine, build_core, without_draft
from dflash.engine.generation_config import default_sampling_params
from dflash.engine.job import Job, Prompt
from dflash.engine.jobs import Jobs
from dflash.engine.metrics import Metrics, Monitor
from dflash.engine.outputs import RequestOutput, StreamChunk
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.statistics import Statistics
from dflash.errors import DflashError

logger = logging.getLogger("dflash")

Params = SamplingParams | Sequence[SamplingParams] | None
Callback = Callable[[int, StreamChunk], None]


class LLM:
    """A target and, optionally, its drafter.

    Any number of calls may be under way at once, from threads and from coroutines: their requests run in
    one batch. Whoever waits for a token runs the next step, for all of them.

    Args:
        model: target checkpoint: a folder of safetensors, a GGUF file, a hub id, or "demo".
        draft: DFlash checkpoint of the same kinds, or with draft_method="autoregressive" a small target; None
            generates without a drafter.
        engine_args: see EngineArgs: dtype, device, num_speculative_tokens, max_model_len, max_num_seqs, ...

    Raises:
        ValueError: an argument or a pair of checkpoints that cannot be served.
        dflash.errors.DflashError: what is not the caller's argument: files, network, device, memory.
    """

    def __init__(self, model: str, draft: str | None = None, **engine_args) -> None:
        args = EngineArgs(model=model, draft=draft, **engine_args)
        engine = build_core(args)
        assert engine.model_dir is not None
        self._start(args, engine, load_tokenizer(engine.model_dir))

    def _start(self, args: EngineArgs, engine: Engine, tokenizer: Any) -> None:
        assert engine.model_dir is not None
        self.args = args
        self.core, self.facts = engine.core, engine.facts
        self.tokenizer = tokenizer
        self.metrics = Metrics(args.model, engine.facts.num_speculative_tokens)
        self._jobs = Jobs(self.core, Monitor(self.core, self.metrics))
        self._default_params = default_sampling_params(engine.model_dir)
        self._engine = engine
        self._worker = ThreadPoolExecutor(1, "dflash")  # steps on behalf of coroutines

    @property
    def statistics(self) -> Statistics:
        """Of every sequence that has ended, however it did."""
        return self._jobs.statistics

    def without_draft(self) -> LLM:
        """An LLM on the same target weights, in the same memory, without the drafter."""
        plain = LLM.__new__(LLM)
        args = replace(
            self.args,
            draft=None,
            draft_method=DFLASH,
            draft_quantization=None,
            num_speculative_tokens=None,
            rejection_sample_method="match",
            synthetic_acceptance_rates=None,
        )
        plain._start(args, without_draft(args, self._engine), self.tokenizer)
        return plain

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """The messages ({"role", "content"}) through the model's chat template, ready to answer."""
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.args.model} has no chat template: pass the prompt raw")
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the values of the model's generation_config.json."""
        return self._default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        callback: Callback | None = None,
    ) -> list[RequestOutput]:
        """Answers every prompt (text, or token ids), batched; results in the prompts' order.

        Text gets the tokenizer's special tokens unless it begins with its beginning-of-sequence token already.
        A prompt that cannot be served, or whose detokeniser or callback fails, ends alone: its outputs have
        the finish_reason "error" and the exception; the others go on.

        Args:
            prompts: one or many.
            sampling_params: for all, or one each; None takes get_default_sampling_params().
            callback: called with the prompt's number and each StreamChunk as it comes.

        Raises:
            ValueError: sampling_params that do not fit the prompts.
            Exception: that of the first prompt, when every one failed.
        """
        many = _as_list(prompts)
        params = self._params(many, sampling_params)
        jobs = [self._job(*pair) for pair in zip(many, params, strict=True)]
        try:
            for job in jobs:
                self._jobs.submit(job)
            while not all(job.done and not job.chunks for job in jobs):
                waiting = next((job for job in jobs if not job.done), None)
                if waiting is not None:
                    self._jobs.step_for(waiting)
                self._call_back(jobs, callback)
        finally:
            for job in jobs:
                self._jobs.drop(job)
        if all(job.error is not None for job in jobs):
            for job in jobs[:1]:
                job.raise_error()
        for number, job in enumerate(jobs):
            if job.error is not None:
                logger.warning("prompt %d failed alone: %s", number, job.error)
        return [job.finished for job in jobs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Yields the answer as it is committed; closing the iterator aborts the request.

        Raises:
            Exception: why the request cannot be served, or what its detokeniser raised.
        """
        job = self._job(prompt, *self._params([prompt], sampling_params))
        try:
            self._jobs.submit(job)
            while not job.done or job.chunks:  # in this order: the last chunk comes first
                if job.chunks:
                    yield job.chunks.popleft()
                else:
                    self._jobs.step_for(job)
            job.raise_error()
        finally:
            self._jobs.drop(job)

    async def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[StreamChunk]:
        """`stream` for coroutines: any number of them share the batch, none blocks the event loop."""
        (params,) = self._params([prompt], sampling_params)
        run = asyncio.get_running_loop().run_in_executor
        job = self._job(prompt, params)
        try:
            await run(self._worker, self._jobs.submit, job)  # the tokenizer may take its time
            while not job.done or job.chunks:  # in this order: the last chunk comes first
                if job.chunks:
                    yield job.chunks.popleft()
                else:
                    await run(self._worker, self._jobs.step_for, job)
            job.raise_error()
        finally:
            self._jobs.drop(job)  # at once: a second cancellation could end a wait

    def _params(self, prompts: Sequence[Prompt], params: Params) -> list[SamplingParams]:
        """One for each prompt."""
        if params is None or isinstance(params, SamplingParams):
            return [params or self._default_params] * len(prompts)
        if not isinstance(params, Sequence) or any(
            not isinstance(p, SamplingParams) for p in params
        ):
            raise ValueError(
                f"sampling_params: expected SamplingParams, one or one a prompt, got {params!r}"
            )
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(params)} sampling_params for {len(prompts)} prompts: expected one each"
            )
        return list(params)

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        return Job(prompt, params, self.tokenizer)

    def _call_back(self, jobs: Sequence[Job], callback: Callback | None) -> None:
        """Hands over and forgets what has come since the last call."""
        for number, job in enumerate(jobs):
            while job.chunks:
                chunk = job.chunks.popleft()
                if callback is None or job.failing:
                    continue
                try:
                    callback(number, chunk)
                except Exception as error:
                    self._jobs.fail(job, error)


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
    if hasattr(prompts, "tolist"):  # an array or a tensor
        prompts = prompts.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts: expected text, token ids or a list of these, got {prompts!r}")
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]
