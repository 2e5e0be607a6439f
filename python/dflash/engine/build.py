# SPDX-License-Identifier: Apache-2.0
"""Engine arguments, checked and resolved once, and the engine built from them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.checkpoints.weights import check_pair, load_draft, load_target
from dflash.devices import why_no_cuda
from dflash.engine.buffers import BatchBuffers, RequestState
from dflash.engine.core import Core
from dflash.engine.kv_cache import BlockPool
from dflash.engine.scheduler import Scheduler
from dflash.engine.step import Step
from dflash.engine.tune import best_num_speculative_tokens
from dflash.errors import DflashError
from dflash.models.decoder import DecoderSettings, Taps
from dflash.models.drafter import Drafter
from dflash.models.target import Target
from dflash.speculators.dflash import DFlashSpeculator

logger = logging.getLogger("dflash")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU_CACHE_BYTES = 4 << 30


@dataclass(frozen=True)
class EngineArgs:
    """Engine arguments, under vLLM's names where vLLM has them.

    Args:
        model, draft: checkpoints; see LLM.
        dtype: "auto" (the checkpoint's on a GPU, float32 on a CPU), float32, float16 or bfloat16.
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        num_speculative_tokens: N; None takes draft_block_size - 1, on a CPU what a short measurement finds best.
        allow_long_drafts: permit N past draft_block_size - 1, where drafters propose poorly.
        max_model_len: prompt and output tokens of a request; None takes the target's.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: prompt rows of one prefill pass.
        kv_block_size: slots of a cache block.
        gpu_memory_utilization: share of the GPU's memory that weights and caches may take.
        attention_backend, draft_attention_backend: "auto" or a backend's name.
        draft_sample_method: "greedy" or "gumbel".
        rejection_sample_method: "match", "standard", "block" or "synthetic", for temperature > 0.
        synthetic_acceptance_rates: N conditional rates, for "synthetic" (benchmarks only: it changes the output).
        seed: of requests that bring none.
    """

    model: str
    draft: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    num_speculative_tokens: int | None = None
    allow_long_drafts: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    kv_block_size: int = 16
    gpu_memory_utilization: float = 0.9
    attention_backend: str = "auto"
    draft_attention_backend: str = "auto"
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "match"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_choice("dtype", ("auto", *DTYPES))
        self._check_choice("draft_sample_method", ("greedy", "gumbel"))
        self._check_choice("rejection_sample_method", ("match", "standard", "block", "synthetic"))
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.num_speculative_tokens is not None and self.draft is None:
            raise ValueError("num_speculative_tokens needs a drafter: pass draft=")
        if (self.rejection_sample_method == "synthetic") != bool(self.synthetic_acceptance_rates):
            raise ValueError(
                'rejection_sample_method "synthetic" and synthetic_acceptance_rates go together'
            )

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(
                f"{name} {getattr(self, name)!r}: expected one of {', '.join(choices)}"
            )


@dataclass(frozen=True)
class EngineFacts:
    """What "auto" became."""

    device: torch.device
    dtype: torch.dtype
    num_speculative_tokens: int
    max_model_len: int
    num_blocks: int
    attention_backends: dict[str, str]


@dataclass(frozen=True)
class Engine:
    core: Core
    facts: EngineFacts
    model_dir: Path | None


def resolve_device(device: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda[:N]".

    Raises:
        ValueError: the name is not a device.
        DflashError: CUDA was asked for and cannot be used; says why.
    """
    if device == "auto":
        device = "cuda" if why_no_cuda() is None else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r}: expected auto, cpu, cuda or cuda:N") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: expected auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda":
        reason = why_no_cuda()
        if reason is not None:
            raise DflashError(f"device {device}: {reason}; the device cpu works everywhere")
        count = torch.cuda.device_count()
        if (resolved.index or 0) >= count:
            raise ValueError(f"device {device}: this machine has {count} GPU(s)")
        resolved = torch.device("cuda", resolved.index or 0)
    return resolved


def build_core(args: EngineArgs) -> Engine:
    """Loads both checkpoints and builds the step, its buffers and the scheduler."""
    device = resolve_device(args.device)
    dtype = DTYPES.get(args.dtype)
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    target_config, target_weights, model_dir = load_target(args.model, dtype, device)
    dtype = target_weights.embed_tokens.dtype
    max_model_len = _max_model_len(
        args.max_model_len, target_config.decoder.max_position_embeddings
    )
    settings = DecoderSettings(
        device, dtype, args.kv_block_size, max_model_len, args.attention_backend
    )
    target = Target(target_config, target_weights, settings)
    drafter = None
    if args.draft is not None:
        drafter = _load_drafter(args, target, settings)
    n = _num_speculative_tokens(args, target, drafter, device)
    engine = assemble(args, target, drafter, n, settings, model_dir)
    facts = engine.facts
    logger.info(
        "%s on %s: N = %d, max_model_len %d, %d cache blocks of %d, attention %s",
        facts.dtype, facts.device, n, max_model_len, facts.num_blocks, args.kv_block_size,
        facts.attention_backends,
    )  # fmt: skip
    return engine


def _load_drafter(args: EngineArgs, target: Target, settings: DecoderSettings) -> Drafter:
    assert args.draft is not None
    config, weights, _ = load_draft(args.draft, settings.dtype, settings.device, target)
    check_pair(target.config, config, weights)
    settings = DecoderSettings(
        settings.device, settings.dtype, settings.kv_block_size, settings.max_model_len,
        args.draft_attention_backend,
    )  # fmt: skip
    return Drafter(config, weights, target.embed_tokens, target.lm_head, settings)


def _max_model_len(requested: int | None, limit: int) -> int:
    if requested is None:
        return limit
    if not 2 <= requested <= limit:
        raise ValueError(
            f"max_model_len must be in 2..{limit} (the target's limit), got {requested}"
        )
    return requested


def _num_speculative_tokens(
    args: EngineArgs, target: Target, drafter: Drafter | None, device: torch.device
) -> int:
    if drafter is None:
        return 0
    longest = drafter.config.draft_block_size - 1
    requested = args.num_speculative_tokens
    if requested is None:
        return best_num_speculative_tokens(target, drafter) if device.type == "cpu" else longest
    if requested < 1:
        raise ValueError(f"num_speculative_tokens must be >= 1, got {requested}")
    if requested > longest and not args.allow_long_drafts:
        raise ValueError(
            f"num_speculative_tokens {requested} is past what this drafter was trained for "
            f"(blocks of {longest + 1}: at most {longest}); allow_long_drafts forces it"
        )
    return requested


def assemble(
    args: EngineArgs,
    target: Target,
    drafter: Drafter | None,
    n: int,
    settings: DecoderSettings,
    model_dir: Path | None,
) -> Engine:
    """The engine over models that are in memory already; n = num_speculative_tokens, 0 without a drafter."""
    device, max_model_len = settings.device, settings.max_model_len
    num_query_per_req = n + 1
    max_rows = max(args.max_num_batched_tokens, args.max_num_seqs * num_query_per_req)
    # The verified block and the drafted one may reach past max_model_len: columns, never blocks.
    max_blocks = -(-(max_model_len + 2 * num_query_per_req) // args.kv_block_size)
    num_blocks = _num_blocks(args, target, drafter, max_blocks, settings)
    for model in (target, drafter):
        if model is not None:
            shape = model.decoder.cache_shape(num_blocks, args.kv_block_size)
            model.decoder.attach_cache(torch.empty(shape, dtype=settings.dtype, device=device))
    vocab_size = min(target.config.decoder.vocab_size, target.lm_head.shape[0])
    gumbel = drafter is not None and args.draft_sample_method == "gumbel"
    state = RequestState.allocate(
        args.max_num_seqs, n, device, (vocab_size, torch.float32) if gumbel else None
    )
    speculator, taps = None, None
    if drafter is not None:
        speculator = DFlashSpeculator(
            drafter,
            n,
            max_rows,
            args.max_num_seqs,
            max_model_len,
            vocab_size,
            args.draft_sample_method,
        )
        width = len(speculator.target_layer_ids) * target.config.decoder.hidden_size
        buffer = torch.zeros(max_rows, width, dtype=settings.dtype, device=device)
        taps = Taps(speculator.target_layer_ids, buffer)
    step = Step(
        target, speculator, state, max_model_len, vocab_size, args.rejection_sample_method, taps,
        _synthetic_rates(args, n, device),
    )  # fmt: skip
    buffers = BatchBuffers(args.max_num_seqs, max_rows, max_blocks, n, args.kv_block_size, device)
    scheduler = Scheduler(
        BlockPool(num_blocks, args.kv_block_size),
        args.max_num_seqs,
        args.max_num_batched_tokens,
        num_query_per_req,
    )
    core = Core(
        step, buffers, scheduler, max_model_len, vocab_size, target.config.eos_token_ids, args.seed
    )
    names = {"target": _backends(target)} | ({"draft": _backends(drafter)} if drafter else {})
    facts = EngineFacts(device, settings.dtype, n, max_model_len, num_blocks, names)
    return Engine(core, facts, model_dir)


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


def _num_blocks(
    args: EngineArgs,
    target: Target,
    drafter: Drafter | None,
    max_blocks: int,
    settings: DecoderSettings,
) -> int:
    """Blocks for max_num_seqs full requests, as far as memory goes; block 0 is the null block."""
    models = [target, drafter] if drafter else [target]
    block_bytes = sum(
        torch.Size(m.decoder.cache_shape(1, args.kv_block_size)).numel() * settings.dtype.itemsize
        for m in models
    )
    wanted = args.max_num_seqs * max_blocks + 1
    affordable = _cache_bytes(args, settings.device) // block_bytes
    if affordable < max_blocks + 1:
        raise DflashError(
            f"one request of max_model_len {settings.max_model_len} needs {max_blocks + 1} cache blocks of "
            f"{block_bytes / 2**20:.1f} MiB; memory allows {affordable}: lower max_model_len"
        )
    return min(wanted, affordable)


def _cache_bytes(args: EngineArgs, device: torch.device) -> int:
    if device.type == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(CPU_CACHE_BYTES, pages // 4)
    free, total = torch.cuda.mem_get_info(device)
    # A tenth of what is left stays for activations and logits.
    return int((free - (1 - args.gpu_memory_utilization) * total) * 0.9)
