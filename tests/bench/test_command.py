# SPDX-License-Identifier: Apache-2.0
"""`dflash bench` in this process, on a stand-in for the engine."""

import json
import os
import signal
import sys

import pytest
import torch

import dflash
from dflash.cli import main

from . import fake


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command on a file of four prompts: (exit code, stdout, stderr)."""
    monkeypatch.setitem(vars(dflash), "LLM", fake.FakeLLM)
    monkeypatch.setitem(vars(dflash), "SamplingParams", fake.SamplingParams)
    monkeypatch.setattr(fake.FakeLLM, "made", [])
    monkeypatch.setattr(fake, "PREFILL", 0.002)
    monkeypatch.setattr(fake, "STEP", 0.001)
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in "abcd"))

    def command(*arguments, dataset=path):
        arguments = ["bench", "--dataset", str(dataset), "--num-prompts", "4", *arguments]
        monkeypatch.setattr(sys, "argv", ["dflash", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return command


def rows_of(out):
    """(level, side) of the table's rows."""
    return [
        tuple(line.split()[:2]) for line in out.splitlines() if "with" in line and " / " in line
    ]


def test_every_level_with_and_without_drafter(run, tmp_path):
    code, out, err = run(
        "--concurrency", "1,2", "--concurrency", "4", "--max-tokens", "7", "--threads", "1",
        "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert rows_of(out) == [(n, side) for n in "124" for side in ("without", "with")]
    assert max(map(len, out.splitlines())) <= 100
    assert out.startswith("demo + demo (N = 4) | 4 x ")
    assert "accepted by position: 1.00 1.00 0.00 0.00 (AL 3.00)" in out
    assert (tmp_path / "out.png").stat().st_size > 10_000

    read = json.loads((tmp_path / "out.json").read_text())
    figures = read["figures"]
    assert figures["interrupted"] is False
    assert (figures["max_num_seqs"], figures["max_tokens"], figures["threads"]) == (4, 7, 1)
    assert [m["num_output_tokens"] for m in figures["measurements"]] == [4 * 7] * 6
    assert [m["acceptance_length"] for m in figures["measurements"]] == [1.0, 3.0] * 3
    # Three tokens a step: far fewer steps than seven.
    assert all(m["speedup"] > 1 for m in figures["measurements"] if m["with_draft"])


def test_engine_and_sampling_arguments_arrive(run):
    code, _, err = run(
        "--model", "m", "--draft", "d", "--concurrency", "3", "--temperature", "0.5", "--top-p", "0.9",
        "--top-k", "20", "--seed", "5", "--max-tokens", "3", "--ignore-eos", "--dtype", "float32",
        "--device", "cpu", "--num-speculative-tokens", "4", "--max-model-len", "99",
        "--max-num-batched-tokens", "64", "--warmup", "0",
        "--enable-prefix-caching", "--draft-method", "autoregressive",
        "--draft-quantization", "fp8",
    )  # fmt: skip
    assert code == 0, err
    (llm, *made), (plain, *_) = fake.FakeLLM.made
    assert made == [
        "m",
        "d",
        {
            "dtype": "float32",
            "device": "cpu",
            "draft_method": "autoregressive",
            "draft_quantization": "fp8",
            "num_speculative_tokens": 4,
            "max_num_seqs": 3,
            "max_model_len": 99,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": True,
        },
    ]
    assert llm.asked == plain.asked
    assert [prompt for prompt, _ in llm.asked] == ["<user>a", "<user>b", "<user>c", "<user>d"]
    assert [params for _, params in llm.asked] == [
        fake.SamplingParams(0.5, 0.9, 20, seed=5 + i, max_tokens=3, ignore_eos=True)
        for i in range(4)
    ]


def test_what_is_not_given_is_left_to_the_engine_but_the_prefix_cache(run):
    assert run("--concurrency", "2", "--warmup", "0")[0] == 0
    (llm, *_, arguments), _ = fake.FakeLLM.made
    assert arguments == {
        "dtype": "auto",
        "device": "auto",
        "draft_method": "dflash",
        "max_num_seqs": 2,
        "enable_prefix_caching": False,
    }
    assert llm.asked[0][1] == fake.SamplingParams(seed=0, max_tokens=128)


def test_arrivals(run, tmp_path):
    code, out, _ = run(
        "--request-rate", "200,400", "--max-tokens", "2", "--json", tmp_path / "o.json"
    )
    assert code == 0
    assert rows_of(out) == [(n, side) for n in ("200", "400") for side in ("without", "with")]
    figures = json.loads((tmp_path / "o.json").read_text())["figures"]
    assert [m["request_rate"] for m in figures["measurements"]] == [200, 200, 400, 400]
    assert figures["max_num_seqs"] == 8


@pytest.mark.parametrize("warmup,count", [((), 2), (("--warmup", "5"), 5), (("--warmup", "0"), 0)])
def test_warmup_is_short_and_not_counted(run, tmp_path, warmup, count):
    run("--concurrency", "2", "--max-tokens", "40", "--json", tmp_path / "o.json", *warmup)
    for llm, *_ in fake.FakeLLM.made:
        lengths = [params.max_tokens for _, params in llm.asked]
        assert lengths == [16] * count + [40] * 4
    for m in json.loads((tmp_path / "o.json").read_text())["figures"]["measurements"]:
        assert (m["num_requests"], m["num_output_tokens"]) == (4, 160)


@pytest.mark.parametrize(
    "arguments,sides",
    [
        ((), ["without", "with"]),
        (("--no-baseline",), ["with"]),
        (("--draft", "none"), ["without"]),
        (("--model", "some/model"), ["without"]),
    ],
)
def test_sides(run, arguments, sides):
    code, out, _ = run("--max-tokens", "3", *arguments)
    assert code == 0
    assert [side for _, side in rows_of(out)] == sides


def test_random_tokens_run_past_any_end(run):
    code, _, _ = run(
        "--random-input-len", "9", "--random-output-len", "6", "--warmup", "0", dataset="random"
    )
    assert code == 0
    for llm, *_ in fake.FakeLLM.made:
        assert [len(prompt) for prompt, _ in llm.asked] == [9] * 4
        assert all((p.max_tokens, p.ignore_eos) == (6, True) for _, p in llm.asked)


def test_failed_requests_are_told_and_exit_1(run, tmp_path):
    path = tmp_path / "failing.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": "{fake.BOOM}"}}\n')
    code, out, err = run("--no-baseline", "--warmup", "0", dataset=path)
    assert code == 1
    assert "concurrency 1, with drafter: 2 of 4 failed: RuntimeError: the step failed" in out
    assert err == (
        "dflash: error: 2 of 4 requests failed, the first with RuntimeError: the step failed\n"
    )


def test_ctrl_c_prints_what_was_measured(run, monkeypatch, tmp_path):
    answer = fake.FakeLLM.stream_async
    asked = []

    def interrupt(self, prompt, params):
        asked.append(prompt)
        if len(asked) == 7:  # four without drafter, then the third of four with it
            os.kill(os.getpid(), signal.SIGINT)
        return answer(self, prompt, params)

    monkeypatch.setattr(fake.FakeLLM, "stream_async", interrupt)
    # A shell's background jobs ignore the signal, and so do the tests among them.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = run(
            "--warmup", "0", "--max-tokens", "5", "--concurrency", "1,2",
            "--json", tmp_path / "o.json", "--plot", tmp_path / "o.png",
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (code, err.strip()) == (130, "")
    assert rows_of(out) == [("1", "without"), ("1", "with")]
    assert "concurrency 1, with drafter: cut off after 2 of 4 requests\ninterrupted: " in out
    assert all(llm.running == 0 for llm, *_ in fake.FakeLLM.made)
    figures = json.loads((tmp_path / "o.json").read_text())["figures"]
    assert figures["interrupted"] is True
    assert [m["complete"] for m in figures["measurements"]] == [True, False]
    assert (tmp_path / "o.png").exists()


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--concurrency", "0"], "--concurrency 0: expected whole numbers above 0"),
        (["--concurrency", "1", "--request-rate", "1"], "or --request-rate, not both"),
        (["--draft", "none", "--baseline"], "--baseline needs a drafter"),
        (["--random-input-len", "9"], "need --dataset random"),
        (["--json", "/absent/folder/x.json"], "expected a file in a folder that exists"),
        (["--json", "/"], "expected a file in a folder that exists"),
        (["--plot", "x.pdf"], "expected a name that ends in .png"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--dataset", "absent"], "no such file"),
    ],
)
def test_usage_errors_come_before_any_work(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert fake.FakeLLM.made == []


def test_plot_without_matplotlib_comes_before_any_work(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("--plot", tmp_path / "x.png")
    assert (code, out) == (1, "")
    assert err == "dflash: error: --plot needs matplotlib: pip install 'matplotlib>=3.8'\n"
    assert fake.FakeLLM.made == []


def test_the_disk_takes_nothing_of_the_table(run, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device", "x.json")

    monkeypatch.setattr("dflash.bench.facts.write_results", full)
    code, out, err = run("--max-tokens", "2", "--json", tmp_path / "x.json")
    assert (code, err) == (1, "dflash: error: x.json: No space left on device\n")
    assert len(rows_of(out)) == 2


@pytest.fixture(autouse=True)
def _threads():
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)
