# SPDX-License-Identifier: Apache-2.0
"""The demo pair through dflash.integrations.transformers.generate, beside model.generate of the same model.

    python -m benchmarks.end_to_end.transformers_generate [--device cpu] [--dtype float32] [--threads N]

One model in memory serves both; greedy, one prompt at a time, runs interleaved, median of 5 after an unmeasured one.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers
from benchmarks import report
from benchmarks.end_to_end.demo import PROMPTS

from dflash.checkpoints.demo import demo_target
from dflash.integrations.transformers import generate
from dflash.integrations.transformers import statistics as last_call

REPEATS = 5


def timed(call):
    started = time.perf_counter()
    tokens = call().cpu()
    return tokens, time.perf_counter() - started


def compare(model, inputs, max_new_tokens: int) -> dict:
    """Both sides on one prompt."""

    def plain():
        return model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)

    def drafted():
        return generate(model, inputs, "demo", max_new_tokens=max_new_tokens)

    same = torch.equal(plain().cpu(), drafted().cpu())
    runs = [(timed(plain), timed(drafted)) for _ in range(REPEATS)]
    num_tokens = runs[0][1][0].shape[1] - inputs["input_ids"].shape[1]
    seconds = [statistics.median(run[side][1] for run in runs) for side in (0, 1)]
    cost = last_call(model)
    return {
        "tokens": num_tokens,
        "tokens_per_second_of_transformers": round(num_tokens / seconds[0], 1),
        "tokens_per_second": round(num_tokens / seconds[1], 1),
        "speedup": round(seconds[0] / seconds[1], 2),
        "acceptance_length": round(1 + cost.num_accepted_tokens / max(1, cost.num_drafts), 2),
        "same_tokens": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = demo_target()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, args.dtype)
    )
    model = model.to(args.device).eval()
    rows = []
    for question in PROMPTS:
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(args.device)
        rows.append({"prompt": question} | compare(model, inputs, args.max_new_tokens))
        print(rows[-1], flush=True)
    figures = {
        "device": args.device,
        "dtype": args.dtype,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "median_speedup": statistics.median(row["speedup"] for row in rows),
        "prompts": rows,
    }
    print(f"median speed-up {figures['median_speedup']:.2f}")
    print(report.write(f"transformers_{args.device.partition(':')[0]}", figures, args.out))


if __name__ == "__main__":
    main()
