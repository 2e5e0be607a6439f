# SPDX-License-Identifier: Apache-2.0
"""The command on the demo pair itself, in a process of its own, as a user runs it."""

import os
import shutil
import subprocess
import sys

import pytest

from dflash.checkpoints.demo import demo_draft, demo_target

RUN = "import sys; from dflash.cli import main; sys.argv[0] = 'dflash'; main()"


def dflash(*arguments):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)],
        capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip


def test_the_drafter_changes_the_speed_and_not_the_text():
    question = ("generate", "--max-tokens", "24", "What is two plus two?")
    drafted, plain = dflash(*question), dflash(*question, "--draft", "none")
    assert drafted.returncode == plain.returncode == 0, drafted.stderr + plain.stderr
    assert drafted.stdout == plain.stdout
    assert len(drafted.stdout.split()) > 3
    assert "tok/s | AL " in drafted.stderr
    assert "float32, cpu, 1 thread" in drafted.stderr
    assert drafted.stderr.count("\n") == plain.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def truncated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truncated")
    for path in demo_target().iterdir():
        shutil.copy(path, folder)
    os.truncate(folder / "model.safetensors", 1 << 20)
    return folder


@pytest.mark.parametrize(
    "arguments,code,message",
    [
        (["--model", "/nonexistent"], 2, "no such directory: /nonexistent"),
        (["--model", "some/thing"], 1, "some/thing is not in the local hub cache"),
        (["--draft", demo_target], 2, "is a target, not a drafter"),
        (["--model", demo_draft], 2, "is a drafter: give it as the draft"),
        (["--num-speculative-tokens", "20"], 2, "num_speculative_tokens 20"),
        (["--dtype", "int8"], 2, "dtype 'int8': expected one of auto"),
        (["--device", "tpu"], 2, "device 'tpu': expected auto, cpu"),
        (["--raw", "word " * 9000], 2, "the prompt has"),
    ],
)
def test_bad_input_is_one_readable_line(arguments, code, message):
    arguments = [argument() if callable(argument) else argument for argument in arguments]
    done = dflash("generate", *arguments, *([] if "--raw" in arguments else ["hi"]))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("dflash: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_truncated_file_is_one_readable_line(truncated):
    done = dflash("generate", "--model", truncated, "hi")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "is truncated or not a safetensors file" in done.stderr
    assert done.stderr.count("\n") == 1
