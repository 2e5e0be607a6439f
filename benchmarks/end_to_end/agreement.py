# SPDX-License-Identifier: Apache-2.0
"""How many greedy answers are the same with and without the drafter, and how near the ties were where they part.

    python -m benchmarks.end_to_end.agreement [--num-prompts 100] [--max-tokens 256] [--dtype bfloat16] [--out FOLDER]

The demo pair on HumanEval prompts, in the ordinary mode and in strict mode, 16 requests at once; and what strict costs.
"""

from __future__ import annotations

import argparse
import gc
import time

from benchmarks import report

from dflash import LLM, RequestOutput, SamplingParams
from dflash.bench.humaneval import questions

NUM_SEQS = 16


def generate(
    llm: LLM, prompts: list[str], max_tokens: int, logprobs: int | None = None
) -> tuple[list[RequestOutput], float]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return outputs, time.perf_counter() - started


def gap_where_they_part(ours: RequestOutput, theirs: RequestOutput) -> float | None:
    """Log-probability of the drafter-less token minus that of the other, at the first difference."""
    a, b = ours.outputs[0], theirs.outputs[0]
    assert b.logprobs is not None
    for i, (mine, other) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if mine != other:
            entry = b.logprobs[i]
            return entry[other].logprob - entry[mine].logprob if mine in entry else float("inf")
    return None


def compare(args: argparse.Namespace, strict: bool) -> dict:
    gc.collect()
    llm = LLM(
        "demo",
        "demo",
        device=args.device,
        dtype=args.dtype,
        max_num_seqs=NUM_SEQS,
        max_model_len=2048,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=4 << 30,
        strict=strict,
    )
    plain = llm.without_draft()
    prompts = [
        llm.chat_prompt([{"role": "user", "content": question}])
        for question in questions()[: args.num_prompts]
    ]
    for side in (llm, plain):
        generate(side, prompts[:2], 8)
    (with_draft, seconds), (without, plain_seconds) = (
        generate(side, prompts, args.max_tokens) for side in (llm, plain)
    )
    without, _ = generate(plain, prompts, args.max_tokens, logprobs=5)  # of the ties; not timed
    gaps = [gap_where_they_part(a, b) for a, b in zip(with_draft, without, strict=True)]
    tokens = sum(len(o.outputs[0].token_ids) for o in with_draft)
    return {
        "strict": strict,
        "prompts": len(prompts),
        "identical": gaps.count(None),
        "logit_gaps": sorted(round(gap, 5) for gap in gaps if gap is not None),
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_second_without_draft": round(
            sum(len(o.outputs[0].token_ids) for o in without) / plain_seconds, 1
        ),
        "acceptance_length": round(llm.statistics.acceptance_length, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    rows = []
    for strict in (False, True):
        rows.append(compare(args, strict))
        print(rows[-1], flush=True)
    print(report.write("agreement", {"dtype": args.dtype, "rows": rows}, args.out))


if __name__ == "__main__":
    main()
