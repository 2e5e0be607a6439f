# SPDX-License-Identifier: Apache-2.0
"""The demo pair with and without its drafter, prompt by prompt: tok/s, AL, speed-up, same tokens.

    python -m benchmarks.end_to_end.demo [--device auto] [--dtype auto] [--max-tokens 128] [--out FOLDER]

One target in memory serves both sides; a prompt's figures are medians of 5 interleaved runs, at each side's best
thread count on a CPU.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks import report

from dflash import LLM, SamplingParams
from dflash.cli.compare import compare

PROMPTS = (
    "Write a Python function that returns the sum of the even numbers in a list.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train drives 60 km in 45 minutes. How fast is it in km per hour?",
    "Explain what a hash table is.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    llm = LLM(
        "demo",
        "demo",
        device=args.device,
        dtype=args.dtype,
        max_num_seqs=1,
        enable_prefix_caching=False,  # every run computes its prompt
    )
    plain = llm.without_draft()
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    rows = []
    for question in PROMPTS:
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
        result = compare(plain, llm, prompt, params, threads=None)
        rows.append(
            {
                "prompt": question,
                "tokens_per_second": round(result.draft.tokens_per_second, 1),
                "tokens_per_second_without_draft": round(result.plain.tokens_per_second, 1),
                "speedup": round(result.speedup, 2),
                "acceptance_length": round(result.acceptance_length, 2),
                "same_tokens": result.first_difference is None,
                "threads": [result.draft.threads, result.plain.threads],
            }
        )
        print(rows[-1], flush=True)
    figures = {
        "device": str(llm.facts.device),
        "dtype": str(llm.facts.dtype),
        "num_speculative_tokens": llm.facts.num_speculative_tokens,
        "median_speedup": statistics.median(row["speedup"] for row in rows),
        "prompts": rows,
    }
    print(f"median speed-up {figures['median_speedup']:.2f}")
    print(report.write(f"demo_{llm.facts.device.type}", figures, args.out))


if __name__ == "__main__":
    main()
