# SPDX-License-Identifier: Apache-2.0
"""The command on the demo pair itself, in a process of its own, as a user runs it."""

import json

from tests.cli.test_demo import dflash


def test_the_demo_pair_under_load(tmp_path):
    done = dflash(
        "bench", "--num-prompts", "4", "--concurrency", "1,3", "--max-tokens", "12", "--warmup", "1",
        "--num-speculative-tokens", "3", "--max-model-len", "1024", "--threads", "1", "--device", "cpu",
        "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("demo + demo (N = 3) | 4 x humaneval, max_tokens 12, greedy")
    assert (tmp_path / "out.png").exists()
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    measurements = figures["measurements"]
    assert [(m["concurrency"], m["with_draft"]) for m in measurements] == [
        (1, False), (1, True), (3, False), (3, True),
    ]  # fmt: skip
    # Greedy: neither the drafter nor the load changes how long the answers are, or how many drafts are accepted.
    assert len({(m["num_prompt_tokens"], m["num_output_tokens"]) for m in measurements}) == 1
    accepted = [m["acceptance_length"] for m in measurements]
    assert accepted[0] == accepted[2] == 1.0
    assert accepted[1] == accepted[3] > 1.3
    assert all(m["complete"] and m["ttft_ms"]["p50"] > 0 for m in measurements)
