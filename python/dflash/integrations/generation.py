# SPDX-License-Identifier: Apache-2.0
"""transformers' generation parameters as dflash's; what would change the tokens and is not served is refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from packaging.version import Version
from transformers import GenerationConfig

from dflash.engine.sampling_params import SamplingParams

SERVED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "repetition_penalty", "num_return_sequences", "eos_token_id", "pad_token_id",
}  # fmt: skip
WITHOUT_EFFECT = {
    "bos_token_id", "decoder_start_token_id", "use_cache", "cache_implementation", "cache_config", "max_cache_len",
    "compile_config", "disable_compile", "prefill_chunk_size", "low_memory", "continuous_batching_config",
    "transformers_version", "_from_model_config", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "early_stopping", "length_penalty",
}  # fmt: skip
"""Of what is served: they concern memory, beams or other ways to draft."""

NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0, "guidance_scale": 1.0,
}  # fmt: skip
DEFAULT_MAX_NEW_TOKENS = 20  # transformers', where neither max_new_tokens nor max_length is given
DEFAULT_TOP_K = 50  # transformers', for do_sample
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Generation:
    """One call: how to sample, how often, and what fills rows that end early."""

    params: SamplingParams
    num_return_sequences: int
    pad_token_id: int


def read_generation(
    model_config: GenerationConfig,
    given: GenerationConfig | None,
    changes: Mapping[str, Any],
    prompt_len: int,
) -> Generation:
    """As `model.generate` reads them: the given config (else the model's) with the keyword arguments over it.

    Raises:
        ValueError: an argument that is unknown, not served or out of range, named.
    """
    config = _filled(given, model_config)
    unknown = config.update(**{k: v for k, v in changes.items() if v is not None})
    if unknown:
        raise ValueError(
            f"generate: {', '.join(sorted(unknown))}: not a generation parameter that dflash serves"
        )
    values = {k: v for k, v in config.to_dict().items() if v is not None}
    _refuse(values)
    eos = _ids(values.get("eos_token_id"))
    pad = values.get("pad_token_id", eos[0] if eos else 0)
    max_tokens = _max_new_tokens(values, prompt_len, changes.get("max_length") is not None)
    min_tokens = values.get("min_new_tokens", max(0, values.get("min_length", 0) - prompt_len))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop_token_ids=eos,
        ignore_eos=True,  # these are the ones
        repetition_penalty=values.get("repetition_penalty", 1.0),
        **_sampling(values),
    )
    return Generation(params, values.get("num_return_sequences", 1), int(pad))


def _filled(given: GenerationConfig | None, model_config: GenerationConfig) -> GenerationConfig:
    """The given config; what it leaves at the default is the model's, as far as this transformers does so."""
    if given is None:
        return copy.deepcopy(model_config)
    config, defaults = copy.deepcopy(given), GenerationConfig().to_dict()
    values = model_config.to_dict()
    if not _fills_all(getattr(model_config, "transformers_version", None)):
        values = {name: values.get(name) for name in SPECIAL_TOKENS}
    for name, value in values.items():
        if getattr(config, name, None) == defaults.get(name):
            setattr(config, name, copy.deepcopy(value))
    return config


def _fills_all(model_version: str | None) -> bool:
    """transformers 4 fills only the special tokens of configs written before 4.50."""
    if Version(transformers.__version__).major >= 5:
        return True
    return model_version is None or Version(model_version) >= Version("4.50.0")


def _refuse(values: Mapping[str, Any]) -> None:
    defaults = GenerationConfig().to_dict()
    for name, value in values.items():
        if name in SERVED | WITHOUT_EFFECT or value is False:
            continue
        if value not in (NEUTRAL.get(name), defaults.get(name)):
            raise ValueError(f"generate: {name}={value!r} is not served")


def _ids(value: Any) -> Sequence[int]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _max_new_tokens(values: Mapping[str, Any], prompt_len: int, is_keyword: bool) -> int:
    if "max_new_tokens" in values:
        return values["max_new_tokens"]
    unset = (
        None,
        GenerationConfig().max_length,
    )  # transformers 4 has 20 where nobody said anything
    if values.get("max_length") in unset and not is_keyword:
        return DEFAULT_MAX_NEW_TOKENS
    if values["max_length"] <= prompt_len:
        raise ValueError(
            f"generate: max_length={values['max_length']} leaves no room behind {prompt_len} prompt tokens"
        )
    return values["max_length"] - prompt_len


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values.get("do_sample"):
        return {"temperature": 0.0}
    return {
        "temperature": values.get("temperature", 1.0),
        "top_k": values.get("top_k", DEFAULT_TOP_K),
        "top_p": values.get("top_p", 1.0),
        "min_p": values.get("min_p", 0.0),
    }
