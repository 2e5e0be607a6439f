# SPDX-License-Identifier: Apache-2.0
"""Our models over one sequence, without the engine: block i of the cache holds its i-th page."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash.attention.spec import AttentionBatch
from dflash.checkpoints.weights import load_draft, load_target
from dflash.models.decoder import DecoderSettings, Taps
from dflash.models.drafter import Drafter
from dflash.models.target import Target


class PairRunner:
    """A target and a drafter in float32 on the CPU."""

    def __init__(
        self, target: Path, draft: Path, kv_block_size: int = 16, max_model_len: int = 512
    ) -> None:
        device = torch.device("cpu")
        self.kv_block_size = kv_block_size
        self.max_model_len = max_model_len
        settings = DecoderSettings(
            device, torch.float32, torch.float32, kv_block_size, max_model_len
        )
        config, weights, _ = load_target(str(target), torch.float32, device)
        self.target = Target(config, weights, settings)
        draft_config, draft_weights, _ = load_draft(str(draft), torch.float32, device)
        self.drafter = Drafter(
            draft_config, draft_weights, weights.embed_tokens, weights.lm_head, settings
        )
        self.num_blocks = 1 + -(-max_model_len // kv_block_size)
        for decoder in (self.target.decoder, self.drafter.decoder):
            decoder.allocate_cache(self.num_blocks, kv_block_size)

    def _batch(self, first: int, count: int) -> AttentionBatch:
        positions = torch.arange(first, first + count)
        return AttentionBatch(
            positions=positions,
            slot_mapping=positions + self.kv_block_size,
            block_table=torch.arange(1, self.num_blocks, dtype=torch.int32)[None],
            seq_lens=torch.tensor([first + count], dtype=torch.int32),
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            max_query_len=count,
            max_seq_len=self.max_model_len,
        )

    def verify(self, token_ids: list[int], first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, V] and taps [T, n * H] of tokens at positions first, first + 1, ..."""
        layer_ids = self.drafter.config.target_layer_ids
        hidden_size = self.target.config.decoder.hidden_size
        taps = Taps(layer_ids, torch.empty(len(token_ids), len(layer_ids) * hidden_size))
        hidden = self.target.forward(
            torch.tensor(token_ids), self._batch(first, len(token_ids)), taps
        )
        return self.target.logits(hidden), taps.buffer

    def observe(self, taps: torch.Tensor, first: int = 0) -> None:
        """Stores the drafter's K/V of tapped rows at positions first, first + 1, ..."""
        batch = self._batch(first, taps.shape[0])
        self.drafter.store_context(self.drafter.combine(taps), batch.positions, batch.slot_mapping)

    def draft(self, bonus: int, position: int, num_tokens: int) -> torch.Tensor:
        """Hidden states [1 + num_tokens, H] of the block [bonus, mask x num_tokens]."""
        ids = torch.tensor([bonus] + [self.drafter.config.mask_token_id] * num_tokens)
        return self.drafter.forward(ids, self._batch(position, len(ids)))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst row's ||actual - expected|| / ||expected||."""
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1)).max())
