# SPDX-License-Identifier: Apache-2.0
"""Whether a target and a drafter belong together, and which vocabulary matrices they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from dflash.checkpoints.config import DraftConfig, TargetConfig
from dflash.errors import CheckpointError

if TYPE_CHECKING:
    from dflash.checkpoints.weights import DraftWeights

# Vocabularies of one tokenizer differ by padding to a multiple of at most this.
MAX_VOCAB_PADDING = 1024
_ROWS_PER_COMPARISON = 8192


class Vocabulary(Protocol):
    """The target's matrices: its weights, or the model built from them."""

    @property
    def embed_tokens(self) -> torch.Tensor: ...

    @property
    def lm_head(self) -> torch.Tensor: ...


def check_pair(target: TargetConfig, draft: DraftConfig, weights: DraftWeights) -> None:
    """Checks that a drafter was made for this target.

    Args:
        weights: the drafter's; a matrix that is None is the target's.

    Raises:
        CheckpointError: it was trained for another target; the message says how that shows.
    """
    wrong = _mismatch(target, draft, weights)
    if wrong:
        raise CheckpointError(
            f"the drafter was trained for another target: {wrong}. Give the drafter of this target"
        )


def _mismatch(target: TargetConfig, draft: DraftConfig, weights: DraftWeights) -> str | None:
    decoder, num_taps = target.decoder, len(draft.target_layer_ids)
    hidden = decoder.hidden_size
    assert isinstance(weights.fc, torch.Tensor)
    if weights.fc.shape[1] != num_taps * hidden:
        return (
            f"its fc takes {weights.fc.shape[1]} features, but {num_taps} taps of this target's "
            f"hidden size {hidden} give {num_taps * hidden}"
        )
    if draft.num_target_layers not in (None, decoder.num_layers):
        return f"it expects {draft.num_target_layers} layers, this target has {decoder.num_layers}"
    outside = [tap for tap in draft.target_layer_ids if tap >= decoder.num_layers]
    if outside:
        return f"it taps layers {outside}, this target has layers 0 to {decoder.num_layers - 1}"
    shared = [
        name
        for name, own in (("embedding", weights.embed_tokens), ("head", weights.lm_head))
        if own is None
    ]
    if shared and draft.decoder.hidden_size != hidden:
        return (
            f"its hidden size is {draft.decoder.hidden_size}, but it needs this target's "
            f"{' and '.join(shared)} of width {hidden}"
        )
    return _vocabulary_mismatch(target.decoder.vocab_size, draft, weights)


def _vocabulary_mismatch(vocab: int, draft: DraftConfig, weights: DraftWeights) -> str | None:
    if abs(draft.decoder.vocab_size - vocab) >= MAX_VOCAB_PADDING:
        return f"its vocabulary has {draft.decoder.vocab_size} tokens, this target's has {vocab}"
    rows = vocab if weights.embed_tokens is None else weights.embed_tokens.shape[0]
    if weights.mask_embedding is None and draft.mask_token_id >= rows:
        return f"its mask token is {draft.mask_token_id}, the embedding has {rows} rows"
    if rows < vocab:
        return f"its own embedding has {rows} rows, this target names tokens up to {vocab - 1}"
    if weights.d2t is not None:
        ids = torch.arange(weights.d2t.shape[0], device=weights.d2t.device) + weights.d2t
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab:
            return f"its d2t names tokens {low} to {high}, this target has {vocab}"
    return None


def shares_embedding(draft: DraftConfig, own: torch.Tensor, target: torch.Tensor) -> bool:
    """An own embedding may be dropped when it equals the target's, which has the mask's row."""
    return draft.mask_token_id < target.shape[0] and _same_rows(own, target)


def shares_head(draft: DraftConfig, own: torch.Tensor, target: torch.Tensor) -> bool:
    """A head of a reduced vocabulary is never the target's, whatever its rows hold."""
    return draft.draft_vocab_size is None and _same_rows(own, target)


def _same_rows(own: torch.Tensor, target: torch.Tensor) -> bool:
    """Equality of the rows that both have: the rest is padding."""
    if own.shape[1] != target.shape[1]:
        return False
    for start in range(0, min(own.shape[0], target.shape[0]), _ROWS_PER_COMPARISON):
        stop = min(start + _ROWS_PER_COMPARISON, own.shape[0], target.shape[0])
        if not torch.equal(own[start:stop].to(target), target[start:stop]):
            return False
    return True
