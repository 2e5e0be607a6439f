# SPDX-License-Identifier: Apache-2.0
"""Speculation changes no distribution: four consecutive tokens of a known chain, through the whole step."""

from __future__ import annotations

import numpy as np
import pytest

from dflash.engine.sampling_params import SamplingParams
from tests.support import engine, markov, tiny

NUM_STATES = 4
NUM_SEQUENCES = 128
NUM_TOKENS = 641
TEMPERATURE = 1.25
CHAIN = markov.random_chain(NUM_STATES, seed=0)
TRANSITIONS = markov.transition(CHAIN, TEMPERATURE)

# A true null falls under this once in a thousand seeds; the seeds here are fixed.
MIN_P_VALUE = 1e-3

METHODS = ("match", "standard", "block")
MODES = ("greedy", "gumbel")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return markov.make_chain_target(tmp_path_factory.mktemp("chain"), CHAIN)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """Its proposals depend on the context and are neither the chain's law nor far from it."""
    return tiny.make_draft(
        tmp_path_factory.mktemp("draft"),
        seed=3,
        vocab_size=NUM_STATES,
        hidden_size=markov.HIDDEN_SIZE,
        num_attention_heads=1,
        num_target_layers=2,
        dflash_config={"mask_token_id": NUM_STATES - 1, "target_layer_ids": [0]},
    )


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A chain of its own: every draft token is drawn behind the ones before it."""
    chain = markov.random_chain(NUM_STATES, seed=1)
    return markov.make_chain_target(tmp_path_factory.mktemp("small"), chain)


def sample(llm, temperatures: list[float], max_tokens: int) -> list[list[int]]:
    """Request i starts in state i % NUM_STATES and has seed i."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)
        for seed, temperature in enumerate(temperatures)
    ]
    prompts = [[i % NUM_STATES] for i in range(len(params))]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def runs_of_four(llm) -> np.ndarray:
    """20480 disjoint runs of four tokens, wherever blocks begin, end or reject."""
    return markov.windows(np.array(sample(llm, [TEMPERATURE] * NUM_SEQUENCES, NUM_TOKENS)), 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_four_tokens_follow_the_chain(target, draft, method, mode):
    llm = engine.make_llm(
        target,
        draft,
        max_num_seqs=NUM_SEQUENCES,
        max_model_len=NUM_TOKENS + 1,
        rejection_sample_method=method,
        draft_sample_method=mode,
    )
    assert markov.p_value(runs_of_four(llm), TRANSITIONS) > MIN_P_VALUE
    accepted = llm.statistics.acceptance_by_position
    assert 0.01 < accepted[-1] < accepted[0] < 0.95  # both outcomes happen at every position


@pytest.mark.parametrize("method", ["standard", "block"])
def test_four_tokens_follow_the_chain_with_a_small_model(target, small_model, method):
    llm = engine.make_llm(
        target,
        small_model,
        draft_method="autoregressive",
        num_speculative_tokens=2,
        max_num_seqs=NUM_SEQUENCES,
        max_model_len=NUM_TOKENS + 1,
        rejection_sample_method=method,
        draft_sample_method="gumbel",
    )
    assert markov.p_value(runs_of_four(llm), TRANSITIONS) > MIN_P_VALUE
    accepted = llm.statistics.acceptance_by_position
    assert 0.01 < accepted[-1] < accepted[0] < 0.95


def test_a_wrong_chain_is_noticed(target):
    """The power of the test above: one transition that is 4 % off is seen."""
    llm = engine.make_llm(target, max_num_seqs=NUM_SEQUENCES, max_model_len=NUM_TOKENS + 1)
    runs = runs_of_four(llm)
    assert markov.p_value(runs, TRANSITIONS) > MIN_P_VALUE
    off = TRANSITIONS.copy()
    off[3, 1] += 0.04
    off[3, 2] -= 0.04
    assert markov.p_value(runs, off) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_argmax_drafter_changes_no_token_under_one_seed(target, draft, method):
    """Sampled tokens with "match", greedy ones with every method; all temperatures in one batch."""
    temperatures = [0.0, 0.7, TEMPERATURE, 0.0, 2.0] * 8
    plain = engine.make_llm(target, max_num_seqs=16, max_model_len=64)
    drafted = engine.make_llm(
        target, draft, max_num_seqs=16, max_model_len=64, rejection_sample_method=method
    )
    expected, actual = (sample(llm, temperatures, 40) for llm in (plain, drafted))
    for temperature, with_draft, without in zip(temperatures, actual, expected, strict=True):
        if method == "match" or temperature == 0.0:
            assert with_draft == without


def test_neighbours_change_no_token(target, draft):
    """Each request alone, at its own temperature, says what it says in a mixed batch."""
    temperatures = [0.0, 0.7, TEMPERATURE, 2.0]
    llm = engine.make_llm(target, draft, max_num_seqs=4, max_model_len=64)
    together = sample(llm, temperatures, 40)
    for i, temperature in enumerate(temperatures):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True)
        (alone,) = llm.generate([[i % NUM_STATES]], params)
        assert list(alone.outputs[0].token_ids) == together[i]
    assert len({tuple(tokens[:12]) for tokens in together}) == 4
