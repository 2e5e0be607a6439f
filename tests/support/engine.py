# SPDX-License-Identifier: Apache-2.0
"""The engine as tests use it: float32 on the CPU, its blocks recorded, its drafts replaced by an oracle's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash.checkpoints.drafts import parse_draft_config
from dflash.engine.llm import LLM, RequestOutput
from dflash.engine.sampling_params import SamplingParams
from tests.support.authors import Block, Generation


def make_llm(target, draft=None, **arguments) -> LLM:
    """N is a DFlash drafter's longest, not what this machine finds fastest, unless given."""
    llm_arguments = {"dtype": "float32", "device": "cpu"} | arguments
    is_dflash = draft is not None and "draft_method" not in arguments
    if is_dflash and "num_speculative_tokens" not in arguments:
        llm_arguments["num_speculative_tokens"] = longest_block(draft)
    return LLM(str(target), str(draft) if draft else None, **llm_arguments)


def longest_block(draft) -> int:
    config = json.loads((Path(draft) / "config.json").read_text())
    return parse_draft_config(config).draft_block_size - 1


def greedy_params(max_tokens: int, **arguments) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **arguments)


@dataclass
class Proposal:
    """What the drafter proposed behind the tokens of a request, and what was verified in its place."""

    request_id: int
    position: int  # of the bonus token
    bonus: int
    proposed: list[int]
    verified: list[int] = field(default_factory=list)


Oracle = Callable[[int, int, int], Sequence[int]]
"""(request_id, position of the first draft, N) to N drafts."""


class Recorder:
    """Wraps what an LLM's speculator proposes."""

    def __init__(self, llm: LLM, oracle: Oracle | None = None) -> None:
        self.proposals: list[Proposal] = []
        self._core = llm.core
        self._oracle = oracle
        self._speculator = llm.core._step.speculator
        self._propose = self._speculator.propose
        self._speculator.propose = self._record

    def detach(self) -> None:
        self._speculator.propose = self._propose

    def _record(self, batch, state, sampling, **arguments) -> None:
        self._propose(batch, state, sampling, **arguments)
        scheduler = self._core.scheduler
        owners = {r.row: r.request_id for r in (*scheduler.prefilling, *scheduler.running)}
        for row in batch.idx_mapping.tolist():
            if row < 0:
                continue
            proposal = Proposal(
                owners[row],
                int(state.seq_lens[row]),
                int(state.last_sampled[row]),
                state.draft_tokens[row].tolist(),
            )
            if self._oracle is not None:
                first, length = proposal.position + 1, len(proposal.proposed)
                for i, token in enumerate(self._oracle(proposal.request_id, first, length)):
                    state.draft_tokens[row, i] = token
            proposal.verified = state.draft_tokens[row].tolist()
            self.proposals.append(proposal)


def generate_blocks(llm: LLM, prompt: list[int], max_tokens: int) -> Generation:
    """Greedy generation of one prompt, as a list of verified blocks."""
    recorder = Recorder(llm)
    try:
        (output,) = llm.generate([prompt], greedy_params(max_tokens))
    finally:
        recorder.detach()
    return Generation(output.outputs[0].token_ids, blocks_of(recorder.proposals, output))


def blocks_of(proposals: list[Proposal], output: RequestOutput) -> list[Block]:
    """Every verified block; the proposal made after the last token was never verified."""
    ends = [p.position for p in proposals] + [
        len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    ]
    return [
        Block(p.bonus, tuple(p.verified), end - p.position)
        for p, end in zip(proposals, ends[1:], strict=True)
        if end > p.position
    ]
