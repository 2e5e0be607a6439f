# SPDX-License-Identifier: Apache-2.0
"""What is said of figures that are known."""

import json
import sys

import pytest
from benchmarks.end_to_end import demo_vs_vllm, vs_vllm
from benchmarks.end_to_end.peers import ENGINES
from benchmarks.shapes import qwen3_8b


def side(*rows):
    names = ("context", "batch", "iteration_ms", "acceptance_length")
    taken = {"hardware": "a card"}
    return {
        "taken": taken,
        "engine": "dflash",
        "version": "x",
        "iterations": [dict(zip(names, row, strict=True)) for row in rows],
    }


def lines(ours, theirs):
    return list(vs_vllm.comparison(side(*ours), side(*theirs)))


def arguments(monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["vs_vllm", *map(str, given)])
    return vs_vllm.parse_args()


def test_a_level_a_line():
    assert lines(
        [(128, 1, 5.0, 6.4), (128, 32, 16.0, 6.4)], [(128, 1, 6.0, 6.5), (128, 32, 15.2, 6.6)]
    ) == [
        "context 128, batch 1: 5.0 / 6.0 ms, 1.200x, AL 6.4 / 6.5",
        "context 128, batch 32: 16.0 / 15.2 ms, 0.950x BELOW 1.00x, AL 6.4 / 6.6 NOT EQUAL",
    ]


def test_long_contexts_ask_for_more_where_matrices_dominate():
    ours = [(8192, 1, 1.0, 6.5), (8192, 8, 1.0, 6.5), (32768, 1, 1.0, 6.5), (32768, 8, 1.0, 6.5)]
    said = lines(ours, [(*level, 1.1, 6.5) for *level, _, _ in ours])
    assert ["BELOW 1.12x" in line for line in said] == [True, True, True, False]


def test_a_level_that_vllm_did_not_reach_is_named():
    assert lines([(128, 1, 5.0, 6.5)], []) == ["context 128, batch 1: vLLM NOT MEASURED"]


def test_batches_that_fit_beside_a_context(monkeypatch):
    args = arguments(monkeypatch, "--contexts", 8192, 32768, "--batch", 1, 8, 32)
    assert list(vs_vllm.levels(args)) == [(8192, 1), (8192, 8), (8192, 32), (32768, 1), (32768, 8)]
    assert args.max_model_len <= qwen3_8b().decoder.max_position_embeddings
    args = arguments(monkeypatch)
    assert list(vs_vllm.levels(args)) == [(128, batch) for batch in (1, 4, 8, 16, 32)]
    assert (args.max_model_len, args.weights) == (4096, "uniform")


class Finite:
    """An engine whose requests end."""

    def __init__(self):
        self.left = {}

    def add(self, key, token_ids, max_tokens):
        self.left[key] = max_tokens

    def step(self):
        new = [(key, min(left, 30)) for key, left in self.left.items() if left]
        self.left |= {key: self.left[key] - count for key, count in new}
        return new

    def clear(self):
        self.left = {}


def test_a_request_that_ended_is_no_steady_state():
    with pytest.raises(SystemExit, match="a request ended after 3904 tokens"):
        vs_vllm.measure_iterations(Finite(), 8, 2, False)


def test_only_figures_of_one_machine_are_compared(monkeypatch, tmp_path):
    ours, theirs = side((128, 1, 5.0, 6.5)), side((128, 1, 6.0, 6.5))
    theirs["taken"]["hardware"], theirs["engine"] = "another", "vllm"
    files = [tmp_path / "ours.json", tmp_path / "theirs.json"]
    for file, figures in zip(files, (ours, theirs), strict=True):
        file.write_text(json.dumps(figures))
    arguments(monkeypatch, "--compare", *files, "--out", tmp_path)
    with pytest.raises(SystemExit, match="taken on a card and another"):
        vs_vllm.main()
    files[1].write_text(files[0].read_text())
    with pytest.raises(SystemExit, match="expected dflash then vllm, got dflash then dflash"):
        vs_vllm.main()
    files[1].write_text(files[0].read_text()[:20])
    with pytest.raises(SystemExit, match="expected two files that --json wrote"):
        vs_vllm.main()


def test_files_of_two_processes_become_one_result(monkeypatch, tmp_path, capsys):
    files = [tmp_path / "ours.json", tmp_path / "theirs.json"]
    for file, engine, milliseconds in zip(files, ENGINES, (5.0, 6.0), strict=True):
        file.write_text(json.dumps(side((8192, 1, milliseconds, 6.5)) | {"engine": engine}))
    arguments(monkeypatch, "--contexts", 8192, "--compare", *files, "--out", tmp_path)
    vs_vllm.main()
    assert "batch 1: 5.0 / 6.0 ms, 1.200x" in capsys.readouterr().out
    figures = json.loads((tmp_path / "vs_vllm_contexts.json").read_text())["figures"]
    assert figures["vllm"] == side((8192, 1, 6.0, 6.5)) | {"engine": "vllm"}


def demo_row(concurrency, way, rate, length):
    return {
        "concurrency": concurrency, "way": way, "tokens_per_second": rate, "acceptance_length": length,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("drafted", "length", "said"),
    [
        (3500.0, 3.80, "3500.0 with, vLLM 2000.0 tok/s, AL 3.800 / 3.820"),
        (1900.0, 3.80, "1900.0 with, vLLM 2000.0 tok/s NOT FASTER, AL 3.800 / 3.820"),
        (3500.0, 3.74, "3500.0 with, vLLM 2000.0 tok/s, AL 3.740 / 3.820 NOT EQUAL"),
    ],
)
def test_the_demo_pair_beside_vllm_at_its_best(drafted, length, said):
    ours = [
        demo_row(1, "without drafter", 1400.0, 1.0),
        demo_row(1, "with drafter", drafted, length),
    ]
    theirs = [demo_row(1, "streamed", 1500.0, 3.82), demo_row(1, "generate", 2000.0, None)]
    (level,) = demo_vs_vllm.compare(ours, theirs)
    assert demo_vs_vllm.verdict(level) == f"concurrency 1: 1400.0 without drafter, {said}"


def test_a_drafter_that_does_not_pay_is_said():
    ours = [demo_row(32, "without drafter", 4000.0, 1.0), demo_row(32, "with drafter", 3000.0, 3.8)]
    (level,) = demo_vs_vllm.compare(ours, [demo_row(32, "streamed", 1500.0, 3.8)])
    assert "NOT FASTER" in demo_vs_vllm.verdict(level)


def test_a_level_that_was_cut_off_is_named():
    ours = [demo_row(1, "without drafter", 4000.0, 1.0)]
    with pytest.raises(SystemExit, match="concurrency 1: not measured to its end by both"):
        demo_vs_vllm.compare(ours, [demo_row(1, "streamed", 1500.0, 3.8)])


def test_ways_take_turns_after_a_warm_up():
    calls = []

    def way(name, seconds):
        def answer(token_ids, num_given):
            calls.append((name, len(token_ids), num_given))
            return demo_vs_vllm.Run(seconds[len(calls) % 3], 60, None if name == "b" else 3.0)

        return answer

    ways = {"a": way("a", [1.0, 2.0, 3.0]), "b": way("b", [2.0, 2.0, 2.0])}
    rows = list(demo_vs_vllm.measure_ways(ways, [[1]] * 20, max_num_seqs=4, num_rounds=3))
    assert calls[:8] == [("a", 8, 1), ("b", 8, 1)] + [("a", 20, 1), ("b", 20, 1)] * 3
    assert calls[8:] == [("a", 20, 20), ("b", 20, 20)] * 4
    assert [(row["concurrency"], row["way"]) for row in rows] == [
        (1, "a"), (1, "b"), (4, "a"), (4, "b"),
    ]  # fmt: skip
    assert rows[0]["tokens_per_second"] == 30.0 and rows[0]["spread"] == [20.0, 60.0]
    assert [row["acceptance_length"] for row in rows] == [3.0, None, 3.0, None]
