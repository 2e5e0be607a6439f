# SPDX-License-Identifier: Apache-2.0
"""A target whose next-token distribution is known exactly: a Markov chain in a Llama checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tiny import TARGET_SHAPE, write_tokenizer

HIDDEN_SIZE = 16


def random_chain(num_states: int, seed: int) -> torch.Tensor:
    """Log-probabilities [from, to], no two rows alike, every state reachable."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_states, num_states, generator=generator, dtype=torch.float64)
    return torch.log_softmax(1.2 * logits, dim=-1)


def make_chain_target(folder: Path, chain: torch.Tensor, **changes) -> Path:
    """Attention and MLP add nothing, embeddings are one-hot and column x of the head is chain[x]."""
    num_states = chain.shape[0]
    shape = TARGET_SHAPE | {
        "vocab_size": num_states,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = LlamaConfig(**(shape | changes))
    model = LlamaForCausalLM(config)
    norm_of_one_hot = (1 / HIDDEN_SIZE + config.rms_norm_eps) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(num_states, HIDDEN_SIZE))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :num_states] = (chain / norm_of_one_hot).T.float()
    model.save_pretrained(folder)
    write_tokenizer(folder, num_states)
    return folder


def transition(chain: torch.Tensor, temperature: float) -> np.ndarray:
    return torch.softmax(chain / temperature, dim=-1).numpy()


def windows(sequences: np.ndarray, length: int) -> np.ndarray:
    """Disjoint runs of `length` tokens, each behind the token that precedes it: [n, 1 + length]."""
    runs = range(0, sequences.shape[1] - length, length)
    return np.concatenate([sequences[:, i : i + length + 1] for i in runs])


def p_value(runs: np.ndarray, transitions: np.ndarray) -> float:
    """Chi-square of [n, 1 + length] runs against their joint law given the token in front.

    One table for each token in front, rare cells pooled; the tables are independent.
    """
    statistic, degrees = 0.0, 0
    for state in range(len(transitions)):
        own = runs[runs[:, 0] == state, 1:]
        observed, expected = _table(own, _joint(transitions, state, own.shape[1]))
        statistic += float(((observed - expected) ** 2 / expected).sum())
        degrees += len(expected) - 1
    return float(stats.chi2.sf(statistic, degrees))


def _joint(transitions: np.ndarray, state: int, length: int) -> np.ndarray:
    """P(t_1 .. t_length | the token in front)."""
    probabilities = transitions[state]
    for _ in range(length - 1):
        probabilities = probabilities[..., None] * transitions
    return probabilities


def _table(sequences: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Observed and expected counts; cells that expect fewer than 5 become one."""
    counts = np.zeros(probabilities.shape)
    np.add.at(counts, tuple(sequences.T), 1)
    observed, expected = counts.ravel(), probabilities.ravel() * len(sequences)
    common = expected >= 5
    if common.all():
        return observed, expected
    pooled = [np.append(x[common], x[~common].sum()) for x in (observed, expected)]
    return pooled[0], pooled[1]
