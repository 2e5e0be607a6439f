# SPDX-License-Identifier: Apache-2.0
"""Whether two checkpoints belong together, and which vocabulary matrices they share."""

import dataclasses

import pytest
import torch

from dflash.checkpoints import check_pair, load_draft, load_target
from dflash.errors import CheckpointError
from tests.checkpoints.support import (
    DRAFT,
    SPECULATORS,
    TARGET,
    draft_tensors,
    target_tensors,
    with_dflash,
    write,
)


def _pair(tmp_path, draft=DRAFT, target=TARGET, extra=None, **tensors):
    target_config, target_weights, _ = load_target(
        write(tmp_path / "target", target, target_tensors(target))
    )
    folder = write(tmp_path / "draft", draft, draft_tensors(draft, **tensors) | (extra or {}))
    draft_config, draft_weights, _ = load_draft(folder, target=target_weights)
    return target_config, target_weights, draft_config, draft_weights


def _check(pair):
    target_config, _, draft_config, draft_weights = pair
    check_pair(target_config, draft_config, draft_weights)


def test_a_pair_that_fits(tmp_path):
    _check(_pair(tmp_path))
    _check(_pair(tmp_path, draft=SPECULATORS))


def test_head_counts_may_differ(tmp_path):
    draft = {**DRAFT, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    _check(_pair(tmp_path, draft=draft))


@pytest.mark.parametrize(
    ("draft", "target_hidden", "message"),
    [
        (DRAFT, 48, r"fc takes 96 features, but 2 taps of this target's hidden size 32 give 64"),
        ({**DRAFT, "num_target_layers": 30}, 32, "expects 30 layers, this target has 3"),
        (with_dflash(target_layer_ids=[0, 3]), 32, r"taps layers \[3\]"),
        ({**DRAFT, "vocab_size": 4096}, 32, "vocabulary has 4096 tokens, this target's has 64"),
        (with_dflash(mask_token_id=64), 32, "mask token is 64, the embedding has 64 rows"),
        ({**DRAFT, "hidden_size": 16}, 32, "hidden size is 16, but it needs .*embedding and head"),
    ],
)
def test_a_drafter_of_another_target(tmp_path, draft, target_hidden, message):
    with pytest.raises(CheckpointError, match=f"trained for another target: .*{message}"):
        _check(_pair(tmp_path, draft=draft, target_hidden=target_hidden))


@pytest.mark.parametrize(("rows", "fits"), [(63, False), (64, True), (72, True)])
def test_an_own_embedding_holds_every_token_of_the_target(tmp_path, rows, fits):
    draft = {**DRAFT, "vocab_size": rows}
    pair = _pair(tmp_path, draft, extra={"embed_tokens.weight": torch.randn(rows, 32)})
    if fits:
        _check(pair)
        return
    with pytest.raises(CheckpointError, match=r"embedding has 63 rows, .* tokens up to 63"):
        _check(pair)


@pytest.mark.parametrize(("shift", "fits"), [(0, True), (40, True), (41, False), (-1, False)])
def test_d2t_stays_in_the_vocabulary(tmp_path, shift, fits):
    draft = {**SPECULATORS, "draft_vocab_size": 24}
    d2t = torch.full((24,), shift, dtype=torch.int64)
    pair = _pair(tmp_path, draft, extra={"d2t": d2t, "lm_head.weight": torch.randn(24, 32)})
    if fits:
        _check(pair)
        return
    with pytest.raises(CheckpointError, match="d2t names tokens"):
        _check(pair)


def _padded(rows, count, hidden=32):
    """`rows` followed by padding that matches nothing."""
    padding = torch.randn(count, hidden).to(rows.dtype)
    return torch.cat([rows, padding])


@pytest.mark.parametrize("own_rows", [60, 64, 72])
@pytest.mark.parametrize("equal", [True, False])
def test_unpadded_rows_decide(tmp_path, own_rows, equal):
    _, weights, _ = load_target(write(tmp_path / "target", TARGET, target_tensors(TARGET)))
    config = {**DRAFT, "vocab_size": own_rows}
    own = {}
    for name, theirs in (
        ("embed_tokens.weight", weights.embed_tokens),
        ("lm_head.weight", weights.lm_head),
    ):
        own[name] = _padded(theirs[: min(own_rows, 64)], max(own_rows - 64, 0)).clone()
        if not equal:
            own[name][59, 0] += 1
    folder = write(tmp_path / "draft", config, draft_tensors(config) | own)
    _, before, _ = load_draft(folder)
    assert before.embed_tokens.shape == before.lm_head.shape == (own_rows, 32)
    _, loaded, _ = load_draft(folder, target=weights)
    assert (loaded.embed_tokens is None) == equal
    assert (loaded.lm_head is None) == equal


def test_embedding_and_head_are_compared_apart(tmp_path):
    _, weights, _ = load_target(write(tmp_path / "target", TARGET, target_tensors(TARGET)))
    own = {"embed_tokens.weight": torch.randn(64, 32), "lm_head.weight": weights.lm_head.clone()}
    folder = write(tmp_path / "draft", DRAFT, draft_tensors(DRAFT) | own)
    _, loaded, _ = load_draft(folder, target=weights)
    assert loaded.embed_tokens is not None and loaded.lm_head is None


def test_equality_is_judged_in_the_served_dtype(tmp_path):
    _, weights, _ = load_target(
        write(tmp_path / "target", TARGET, target_tensors(TARGET)), torch.float32
    )
    own = {"lm_head.weight": weights.lm_head.to(torch.bfloat16)}
    folder = write(tmp_path / "draft", DRAFT, draft_tensors(DRAFT) | own)
    assert load_draft(folder, torch.float32, target=weights)[1].lm_head is None


def test_a_reduced_head_is_never_the_targets(tmp_path):
    target_weights = load_target(write(tmp_path / "t", TARGET, target_tensors(TARGET)))[1]
    config = {**SPECULATORS, "draft_vocab_size": 24}
    own = {"d2t": torch.zeros(24, dtype=torch.int64)}
    own["lm_head.weight"] = target_weights.lm_head[:24].clone()
    folder = write(tmp_path / "draft", config, draft_tensors(config) | own)
    _, loaded, _ = load_draft(folder, target=target_weights)
    assert loaded.lm_head is not None and loaded.d2t is not None


def test_a_mask_row_the_target_lacks_keeps_the_own_embedding(tmp_path):
    target_config, weights, _ = load_target(
        write(tmp_path / "target", TARGET, target_tensors(TARGET))
    )
    config = {**with_dflash(mask_token_id=70), "vocab_size": 72}
    own = {"embed_tokens.weight": _padded(weights.embed_tokens, 8)}
    folder = write(tmp_path / "draft", config, draft_tensors(config) | own)
    draft_config, loaded, _ = load_draft(folder, target=weights)
    assert loaded.embed_tokens is not None
    check_pair(target_config, draft_config, loaded)
    with pytest.raises(CheckpointError, match="mask token is 70"):
        check_pair(target_config, draft_config, dataclasses.replace(loaded, embed_tokens=None))
