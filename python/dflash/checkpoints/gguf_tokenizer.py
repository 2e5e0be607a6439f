# SPDX-License-Identifier: Apache-2.0
"""A GGUF's tokenizer as tokenizer.json and tokenizer_config.json.

Built here and not by transformers' own conversion, which loses the digit rule and, in version 4,
the eos token and the absence of a bos token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from dflash.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4  # token types: special, and whole but not special

# How each kind cuts text before merging; DIGITS is how many digits one token may hold.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
_SUPPORTED = ("smollm", "default", "gpt-2", *_DIGITS)


def save_tokenizer(folder: Path, path: Path, metadata: dict[str, Any], max_positions: int) -> None:
    """Writes the tokenizer of the GGUF at `path`, given by its metadata, into a folder.

    Raises:
        CheckpointError: a kind of tokenizer that is not supported, or one without its lists.
    """
    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _SUPPORTED:
        raise CheckpointError(
            f"{path}: tokenizer '{model}' of kind '{pre}' is not supported: expected 'gpt2' "
            f"(byte-level BPE) of kind {', '.join(_SUPPORTED)}"
        )
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if not metadata.get(key):
            raise CheckpointError(f"{path}: key {key} is missing")
    _build(metadata, pre).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
        "bos_token": _token(metadata, "bos"),
        "eos_token": _token(metadata, "eos"),
        "pad_token": _token(metadata, "padding"),
        "unk_token": _token(metadata, "unknown"),
    }
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def _build(metadata: dict[str, Any], pre: str) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type") or [], strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    bos = _token(metadata, "bos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, vocabulary[bos])],
        )
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _DIGITS:
        words = Regex(_WORDS.replace("DIGITS", _DIGITS[pre]))
        parts = [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        return pre_tokenizers.Sequence(parts)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre != "smollm":
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _token(metadata: dict[str, Any], name: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else None
