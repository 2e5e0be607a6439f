# SPDX-License-Identifier: Apache-2.0
"""The loop of docs/integrating.md runs as it stands there, piece by piece, in one namespace."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrating.md"
BLOCK = re.compile(r"(<!-- gpu -->\n)?```python\n(.*?)```", re.S)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """The models are tiny."""


def run_page(device):
    """The namespace behind the page's last piece; GPU pieces only on a GPU."""
    text, names = PAGE.read_text(), {}
    with torch.inference_mode():
        for match in BLOCK.finditer(text):
            if match[1] and device == "cpu":
                continue
            line = text[: match.start(2)].count("\n")
            source = "\n" * line + match[2].replace('"cpu"', f'"{device}"')
            exec(compile(source, str(PAGE), "exec"), names)
    return names


def test_the_loop_generates_what_the_target_alone_would():
    page = run_page("cpu")
    assert page["num_accepted"] > 5


def test_the_page_names_real_ops_only():
    named = set(re.findall(r"from dflash\.ops\.(\w+) import", PAGE.read_text()))
    assert len(named) == 8
    assert all(hasattr(torch.ops.dflash, name) for name in named)


@pytest.mark.gpu
def test_the_loop_replays_as_a_graph():
    page = run_page("cuda")
    captured = page["answers"]

    def iteration(rows):
        running = [row for row in rows.idx_mapping.tolist() if row >= 0]
        tables = torch.zeros_like(rows.table)
        tables[running] = rows.table[: len(running)]
        page["replayed"](running, tables)

    page["iteration"] = iteration
    with torch.inference_mode():
        answers, _ = page["generate"](page["prompts"], max_tokens=60)
    assert answers == captured
