# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters that a checkpoint recommends."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from dflash.engine.sampling_params import SamplingParams
from dflash.log import log_once

NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's keys and ours."""


def default_sampling_params(model_dir: Path) -> SamplingParams:
    """SamplingParams with the values of model_dir/generation_config.json; do_sample: false is temperature 0.

    Values that SamplingParams refuses are left out, all of them, with a warning.
    """
    path = model_dir / "generation_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    values = {
        NAMES[key]: value for key, value in config.items() if key in NAMES and value is not None
    }
    if config.get("do_sample") is False:
        values = {"temperature": 0.0} | {
            k: v for k, v in values.items() if k in ("max_tokens", "repetition_penalty")
        }
    try:
        return SamplingParams(**values)
    except ValueError as error:
        log_once(f"{path}: {error}; using SamplingParams()", logging.WARNING)
        return SamplingParams()
