# SPDX-License-Identifier: Apache-2.0
"""dflash's and vLLM's engine behind one interface, and the checkpoints and settings under which vLLM is measured."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from benchmarks.end_to_end.iteration import draft_milliseconds

import dflash
from dflash import SamplingParams
from dflash.bench.facts import facts
from dflash.engine.core import Core
from dflash.integrations.vllm import SWITCH

ENGINES = ("dflash", "vllm")
NUM_DRAFTS = 30  # draft steps whose median is vLLM's time of one


class Engine(Protocol):
    """Requests by number; `step` does one iteration or prefill and says who got how many tokens."""

    version: str

    def add(self, key: int, token_ids: list[int], max_tokens: int) -> None:
        """Greedy, always max_tokens tokens."""
        ...

    def step(self) -> list[tuple[int, int]]: ...

    def clear(self) -> None:
        """Ends all requests."""
        ...

    def draft_milliseconds(self, batch: int) -> float | None:
        """Of one draft step, context K/V included: vLLM's in its place in the iteration, ours in a graph of its own."""
        ...


class Dflash:
    version = dflash.__version__

    def __init__(self, core: Core) -> None:
        self._core = core
        self._requests, self._keys = {}, {}

    def add(self, key: int, token_ids: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = self._core.add_request(token_ids, params)
        self._requests[key], self._keys[id(request)] = request, key

    def step(self) -> list[tuple[int, int]]:
        return [(self._keys[id(new.request)], len(new.token_ids)) for new in self._core.step()]

    def clear(self) -> None:
        for request in self._requests.values():
            self._core.abort(request)
        self._requests, self._keys = {}, {}
        self._core.step()

    def draft_milliseconds(self, batch: int) -> float | None:
        return draft_milliseconds(self._core, batch)


class Vllm:
    """vLLM's engine, compiled and with CUDA graphs as it likes them, in this process: by default it has one of its own,
    which matters where the host's work does.

    Args:
        model: folder of the target.
        speculative: speculative_config without its method; None: no drafter.
        time_drafts: record the time of every draft step.
        options: of vllm.LLM.
    """

    def __init__(
        self,
        model: Path,
        speculative: dict[str, Any] | None,
        time_drafts: bool = False,
        **options: Any,
    ) -> None:
        set_environment()
        import vllm  # pyright: ignore[reportMissingImports]

        self._drafts = record_drafts() if time_drafts else []
        if speculative is not None:
            options["speculative_config"] = {"method": "dflash"} | speculative
        self.version: str = vllm.__version__
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            str(model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            gpu_memory_utilization=0.6,
            enable_prefix_caching=False,
            **options,
        )
        self._engine = self._llm.llm_engine
        self._counts: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._num_added = itertools.count()

    def _greedy(self, max_tokens: int) -> Any:
        return self._params(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )

    def add(self, key: int, token_ids: list[int], max_tokens: int) -> None:
        name = str(next(self._num_added))
        self._names[name], self._counts[key] = key, 0
        self._engine.add_request(name, {"prompt_token_ids": token_ids}, self._greedy(max_tokens))

    def step(self) -> list[tuple[int, int]]:
        new = []
        for output in self._engine.step():
            key, count = self._names[output.request_id], len(output.outputs[0].token_ids)
            new.append((key, count - self._counts[key]))
            self._counts[key] = count
        return new

    def clear(self) -> None:
        self._engine.abort_request(list(self._names))
        self._names, self._counts = {}, {}
        for _ in range(3):
            self._engine.step()

    def generate(self, token_ids: list[list[int]], max_tokens: int) -> None:
        """All at once, nothing delivered before the last token: what costs vLLM's host least."""
        requests = [{"prompt_token_ids": ids} for ids in token_ids]
        self._llm.generate(requests, self._greedy(max_tokens), use_tqdm=False)

    def draft_milliseconds(self, batch: int) -> float | None:
        synchronize()
        recent = self._drafts[-NUM_DRAFTS:]
        return statistics.median(draft.milliseconds for draft in recent) if recent else None


class Draft(NamedTuple):
    """One draft step of vLLM."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    num_reqs: int

    @property
    def milliseconds(self) -> float:
        return self.start.elapsed_time(self.end)


def record_drafts() -> list[Draft]:
    """The list that every draft step of vLLM is appended to from here on."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import (  # pyright: ignore[reportMissingImports]
        DFlashSpeculator,
    )

    drafts, propose = [], DFlashSpeculator.propose

    def timed(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = propose(self, *args, **kwargs)
        end.record()
        batch = kwargs["input_batch"] if "input_batch" in kwargs else args[0]
        drafts.append(Draft(start, end, batch.num_reqs))
        return result

    DFlashSpeculator.propose = timed
    return drafts


def set_environment() -> None:
    """Before vLLM is imported: its engine in this process, its second model runner, no plugin of ours."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        SWITCH: "0",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def write_dummy_checkpoints() -> tuple[Path, Path]:
    """Folders of target and drafter with no more than a config.json: the pair of benchmarks/shapes.py."""
    folder = Path(tempfile.mkdtemp())
    for name, config in dummy_configs().items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder / "target", folder / "draft"


def dummy_configs() -> dict[str, dict]:
    """config.json of the two checkpoints."""
    shared = {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 40960,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
        "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16",
    }  # fmt: skip
    draft = {
        "architectures": ["DFlashDraftModel"], "num_hidden_layers": 5, "max_window_layers": 5,
        "layer_types": ["full_attention"] * 5, "block_size": 16, "num_target_layers": 36,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    }  # fmt: skip
    target = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "max_window_layers": 36,
    }
    return {"target": shared | target, "draft": shared | draft}


def in_own_process(module: str, *arguments: str | Path) -> None:
    """A benchmark again, with these arguments behind those it was given."""
    command = [sys.executable, "-m", module, *sys.argv[1:], *map(str, arguments)]
    subprocess.run(command, check=True)


def save(path: Path | None, engine: str, figures: dict) -> None:
    """One engine's figures so far: what is measured stays, should the process be ended."""
    if path is not None:
        path.write_text(json.dumps({"engine": engine, "taken": facts()} | figures))


def read_both(files: Sequence[Path]) -> tuple[dict, dict]:
    """What two engines saved: dflash's, then vLLM's; figures of unlike machines compare nothing."""
    try:
        ours, theirs = (json.loads(file.read_text()) for file in files)
        engines = ours["engine"], theirs["engine"]
    except (OSError, ValueError, KeyError) as error:
        names = " and ".join(map(str, files))
        raise SystemExit(f"{names}: expected two files that --json wrote: {error!r}") from None
    if engines != ENGINES:
        raise SystemExit(
            f"--compare: expected {' then '.join(ENGINES)}, got {' then '.join(engines)}"
        )
    machines = [side["taken"]["hardware"] for side in (ours, theirs)]
    if machines[0] != machines[1]:
        raise SystemExit(
            f"--compare: taken on {machines[0]} and {machines[1]}: measure both on one"
        )
    return ours, theirs


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
