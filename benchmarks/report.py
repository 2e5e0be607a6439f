# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark of this repository writes its results."""

from __future__ import annotations

from pathlib import Path

from dflash.bench.facts import write_results

RESULTS = Path(__file__).parent / "results"


def write(name: str, figures: object, folder: str | None = None) -> Path:
    """Writes <folder>/<name>.json and returns its path."""
    path = Path(folder or RESULTS) / f"{name}.json"
    write_results(path, figures)
    return path
