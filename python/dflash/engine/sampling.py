# SPDX-License-Identifier: Apache-2.0
"""What the device knows of how each request is sampled, by state row; and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from dflash.engine.outputs import Logprob
from dflash.engine.request import Request
from dflash.engine.sampling_params import MAX_LOGIT_BIAS
from dflash.engine.staging import to_device

MAX_STOP_TOKEN_IDS = 16
IN_PROMPT = -(2**31)
"""Bit 31 of token_counts."""


@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters at fixed addresses (S = max_num_seqs, V = the target's vocabulary)."""

    temperatures: torch.Tensor  # float32 [S]
    seeds: torch.Tensor  # int64 [S]
    top_ks: torch.Tensor  # int32 [S]
    top_ps: torch.Tensor  # float32 [S]
    min_ps: torch.Tensor  # float32 [S]
    repetition_penalties: torch.Tensor  # float32 [S]
    frequency_penalties: torch.Tensor  # float32 [S]
    presence_penalties: torch.Tensor  # float32 [S]
    token_counts: torch.Tensor  # int32 [S, V]: bit 31 = in the prompt, else times generated
    logit_bias_ids: torch.Tensor  # int64 [S, MAX_LOGIT_BIAS], -1 = unused
    logit_bias: torch.Tensor  # float32 [S, MAX_LOGIT_BIAS]
    min_seq_lens: torch.Tensor  # int64 [S]: length before which stop tokens are banned
    stop_token_ids: torch.Tensor  # int64 [S, MAX_STOP_TOKEN_IDS], -1 = unused

    @classmethod
    def allocate(cls, max_reqs: int, vocab_size: int, device: torch.device) -> SamplingState:
        def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((max_reqs, *shape), value, dtype=dtype, device=device)

        return cls(
            temperatures=full(0),
            seeds=full(0, dtype=torch.int64),
            top_ks=full(0, dtype=torch.int32),
            top_ps=full(1),
            min_ps=full(0),
            repetition_penalties=full(1),
            frequency_penalties=full(0),
            presence_penalties=full(0),
            token_counts=full(0, vocab_size, dtype=torch.int32),
            logit_bias_ids=full(-1, MAX_LOGIT_BIAS, dtype=torch.int64),
            logit_bias=full(0, MAX_LOGIT_BIAS),
            min_seq_lens=full(0, dtype=torch.int64),
            stop_token_ids=full(-1, MAX_STOP_TOKEN_IDS, dtype=torch.int64),
        )

    def admit(self, requests: Sequence[Request], stop_token_ids: Sequence[Sequence[int]]) -> None:
        """Writes the rows of new requests."""
        params = [request.params for request in requests]
        rows = to_device([request.row for request in requests], torch.int64, self.seeds.device)

        def write(table: torch.Tensor, values: list) -> None:
            table[rows] = to_device(values, table.dtype, table.device)

        write(self.temperatures, [p.temperature for p in params])
        write(self.seeds, [request.seed for request in requests])
        write(self.top_ks, [p.top_k for p in params])
        write(self.top_ps, [p.top_p for p in params])
        write(self.min_ps, [p.min_p for p in params])
        write(self.repetition_penalties, [p.repetition_penalty for p in params])
        write(self.frequency_penalties, [p.frequency_penalty for p in params])
        write(self.presence_penalties, [p.presence_penalty for p in params])
        write(self.min_seq_lens, [_min_seq_len(request) for request in requests])
        write(self.stop_token_ids, [_padded(ids, MAX_STOP_TOKEN_IDS) for ids in stop_token_ids])
        self.logit_bias_ids[rows] = -1
        for request in requests:
            self._admit_tables(request)

    def _admit_tables(self, request: Request) -> None:
        """The wide rows, for those that use them."""
        bias = request.params.logit_bias
        if bias:
            ids = torch.tensor(_padded(list(bias), MAX_LOGIT_BIAS))
            self.logit_bias_ids[request.row].copy_(ids)
            self.logit_bias[request.row, : len(bias)] = torch.tensor(list(bias.values())).to(
                self.logit_bias.device, torch.float32
            )
        if request.params.penalises:
            counts = torch.bincount(
                torch.tensor(request.output_token_ids, dtype=torch.int64),
                minlength=self.token_counts.shape[1],
            ).int()
            counts[torch.tensor(request.prompt_token_ids).unique()] |= IN_PROMPT
            self.token_counts[request.row].copy_(counts)


@dataclass(frozen=True)
class RawLogprobs:
    """Log-probabilities of rows [n] before any processing, and the tokens' own."""

    logprobs: torch.Tensor  # float32 [n]: of the tokens sampled
    ranks: torch.Tensor  # int64 [n]: 1 = the most likely
    top_ids: torch.Tensor  # int64 [n, k]
    top_logprobs: torch.Tensor  # float32 [n, k]

    def start_to_host(self) -> RawLogprobs:
        """The same in host memory; there once the work enqueued so far has run."""
        return RawLogprobs(*(_start_to_host(getattr(self, f.name)) for f in fields(self)))

    def to_lists(self) -> HostLogprobs:
        return HostLogprobs(*(getattr(self, f.name).tolist() for f in fields(self)))


@dataclass(frozen=True)
class HostLogprobs:
    """RawLogprobs as lists."""

    logprobs: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def listed(self, first: int, token_ids: list[int], count: int) -> list[dict[int, Logprob]]:
        """For each token, sampled from rows first, first + 1, ...: itself and the `count` most likely."""
        result = []
        for row, token in enumerate(token_ids, start=first):
            ids, values = self.top_ids[row][:count], self.top_logprobs[row][:count]
            top = {t: Logprob(v, i + 1) for i, (t, v) in enumerate(zip(ids, values, strict=True))}
            result.append({token: Logprob(self.logprobs[row], self.ranks[row])} | top)
        return result


def raw_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> RawLogprobs:
    """Of unprocessed logits [n, V] and the tokens [n] (-1: none) sampled from the rows."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.clamp_min(0)[:, None])
    top = logprobs.topk(count, dim=-1)
    ranks = (logprobs > chosen).sum(-1) + 1
    return RawLogprobs(chosen[:, 0], ranks, top.indices, top.values)


def _start_to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _min_seq_len(request: Request) -> int:
    minimum = request.params.min_tokens
    return len(request.prompt_token_ids) + minimum if minimum else 0


def _padded(ids: Sequence[int], size: int) -> list[int]:
    return [*ids, *[-1] * (size - len(ids))]
