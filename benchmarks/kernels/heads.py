# SPDX-License-Identifier: Apache-2.0
"""The GEMMs that do more in their epilogue, beside what they replace: the head with its sampler, the context's K and V.

    python -m benchmarks.kernels.heads [--out FOLDER]

Shapes of Qwen3-8B and its 5-layer drafter, bfloat16, requests of 16 rows. Microseconds a call in a CUDA graph over
weights rotated past the L2, median of the replays, all kinds in one process by turns. `bare_us` is the library's GEMM
alone, `streamed_us` linear's: ours with a stored output, the library's of more than 128 rows; the head's `logits_us` is
the head with logits in fp32, process_logits where rows are sampled, and rejection_sample; `tokens_us` is lm_head_sample
and rejection_sample. For the head's drafts they are linear and sample_draft, and lm_head_sample.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from benchmarks import report
from benchmarks.kernels import ops
from benchmarks.kernels.ops import (
    BYTES_PER_US,
    DRAFT_LAYERS,
    FLOPS_PER_US,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    Batch,
    N,
    Q,
    randn,
)
from benchmarks.timing import captured, median_us

from dflash.ops.add_rms_norm import add_rms_norm
from dflash.ops.linear import linear
from dflash.ops.lm_head_sample import lm_head_sample, lm_head_sample_plan
from dflash.ops.precompute_context_kv import precompute_context_kv
from dflash.ops.process_logits import process_logits
from dflash.ops.rejection_sample import rejection_sample
from dflash.ops.sample_draft import sample_draft

REQUESTS = (1, 2, 4, 8, 16, 32)
COPIES = {"head": 3, "context": 8}
Calls = dict[str, Callable[[torch.Tensor], object]]
"""What is compared, each a function of the weight."""


class Head:
    """The head over the rows of some requests, at one temperature for all."""

    def __init__(self, b: Batch, temperature: float) -> None:
        self.b, self.is_sampled = b, temperature > 0
        self.hidden, self.drafted = randn(b.rows, HIDDEN), randn(b.reqs * N, HIDDEN)
        self.logits = torch.empty(b.rows, VOCAB, device=ops.DEVICE)
        self.tokens = torch.empty(b.rows, **ops.I64)
        self.rounded = randn(b.rows, VOCAB)
        self.seeds = torch.arange(b.reqs, **ops.I64)
        self.temperatures = torch.full((b.reqs,), temperature, device=ops.DEVICE)
        self.drafts = torch.randint(0, VOCAB, (b.reqs, N), **ops.I64)
        self.counts = torch.full_like(b.seq_lens, N)
        self.left = torch.full_like(b.seq_lens, 1 << 30)
        self.processed = torch.empty_like(self.logits) if self.is_sampled else self.logits

    def accept(self, logits: torch.Tensor | None, tokens: torch.Tensor | None) -> None:
        b = self.b
        rejection_sample(
            logits, b.query_start_loc, b.positions, b.idx_mapping, self.drafts, self.counts, self.temperatures,
            self.seeds, self.left, target_tokens=tokens, vocab_size=VOCAB)  # fmt: skip

    def with_logits(self, weight: torch.Tensor) -> None:
        b = self.b
        linear(self.hidden, weight, None, self.logits)
        if self.is_sampled:
            process_logits(
                self.logits, b.query_start_loc, b.positions, b.idx_mapping, self.drafts, self.temperatures,
                vocab_size=VOCAB, output=self.processed)  # fmt: skip
        self.accept(self.processed, None)

    def with_tokens(self, weight: torch.Tensor) -> None:
        b = self.b
        lm_head_sample(
            self.hidden, weight, b.positions, b.idx_mapping, self.tokens, logits_start_loc=b.query_start_loc,
            temperatures=self.temperatures, seeds=self.seeds)  # fmt: skip
        self.accept(None, self.tokens)

    def verified(self) -> Calls:
        return {
            "bare_us": lambda w: torch.mm(self.hidden, w.T, out=self.rounded),
            "streamed_us": lambda w: linear(self.hidden, w, None, self.logits),
            "logits_us": self.with_logits,
            "tokens_us": self.with_tokens,
        }

    def draft_rows(self) -> Calls:
        b, count = self.b, self.b.reqs * N
        states = b.idx_mapping.repeat_interleave(N)
        positions = b.positions.view(b.reqs, Q)[:, 1:].flatten()
        logits = self.logits[:count]
        noise = {"temperatures": self.temperatures, "seeds": self.seeds} if self.is_sampled else {}

        def with_logits(weight: torch.Tensor) -> None:
            linear(self.drafted, weight, None, logits)
            sample_draft(logits, positions, states, self.drafts, **noise)

        return {
            "bare_us": lambda w: torch.mm(self.drafted, w.T, out=self.rounded[:count]),
            "streamed_us": lambda w: linear(self.drafted, w, None, logits),
            "logits_us": with_logits,
            "tokens_us": lambda w: lm_head_sample(
                self.drafted, w, positions, states, self.drafts, **noise
            ),
        }


def context(b: Batch, num_rejected: int) -> Calls:
    """K and V of the rows, the last num_rejected of each request rejected."""
    hidden, norm = randn(b.rows, HIDDEN), randn(HIDDEN)
    normed, outputs = torch.empty_like(hidden), 2 * DRAFT_LAYERS * KV_HEADS * HEAD_DIM
    kv = randn(b.rows, outputs)
    slots = b.slots.clone().view(b.reqs, Q)
    slots[:, Q - num_rejected :] = -1
    norms = randn(DRAFT_LAYERS, HEAD_DIM)
    caches = [[b.cache() for _ in range(DRAFT_LAYERS)] for _ in range(2)]

    def op(weight: torch.Tensor) -> None:
        precompute_context_kv(
            hidden, norm, 1e-6, weight, None, norms, b.rope, True, b.positions, [slots.view(-1)],
            [0] * DRAFT_LAYERS, 1.0, None, None, *caches)  # fmt: skip

    def norm_and_streamed(weight: torch.Tensor) -> None:
        add_rms_norm(None, hidden, norm, 1e-6, normed)
        linear(normed, weight, None, kv)

    return {
        "bare_us": lambda w: torch.mm(normed, w.T, out=kv),
        "streamed_us": lambda w: linear(normed, w, None, kv),
        "norm_and_streamed_us": norm_and_streamed,
        "op_us": op,
    }


def measure(name: str, outputs: int, rows: int, calls: Calls, replays: int) -> dict:
    weights = [randn(outputs, HIDDEN) for _ in range(COPIES[name.split()[0]])]
    turns = weights * 2
    graphs = {
        kind: captured([lambda w=w, call=call: call(w) for w in turns])
        for kind, call in calls.items()
    }
    times = median_us(graphs, len(turns), replays)
    moved, flops = 2 * outputs * HIDDEN, 2.0 * rows * outputs * HIDDEN
    floor = max(moved / BYTES_PER_US, flops / FLOPS_PER_US)
    row = {"case": name, "rows": rows, "floor_us": round(floor, 2)}
    return row | {kind: round(us, 2) for kind, us in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None)
    parser.add_argument("--replays", type=int, default=11)
    args = parser.parse_args()
    figures = []
    for reqs in REQUESTS:
        b = Batch(reqs, 512)
        cases: list[tuple[str, int, int, Calls]] = []
        for label, temperature in (("greedy", 0.0), ("sampled", 0.8)):
            head = Head(b, temperature)
            assert lm_head_sample_plan(head.hidden, randn(VOCAB, HIDDEN)) is not None
            cases.append((f"head {label} verified", VOCAB, b.rows, head.verified()))
            cases.append((f"head {label} drafts", VOCAB, b.reqs * N, head.draft_rows()))
        outputs = 2 * DRAFT_LAYERS * KV_HEADS * HEAD_DIM
        for num_rejected in (0, 10):
            name = f"context {num_rejected} rejected"
            cases.append((name, outputs, b.rows, context(b, num_rejected)))
        for name, size, rows, calls in cases:
            figures.append(measure(name, size, rows, calls, args.replays))
            print(*(f"{key} {value}" for key, value in figures[-1].items()), flush=True)
        torch.cuda.empty_cache()
    print(report.write("heads", figures, args.out))


if __name__ == "__main__":
    main()
