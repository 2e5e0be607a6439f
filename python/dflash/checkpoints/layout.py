# SPDX-License-Identifier: Apache-2.0
"""Which tensors a checkpoint must hold, in which shapes: one error names all that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash.checkpoints.config import DecoderConfig, DraftConfig, TargetConfig
from dflash.errors import CheckpointError

Shape = tuple[int, ...]

_ALIASES = (
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)


@dataclass
class Layout:
    """Canonical tensor name -> shape, of what a checkpoint must and may hold."""

    required: dict[str, Shape] = field(default_factory=dict)
    optional: dict[str, Shape] = field(default_factory=dict)


def target_layout(config: TargetConfig) -> Layout:
    """The tensors of a target; tied embeddings make its head optional."""
    decoder = config.decoder
    vocabulary = (decoder.vocab_size, decoder.hidden_size)
    layout = Layout(_decoder_layout(decoder, has_sinks=False))
    layout.required["embed_tokens.weight"] = vocabulary
    head = layout.optional if config.tie_word_embeddings else layout.required
    head["lm_head.weight"] = vocabulary
    return layout


def draft_layout(config: DraftConfig) -> Layout:
    """The tensors of a drafter; its own embedding and full head are optional."""
    decoder = config.decoder
    hidden = decoder.hidden_size
    layout = Layout(_decoder_layout(decoder, config.has_sinks))
    layout.required["fc.weight"] = (
        hidden,
        len(config.target_layer_ids) * config.target_hidden_size,
    )
    layout.required["hidden_norm.weight"] = (hidden,)
    layout.optional["embed_tokens.weight"] = (decoder.vocab_size, hidden)
    # A reduced vocabulary needs its own head and map: the target's head means other tokens.
    reduced = layout.optional if config.draft_vocab_size is None else layout.required
    reduced["lm_head.weight"] = draft_head(config)
    reduced["d2t"] = draft_head(config)[:1]
    return layout


def draft_head(config: DraftConfig) -> Shape:
    """[V or draft_vocab_size, H]."""
    return (config.draft_vocab_size or config.decoder.vocab_size, config.decoder.hidden_size)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> stored name, without tensors that carry no weights of the model.

    Raises:
        CheckpointError: two stored tensors mean the same weight, or one is a `mask_hidden`.
    """
    canonical: dict[str, str] = {}
    for stored in sorted(names):
        name = stored.removeprefix("model.")
        if "mask_hidden" in name:
            raise CheckpointError(
                f"tensor {stored} is not supported: a mask embedding is the mask token's row or "
                "mask_embedding.pt"
            )
        if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
            continue
        for alias, meaning in _ALIASES:
            if name.startswith(alias):
                name = meaning + name.removeprefix(alias)
        if name in canonical:
            raise CheckpointError(f"tensors {canonical[name]} and {stored} are the same weight")
        canonical[name] = stored
    return canonical


def check_layout(
    directory: Path | str, layout: Layout, shapes: Mapping[str, Shape], names: Mapping[str, str]
) -> None:
    """Names every missing, unexpected and ill-shaped tensor in one CheckpointError."""
    missing = sorted(layout.required.keys() - names.keys())
    known = {**layout.optional, **layout.required}
    unexpected = sorted(names[name] for name in names.keys() - known.keys())
    wrong = [
        f"{stored} is {list(shapes[stored])}, expected {list(known[name])}"
        for name, stored in sorted(names.items())
        if name in known and shapes[stored] != known[name]
    ]
    lines = [
        f"{what} ({len(items)}): {', '.join(items)}"
        for what, items in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("tensors of another shape", wrong),
        )
        if items
    ]
    if lines:
        raise CheckpointError(
            f"{directory}: the weights do not fit config.json: {'; '.join(lines)}"
        )


def _decoder_layout(decoder: DecoderConfig, has_sinks: bool) -> dict[str, Shape]:
    hidden, inner, head = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    q_rows, kv_rows = decoder.num_heads * head, decoder.num_kv_heads * head
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if decoder.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if decoder.qkv_bias:
        layer |= {
            "self_attn.q_proj.bias": (q_rows,),
            "self_attn.k_proj.bias": (kv_rows,),
            "self_attn.v_proj.bias": (kv_rows,),
        }
    if decoder.o_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if has_sinks:
        layer["self_attn.attention_sink_bias"] = (decoder.num_heads,)
    layout: dict[str, Shape] = {"norm.weight": (hidden,)}
    for i in range(decoder.num_layers):
        layout |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return layout
