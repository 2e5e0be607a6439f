# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints on disk, in the formats that transformers and the authors' package write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support import authors

TARGET_SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "dtype": "float32",
}

DRAFT_SHAPE: dict[str, Any] = TARGET_SHAPE | {
    "num_hidden_layers": 2,
    "num_target_layers": 5,
    "block_size": 4,
    "use_sliding_window": False,
    "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 2, 3]},
}
"""The last layer is not tapped: transformers gives its output normed."""


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights whose logits differ by far more than rounding does, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.dim() == 2:
                scale = 1.0 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Words w0 .. w<vocab_size - 1>, one token each."""
    vocabulary = {f"w{i}": i for i in range(vocab_size)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def make_target(folder: Path, model_type: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A random dense target with tokenizer; `changes` go to its config."""
    config = AutoConfig.for_model(model_type, **(TARGET_SHAPE | changes))
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder


def make_draft(folder: Path, seed: int = 1, **changes: Any) -> Path:
    """A random drafter, written by the authors' class; `changes` go to its config."""
    draft_class = authors.package().DFlashDraftModel
    model = draft_class(draft_class.config_class(**(DRAFT_SHAPE | changes)))
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load_target(folder: Path):
    """The transformers model of a target checkpoint, float32."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
