# SPDX-License-Identifier: Apache-2.0
"""Table, json and picture of measurements whose figures are known."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from dflash.bench import facts
from dflash.bench.load import ClosedLoop, PoissonArrivals, Record
from dflash.bench.plot import draw, require_matplotlib, write_plot
from dflash.bench.report import REPORT_WIDTH, figures_of, print_report, speedup, title_of
from dflash.bench.runner import Measurement
from dflash.engine.statistics import Statistics
from dflash.errors import DflashError


def measurement(load, with_draft, seconds, num_prompts=1, tokens=10, num_positions=4):
    """One request of `tokens` tokens: the first after a tenth of the time, the rest at its end."""
    statistics = Statistics(num_requests=1)
    if with_draft:
        for committed in range(1, num_positions + 2):
            statistics.record_step(num_positions, committed, 0.1)
    output = SimpleNamespace(prompt_token_ids=[0] * 7, statistics=statistics)
    chunks = [(seconds / 10, 1), (seconds, tokens - 1)]
    return Measurement(load, with_draft, num_prompts, [Record(0.0, chunks, seconds, output)])


def levels(times, make=ClosedLoop, **arguments):
    """Both sides at levels of (level, seconds without, seconds with)."""
    return [
        measurement(make(level), with_draft, seconds, **arguments)
        for level, *pair in times
        for with_draft, seconds in zip((False, True), pair, strict=True)
    ]


def printed(measurements, interrupted=False):
    file = io.StringIO()
    print_report(file, "the title", measurements, interrupted)
    return file.getvalue()


def test_the_title_says_what_was_run():
    setup = {
        "model": "m", "draft": "d", "num_speculative_tokens": 3, "num_prompts": 8, "dataset": "random",
        "max_tokens": 9, "temperature": 0.6, "top_p": 0.95, "top_k": None, "dtype": "float32", "device": "cpu",
        "threads": 1,
    }  # fmt: skip
    assert title_of(setup) == (
        "m + d (N = 3) | 8 x random, max_tokens 9, temperature 0.6, top_p 0.95 | float32, cpu, 1 thread"
    )
    setup |= {"draft": None, "temperature": 0.0, "device": "cuda:0", "threads": None}
    assert title_of(setup) == "m | 8 x random, max_tokens 9, greedy | float32, cuda:0"


def test_one_row_a_level_and_side():
    text = printed(levels([(1, 2.0, 1.0), (4, 2.0, 1.6)]))
    rows = [line.split() for line in text.splitlines() if "with" in line and "/" in line]
    assert [row[:2] for row in rows] == [
        ["1", "without"], ["1", "with"], ["4", "without"], ["4", "with"],
    ]  # fmt: skip
    assert " ".join(rows[0][2:]) == "5.00 200 / 200 1800 / 1800 200 2.00 / 2.00"
    assert rows[1][2:5] == ["10.0", "2.00x", "3.00"]
    assert rows[3][2:5] == ["6.25", "1.25x", "3.00"]
    assert "accepted by position: 0.80 0.60 0.40 0.20 (AL 3.00)" in text
    assert "one gap however many" in text


def test_the_table_fits_with_large_figures():
    text = printed(levels([(1024, 200.0, 98.765)], tokens=1_000_000))
    assert max(map(len, text.splitlines())) <= REPORT_WIDTH
    assert "10125" in text
    assert "20000 / 20000" in text
    assert "180000 / 180000" in text
    assert "…" not in text


def test_what_went_wrong_is_said():
    broken = measurement(ClosedLoop(2), True, 1.0, num_prompts=5)
    broken.records.append(Record(0.0, finished=1.0, error="ValueError: no [bold]room"))
    text = printed([broken], interrupted=True)
    assert text.splitlines()[-1] == "interrupted: what is not in the table was not measured"
    assert "interrupted" not in printed([broken])
    assert "concurrency 2, with drafter: 1 of 2 failed: ValueError: no [bold]room" in text
    assert "concurrency 2, with drafter: cut off after 2 of 5 requests" in text


def test_nothing_finished():
    text = printed([Measurement(PoissonArrivals(0.5), False, 4)])
    assert "requests/s" in text
    assert "cut off after 0 of 4" in text


def test_a_speed_up_needs_both_sides_whole():
    plain, drafted = levels([(1, 2.0, 1.0)])
    assert speedup(drafted, [plain, drafted]) == pytest.approx(2.0)
    assert speedup(plain, [plain, drafted]) is None
    assert speedup(drafted, [drafted]) is None
    assert speedup(measurement(ClosedLoop(2), True, 1.0), [plain, drafted]) is None
    drafted.num_prompts = 2
    assert speedup(drafted, [plain, drafted]) is None


def test_json_holds_every_figure_and_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/venv/bin/dflash", "bench", "--model", "a b"])
    monkeypatch.setenv("DFLASH_COMMIT", "abc")
    unfinished = Measurement(PoissonArrivals(0.5), True, 1)
    figures = figures_of({"model": "m"}, [*levels([(2, 2.0, 1.0)]), unfinished], interrupted=True)
    facts.write_results(tmp_path / "out.json", figures, "cpu")
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["command"] == "dflash bench --model 'a b'"
    assert read["commit"] == "abc"
    assert "cores" in read["hardware"]
    assert (read["figures"]["model"], read["figures"]["interrupted"]) == ("m", True)
    plain, drafted, none = read["figures"]["measurements"]
    assert (plain["concurrency"], plain["request_rate"], plain["with_draft"]) == (2, None, False)
    assert (plain["speedup"], drafted["speedup"]) == (None, 2.0)
    assert drafted["ttft_ms"] == {"mean": 100.0, "p50": 100.0, "p99": 100.0}
    assert drafted["acceptance_by_position"] == [0.8, 0.6, 0.4, 0.2]
    assert (drafted["num_prompt_tokens"], drafted["num_output_tokens"]) == (7, 10)
    assert (none["request_rate"], none["complete"], none["ttft_ms"]) == (0.5, False, None)


def test_the_commit_is_ours_and_no_other_repositorys(monkeypatch, tmp_path):
    monkeypatch.delenv("DFLASH_COMMIT", raising=False)
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "facts.py"))
    assert facts.facts("cpu")["commit"] == "unknown"
    facts.subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert facts.facts("cpu")["commit"] == "unknown"


def test_the_picture_has_both_panels(tmp_path):
    measurements = levels([(1, 2.0, 1.0), (2, 1.5, 0.7), (8, 0.5, 0.4)])
    write_plot(tmp_path / "out.png", "the title", measurements)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    accepted, speed = draw("the title", measurements).axes
    assert [bar.get_height() for bar in accepted.patches] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    drafted, plain = speed.lines
    assert list(drafted.get_xdata()) == [1, 2, 8]
    assert list(drafted.get_ydata()) == pytest.approx([10 / 1.0, 10 / 0.7, 10 / 0.4])
    assert list(plain.get_ydata()) == pytest.approx([10 / 2.0, 10 / 1.5, 10 / 0.5])
    texts = [text.get_text() for text in speed.texts]
    assert texts == ["2.00x", "2.14x", "with drafter 1.25x", "", "", "without drafter"]
    assert [tick.get_text() for tick in speed.get_xticklabels()] == ["1", "2", "8"]


@pytest.mark.parametrize(
    "times", [[(1, 1.0, 1.0)], [(1, 1.0, 0.99), (64, 0.5, 0.51)], [(1, 2.0, 0.5), (2, 2.0, 0.2)]]
)
@pytest.mark.parametrize("num_positions", [1, 15])
def test_labels_do_not_overlap(times, num_positions):
    figure = draw("t", levels(times, num_positions=num_positions))
    figure.canvas.draw()
    for axes in figure.axes:
        shown = [text for text in axes.texts if text.get_text()]
        boxes = [text.get_window_extent() for text in shown]
        assert len(boxes) >= 2 or len(axes.patches) == 1
        for i, box in enumerate(boxes):
            assert figure.bbox.x1 >= box.x1 and figure.bbox.y1 >= box.y1, shown[i]
            assert not any(box.overlaps(other) for other in boxes[:i]), shown[i]


def test_without_a_drafter_there_is_one_panel():
    (speed,) = draw("t", [measurement(PoissonArrivals(0.5), False, 1.0)]).axes
    assert speed.get_xlabel() == "request rate (requests/s)"


def test_a_missing_matplotlib_is_one_command_away(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DflashError, match=r"pip install 'matplotlib>=3.8'"):
        require_matplotlib()
