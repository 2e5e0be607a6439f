# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding: several tokens a step, none of them changed."""

from dflash import _library as _library
from dflash._conflict import report_conflict

report_conflict()

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "Statistics", "StreamChunk", "__version__"]

_LAZY = {
    "LLM": "dflash.engine.llm",
    "RequestOutput": "dflash.engine.llm",
    "StreamChunk": "dflash.engine.llm",
    "SamplingParams": "dflash.engine.sampling_params",
    "Statistics": "dflash.engine.statistics",
}


def __getattr__(name: str):
    """The engine is imported when first used: the ops alone need torch and nothing else."""
    if name not in _LAZY:
        raise AttributeError(f"module 'dflash' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
