# SPDX-License-Identifier: Apache-2.0
"""Our drafter against the authors' package on the same weights: hidden states, drafts, acceptance length."""

from __future__ import annotations

import pytest
import torch

from tests.parity.conftest import NUM_PROMPTS
from tests.support import authors, demo, engine, tiny
from tests.support.runner import PairRunner, relative_error

TOLERANCE = 1e-5
DEMO_BLOCK_SIZE = 8
EOS = [1]
TINY_PROMPTS = ([3, 4, 5, 6], [7] * 11, [9], [12, 30, 8, 8, 21, 17, 5, 29, 11, 14, 3, 10, 22])

WINDOW = {"use_sliding_window": True, "sliding_window": 7}
S, F = "sliding_attention", "full_attention"

# Layer counts 1..6, GQA 1/3/4/8, window on some and all layers, causality by layer type and by is_causal.
DRAFTS = {
    "1 layer": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    "2 layers, GQA 3, causal window then full": WINDOW
    | {
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "layer_types": [S, F],
    },
    "3 layers, GQA 4, non-causal windows": WINDOW
    | {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "layer_types": [S, S, S],
        "is_causal": False,
    },
    "4 layers, GQA 8, causal": {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "is_causal": True,
    },
    "5 layers, GQA 3, head_dim 128, biases, mixed": WINDOW
    | {
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "attention_bias": True,
        "layer_types": [F, S, F, S, F],
    },
    "6 layers, window under the block": {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": [S, F, S, F, S, S],
        "is_causal": False,
    },
    "fewer positions than the context": {"max_position_embeddings": 16},
}


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=DRAFTS.values(), ids=DRAFTS.keys())
def tiny_draft(request, tmp_path_factory):
    return tiny.make_draft(tmp_path_factory.mktemp("draft"), **request.param)


@torch.inference_mode()
def their_states(target, draft, token_ids, bonus, num_drafts):
    """Taps, hidden states and draft logits of one block after `token_ids`, by their code."""
    ids = torch.tensor([token_ids])
    states = target(ids, output_hidden_states=True).hidden_states
    taps = authors.package().extract_context_feature(states, draft.target_layer_ids)
    block = torch.tensor([[bonus] + [draft.mask_token_id] * num_drafts])
    hidden = draft(
        target_hidden=taps,
        noise_embedding=target.get_input_embeddings()(block),
        position_ids=torch.arange(ids.shape[1] + block.shape[1])[None],
    )
    return taps[0], hidden[0], draft.compute_logits(hidden[0, 1:], target.lm_head)


def compare_states(target_dir, draft_dir, target, draft, token_ids):
    num_drafts = draft.block_size - 1
    taps, hidden, logits = their_states(target, draft, token_ids, 5, num_drafts)
    runner = PairRunner(target_dir, draft_dir)
    _, our_taps = runner.verify(token_ids)
    # In two pieces, as the engine observes them.
    half = len(token_ids) // 2
    runner.observe(our_taps[:half], 0)
    runner.observe(our_taps[half:], half)
    our_hidden = runner.draft(5, len(token_ids), num_drafts)
    assert relative_error(our_taps, taps) < TOLERANCE
    assert relative_error(our_hidden, hidden) < TOLERANCE
    our_drafts = runner.drafter.logits(our_hidden[1:]).argmax(-1)
    assert our_drafts.tolist() == logits.argmax(-1).tolist()


def compare_blocks(ours: authors.Generation, theirs: authors.Generation, block_size: int):
    """Token for token and block for block; returns the blocks compared.

    Near the length limit they draft shorter blocks, which changes a non-causal drafter's proposals:
    those last blocks are left out.
    """
    assert ours.token_ids == theirs.token_ids
    full = [block for block in theirs.blocks if len(block.drafts) == block_size - 1]
    assert ours.blocks[: len(full)] == full
    return full


def test_tiny_hidden_states(tiny_target, tiny_draft):
    target, draft = tiny.load_target(tiny_target), authors.load_draft(tiny_draft)
    compare_states(tiny_target, tiny_draft, target, draft, [(7 * i) % 32 for i in range(40)])


def test_tiny_drafts_and_acceptance(tiny_target, tiny_draft):
    target, draft = tiny.load_target(tiny_target), authors.load_draft(tiny_draft)
    llm = engine.make_llm(tiny_target, tiny_draft)
    for prompt in TINY_PROMPTS:
        theirs = authors.generate(draft, target, prompt, 40, EOS)
        ours = engine.generate_blocks(llm, prompt, 40)
        assert compare_blocks(ours, theirs, draft.block_size)


@pytest.mark.parametrize("i", range(3))
def test_demo_hidden_states(i, answers):
    target, draft = demo.transformers_target(), authors.load_draft(demo.draft_directory())
    directories = demo.target_directory(), demo.draft_directory()
    compare_states(*directories, target, draft, answers.prompts[i])


@pytest.mark.parametrize("i", range(NUM_PROMPTS))
def test_demo_drafts_on_humaneval(i, answers):
    ours = answers.with_drafter(i)
    assert compare_blocks(ours, answers.by_authors(i), DEMO_BLOCK_SIZE)


def test_demo_acceptance_on_humaneval(answers):
    """After the test above, over the blocks that it compared."""
    ours, theirs = [], []
    for i in range(NUM_PROMPTS):
        full = compare_blocks(answers.with_drafter(i), answers.by_authors(i), DEMO_BLOCK_SIZE)
        ours += answers.with_drafter(i).blocks[: len(full)]
        theirs += full
    assert authors.acceptance_length(ours) == authors.acceptance_length(theirs)
    assert authors.acceptance_length(ours) > 2.5  # it drafts: 3.9 where answers are 256 tokens long
