# SPDX-License-Identifier: Apache-2.0
"""From draft_method and a checkpoint to a speculator: what differs between the methods before the first step."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash.checkpoints.config import DraftConfig, TargetConfig
from dflash.checkpoints.quantize import load_draft_of
from dflash.checkpoints.vocabulary import check_same_vocabulary
from dflash.checkpoints.weights import DraftWeights, TargetWeights, load_target
from dflash.engine.args import AUTOREGRESSIVE, EngineArgs
from dflash.engine.tune import best_num_speculative_tokens
from dflash.models.decoder import DecoderSettings
from dflash.models.drafter import Drafter
from dflash.models.target import Target
from dflash.speculators.autoregressive import AutoregressiveSpeculator
from dflash.speculators.dflash import DFlashSpeculator
from dflash.speculators.spec import Speculator

DEFAULT_AUTOREGRESSIVE_TOKENS = 4
"""N of an ordinary model: each draft costs a pass of it."""

DraftCheckpoint = tuple[DraftConfig, DraftWeights] | tuple[TargetConfig, TargetWeights]


def load_drafter(
    args: EngineArgs,
    target: tuple[TargetConfig, TargetWeights, Path],
    dtype: torch.dtype,
    device: torch.device,
) -> DraftCheckpoint | None:
    """The checkpoint args.draft, as args.draft_method reads it; None without one.

    Raises:
        CheckpointError: it does not belong to the target.
    """
    if args.draft is None:
        return None
    target_config, target_weights, target_dir = target
    if args.draft_method == AUTOREGRESSIVE:
        config, weights, directory = load_target(args.draft, dtype, device)
        check_same_vocabulary(target_config, target_dir, config, directory)
        return config, weights
    pair = target_config, target_weights
    return load_draft_of(pair, args.draft, args.draft_quantization, dtype, device)


def make_drafter(
    checkpoint: DraftCheckpoint, target: Target, settings: DecoderSettings
) -> Drafter | Target:
    """The model of a checkpoint; one of the target's kind is a drafter too."""
    config, weights = checkpoint
    if isinstance(config, TargetConfig):
        assert isinstance(weights, TargetWeights)
        return Target(config, weights, settings)
    assert isinstance(weights, DraftWeights)
    return Drafter(config, weights, target.embed_tokens, target.lm_head, settings)


def choose_num_speculative_tokens(
    args: EngineArgs, target: Target, drafter: Drafter | Target | None
) -> int:
    """N: what was asked for, or the method's default.

    Raises:
        ValueError: more than the drafter was trained for.
    """
    requested = args.num_speculative_tokens
    if drafter is None:
        return 0
    if isinstance(drafter, Target):
        return requested or DEFAULT_AUTOREGRESSIVE_TOKENS
    longest = drafter.config.draft_block_size - 1
    if requested is None:
        on_cpu = target.lm_head.device.type == "cpu"
        return best_num_speculative_tokens(target, drafter) if on_cpu else longest
    if requested > longest and not args.allow_long_drafts:
        raise ValueError(
            f"num_speculative_tokens {requested} is past what this drafter was trained for "
            f"(blocks of {longest + 1}: at most {longest}); allow_long_drafts forces it"
        )
    return requested


def make_speculator(
    args: EngineArgs,
    drafter: Drafter | Target | None,
    n: int,
    max_rows: int,
    max_reqs: int,
    max_model_len: int,
    vocab_size: int,
) -> Speculator | None:
    """The drafter's half of the step, for batches of at most max_rows rows of max_reqs requests."""
    if drafter is None:
        return None
    if isinstance(drafter, Target):
        return AutoregressiveSpeculator(
            drafter, n, max_reqs, args.max_num_seqs, max_model_len, vocab_size, args.draft_sample_method
        )  # fmt: skip
    return DFlashSpeculator(
        drafter, n, max_rows, max_reqs, max_model_len, vocab_size, args.draft_sample_method
    )
