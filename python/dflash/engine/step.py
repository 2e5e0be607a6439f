# SPDX-License-Identifier: Apache-2.0
"""One iteration as an ordered list of parts: verify, accept, observe, propose.

A part is a function of the buffers; one that cannot be captured in a graph says why. Prefill runs the
same parts on prompt rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dflash.attention.spec import AttentionBatch
from dflash.engine.buffers import Batch, RequestState
from dflash.engine.sampling import RawLogprobs, SamplingState, raw_logprobs
from dflash.models.decoder import Decoder, Taps
from dflash.models.target import Target
from dflash.ops.advance import advance
from dflash.ops.build_verify import build_verify
from dflash.ops.lm_head_sample import lm_head_sample
from dflash.ops.process_logits import process_logits
from dflash.ops.rejection_sample import rejection_sample
from dflash.speculators.spec import Speculator

LOGPROBS_REASON = "only batches that ask for logprobs run it"


@dataclass
class Flow:
    """What one pass hands from part to part."""

    batch: Batch
    in_graph: bool = False  # under capture: no host work
    hidden: torch.Tensor | None = None
    positions: torch.Tensor | None = None  # of the rows that get logits
    raw_logits: torch.Tensor | None = None
    logits: torch.Tensor | None = None  # processed
    target_tokens: torch.Tensor | None = None  # in place of logits, where the head samples
    logprobs: RawLogprobs | None = None


@dataclass(frozen=True)
class Part:
    """A named piece of the step; eager_reason is set when it cannot be captured."""

    name: str
    run: Callable[[Flow], None]
    eager_reason: str | None = None


def run_parts(parts: Sequence[Part], flow: Flow) -> Flow:
    for part in parts:
        part.run(flow)
    return flow


@dataclass
class Step:
    """The parts of an iteration over one target, one optional speculator and one state.

    Args:
        vocab_size: columns of the target's logits that are tokens.
        method: how sampled requests accept: match, standard, block or synthetic.
        synthetic_rates: float32 [N], for method "synthetic".
        raw_logits: [rows, V] of the largest batch, where all graphs that make logits leave the head's output; None
            allocates it anew.
    """

    target: Target
    speculator: Speculator | None
    state: RequestState
    sampling: SamplingState
    max_model_len: int
    vocab_size: int
    method: str
    taps: Taps | None = None
    synthetic_rates: torch.Tensor | None = None
    raw_logits: torch.Tensor | None = None
    decode_parts: list[Part] = field(init=False)
    sample_parts: list[Part] = field(init=False)

    def __post_init__(self) -> None:
        accept = [
            Part("logits", self.logits),
            Part("accept", self.accept),
            Part("advance", self.advance),
        ]
        observe, propose = [], []
        if self.speculator is not None:
            observe = [Part("observe", self.observe, self.speculator.observe_eager_reason)]
            propose = [Part("propose", self.propose, self.speculator.propose_eager_reason)]
        verify = Part("verify", self.verify, self.target.decoder.eager_reason)
        output = [Part("output", self.output), Part("logprobs", self.logprobs, LOGPROBS_REASON)]
        self.decode_parts = [Part("rows", self.rows), verify, *accept, *observe, *propose, *output]
        self.sample_parts = [verify, *accept, *observe, *propose, *output]
        self.observe_parts = [verify, Part("nothing sampled", self.skip_accept), *observe]

    @torch.inference_mode()
    def decode(self, batch: Batch) -> Flow:
        """One iteration for requests that have a bonus token and, with a speculator, drafts."""
        return run_parts(self.decode_parts, Flow(batch))

    @torch.inference_mode()
    def prefill(self, batch: Batch) -> Flow:
        """Prompt rows. A finished prompt gets drafts and, unless it was resumed, a token; others only observe."""
        parts = self.sample_parts if batch.variant.drafts else self.observe_parts
        return run_parts(parts, Flow(batch))

    def samples_in_head(self, batch: Batch) -> bool:
        """Whether the head's GEMM leaves tokens and no logits: of so many rows, nothing but a temperature asked for."""
        variant = batch.variant
        if not self._fits_head(batch) or variant.num_logprobs is not None:
            return False
        return not variant.processes_logits or (
            variant.is_plain and self.method in ("match", "synthetic")
        )

    def needs_all_logits(self, batch: Batch) -> bool:
        """Which of a bucket's two graphs serves: one has what any request may ask for, the other what greedy needs."""
        if self.samples_in_head(batch):
            return False
        variant = batch.variant
        asks_logprobs = variant.num_logprobs is not None
        return variant.processes_logits or (asks_logprobs and self._fits_head(batch))

    def _fits_head(self, batch: Batch) -> bool:
        """Whether the head's GEMM samples as many rows as get logits."""
        rows = batch.num_rows if batch.logits_rows is None else batch.logits_rows.shape[0]
        return self.target.samples_in_head(rows)

    def rows(self, flow: Flow) -> None:
        """[bonus, d_1..d_N] of every request, from the state."""
        batch, state = flow.batch, self.state
        build_verify(
            batch.idx_mapping,
            state.seq_lens,
            state.last_sampled,
            state.draft_tokens,
            batch.block_table,
            kv_block_size=batch.kv_block_size,
            max_model_len=self.max_model_len,
            input_ids=batch.input_ids,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            query_seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
        )

    def verify(self, flow: Flow) -> None:
        """The target over the batch's rows, causally; taps go straight into their buffer."""
        attention = flow.batch.attention(self.max_model_len)
        if not flow.in_graph:
            self.target.decoder.prepare(attention)
        flow.hidden = self.target.forward(flow.batch.input_ids, attention, self.taps)

    def logits(self, flow: Flow) -> None:
        """Logits of the rows that are sampled, as the requests' parameters change them; or their tokens."""
        batch, sampling = flow.batch, self.sampling
        hidden = flow.hidden
        assert hidden is not None
        flow.positions = batch.positions
        if batch.logits_rows is not None:
            hidden = hidden.index_select(0, batch.logits_rows)
            flow.positions = batch.positions.index_select(0, batch.logits_rows)
        if self.samples_in_head(batch):
            flow.target_tokens = lm_head_sample(
                hidden,
                self.target.lm_head,
                flow.positions,
                batch.idx_mapping,
                torch.empty_like(flow.positions),
                logits_start_loc=batch.logits_start_loc,
                temperatures=sampling.temperatures,
                seeds=sampling.seeds,
                vocab_size=self.vocab_size,
            )
            return
        raw = None if self.raw_logits is None else self.raw_logits[: hidden.shape[0]]
        flow.logits = flow.raw_logits = self.target.logits(hidden, raw)
        if not batch.variant.processes_logits:
            return
        # Where logprobs may be asked for, the model's own logits stay.
        spare = batch.variant.num_logprobs is None and flow.logits.device.type == "cpu"
        in_place = spare and flow.logits.dtype == torch.float32
        flow.logits = process_logits(
            flow.raw_logits,
            batch.logits_start_loc,
            flow.positions,
            batch.idx_mapping,
            self.state.draft_tokens,
            sampling.temperatures,
            top_ks=sampling.top_ks,
            top_ps=sampling.top_ps,
            min_ps=sampling.min_ps,
            repetition_penalties=sampling.repetition_penalties,
            frequency_penalties=sampling.frequency_penalties,
            presence_penalties=sampling.presence_penalties,
            token_counts=sampling.token_counts,
            logit_bias_ids=sampling.logit_bias_ids,
            logit_bias=sampling.logit_bias,
            min_seq_lens=sampling.min_seq_lens,
            stop_token_ids=sampling.stop_token_ids,
            vocab_size=self.vocab_size,
            output=flow.raw_logits if in_place else None,
        )

    def accept(self, flow: Flow) -> None:
        """The longest accepted prefix and the next token of every request."""
        batch, state, sampling = flow.batch, self.state, self.sampling
        assert flow.positions is not None
        method = self.method
        if flow.target_tokens is not None and method != "synthetic":
            method = "match"  # what the others do at temperature 0, too
        rejection_sample(
            flow.logits,
            batch.logits_start_loc,
            flow.positions,
            batch.idx_mapping,
            state.draft_tokens,
            state.num_draft_tokens,
            draft_logits=state.draft_logits,
            temperatures=sampling.temperatures,
            seeds=sampling.seeds,
            tokens_left=state.tokens_left,
            stop_token_ids=sampling.stop_token_ids,
            method=method,
            target_tokens=flow.target_tokens,
            vocab_size=self.vocab_size,
            synthetic_rates=self.synthetic_rates,
            sampled_token_ids=batch.sampled_token_ids,
            num_sampled=batch.num_sampled,
            num_rejected=batch.num_rejected,
        )

    def logprobs(self, flow: Flow) -> None:
        """Of the sampled tokens under the model's own distribution, for batches that ask."""
        batch = flow.batch
        if batch.variant.num_logprobs is None:
            return
        assert flow.raw_logits is not None
        tokens = batch.sampled_token_ids
        whose = batch.logits_reqs
        sampled = tokens.flatten() if whose is None else tokens[:, 0].index_select(0, whose)
        logits = flow.raw_logits[: len(sampled), : self.vocab_size]
        flow.logprobs = raw_logprobs(logits, sampled, batch.variant.num_logprobs).start_to_host()

    def skip_accept(self, flow: Flow) -> None:
        """A partial chunk samples nothing and rejects nothing."""
        flow.batch.num_sampled.zero_()
        flow.batch.num_rejected.zero_()

    def advance(self, flow: Flow) -> None:
        """Commits to the state and writes the output ring."""
        batch, state = flow.batch, self.state
        advance(
            batch.sampled_token_ids,
            batch.num_sampled,
            batch.idx_mapping,
            stop_token_ids=self.sampling.stop_token_ids,
            seq_lens=state.seq_lens,
            last_sampled=state.last_sampled,
            tokens_left=state.tokens_left,
            finished=state.finished,
            step=state.step,
            output_ring=state.output_ring,
            token_counts=self.sampling.token_counts,
        )

    def output(self, flow: Flow) -> None:
        """The output ring to where the host reads it."""
        if self.state.host_ring is not self.state.output_ring:
            self.state.host_ring.copy_(self.state.output_ring, non_blocking=True)

    def forwards(self, batch: Batch) -> list[tuple[Decoder, AttentionBatch]]:
        """Every decoder that an iteration runs, with its rows; one entry for each shape of these."""
        target = [(self.target.decoder, batch.attention(self.max_model_len))]
        return target + (self.speculator.forwards(batch) if self.speculator else [])

    def observe(self, flow: Flow) -> None:
        """The drafter's K/V of every row."""
        assert self.speculator is not None
        taps = None if self.taps is None else self.taps.buffer
        self.speculator.observe(flow.batch, taps, self.state, prepare=not flow.in_graph)

    def propose(self, flow: Flow) -> None:
        """The next block of every request."""
        assert self.speculator is not None
        self.speculator.propose(flow.batch, self.state, self.sampling, prepare=not flow.in_graph)
