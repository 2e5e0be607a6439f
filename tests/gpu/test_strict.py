# SPDX-License-Identifier: Apache-2.0
"""strict: the target's logits behind one prefix are the same bits, whatever is computed beside them."""

from __future__ import annotations

import gc
import hashlib

import pytest

from dflash import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.gpu

NUM_TOKENS = 120
QUESTIONS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain what a hash table is.",
    "A train drives 60 km in 45 minutes. How fast is it?",
    "List the planets of the solar system.",
    "Write a haiku about memory.",
    "Complete this Python function: def is_prime(n):",
    # Last, so that it is the one preempted: more rows than any kernel's shape for few rows.
    "What is most expensive? " + " ".join(f"Item {i} costs {i * 37 % 100}." for i in range(150)),
]
REFERENCE = {"draft": None, "max_num_seqs": 1, "enforce_eager": True}
VARIANTS = {
    "batch": {"draft": None, "max_num_seqs": 7},
    "graph": {"draft": None, "max_num_seqs": 1},
    "drafter": {"draft": "demo", "max_num_seqs": 1},
    "drafter, batch": {"draft": "demo", "max_num_seqs": 4},
    "N = 3": {"draft": "demo", "max_num_seqs": 4, "num_speculative_tokens": 3},
    "chunks": {"draft": "demo", "max_num_seqs": 7, "max_num_batched_tokens": 17},
    "preemption": {"draft": "demo", "max_num_seqs": 7, "num_gpu_blocks_override": 128},
    "prefix hits": {"draft": "demo", "max_num_seqs": 2, "enable_prefix_caching": True},
}


class LogitsRecorder:
    """The digest of every row of logits that follows a request's own tokens, by (prompt, position)."""

    def __init__(self, llm: LLM) -> None:
        self.rows: dict[tuple[int, int], set[str]] = {}
        core, runner = llm.core, llm.core._runner
        decode, prefill = runner.decode, runner.prefill
        self._core = core

        def recorded_decode(batch):
            flow = decode(batch)
            self._record(flow, batch.max_query_len)
            return flow

        def recorded_prefill(batch):
            flow = prefill(batch)
            self._record(flow, 1)
            return flow

        runner.decode, runner.prefill = recorded_decode, recorded_prefill

    def _record(self, flow, rows_per_req: int) -> None:
        if flow.raw_logits is None:  # nothing is sampled, or the head did it
            return
        scheduler = self._core.scheduler
        owners = {r.row: r for r in (*scheduler.running, *scheduler.prefilling)}
        logits, positions = flow.raw_logits.cpu(), flow.positions.tolist()
        starts, counts = flow.batch.logits_start_loc.tolist(), flow.batch.num_sampled.tolist()
        for r, row in enumerate(flow.batch.idx_mapping.tolist()):
            if row < 0:
                continue
            prompt = tuple(owners[row].prompt_token_ids)
            for i in range(starts[r], starts[r] + counts[r]):
                digest = hashlib.sha1(logits[i].view(-1).float().numpy().tobytes()).hexdigest()
                self.rows.setdefault((hash(prompt), positions[i]), set()).add(digest)


def prompts_of(llm: LLM) -> list[str]:
    return [llm.chat_prompt([{"role": "user", "content": q}]) for q in QUESTIONS]


def params(**arguments) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **arguments)


def record(arguments: dict) -> tuple[LogitsRecorder, list[RequestOutput], LLM]:
    gc.collect()
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 30,
        "strict": True,
    }
    llm = LLM("demo", **(defaults | arguments))
    recorder = LogitsRecorder(llm)
    prompts, with_logits = prompts_of(llm), params(logprobs=0)
    if arguments.get("enable_prefix_caching"):
        llm.generate(prompts, with_logits)
    return recorder, llm.generate(prompts, with_logits), llm


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def reference():
    recorder, outputs, _ = record(REFERENCE)
    assert len(recorder.rows) == len(QUESTIONS) * NUM_TOKENS
    assert all(len(digests) == 1 for digests in recorder.rows.values())
    return recorder.rows, token_ids(outputs)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_the_same_bits(name, reference):
    recorder, outputs, llm = record(VARIANTS[name])
    assert llm.core._runner.captured_prompts
    rows, expected = reference
    assert token_ids(outputs) == expected
    assert set(rows) <= set(recorder.rows)
    different = [key for key in rows if recorder.rows[key] != rows[key]]
    assert not different, [
        (prompt % 1000, at, len(recorder.rows[prompt, at])) for prompt, at in different
    ]
    # Without logprobs the head samples where there are few rows, and makes no logits.
    assert llm.core._step.target.samples_in_head(1)
    assert token_ids(llm.generate(prompts_of(llm), params())) == expected
    if name == "preemption":
        assert outputs[-1].statistics.num_preemptions > 0
    if name == "prefix hits":
        assert llm.statistics.num_cached_tokens > 100
