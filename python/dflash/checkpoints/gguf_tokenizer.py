# SPDX-License-Identifier: Apache-2.0
"""A GGUF's tokenizer as tokenizer files: transformers' conversion, with what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, pre_tokenizers, processors

from dflash.errors import CheckpointError, DflashError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL_TOKEN = 3

# How each kind of byte-level BPE cuts text before merging; \p{N} takes the digits a token may hold.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}

_ROUND_TRIPS = (
    "def f(x):\n    return  x * 1234  # a  7\n",
    "\tNaïve café, 漢字, \U0001f600: don't 'tis  3.14\r\n\n  end",
)


def save_tokenizer(folder: Path, path: Path, metadata: dict[str, Any], max_positions: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template of a GGUF into a folder.

    Raises:
        CheckpointError: a kind of tokenizer that is not supported.
        DflashError: the converted tokenizer does not reproduce its own tokens.
    """
    from transformers import AutoTokenizer  # seconds to import: only a conversion pays

    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    known = ("smollm", "default", "gpt-2", *_DIGITS)
    if model != "gpt2" or pre not in known:
        raise CheckpointError(
            f"{path}: tokenizer '{model}' of kind '{pre}' is not supported: expected 'gpt2' "
            f"(byte-level BPE) of kind {', '.join(known)}"
        )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = _pre_tokenizer(pre)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        token = metadata["tokenizer.ggml.tokens"][bos]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, bos)]
        )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    tokenizer.model_max_length = max_positions
    _check(path, tokenizer, metadata)
    tokenizer.save_pretrained(folder)
    _write_config(folder / "tokenizer_config.json", tokenizer)


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _DIGITS:
        pattern = Regex(_SPLIT.replace("DIGITS", _DIGITS[pre]))
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre != "smollm":
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _write_config(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """One that transformers 4 reads too: the class's name differs between 4 and 5."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "model_max_length")
    config = {name: getattr(tokenizer, name) for name in names}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check(path: Path, tokenizer: PreTrainedTokenizerFast, metadata: dict[str, Any]) -> None:
    """Every token keeps its id, control tokens stay whole, and text survives a round trip."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = tokenizer.get_vocab()
    wrong = [token for i, token in enumerate(tokens) if vocabulary.get(token) != i]
    for i, kind in enumerate(kinds):
        if kind == _CONTROL_TOKEN and tokenizer.encode(tokens[i], add_special_tokens=False) != [i]:
            wrong.append(tokens[i])
    for text in _ROUND_TRIPS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
            wrong.append(text)
    if wrong:
        raise DflashError(
            f"{path}: the tokenizer does not convert exactly with this transformers: "
            f"{wrong[:5]!r} come out different"
        )
