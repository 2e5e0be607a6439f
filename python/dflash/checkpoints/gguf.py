# SPDX-License-Identifier: Apache-2.0
"""GGUF files, converted once to an ordinary checkpoint directory in the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from rich.progress import TaskID
from safetensors.torch import save_file

from dflash.checkpoints.cache import cache_dir, new_entry, sha256_of
from dflash.checkpoints.gguf_tokenizer import save_tokenizer
from dflash.checkpoints.reader import progress_bar
from dflash.errors import CheckpointError, DflashError

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SHARD_BYTES = 4 << 30


def convert_gguf(path: Path, sha256: str | None = None) -> Path:
    """The directory a GGUF becomes: config.json, bf16 safetensors, tokenizer, generation config.

    Args:
        sha256: the file's, where the caller has it; the cache's key.

    Raises:
        CheckpointError: an architecture, a RoPE or a tokenizer that is not supported.
        DflashError: an unreadable or damaged file, or a full disk.
    """
    try:
        final = cache_dir() / "gguf" / (sha256 or sha256_of(path))
    except OSError as error:
        raise DflashError(f"cannot read {path}: {error.strerror}") from error
    if final.is_dir():
        return final
    reader = _open(path)
    fields = _Metadata(path, reader)
    config = _config(fields, reader)
    with new_entry(final) as folder:
        _save_weights(folder, path, reader, config)
        save_tokenizer(folder, path, fields.values, config["max_position_embeddings"])
        _write_json(folder / "config.json", config)
        eos = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        generation = {"eos_token_id": list(dict.fromkeys(x for x in eos if x is not None))}
        _write_json(folder / "generation_config.json", generation)
    return final


def gguf_config(path: Path) -> dict[str, Any]:
    """The config.json that convert_gguf would write; errors as its."""
    reader = _open(path)
    return _config(_Metadata(path, reader), reader)


class _Metadata:
    """The file's key/value fields; an architecture's own keys by their last part."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self.values: dict[str, Any] = {
            name: field.contents() for name, field in reader.fields.items()
        }
        self.architecture = self.values.get("general.architecture", "unknown")

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def own(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def required(self, key: str) -> Any:
        value = self.own(key)
        if value is None:
            raise CheckpointError(f"{self.path}: key {self.architecture}.{key} is missing")
        return value


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except OSError as error:
        raise DflashError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # the reader's own errors on damaged files have no common type
        raise DflashError(
            f"{path} is truncated or not a GGUF file ({error}): download it again"
        ) from error


def _config(fields: _Metadata, reader: GGUFReader) -> dict[str, Any]:
    if fields.architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{fields.path}: GGUF architecture '{fields.architecture}' is not supported: expected "
            f"one of {', '.join(_ARCHITECTURES)}"
        )
    names = {tensor.name for tensor in reader.tensors}
    if "rope_freqs.weight" in names:
        raise CheckpointError(
            f"{fields.path}: RoPE frequencies given as a tensor (rope_freqs.weight) are not "
            "supported: use the model's safetensors checkpoint"
        )
    architecture, model_type = _ARCHITECTURES[fields.architecture]
    num_heads, hidden = fields.required("attention.head_count"), fields.required("embedding_length")
    head_dim = fields.own("attention.key_length", hidden // num_heads)
    embedding = next((t for t in reader.tensors if t.name == "token_embd.weight"), None)
    if embedding is None:
        raise CheckpointError(f"{fields.path}: tensor token_embd.weight is missing")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": fields.required("feed_forward_length"),
        "num_hidden_layers": fields.required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.own("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": int(embedding.shape[-1]),
        "max_position_embeddings": fields.required("context_length"),
        "rms_norm_eps": _shortest(fields.required("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": fields.architecture == "llama" and "blk.0.attn_q.bias" in names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    rotary_dim = fields.own("rope.dimension_count", head_dim)
    return config | _rope(fields, rotary_dim / head_dim)


def _rope(fields: _Metadata, fraction: float) -> dict[str, Any]:
    """Both spellings, so that transformers 4 and 5 read the directory too."""
    theta = _shortest(fields.own("rope.freq_base", 10000.0))
    kind = fields.own("rope.scaling.type", "none")
    scaling: dict[str, Any] | None = None
    if kind in ("linear", "yarn"):
        factor = _shortest(fields.required("rope.scaling.factor"))
        scaling = {"rope_type": kind, "factor": factor}
        original = fields.own("rope.scaling.original_context_length")
        if kind == "yarn" and original is not None:
            scaling["original_max_position_embeddings"] = original
    elif kind != "none":
        raise CheckpointError(f"{fields.path}: RoPE scaling '{kind}' is not supported")
    partial = {} if fraction == 1.0 else {"partial_rotary_factor": fraction}
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": theta, **partial}
    old = {"rope_theta": theta, **partial}
    return {**old, "rope_parameters": parameters} | ({"rope_scaling": scaling} if scaling else {})


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 9.9999997e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _save_weights(folder: Path, path: Path, reader: GGUFReader, config: dict[str, Any]) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    names: list[list[str]] = [[]]
    size = 0
    for name, tensor in _tensors(path, reader, config):
        if size and size + tensor.nbytes > _SHARD_BYTES:
            _save_shard(folder, len(names), shards[-1])
            shards[-1], size = {}, 0
            names.append([])
        shards[-1][name] = tensor
        names[-1].append(name)
        size += tensor.nbytes
    _save_shard(folder, len(names), shards[-1])
    if len(names) == 1:
        _shard(folder, 1).rename(folder / "model.safetensors")
        return
    weight_map = {name: _shard(folder, i + 1).name for i, part in enumerate(names) for name in part}
    _write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def _tensors(
    path: Path, reader: GGUFReader, config: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, dequantised to bf16, under its Hugging Face name."""
    total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    with progress_bar(f"Converting {path.name}", total) as progress:
        for tensor in reader.tensors:
            name = _hugging_face_name(path, tensor.name)
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise CheckpointError(
                    f"{path}: {tensor.name} is {tensor.tensor_type.name}, which is not supported"
                ) from None
            if config["model_type"] == "llama":
                values = _half_rotation(tensor, values, config)
            yield name, torch.from_numpy(np.array(values, order="C")).to(torch.bfloat16)
            progress.advance(TaskID(0), int(tensor.n_bytes))


def _half_rotation(tensor: ReaderTensor, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Rows of q and k from interleaved pairs (llama.cpp) back to two halves of a head."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }.get(tensor.name.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _hugging_face_name(path: Path, name: str) -> str:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise CheckpointError(f"{path}: unexpected tensor {name}")


def _shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}.safetensors"


def _save_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, _shard(folder, number), metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
