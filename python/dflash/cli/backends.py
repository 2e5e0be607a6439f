# SPDX-License-Identifier: Apache-2.0
"""Which attention backend each layer group of a pair gets, and why the others were passed over."""

from __future__ import annotations

import re
from typing import Any

import torch
from rich.console import Console

from dflash.attention.select import BACKENDS, all_answers
from dflash.attention.spec import AttentionSpec, Refusal, Support
from dflash.checkpoints.config import DecoderConfig, LayerAttention
from dflash.checkpoints.read_configs import read_draft_config, read_target_config
from dflash.engine.args import AUTOREGRESSIVE, DFLASH, DRAFT_METHODS, EngineArgs, resolve_device
from dflash.models.decoder import DecoderSettings, arch_of, attention_specs

Plan = dict[str, Any]


def plan_backends(
    model: str | None, draft: str | None, device: str, draft_method: str = DFLASH
) -> dict[str, list[Plan]]:
    """By "target" and "draft", one entry a layer group. Reads nothing but configurations.

    Raises:
        ValueError, DflashError: as for loading the pair and resolving the device.
    """
    if draft_method not in DRAFT_METHODS:
        raise ValueError(
            f"draft_method {draft_method!r}: expected one of {', '.join(DRAFT_METHODS)}"
        )
    by_name = re.fullmatch(r"sm_\d+", device) is not None
    place = torch.device("cpu") if by_name else resolve_device(device)
    arch = device if by_name else arch_of(place)
    plans, dtype = {}, torch.float32 if arch == "cpu" else None
    if model is not None:
        target = read_target_config(model)
        dtype = dtype or target.dtype
        plans["target"] = _plan(target.decoder, dtype, arch, False)
    if draft is not None and draft_method == AUTOREGRESSIVE:
        small = read_target_config(draft)
        plans["draft"] = _plan(small.decoder, dtype or small.dtype, arch, False)
    elif draft is not None:
        drafter = read_draft_config(draft)
        plans["draft"] = _plan(drafter.decoder, dtype or drafter.dtype, arch, drafter.has_sinks)
    return plans


def _plan(config: DecoderConfig, dtype: torch.dtype, arch: str, has_sinks: bool) -> list[Plan]:
    settings = DecoderSettings(
        torch.device("cpu"), dtype, dtype, EngineArgs.kv_block_size, config.max_position_embeddings
    )
    specs = attention_specs(config, settings, arch, [has_sinks] * config.num_layers)
    return [_group(config, group, spec) for group, spec in specs.items()]


def _group(config: DecoderConfig, group: LayerAttention, spec: AttentionSpec) -> Plan:
    answers = all_answers(spec)
    able = [b for b in BACKENDS if b.is_automatic and isinstance(answers[b.name], Support)]
    chosen = able[0].name if able else None
    return {
        "layers": [i for i, layer in enumerate(config.layers) if layer == group],
        "causal": spec.causal,
        "window": spec.window,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "arch": spec.arch,
        "chosen": chosen,
        "candidates": {
            b.name: _verdict(answers[b.name], b.name, chosen, b.is_automatic) for b in BACKENDS
        },
    }


def _verdict(answer: Support | Refusal, name: str, chosen: str | None, automatic: bool) -> str:
    if isinstance(answer, Refusal):
        return f"passed over: {answer.reason}"
    how = "in one graph" if answer.in_one_graph else f"eagerly ({answer.reason})"
    if name == chosen:
        return f"chosen: runs {how}"
    why = f"{chosen} comes first" if automatic else "taken only when asked for by name"
    return f"passed over: {why}; would run {how}"


def print_plans(console: Console, plans: dict[str, list[Plan]]) -> None:
    """A heading a layer group, a line a candidate."""
    for model, groups in plans.items():
        for group in groups:
            console.print(f"{model}: {_heading(group)}")
            for name, verdict in group["candidates"].items():
                console.print(f"  {name + ':':18}{verdict}")


def _heading(group: Plan) -> str:
    causality = "causal" if group["causal"] else "non-causal"
    window = "no window" if group["window"] is None else f"window {group['window']}"
    return (
        f"layers {_ranges(group['layers'])}, {causality}, {window}, {group['num_heads']} heads over "
        f"{group['num_kv_heads']} K/V heads of {group['head_dim']}, {group['dtype']} on "
        f"{group['arch']}: {group['chosen'] or 'no backend serves it'}"
    )


def _ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5] as 0-2, 5."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
