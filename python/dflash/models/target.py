# SPDX-License-Identifier: Apache-2.0
"""The target: a dense decoder that verifies blocks and taps its residual stream."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dflash.attention.spec import AttentionBatch
from dflash.checkpoints.config import TargetConfig
from dflash.checkpoints.weights import TargetWeights
from dflash.models.decoder import Decoder, DecoderSettings, Taps
from dflash.models.linear import is_streamed, logits_dtype
from dflash.ops.lm_head_sample import lm_head_sample_plan


class Target:
    """Embedding, decoder and head of the model that is served."""

    def __init__(
        self, config: TargetConfig, weights: TargetWeights, settings: DecoderSettings
    ) -> None:
        self.config = config
        self.embed_tokens = weights.embed_tokens
        self.lm_head = weights.lm_head
        self.decoder = Decoder(config.decoder, weights.layers, weights.norm, settings)
        self.vocab_size = min(config.decoder.vocab_size, weights.lm_head.shape[0])
        self._samples_in_head: dict[int, bool] = {}
        self._is_streamed = is_streamed(weights.lm_head) and self.decoder.is_streamed

    @property
    def padded_rows(self) -> int | None:
        """What the rows of a pass, and those that get logits, have to be a multiple of; see models/linear.py."""
        return None if self._is_streamed else self.decoder.tile_rows

    def samples_in_head(self, num_rows: int) -> bool:
        """Whether so many rows are sampled in the head's GEMM, which makes no logits."""
        if num_rows not in self._samples_in_head:
            # Rows of the head have the size, dtype and device of hidden states.
            plan = lm_head_sample_plan(self.lm_head[:num_rows], self.lm_head, self.vocab_size)
            self._samples_in_head[num_rows] = plan is not None
        return self._samples_in_head[num_rows]

    def forward(
        self, input_ids: torch.Tensor, batch: AttentionBatch, taps: Taps | None = None
    ) -> torch.Tensor:
        """Hidden states [T, H] after the final norm, of int64 ids [T]."""
        return self.decoder.forward(F.embedding(input_ids, self.embed_tokens), batch, taps)

    def logits(self, hidden: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """[n, H] to [n, V], of models.linear.logits_dtype."""
        if output is None:
            shape = hidden.shape[0], self.lm_head.shape[0]
            output = hidden.new_empty(shape, dtype=logits_dtype(self.lm_head))
        return self.decoder.linear(hidden, self.lm_head, output=output)
