# SPDX-License-Identifier: Apache-2.0
"""DFlash for a transformers model that is in memory: `generate(model, inputs, draft=...)`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig

from dflash.checkpoints.in_memory import adopt_target
from dflash.checkpoints.quantize import load_draft_of
from dflash.engine.args import EngineArgs, resolve_device
from dflash.engine.build import Engine, build_engine
from dflash.engine.core import Core
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.statistics import Statistics
from dflash.integrations.generation import read_generation

LENGTH_STEP = 256  # the shortest max_model_len of an engine

_sessions: WeakKeyDictionary[Any, Session] = WeakKeyDictionary()
_turn = threading.Lock()  # of the threads that call generate


def generate(
    model: Any,
    inputs: torch.Tensor | Mapping[str, torch.Tensor],
    draft: str,
    *,
    num_speculative_tokens: int | None = None,
    engine_args: Mapping[str, Any] | None = None,
    generation_config: GenerationConfig | None = None,
    **generation: Any,
) -> torch.Tensor:
    """`model.generate(**inputs)` with a DFlash drafter, on the model's own weights.

    Greedy answers are those of model.generate. Sampled ones follow torch's seed (torch.manual_seed) but are other draws
    than transformers'. The model's K/V cache, attention implementation and hooks are not used. What was built for a
    model (drafter, caches, on a GPU graphs) is kept while the model lives, until a call with another drafter or engine.

    Args:
        model: an AutoModelForCausalLM of a supported family, whole on one device.
        inputs: input_ids [B, T], or a tokenizer's mapping with input_ids and attention_mask (0: not in the prompt).
        draft: DFlash checkpoint: a folder, a hub id, or "demo".
        num_speculative_tokens, engine_args: see EngineArgs; "auto" dtype and device are the model's.
        generation_config, generation: as in model.generate; what is not served is an error that names it.

    Returns:
        int64 [B * num_return_sequences, T + longest answer] on the inputs' device, padded with pad_token_id.

    Raises:
        ValueError: an argument, a model or a pair that cannot be served.
    """
    ids, prompts = _prompts(inputs)
    call = read_generation(model.generation_config, generation_config, generation, ids.shape[1])
    if not draft:
        raise ValueError(f'draft: expected a folder, a hub id or "demo", got {draft!r}')
    unknown = set(engine_args or {}) - {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown:
        raise ValueError(f"engine_args: {', '.join(sorted(unknown))}: no field of EngineArgs")
    args = EngineArgs(
        **{
            "model": type(model).__name__,
            "draft": draft,
            "num_speculative_tokens": num_speculative_tokens,
            "device": str(model.device),
            "enable_prefix_caching": False,  # the owner may change the weights between two calls
            **(engine_args or {}),
        }
    )
    prompts = [prompt for prompt in prompts for _ in range(call.num_return_sequences)]
    with _turn:
        session = _sessions.get(model)
        if session is None or not session.serves(model, args):
            session = _sessions[model] = Session(model, args)
        with torch.inference_mode():
            answers = session.generate(prompts, call.params)
    return _padded(ids.repeat_interleave(call.num_return_sequences, 0), answers, call.pad_token_id)


def statistics(model: Any) -> Statistics:
    """Of the last call of `generate` with this model: acceptance length, counts, times."""
    if model not in _sessions:
        raise ValueError(f"generate has not been called with this {type(model).__name__} yet")
    return _sessions[model].statistics


def release(model: Any) -> None:
    """Lets go of what was built for a model, before the model itself is."""
    _sessions.pop(model, None)


class Session:
    """A model, a drafter and the engine over both, which is built anew for more or longer requests than it holds."""

    def __init__(self, model: Any, args: EngineArgs) -> None:
        self._given = self._args = args
        self._addresses = _addresses(model)
        self._device = resolve_device(args.device)
        self._target = adopt_target(model)
        assert args.draft is not None
        dtype, quantization = self._target[0].dtype, args.draft_quantization
        if args.dtype not in ("auto", str(dtype).removeprefix("torch.")):
            raise ValueError(
                f"engine_args: dtype {args.dtype!r}, but the model's weights are {dtype}"
            )
        self._draft = load_draft_of(self._target, args.draft, quantization, dtype, self._device)
        self._engine: Engine | None = None
        self._longest = self._most = 1
        self.statistics = Statistics()

    @property
    def _limit(self) -> int:
        limit = self._target[0].decoder.max_position_embeddings
        return min(limit, self._given.max_model_len or limit)

    def serves(self, model: Any, args: EngineArgs) -> bool:
        return args == self._given and self._addresses == _addresses(model)

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """The answers' token ids, the one that ended each included."""
        core = self._core(len(prompts), max(map(len, prompts)) + params.max_tokens)
        seeds = [0] * len(prompts)
        if params.temperature > 0:
            seeds = torch.randint(2**62, (len(prompts),)).tolist()
        requests = []
        try:
            for prompt, seed in zip(prompts, seeds, strict=True):
                requests.append(core.add_request(prompt, params, seed))
            while any(request.finish_reason is None for request in requests):
                core.step()
        except BaseException:
            core.reset(requests)
            raise
        self.statistics = Statistics()
        for request in requests:
            self.statistics.add(request.statistics)
        return [request.output_token_ids for request in requests]

    def _core(self, num_requests: int, length: int) -> Core:
        """An engine for so many requests of so many tokens each."""
        if length > self._limit:
            raise ValueError(
                f"generate: prompt and answer may take {length} tokens, the limit is {self._limit}"
            )
        most = min(num_requests, self._given.max_num_seqs)
        if self._engine is not None and most <= self._most and length <= self._longest:
            return self._engine.core
        self._longest = max(self._longest, min(_power_of_two(length, LENGTH_STEP), self._limit))
        self._most = max(self._most, min(_power_of_two(most), self._given.max_num_seqs))
        self._engine = None  # its caches are free before the next are made
        args = replace(self._args, max_num_seqs=self._most, max_model_len=self._longest)
        self._engine = build_engine(args, *self._target, self._draft, self._device)
        # What was measured once is not measured again.
        n = self._engine.facts.num_speculative_tokens
        self._args = replace(self._args, num_speculative_tokens=n, allow_long_drafts=True)
        return self._engine.core


def _power_of_two(size: int, smallest: int = 1) -> int:
    """At least `size`: what grows by factors is rarely built again."""
    return smallest if size <= smallest else 1 << (size - 1).bit_length()


def _addresses(model: Any) -> tuple[int, ...]:
    """Where the weights are: `model.to` and new parameters change it."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())


def _prompts(
    inputs: torch.Tensor | Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, list[list[int]]]:
    """input_ids [B, T], and each row's tokens."""
    ids = inputs if isinstance(inputs, torch.Tensor) else inputs["input_ids"]
    mask = None if isinstance(inputs, torch.Tensor) else inputs.get("attention_mask")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"inputs: expected integer input_ids [B, T], got {ids.dtype} {list(ids.shape)}"
        )
    mask = torch.ones_like(ids) if mask is None else mask
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask: expected {list(ids.shape)}, got {list(mask.shape)}")
    rows = zip(ids.cpu(), mask.bool().cpu(), strict=True)
    return ids.long(), [row[kept].tolist() for row, kept in rows]


def _padded(ids: torch.Tensor, answers: list[list[int]], pad_token_id: int) -> torch.Tensor:
    longest = max(map(len, answers))
    tails = [answer + [pad_token_id] * (longest - len(answer)) for answer in answers]
    return torch.cat([ids, torch.tensor(tails, dtype=torch.int64).to(ids.device)], dim=1)
