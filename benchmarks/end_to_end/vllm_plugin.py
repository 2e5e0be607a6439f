# SPDX-License-Identifier: Apache-2.0
"""vLLM's DFlash without and with the plugin, in one process: ms a draft step and an iteration.

    PYTHONPATH=SITE:PEER python -m benchmarks.end_to_end.vllm_plugin [--batches 1,4,8,16,32] [--out FOLDER]

SITE holds vLLM 0.26.0 and dflash-cuda, PEER the peer's bench.py: its models (Qwen3-8B's shape, dummy weights, synthetic
acceptance length 6.5) and its way to measure.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile

import bench as peer  # first: it prepares vLLM's environment
import torch
import vllm
from benchmarks import report

from dflash.integrations.vllm import SWITCH, register

NUM_SPECULATIVE_TOKENS = 15
PROMPT_TOKENS = 128


def make_llm(with_plugin: bool, batches: list[int]):
    """Classes that are made after `register` are ours; the engine made before keeps its own graphs."""
    target, draft = peer.write_dummy_configs(tempfile.mkdtemp())
    speculative = {
        "method": "dflash",
        "model": draft,
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": peer.SYNTHETIC_ACCEPTANCE_LENGTH,
    }
    os.environ[SWITCH] = "1" if with_plugin else "0"
    if with_plugin:
        register()
        speculative["attention_backend"] = "CUSTOM"
    return vllm.LLM(
        model=target, max_model_len=4096, max_num_seqs=max(batches), gpu_memory_utilization=0.4, dtype="bfloat16",
        enable_prefix_caching=False, seed=0, load_format="dummy", skip_tokenizer_init=True,
        speculative_config=speculative,
    )  # fmt: skip


def measure(llm, batch: int, max_tokens: int, events: list) -> dict:
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(PROMPT_TOKENS)]}
        for _ in range(batch)
    ]
    peer.generate(llm, prompts, 64)
    long_s, long_tokens, long_steps = peer.measure(llm, prompts, max_tokens, events)
    draft_ms = [start.elapsed_time(end) for start, end in events[2:]]
    short_s, short_tokens, short_steps = peer.measure(llm, prompts, max_tokens // 4, events)
    steps = long_steps - short_steps
    return {
        "draft_ms": round(statistics.median(draft_ms), 4),
        "iteration_ms": round((long_s - short_s) / steps * 1e3, 4),
        "acceptance_length": round((long_tokens - short_tokens) / batch / steps, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    events = peer.record_draft_times()
    rows: list[dict] = [{"batch": batch} for batch in batches]
    for side in ("vllm", "plugin"):
        llm = make_llm(side == "plugin", batches)
        for row in rows:
            row[side] = measure(llm, row["batch"], args.max_tokens, events)
            print(side, row["batch"], row[side], flush=True)
    figures = {"vllm": vllm.__version__, "gpu": torch.cuda.get_device_name(), "rows": rows}
    print(report.write("vllm_plugin", figures, args.out))


if __name__ == "__main__":
    main()
