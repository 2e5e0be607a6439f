# SPDX-License-Identifier: Apache-2.0
"""The engine, built from its arguments; "auto" is resolved here, once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dflash.checkpoints.config import DecoderConfig, TargetConfig
from dflash.checkpoints.weights import TargetWeights, load_target
from dflash.devices import on_device
from dflash.engine.admission import Limits
from dflash.engine.args import DTYPES, EngineArgs, cache_dtype, resolve_device
from dflash.engine.buckets import request_buckets, request_multiple
from dflash.engine.buffers import BatchBuffers, RequestState
from dflash.engine.core import Core
from dflash.engine.graphs import GraphRunner, choose_prompt_buckets, num_steps_ahead
from dflash.engine.kv_cache import BlockPool
from dflash.engine.memory import (
    MemoryProfile,
    choose_num_blocks,
    gib,
    profile_memory,
    rough_cache_bytes,
)
from dflash.engine.pacing import PrefillPacer
from dflash.engine.sampling import SamplingState
from dflash.engine.scheduler import Scheduler
from dflash.engine.step import Step
from dflash.errors import DflashError
from dflash.log import log_once
from dflash.models.decoder import DecoderSettings, Taps
from dflash.models.drafter import Drafter
from dflash.models.linear import STRICT_ROWS, logits_dtype
from dflash.models.target import Target
from dflash.speculators.make import (
    DraftCheckpoint,
    choose_num_speculative_tokens,
    load_drafter,
    make_drafter,
    make_speculator,
)
from dflash.speculators.spec import Speculator

logger = logging.getLogger("dflash")


@dataclass(frozen=True)
class EngineFacts:
    """What "auto" became."""

    device: torch.device
    dtype: torch.dtype
    num_speculative_tokens: int
    max_model_len: int
    num_blocks: int
    cache_bytes: int
    attention_backends: dict[str, str]
    memory: MemoryProfile


@dataclass(frozen=True)
class Engine:
    """A core, what "auto" became, and the target's weights, which another engine may share."""

    core: Core
    facts: EngineFacts
    model_dir: Path | None = None
    target_config: TargetConfig | None = None
    target_weights: TargetWeights | None = None


def build_core(args: EngineArgs) -> Engine:
    """Loads both checkpoints and builds the step, its buffers and the scheduler."""
    device = resolve_device(args.device)
    dtype = DTYPES.get(args.dtype)
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    target_config, target_weights, model_dir = load_target(args.model, dtype, device)
    dtype = target_weights.embed_tokens.dtype
    drafted = load_drafter(args, (target_config, target_weights, model_dir), dtype, device)
    engine = build_engine(args, target_config, target_weights, drafted, device)
    return replace(engine, model_dir=model_dir)


def build_engine(
    args: EngineArgs,
    target_config: TargetConfig,
    target_weights: TargetWeights,
    drafted: DraftCheckpoint | None,
    device: torch.device,
) -> Engine:
    """The engine over weights that are in memory already; args.model and args.draft are names only."""
    dtype = target_weights.embed_tokens.dtype
    decoders = [target_config.decoder] + ([drafted[0].decoder] if drafted else [])
    max_model_len = _max_model_len(args, decoders, dtype, device)
    settings = _target_settings(args, device, dtype, max_model_len)
    target = Target(target_config, target_weights, settings)
    drafter = None
    if drafted is not None:
        draft_settings = replace(
            settings,
            kv_dtype=cache_dtype(args.draft_kv_cache_dtype, dtype),
            attention_backend=args.draft_attention_backend,
            tile_rows=None,
        )
        drafter = make_drafter(drafted, target, draft_settings)
    n = choose_num_speculative_tokens(args, target, drafter)
    engine = replace(
        assemble(args, target, drafter, n, settings),
        target_config=target_config,
        target_weights=target_weights,
    )
    _log_facts(engine.facts, args)
    return engine


def without_draft(args: EngineArgs, engine: Engine) -> Engine:
    """A second engine on the same target weights, in the same memory; args without a drafter."""
    assert engine.target_config is not None and engine.target_weights is not None
    facts = engine.facts
    settings = _target_settings(args, facts.device, facts.dtype, facts.max_model_len)
    target = Target(engine.target_config, engine.target_weights, settings)
    plain = assemble(args, target, None, 0, settings)
    return replace(engine, core=plain.core, facts=plain.facts)


def _target_settings(
    args: EngineArgs, device: torch.device, dtype: torch.dtype, max_model_len: int
) -> DecoderSettings:
    return DecoderSettings(
        device,
        dtype,
        cache_dtype(args.kv_cache_dtype, dtype),
        args.kv_block_size,
        max_model_len,
        "native" if args.strict else args.attention_backend,
        STRICT_ROWS if args.strict else None,
    )


def _log_facts(facts: EngineFacts, args: EngineArgs) -> None:
    logger.info("memory: %s", facts.memory)
    logger.info(
        "%s on %s: N = %d, max_model_len %d, %d cache blocks of %d (%s, %d tokens), attention %s",
        facts.dtype, facts.device, facts.num_speculative_tokens, facts.max_model_len, facts.num_blocks,
        args.kv_block_size, gib(facts.cache_bytes), facts.num_blocks * args.kv_block_size,
        facts.attention_backends,
    )  # fmt: skip


def _max_model_len(
    args: EngineArgs, decoders: list[DecoderConfig], dtype: torch.dtype, device: torch.device
) -> int:
    """What was asked for, or the target's limit as far as one such request fits in memory."""
    limit, requested = decoders[0].max_position_embeddings, args.max_model_len
    if requested is not None:
        if 2 <= requested <= limit:
            return requested
        raise ValueError(
            f"max_model_len must be in 2..{limit} (the target's limit), got {requested}"
        )
    if args.num_gpu_blocks_override is not None:
        return limit
    names = (args.kv_cache_dtype, args.draft_kv_cache_dtype)
    slot_bytes = sum(
        2 * d.num_layers * d.num_kv_heads * d.head_dim * cache_dtype(name, dtype).itemsize
        for d, name in zip(decoders, names, strict=False)
    )
    # Room for the null block and for blocks that a draft may reach past the end.
    margin = 4 * args.kv_block_size + 64
    affordable = int(rough_cache_bytes(args, device) // slot_bytes) - margin
    if affordable >= limit:
        return limit
    if affordable < 2:
        raise DflashError(
            f"{device} has no memory left for a K/V cache: {slot_bytes} bytes a token"
        )
    log_once(
        f"max_model_len {affordable}, below the model's {limit}: that is what fits in memory",
        logging.WARNING,
    )
    return affordable


def assemble(
    args: EngineArgs,
    target: Target,
    drafter: Drafter | Target | None,
    n: int,
    settings: DecoderSettings,
) -> Engine:
    """The engine over models that are in memory already; n = num_speculative_tokens, 0 without a drafter."""
    with on_device(settings.device):
        return _assemble(args, target, drafter, n, settings)


def _assemble(
    args: EngineArgs,
    target: Target,
    drafter: Drafter | Target | None,
    n: int,
    settings: DecoderSettings,
) -> Engine:
    device, max_model_len = settings.device, settings.max_model_len
    num_query_per_req = n + 1
    tile_rows = target.padded_rows
    # Padded: whole tiles of verified rows, and of prompts'.
    multiple = request_multiple(num_query_per_req, tile_rows)
    max_reqs = request_buckets(args.max_num_seqs, multiple)[-1]
    max_rows = max(args.max_num_batched_tokens + (tile_rows or 0), max_reqs * num_query_per_req)
    steps_ahead = num_steps_ahead(device)
    # Blocks in flight may reach past max_model_len: columns, never blocks.
    lookahead = (2 + steps_ahead) * num_query_per_req
    max_blocks = -(-(max_model_len + lookahead) // args.kv_block_size)
    vocab_size = target.vocab_size
    gumbel = drafter is not None and args.draft_sample_method == "gumbel"
    state = RequestState.allocate(
        args.max_num_seqs, n, device, (vocab_size, torch.float32) if gumbel else None
    )
    sampling = SamplingState.allocate(args.max_num_seqs, vocab_size, device)
    buffers = BatchBuffers(max_reqs, max_rows, max_blocks, n, args.kv_block_size, device, tile_rows)
    speculator = make_speculator(args, drafter, n, max_rows, max_reqs, max_model_len, vocab_size)
    taps = _taps(target, speculator, max_rows)
    raw_logits = None
    if device.type == "cuda" and not args.enforce_eager:
        head = target.lm_head
        shape = max_reqs * num_query_per_req, head.shape[0]
        raw_logits = head.new_empty(shape, dtype=logits_dtype(head))
    models = [target, *(speculator.models if speculator else ())]
    prompt_buckets = choose_prompt_buckets(args, device, [m.decoder for m in models], tile_rows)
    profile = profile_memory(
        args, device, target, speculator, [state, sampling, buffers, speculator, taps, raw_logits],
        max_rows, num_query_per_req, prompt_buckets,
    )  # fmt: skip
    block_bytes = sum(model.decoder.cache_bytes(args.kv_block_size) for model in models)
    num_blocks = choose_num_blocks(args, device, profile, block_bytes, max_blocks)
    for model in models:
        model.decoder.allocate_cache(num_blocks, args.kv_block_size)
    step = Step(
        target, speculator, state, sampling, max_model_len, vocab_size,
        args.rejection_sample_method, taps, _synthetic_rates(args, n, device), raw_logits,
    )  # fmt: skip
    scheduler = Scheduler(
        BlockPool(num_blocks, args.kv_block_size, args.enable_prefix_caching),
        args.max_num_seqs,
        args.max_num_batched_tokens,
        num_query_per_req,
        steps_ahead,
    )
    target_ms = args.inter_token_latency_target_ms
    pacer = PrefillPacer(
        None if target_ms is None else target_ms / 1e3, args.max_num_batched_tokens
    )
    runner = GraphRunner(step, buffers, args.max_num_seqs, args.enforce_eager, prompt_buckets)
    limits = Limits(max_model_len, vocab_size, target.config.eos_token_ids, args.seed)
    core = Core(runner, scheduler, pacer, limits)
    names = {"target": _backends(target)} | ({"draft": _backends(drafter)} if drafter else {})
    facts = EngineFacts(
        device,
        settings.dtype,
        n,
        max_model_len,
        num_blocks,
        num_blocks * block_bytes,
        names,
        profile,
    )
    return Engine(core, facts)


def _taps(target: Target, speculator: Speculator | None, max_rows: int) -> Taps | None:
    """Where the target leaves its features for a drafter that reads them."""
    layer_ids = speculator.target_layer_ids if speculator else ()
    if not layer_ids:
        return None
    width = len(layer_ids) * target.config.decoder.hidden_size
    return Taps(layer_ids, target.embed_tokens.new_zeros(max_rows, width))


def _backends(model: Target | Drafter) -> str:
    return ", ".join(dict.fromkeys(model.decoder.backend_names.values()))


def _synthetic_rates(args: EngineArgs, n: int, device: torch.device) -> torch.Tensor | None:
    rates = args.synthetic_acceptance_rates
    if rates is None:
        return None
    if len(rates) != n:
        raise ValueError(
            f"synthetic_acceptance_rates: expected {n} (one a draft token), got {len(rates)}"
        )
    return torch.tensor(rates, dtype=torch.float32, device=device)
