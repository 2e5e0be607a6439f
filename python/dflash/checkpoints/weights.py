# SPDX-License-Identifier: Apache-2.0
"""The weights of a target and of a drafter, fused the way the models use them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import Progress, TaskID

from dflash.checkpoints.config import DecoderConfig, DraftConfig, TargetConfig
from dflash.checkpoints.drafts import parse_draft_config
from dflash.checkpoints.layout import (
    canonical_names,
    check_layout,
    draft_head,
    draft_layout,
    target_layout,
)
from dflash.checkpoints.matrix import Matrix
from dflash.checkpoints.pair import Vocabulary, shares_embedding, shares_head
from dflash.checkpoints.reader import (
    TensorReader,
    progress_bar,
    read_json,
    read_mask_embedding,
)
from dflash.checkpoints.resolve import resolve_draft, resolve_target
from dflash.checkpoints.targets import parse_target_config
from dflash.errors import CheckpointError

__all__ = [
    "DraftWeights",
    "LayerWeights",
    "Loader",
    "TargetWeights",
    "load_draft",
    "load_target",
]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; H hidden_size, I intermediate_size."""

    input_layernorm: torch.Tensor  # [H]
    qkv_proj: Matrix  # [(num_heads + 2 * num_kv_heads) * head_dim, H]
    qkv_bias: Matrix | None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o_proj: Matrix  # [H, num_heads * head_dim]
    o_bias: torch.Tensor | None  # [H]
    post_attention_layernorm: torch.Tensor  # [H]
    gate_up_proj: Matrix  # [2 * I, H], gate first
    down_proj: Matrix  # [H, I]
    sinks: torch.Tensor | None = None  # [num_heads]


@dataclass(frozen=True)
class TargetWeights:
    """A target; V vocab_size, H hidden_size."""

    embed_tokens: torch.Tensor  # [V, H]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [V, H]; the same tensor as embed_tokens when tied


@dataclass(frozen=True)
class DraftWeights:
    """A drafter; H its own hidden_size, H_target the target's."""

    fc: Matrix  # [H, num_taps * H_target]
    hidden_norm: torch.Tensor | None  # [H]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [H]
    embed_tokens: torch.Tensor | None  # [V, H], or None: the target's
    lm_head: torch.Tensor | None  # [V or draft_vocab_size, H], or None: the target's
    d2t: torch.Tensor | None  # int64 [draft_vocab_size]: target id = k + d2t[k]
    mask_embedding: torch.Tensor | None  # [H]: replaces the mask token's embedding row
    kv_proj: torch.Tensor | None = None  # K and V rows, layer by layer, of qkv_proj in fp8


def load_target(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[TargetConfig, TargetWeights, Path]:
    """Loads a target.

    Args:
        path: a directory, a .gguf file, "demo" or a hub id.
        dtype: what the weights are served in; None keeps the file's.
        device: where they go. On the CPU in the file's dtype they are the mapped file.

    Returns:
        config (its dtype the one served), weights and the checkpoint's directory.

    Raises:
        CheckpointError: an architecture, config or set of tensors that cannot be served.
        DflashError: network, disk or a damaged file.
    """
    directory = resolve_target(path)
    generation = directory / "generation_config.json"
    config = _parsed(
        parse_target_config,
        directory,
        read_json(directory / "config.json"),
        read_json(generation) if generation.exists() else None,
    )
    reader = TensorReader(directory)
    names = _canonical(reader)
    check_layout(directory, target_layout(config), reader.shapes, names)
    dtype = dtype or reader.floating(names["embed_tokens.weight"]).dtype
    with progress_bar("Loading the model", _total(reader, names)) as progress:
        loader = Loader(reader, names, dtype, torch.device(device), progress)
        embed_tokens = loader.one("embed_tokens.weight")
        weights = TargetWeights(
            embed_tokens=embed_tokens,
            layers=loader.layers(config.decoder),
            norm=loader.one("norm.weight"),
            lm_head=embed_tokens if config.tie_word_embeddings else loader.one("lm_head.weight"),
        )
    return replace(config, dtype=dtype), weights, directory


def load_draft(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    target: Vocabulary | None = None,
) -> tuple[DraftConfig, DraftWeights, Path]:
    """Loads a drafter; arguments, result and errors as load_target's.

    Args:
        target: its weights, or the model built from them. An embedding or head that equals the
            target's becomes None, before it is copied to the device.
    """
    directory = resolve_draft(path)
    raw = read_json(directory / "config.json")
    config = _parsed(parse_draft_config, directory, raw)
    reader = TensorReader(directory)
    names = _canonical(reader)
    config = _with_fc_width(config, raw, reader, names)
    layout = draft_layout(config)
    if raw.get("has_own_lm_head") is True:
        layout.required["lm_head.weight"] = draft_head(config)
    check_layout(directory, layout, reader.shapes, names)
    dtype = dtype or reader.floating(names["fc.weight"]).dtype
    with progress_bar("Loading the drafter", _total(reader, names)) as progress:
        loader = Loader(reader, names, dtype, torch.device(device), progress)
        d2t = reader.integer(names["d2t"]) if "d2t" in names else None
        if d2t is not None and config.draft_vocab_size is None and not d2t.any():
            d2t = None
        own = _own_vocabulary(config, loader, target)
        mask = read_mask_embedding(directory, config.mask_token_id, config.decoder.hidden_size)
        weights = DraftWeights(
            fc=loader.one("fc.weight"),
            hidden_norm=loader.one("hidden_norm.weight"),
            layers=loader.layers(config.decoder, config.has_sinks),
            norm=loader.one("norm.weight"),
            embed_tokens=own[0],
            lm_head=own[1],
            d2t=None if d2t is None else d2t.to(device),
            mask_embedding=None if mask is None else mask.to(device, dtype),
        )
    return replace(config, dtype=dtype), weights, directory


class Loader:
    """Turns named tensors into served ones: dtype, device, fused rows, progress."""

    def __init__(
        self,
        reader: TensorReader,
        names: dict[str, str],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.names = names
        self._reader = reader
        self._dtype = dtype
        self._device = device
        self._progress = progress

    def mapped(self, name: str) -> torch.Tensor:
        return self._reader.floating(self.names[name])

    def one(self, name: str) -> torch.Tensor:
        tensor = self.mapped(name).to(self._device, self._dtype)
        self._advance(name)
        return tensor

    def stacked(self, *names: str) -> Matrix:
        """The rows of several tensors as one, written once: no list of copies is ever alive."""
        parts = [self.mapped(name) for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        fused = torch.empty(shape, dtype=self._dtype, device=self._device)
        start = 0
        for name, part in zip(names, parts, strict=True):
            fused[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
            self._advance(name)
        return fused

    def layers(self, decoder: DecoderConfig, has_sinks: bool = False) -> list[LayerWeights]:
        return [self._layer(f"layers.{i}.", decoder, has_sinks) for i in range(decoder.num_layers)]

    def _layer(self, layer: str, decoder: DecoderConfig, has_sinks: bool) -> LayerWeights:
        attention = f"{layer}self_attn."
        qkv = [f"{attention}{part}_proj" for part in "qkv"]
        norms = [self.one(f"{attention}{part}_norm.weight") for part in "qk" if decoder.qk_norm]
        return LayerWeights(
            input_layernorm=self.one(f"{layer}input_layernorm.weight"),
            qkv_proj=self.stacked(*(f"{name}.weight" for name in qkv)),
            qkv_bias=self.stacked(*(f"{name}.bias" for name in qkv)) if decoder.qkv_bias else None,
            q_norm=norms[0] if norms else None,
            k_norm=norms[1] if norms else None,
            o_proj=self.one(f"{attention}o_proj.weight"),
            o_bias=self.one(f"{attention}o_proj.bias") if decoder.o_bias else None,
            post_attention_layernorm=self.one(f"{layer}post_attention_layernorm.weight"),
            gate_up_proj=self.stacked(f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"),
            down_proj=self.one(f"{layer}mlp.down_proj.weight"),
            sinks=self.one(f"{attention}attention_sink_bias") if has_sinks else None,
        )

    def _advance(self, name: str) -> None:
        self._progress.advance(TaskID(0), self._reader.num_bytes(self.names[name]))


def _parsed(parse, directory: Path, *configs):
    try:
        return parse(*configs)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None


def _canonical(reader: TensorReader) -> dict[str, str]:
    try:
        return canonical_names(reader.shapes)
    except CheckpointError as error:
        raise CheckpointError(f"{reader.directory}: {error}") from None


def _total(reader: TensorReader, names: dict[str, str]) -> int:
    return sum(reader.num_bytes(stored) for stored in names.values())


def _with_fc_width(
    config: DraftConfig, raw: dict, reader: TensorReader, names: dict[str, str]
) -> DraftConfig:
    """Takes the target's hidden size from fc where the config does not name it."""
    shape = reader.shapes.get(names.get("fc.weight", ""), ())
    num_taps = len(config.target_layer_ids)
    named = raw.get("target_hidden_size") or (raw.get("dflash_config") or {}).get(
        "target_hidden_size"
    )
    if named or len(shape) != 2:
        return config
    if shape[1] == 0 or shape[1] % num_taps:
        raise CheckpointError(
            f"{reader.directory}: fc.weight is {list(shape)}, no multiple of {num_taps} taps wide: "
            "the drafter was trained with other taps than target_layer_ids"
        )
    return replace(config, target_hidden_size=shape[1] // num_taps)


def _own_vocabulary(
    config: DraftConfig, loader: Loader, target: Vocabulary | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    own: list[torch.Tensor | None] = []
    for name, shares, theirs in (
        ("embed_tokens.weight", shares_embedding, target.embed_tokens if target else None),
        ("lm_head.weight", shares_head, target.lm_head if target else None),
    ):
        shared = name not in loader.names or (
            theirs is not None and shares(config, loader.mapped(name), theirs)
        )
        own.append(None if shared else loader.one(name))
    return own[0], own[1]
