# SPDX-License-Identifier: Apache-2.0
"""Where the memory goes: what is left for the K/V caches, counted before they are made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch

from dflash.engine.args import EngineArgs
from dflash.engine.buckets import PromptBucket, request_buckets
from dflash.errors import DflashError
from dflash.models.drafter import Drafter
from dflash.models.linear import logits_dtype
from dflash.models.target import Target
from dflash.speculators.spec import Speculator

CPU_CACHE_BYTES = 4 << 30
GRAPH_BYTES = 16 << 20
"""Of one CUDA graph, without its tensors."""

ALLOCATOR_SLACK = 0.02
"""Of the memory that may be used: what a caching allocator loses to rounding and fragments."""


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of one device. `limit` is what everything together may take; the caches get the rest."""

    limit: int
    others: int  # held by other engines and processes
    weights: int  # and RoPE tables
    buffers: int  # request state, batch arrays, taps
    logits: int  # of the target and the drafter at the largest batch, processed and not
    activations: int  # of the largest batch
    workspaces: int  # that attention backends keep
    graphs: int  # CUDA graph pools

    @property
    def available(self) -> int:
        """For both K/V caches."""
        used = (f.name for f in fields(self) if f.name != "limit")
        return self.limit - sum(getattr(self, name) for name in used)

    def __str__(self) -> str:
        parts = [f"{f.name} {gib(getattr(self, f.name))}" for f in fields(self)]
        return ", ".join(parts) + f": {gib(max(self.available, 0))} for K/V"


def rough_cache_bytes(args: EngineArgs, device: torch.device) -> int:
    """What the caches may take, before the buffers' sizes are known."""
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    if device.type == "cpu":
        return min(CPU_CACHE_BYTES, _physical_bytes() // 4)
    free, total = torch.cuda.mem_get_info(device)
    return int((free - (1 - args.gpu_memory_utilization) * total) * 0.9)


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_num_blocks(
    args: EngineArgs,
    device: torch.device,
    profile: MemoryProfile,
    block_bytes: int,
    max_blocks: int,
) -> int:
    """Cache blocks, the null block included.

    Requests never need more than max_num_seqs * max_blocks. For prefix caching a GPU gives all that is left, a
    CPU as much again, within 4 GiB.

    Raises:
        DflashError: not even one request of max_model_len fits; the message has the figures.
    """
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    on_cpu = device.type == "cpu"
    room = args.kv_cache_memory_bytes
    if room is None:
        room = min(profile.available, CPU_CACHE_BYTES) if on_cpu else profile.available
    affordable = max(0, room) // block_bytes
    if affordable < max_blocks + 1:
        raise DflashError(
            f"one request of max_model_len needs {max_blocks + 1} cache blocks of {block_bytes / 2**20:.2f} MiB, "
            f"{gib((max_blocks + 1) * block_bytes)}; memory allows {affordable}. {profile}. Lower max_model_len, "
            "max_num_seqs or max_num_batched_tokens, raise gpu_memory_utilization, or leave room for this engine with "
            "kv_cache_memory_bytes of another"
        )
    wanted = args.max_num_seqs * max_blocks
    if args.enable_prefix_caching:
        wanted = 2 * wanted if on_cpu else affordable
    return min(wanted + 1, affordable)


def tensor_bytes(*objects: object) -> int:
    """Bytes of all tensors in objects, lists and dataclasses; shared storage counts once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _walk(objects)
    }
    return sum(storages.values())


def _walk(thing: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from _walk(item, depth)
    elif isinstance(thing, dict):
        yield from _walk(list(thing.values()), depth)
    elif depth < 4 and (is_dataclass(thing) or type(thing).__module__.startswith("dflash.")):
        yield from _walk(list(getattr(thing, "__dict__", {}).values()), depth + 1)


def profile_memory(
    args: EngineArgs,
    device: torch.device,
    target: Target,
    speculator: Speculator | None,
    buffers: list[object],
    max_rows: int,
    num_query_per_req: int,
    prompt_buckets: Sequence[PromptBucket] = (),
) -> MemoryProfile:
    """Counts everything but the caches; weights and buffers exist already."""
    models = [target, *(speculator.models if speculator else ())]
    workspaces = tensor_bytes(*(model.decoder.backends for model in models))
    weights = tensor_bytes(*models) - workspaces
    held = tensor_bytes(*models, speculator, *buffers)
    if device.type == "cpu":
        total, others = _physical_bytes(), 0
    else:
        free, total = torch.cuda.mem_get_info(device)
        others = max(0, total - free - held)
    q = num_query_per_req
    is_captured = device.type != "cpu" and not args.enforce_eager
    num_logits = args.max_num_seqs * q * target.lm_head.shape[0]
    head_output = num_logits * logits_dtype(target.lm_head).itemsize
    sampled = num_logits * 4  # as process_logits leaves them, and the drafts'
    sampled += speculator.logits_bytes(args.max_num_seqs) if speculator else 0
    logprobs = num_logits * 4
    # All graphs share the memory of the largest one's intermediate tensors; each has its nodes.
    graph_rows = max([args.max_num_seqs * q, *(bucket.num_rows for bucket in prompt_buckets)])
    graphs = sampled + max(_activation_bytes(model, graph_rows) for model in models)
    graphs += GRAPH_BYTES * (2 * len(request_buckets(args.max_num_seqs)) + len(prompt_buckets))
    return MemoryProfile(
        limit=int(total * (args.gpu_memory_utilization - ALLOCATOR_SLACK)),
        others=others,
        weights=weights,
        buffers=held - weights - workspaces,
        logits=sampled + logprobs + (0 if is_captured else head_output),  # there it is a buffer
        activations=max(_activation_bytes(model, max_rows) for model in models),
        workspaces=workspaces,
        graphs=graphs if is_captured else 0,
    )


def _activation_bytes(model: Target | Drafter, rows: int) -> int:
    """What one layer holds at once: residual, norms, qkv, query, output, gate and up, their product."""
    c = model.config.decoder
    heads = (2 * c.num_heads + 2 * c.num_kv_heads + c.num_heads) * c.head_dim
    values = 4 * c.hidden_size + heads + 3 * c.intermediate_size
    return rows * values * model.lm_head.dtype.itemsize


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
