# SPDX-License-Identifier: Apache-2.0
import io
import sys

import pytest
import torch

import dflash
from dflash.cli import compare, main
from dflash.errors import DflashError

from . import fake


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setitem(vars(dflash), "LLM", fake.FakeLLM)
    monkeypatch.setitem(vars(dflash), "SamplingParams", fake.SamplingParams)
    monkeypatch.setattr(fake.FakeLLM, "made", [])
    monkeypatch.setattr(fake.FakeLLM, "prompts", [])

    def command(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["dflash", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return command


def test_text_on_stdout_and_one_line_on_stderr(run):
    code, out, err = run("generate", "why?", "--threads", "1")
    assert code == 0
    assert out == "The sky is blue.\n"
    assert err == "50.0 tok/s | AL 3.50 | 5 tokens | float32, cpu, 1 thread\n"
    assert fake.FakeLLM.prompts == ["<user>why?"]
    ((model, draft, arguments),) = fake.FakeLLM.made
    assert (model, draft, arguments["dtype"], arguments["device"]) == (
        "demo",
        "demo",
        "auto",
        "auto",
    )


def test_compare_says_speed_up_and_identity(run):
    code, _, err = run("generate", "--compare", "--threads", "2", "why?")
    assert code == 0
    assert err.strip() == (
        "50.0 tok/s | AL 3.50 | 2.50x the 20.0 tok/s without drafter "
        "(medians of 5 interleaved runs) | same 5 tokens | float32, cpu, 2 threads"
    )
    assert [draft for _, draft, _ in fake.FakeLLM.made] == ["demo", None]


def test_compare_measures_the_threads_of_each_side(run, monkeypatch):
    counts = {True: 1, False: 2}
    monkeypatch.setattr(
        compare, "_best_thread_count", lambda llm, *_: counts[llm.draft is not None]
    )
    _, _, err = run("generate", "--compare", "why?")
    assert err.endswith("| float32, cpu, 1 thread (2 without drafter)\n")


def test_compare_names_the_first_token_that_differs(run, monkeypatch):
    monkeypatch.setattr(fake.FakeLLM, "tokens_with_draft", [1, 2, 9, 4, 5])
    _, _, err = run("generate", "--compare", "why?")
    assert "tokens DIFFER from number 3 on" in err


@pytest.mark.parametrize(
    "a,b,expected", [([], [], None), ([1], [1], None), ([1, 2], [1], 1), ([1, 2], [3, 2], 0)]
)
def test_first_difference(a, b, expected):
    assert compare.first_difference(a, b) == expected


@pytest.mark.parametrize("cores,expected", [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])])
def test_thread_candidates(cores, expected):
    assert compare._candidates(cores) == expected


@pytest.mark.parametrize("arguments", [["generate", "-"], ["generate"]])
def test_prompt_from_stdin(run, arguments):
    assert run(*arguments, "--raw", stdin="Once upon")[0] == 0
    assert fake.FakeLLM.prompts == ["Once upon"]


def test_a_drafter_is_not_guessed_for_another_model(run):
    run("generate", "--model", "some/model", "hi")
    run("generate", "--draft", "none", "hi")
    assert [made[:2] for made in fake.FakeLLM.made] == [("some/model", None), ("demo", None)]


def test_a_small_model_may_draft(run):
    run("generate", "--draft", "small/model", "--draft-method", "autoregressive", "hi")
    run("generate", "--draft", "none", "--draft-method", "autoregressive", "hi")
    made = [(model, draft, a["draft_method"]) for model, draft, a in fake.FakeLLM.made]
    assert made == [("demo", "small/model", "autoregressive"), ("demo", None, "dflash")]


def test_a_drafter_may_be_quantized(run):
    run("generate", "--draft-quantization", "fp8", "hi")
    run("generate", "hi")
    assert [a["draft_quantization"] for _, _, a in fake.FakeLLM.made] == ["fp8", None]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["generate", "--nonsense"], "No such option: --nonsense"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "--max-tokens", "0", "hi"], "--max-tokens"),
        (["generate", "--temperature", "-1", "hi"], "--temperature"),
        (["generate", "--compare", "--model", "some/model", "hi"], "--compare needs a drafter"),
        (["generate", "--draft-method", "autoregressive", "hi"], "needs a drafter: give --draft"),
        (["generate", "--threads", "1000000", "hi"], "--threads"),
        (["bench", "--threads", "1000000"], "--threads"),
        (["generate", "\udcff"], "the prompt is not UTF-8"),
        (["talk"], "No such command 'talk'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dflash: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error,code,line",
    [
        (ValueError("N is 99:\n expected at most 7"), 2, "N is 99: expected at most 7"),
        (DflashError("no network"), 1, "no network"),
        (OSError(28, "No space left on device", "/cache"), 1, "/cache: No space left on device"),
        (RuntimeError("boom\nstack"), 1, "RuntimeError: boom (DFLASH_LOG_LEVEL=DEBUG shows where)"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_errors_are_one_line(run, monkeypatch, error, code, line):
    def fail(*_):
        raise error

    monkeypatch.setattr(fake.FakeLLM, "stream", fail)
    got, out, err = run("generate", "hi")
    assert (got, out) == (code, "")
    assert err.strip() == (f"dflash: error: {line}" if line else "")


def test_debug_shows_the_traceback(run, monkeypatch):
    def fail(*_):
        raise ValueError("bad")

    monkeypatch.setattr(fake.FakeLLM, "stream", fail)
    dflash.log.logger.setLevel("DEBUG")
    try:
        _, _, err = run("generate", "hi")
    finally:
        dflash.log.logger.setLevel("WARNING")
    assert "Traceback" in err
    assert err.endswith("dflash: error: bad\n")


def test_cuda_asked_for_and_absent(run, monkeypatch):
    monkeypatch.delitem(vars(dflash), "LLM")  # the real one again
    monkeypatch.setattr(torch.version, "cuda", None)
    code, out, err = run("generate", "--device", "cuda", "hi")
    assert (code, out) == (1, "")
    assert err.startswith("dflash: error: device cuda: torch ")
    assert "is a CPU build" in err


def test_the_other_dflash_is_refused(run, monkeypatch, caplog):
    monkeypatch.setattr("dflash._conflict.find_conflict", lambda: "separate environments")
    assert run("generate", "hi")[0] == 1
    assert caplog.messages == ["separate environments"]
    assert fake.FakeLLM.made == []
