# SPDX-License-Identifier: Apache-2.0
"""Each op's time beside its floor on this GPU, at the shapes of Qwen3-8B and its block-16 drafter.

    python -m benchmarks.kernels.ops [--batch 1 8 32] [--context 1024] [--out FOLDER]

A case runs in a CUDA graph over inputs rotated past the L2 cache; the figure is the median replay. The floor is
the larger of the bytes that must move at 4.3 TB/s and the operations at 790 TFLOP/s (both measured on an H200).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from benchmarks import report
from benchmarks.timing import captured, median_us

from dflash.ops.add_rms_norm import add_rms_norm
from dflash.ops.advance import advance
from dflash.ops.build_query import build_query
from dflash.ops.build_verify import build_verify
from dflash.ops.lm_head_sample import lm_head_sample
from dflash.ops.paged_attention import paged_attention
from dflash.ops.precompute_context_kv import precompute_context_kv
from dflash.ops.process_logits import process_logits
from dflash.ops.qk_norm_rope_store import qk_norm_rope_store
from dflash.ops.rejection_sample import rejection_sample
from dflash.ops.sample_draft import sample_draft
from dflash.ops.silu_mul import silu_mul

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32, 8, 128
VOCAB, DRAFT_LAYERS, N, PAGE = 151936, 5, 15, 16
Q = N + 1
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6
L2_BYTES = 60 << 20
DEVICE = "cuda"
I64 = {"dtype": torch.int64, "device": DEVICE}
I32 = {"dtype": torch.int32, "device": DEVICE}


@dataclass(frozen=True)
class Case:
    """An op on one set of inputs; `make` builds a fresh set and returns the call."""

    op: str
    shape: str
    make: Callable[[], Callable[[], object]]
    bytes: float
    flops: float = 0.0

    @property
    def floor_us(self) -> float:
        return max(self.bytes / BYTES_PER_US, self.flops / FLOPS_PER_US)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def int32(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def int64(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=DEVICE)


class Batch:
    """R requests of Q rows at one context length, with pages of their own."""

    def __init__(self, reqs: int, context: int) -> None:
        self.reqs, self.rows, self.context = reqs, reqs * Q, context
        self.columns = -(-(context + 3 * Q) // PAGE)
        self.num_blocks = reqs * self.columns + 1
        blocks = torch.randperm(self.num_blocks - 1, device=DEVICE).int() + 1
        self.block_table = blocks.view(reqs, self.columns)
        self.idx_mapping = int32(range(reqs))
        self.seq_lens = int32([context] * reqs)
        self.query_start_loc = int32(range(0, self.rows + 1, Q))
        self.positions = int64(range(context, context + Q)).repeat(reqs)
        flat = self.block_table.gather(1, (self.positions.view(reqs, Q) // PAGE)).long()
        self.slots = (flat * PAGE + self.positions.view(reqs, Q) % PAGE).flatten()
        self.rope = torch.rand(context + 4 * Q, HEAD_DIM, device=DEVICE)

    def cache(self) -> torch.Tensor:
        return randn(self.num_blocks, PAGE, KV_HEADS, HEAD_DIM)


def cases(reqs: int, context: int) -> list[Case]:
    b = Batch(reqs, context)
    name = f"batch {reqs}"
    return [
        *_elementwise(b, name),
        *_attention(b, f"{name}, context {context}"),
        *_integer(b, name),
        *_processing(b, name),
        *_sampling(b, name),
    ]


def _elementwise(b: Batch, name: str) -> list[Case]:
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    kv = DRAFT_LAYERS * 2 * KV_HEADS * HEAD_DIM

    def norm():
        x, residual, weight = randn(b.rows, HIDDEN), randn(b.rows, HIDDEN), randn(HIDDEN)
        out, taps = torch.empty_like(x), randn(b.rows, 5 * HIDDEN)
        return lambda: add_rms_norm(x, residual, weight, 1e-6, out, taps[:, :HIDDEN])

    def silu():
        x = randn(b.rows, 2 * INTERMEDIATE)
        out = randn(b.rows, INTERMEDIATE)
        return lambda: silu_mul(x, out)

    def rope():
        qkv, weight = randn(b.rows, width), randn(HEAD_DIM)
        query, key, value = randn(b.rows, HEADS, HEAD_DIM), b.cache(), b.cache()
        return lambda: qk_norm_rope_store(
            qkv, q_norm_weight=weight, k_norm_weight=weight, rms_norm_eps=1e-6, cos_sin_cache=b.rope, is_neox=True,
            positions=b.positions, slot_mapping=b.slots, value_scale=1.0, k_scale=None, v_scale=None,
            query=query, key_cache=key, value_cache=value)  # fmt: skip

    def context_kv():
        hidden, hidden_norm = randn(b.rows, HIDDEN), randn(HIDDEN)
        weight, norms = randn(kv, HIDDEN), randn(DRAFT_LAYERS, HEAD_DIM)
        keys = [b.cache() for _ in range(DRAFT_LAYERS)]
        values = [b.cache() for _ in range(DRAFT_LAYERS)]
        return lambda: precompute_context_kv(
            hidden, hidden_norm_weight=hidden_norm, rms_norm_eps=1e-6, kv_weight=weight,
            kv_bias=None, k_norm_weight=norms,
            cos_sin_cache=b.rope, is_neox=True, positions=b.positions, slot_mappings=[b.slots],
            layer_groups=[0] * DRAFT_LAYERS, value_scale=1.0, k_scales=None, v_scales=None,
            key_caches=keys, value_caches=values)  # fmt: skip

    return [
        Case("add_rms_norm", name, norm, 2 * b.rows * HIDDEN * 5),
        Case("silu_mul", name, silu, 2 * b.rows * INTERMEDIATE * 3),
        Case("qk_norm_rope_store", name, rope, 2 * b.rows * width * 2),
        Case(
            "precompute_context_kv",
            name,
            context_kv,
            2 * (kv * HIDDEN + b.rows * (HIDDEN + kv)),
            2.0 * b.rows * kv * HIDDEN,
        ),
    ]


def _attention(b: Batch, name: str) -> list[Case]:
    moved = 2 * b.reqs * (2 * (b.context + Q) * KV_HEADS + 2 * Q * HEADS) * HEAD_DIM
    flops = 4.0 * b.reqs * Q * (b.context + Q) * HEADS * HEAD_DIM

    def make(causal: bool):
        query, key, value = randn(b.rows, HEADS, HEAD_DIM), b.cache(), b.cache()
        output = torch.empty_like(query)
        lengths = b.seq_lens + Q
        return lambda: paged_attention(
            query, key, value, b.block_table, lengths, b.query_start_loc, max_query_len=Q, max_seq_len=b.context + Q,
            scale=HEAD_DIM**-0.5, causal=causal, output=output)  # fmt: skip

    return [
        Case("paged_attention, causal", name, lambda: make(True), moved, flops),
        Case("paged_attention, non-causal", name, lambda: make(False), moved, flops),
    ]


def _integer(b: Batch, name: str) -> list[Case]:
    drafts = torch.randint(0, VOCAB, (b.reqs, N), **I64)
    bonus = torch.randint(0, VOCAB, (b.reqs,), **I64)
    accepted = torch.full((b.reqs,), 6, **I32)

    def verify():
        out = [torch.empty(b.rows, **I64) for _ in range(3)]
        lens, starts = torch.empty(b.reqs, **I32), torch.empty(b.reqs + 1, **I32)
        return lambda: build_verify(
            b.idx_mapping, b.seq_lens, bonus, drafts, b.block_table, kv_block_size=PAGE, max_model_len=40960,
            input_ids=out[0], positions=out[1], slot_mapping=out[2], query_seq_lens=lens,
            query_start_loc=starts)  # fmt: skip

    def query():
        rows = [torch.empty(b.rows, **I64) for _ in range(5)]
        samples = [torch.empty(b.reqs * N, **I64) for _ in range(2)]
        rejected = Q - accepted
        lens, starts = torch.empty_like(b.seq_lens), torch.empty_like(b.query_start_loc)
        sample_map = torch.empty(b.reqs * N, **I32)
        return lambda: build_query(
            b.positions, b.query_start_loc, accepted, rejected, bonus, bonus, b.idx_mapping, [b.block_table], [PAGE],
            num_speculative_tokens=N, mask_token_id=1, max_model_len=40960, sample_from_anchor=False,
            context_positions=rows[0], context_slot_mappings=[rows[1]], query_input_ids=rows[2],
            query_positions=rows[3], query_slot_mappings=[rows[4]], query_seq_lens=lens,
            draft_query_start_loc=starts, sample_rows=samples[0],
            sample_positions=samples[1], sample_idx_mapping=sample_map)  # fmt: skip

    def commit():
        tokens = torch.randint(0, VOCAB, (b.reqs, Q), **I64)
        left, finished = torch.full((b.reqs,), 1 << 30, **I32), torch.zeros(b.reqs, **I32)
        seq_lens, last_sampled = b.seq_lens.clone(), bonus.clone()
        step, ring = torch.zeros(1, **I64), torch.zeros(4, b.reqs, 3 + Q, **I64)
        return lambda: advance(
            tokens, accepted, b.idx_mapping, stop_token_ids=None, seq_lens=seq_lens,
            last_sampled=last_sampled, tokens_left=left, finished=finished, step=step, output_ring=ring)  # fmt: skip

    return [
        Case("build_verify", name, verify, b.rows * 32),
        Case("build_query", name, query, b.rows * 96),
        Case("advance", name, commit, b.reqs * (Q + 8) * 16),
    ]


def _processing(b: Batch, name: str) -> list[Case]:
    """Qwen3's recommended settings, and penalties over a prompt and an answer of 1,000 tokens each."""
    drafts = torch.randint(0, VOCAB, (b.reqs, N), **I64)

    def of_all(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((b.reqs,), value, dtype=dtype, device=DEVICE)

    qwen3 = {"top_ks": of_all(20, torch.int32), "top_ps": of_all(0.95)}
    penalties = {
        "repetition_penalties": of_all(1.05),
        "frequency_penalties": of_all(0.1),
        "presence_penalties": of_all(0.1),
    }

    def process(penalized: bool, **parameters: torch.Tensor):
        logits = randn(b.rows, VOCAB)
        output = torch.empty(b.rows, VOCAB, device=DEVICE)
        temperatures = of_all(0.6)
        if penalized:
            counts = torch.zeros(b.reqs, VOCAB, **I32)
            counts.scatter_(1, torch.randint(0, VOCAB, (b.reqs, 1000), **I64), 1)
            counts.scatter_(1, torch.randint(0, VOCAB, (b.reqs, 1000), **I64), -(1 << 31))
            parameters |= penalties | {"token_counts": counts}
        return lambda: process_logits(
            logits, b.query_start_loc, b.positions, b.idx_mapping, drafts, temperatures,
            vocab_size=VOCAB, output=output, **parameters)  # fmt: skip

    moved = (2 + 4) * b.rows * VOCAB
    return [
        Case("process_logits, temperature", name, lambda: process(False), moved),
        Case("process_logits, Qwen3", name, lambda: process(False, **qwen3), moved),
        Case("process_logits, top_p", name, lambda: process(False, top_ps=of_all(0.95)), moved),
        Case(
            "process_logits, + penalties",
            name,
            lambda: process(True, **qwen3),
            moved + 4 * b.reqs * VOCAB,
        ),
    ]


def _sampling(b: Batch, name: str) -> list[Case]:
    drafts = torch.randint(0, VOCAB, (b.reqs, N), **I64)
    seeds = torch.arange(b.reqs, **I64)
    sample_map = b.idx_mapping.repeat_interleave(N)
    sample_positions = b.positions.view(b.reqs, Q)[:, 1:].flatten()

    def draft(temperature: float):
        logits, tokens = randn(b.reqs * N, VOCAB), drafts.clone()
        temperatures = torch.full((b.reqs,), temperature, device=DEVICE) if temperature else None
        return lambda: sample_draft(
            logits, sample_positions, sample_map, temperatures=temperatures,
            seeds=seeds if temperature else None, vocab_size=VOCAB, draft_tokens=tokens)  # fmt: skip

    def accept(temperature: float):
        logits = randn(b.rows, VOCAB)
        temperatures = torch.full((b.reqs,), temperature, device=DEVICE)
        count = torch.full((b.reqs,), N, **I32)
        left = torch.full((b.reqs,), 1 << 30, **I32)
        out = torch.empty(b.reqs, Q, **I64), torch.empty(b.reqs, **I32), torch.empty(b.reqs, **I32)
        return lambda: rejection_sample(
            logits, b.query_start_loc, b.positions, b.idx_mapping, drafts, count, temperatures=temperatures,
            seeds=seeds, tokens_left=left, method="match", vocab_size=VOCAB, sampled_token_ids=out[0],
            num_sampled=out[1], num_rejected=out[2])  # fmt: skip

    head_bytes, head_flops = 2 * VOCAB * HIDDEN, 2.0 * VOCAB * HIDDEN

    def head_draft(temperature: float):
        hidden, weight, tokens = randn(b.reqs * N, HIDDEN), randn(VOCAB, HIDDEN), drafts.clone()
        temperatures = torch.full((b.reqs,), temperature, device=DEVICE) if temperature else None
        return lambda: lm_head_sample(
            hidden, weight, sample_positions, sample_map, tokens, temperatures=temperatures,
            seeds=seeds if temperature else None)  # fmt: skip

    def head_accept(temperature: float):
        hidden, weight = randn(b.rows, HIDDEN), randn(VOCAB, HIDDEN)
        temperatures = torch.full((b.reqs,), temperature, device=DEVICE)
        count = torch.full((b.reqs,), N, **I32)
        left = torch.full((b.reqs,), 1 << 30, **I32)
        tokens = torch.empty(b.rows, **I64)
        out = torch.empty(b.reqs, Q, **I64), torch.empty(b.reqs, **I32), torch.empty(b.reqs, **I32)

        def run():
            lm_head_sample(
                hidden, weight, b.positions, b.idx_mapping, tokens, logits_start_loc=b.query_start_loc,
                temperatures=temperatures, seeds=seeds)  # fmt: skip
            rejection_sample(
                None, b.query_start_loc, b.positions, b.idx_mapping, drafts, count, temperatures=temperatures,
                seeds=seeds, tokens_left=left, target_tokens=tokens, vocab_size=VOCAB, sampled_token_ids=out[0],
                num_sampled=out[1], num_rejected=out[2])  # fmt: skip

        return run

    heads = [
        Case(f"lm_head_sample, {kind}", name, make, head_bytes, rows * head_flops)
        for kind, rows, make in (
            ("drafts, argmax", b.reqs * N, lambda: head_draft(0.0)),
            ("drafts, gumbel", b.reqs * N, lambda: head_draft(1.0)),
            ("+ acceptance, greedy", b.rows, lambda: head_accept(0.0)),
            ("+ acceptance, match", b.rows, lambda: head_accept(1.0)),
        )
    ]
    return [
        *heads,
        Case("sample_draft, argmax", name, lambda: draft(0.0), 2 * b.reqs * N * VOCAB),
        Case("sample_draft, gumbel", name, lambda: draft(1.0), 2 * b.reqs * N * VOCAB),
        Case("rejection_sample, greedy", name, lambda: accept(0.0), 2 * b.rows * VOCAB),
        Case("rejection_sample, match", name, lambda: accept(1.0), 2 * b.rows * VOCAB),
    ]


def time_us(case: Case, replays: int = 20) -> float:
    """Median microseconds a call, in a graph of calls over rotated inputs."""
    copies = int(min(32, max(2, 3 * L2_BYTES // max(case.bytes, 1))))
    calls = [case.make() for _ in range(copies)]
    return median_us({case.op: captured(calls)}, copies, replays)[case.op]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    rows = []
    print(f"{'op':30} {'shape':24} {'us':>8} {'floor us':>9}")
    for reqs in args.batch:
        for case in cases(reqs, args.context):
            us = time_us(case)
            rows.append(
                {
                    "op": case.op,
                    "shape": case.shape,
                    "us": round(us, 2),
                    "floor_us": round(case.floor_us, 2),
                }
            )
            print(f"{case.op:30} {case.shape:24} {us:8.2f} {case.floor_us:9.2f}", flush=True)
            torch.cuda.empty_cache()
    print(report.write("ops", rows, args.out))


if __name__ == "__main__":
    main()
