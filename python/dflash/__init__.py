# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding: several tokens a step, none of them changed."""

from dflash import _library as _library
from dflash._conflict import report_conflict

report_conflict()

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "Statistics",
    "StreamChunk",
    "__version__",
]

_LAZY = {
    "LLM": "dflash.engine.llm",
    "CompletionOutput": "dflash.engine.outputs",
    "Logprob": "dflash.engine.outputs",
    "RequestOutput": "dflash.engine.outputs",
    "StreamChunk": "dflash.engine.outputs",
    "SamplingParams": "dflash.engine.sampling_params",
    "Statistics": "dflash.engine.statistics",
}


def __getattr__(name: str):
    """The engine is imported when first used: the ops alone need torch and nothing else."""
    if name not in _LAZY:
        raise AttributeError(f"module 'dflash' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
