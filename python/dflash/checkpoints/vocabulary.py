# SPDX-License-Identifier: Apache-2.0
"""Whether two ordinary models name the same tokens."""

from __future__ import annotations

from pathlib import Path

from dflash.checkpoints.config import TargetConfig
from dflash.checkpoints.pair import MAX_VOCAB_PADDING
from dflash.checkpoints.reader import read_json
from dflash.errors import CheckpointError


def check_same_vocabulary(
    target: TargetConfig, target_dir: Path, draft: TargetConfig, draft_dir: Path
) -> None:
    """Checks that a small model can draft for this target: that an id means the same token to both.

    Sizes may differ by padding. Where both have a tokenizer.json, its tokens are compared, without added ones (chat and
    tool markers): those differ within a family, and a wrong guess about one costs a draft.

    Raises:
        CheckpointError: the vocabularies differ; the message says where.
    """
    theirs, ours = draft.decoder.vocab_size, target.decoder.vocab_size
    if abs(theirs - ours) >= MAX_VOCAB_PADDING:
        raise _differs(
            f"it has {theirs} tokens, this target {ours}: expected the same but for padding"
        )
    if target_dir == draft_dir:
        return
    files = [directory / "tokenizer.json" for directory in (target_dir, draft_dir)]
    if not all(file.exists() for file in files):
        return
    (our_tokens, our_added), (their_tokens, their_added) = (_tokens(file) for file in files)
    if not our_tokens or not their_tokens:  # of a kind that keeps its words elsewhere
        return
    plain = (our_tokens.keys() | their_tokens.keys()) - our_added - their_added
    for token_id in sorted(plain):
        our_token, their_token = our_tokens.get(token_id), their_tokens.get(token_id)
        if our_token != their_token:
            raise _differs(
                f"token {token_id} is {_shown(their_token)}, expected this target's {_shown(our_token)}"
            )


def _differs(how: str) -> CheckpointError:
    return CheckpointError(
        f"the draft model has another vocabulary: {how}. Give a model of this target's family"
    )


def _shown(token: str | None) -> str:
    return "absent" if token is None else repr(token)


def _tokens(file: Path) -> tuple[dict[int, str], set[int]]:
    """Tokens by id, and the ids of those added to them."""
    tokenizer = read_json(file)
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram: [token, score]
        tokens = {i: entry[0] for i, entry in enumerate(vocabulary)}
    else:
        tokens = {i: token for token, i in vocabulary.items()}
    return tokens, {entry["id"] for entry in tokenizer.get("added_tokens", ())}
