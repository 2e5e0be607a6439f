# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM that the plugin replaces or relies on, by the hash of their source, for the versions we know.

`python -m dflash.integrations.vllm FOLDER --hashes` prints those of an unpacked wheel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MODEL = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3"
_FLASH = "vllm.v1.attention.backends.flash_attn:FlashAttention"
_GPU = "vllm.v1.worker.gpu"
_DRAFT = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"
_DFLASH = "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"
_INPUTS = "vllm.v1.worker.gpu.spec_decode.dflash.speculator"
_LOGITS = "vllm.model_executor.layers.logits_processor:LogitsProcessor"
_HEAD = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
_REGISTRY = "vllm.v1.attention.backends.registry"
_OURS = "dflash.integrations.vllm"


@dataclass(frozen=True)
class Version:
    """What a part does under one version of vLLM."""

    install: str  # "module:function", called once in a process
    functions: dict[str, str]  # "module:name" -> sources.source_hash


@dataclass(frozen=True)
class Part:
    """A piece of vLLM's draft step that is taken over as a whole, or left."""

    name: str
    versions: dict[str, Version]
    left: dict[str, str] = field(default_factory=dict)  # versions that we leave, and why


PARTS = (
    Part(
        "input preparation",
        {
            "0.26.0": Version(
                f"{_OURS}.inputs:install",
                {
                    f"{_INPUTS}:prepare_dflash_inputs": "f640ad4e771535aa",
                    f"{_INPUTS}:_prepare_dflash_inputs_kernel": "93b7c57d4fb78cfa",
                    f"{_DFLASH}.propose": "b82fcff527068b42",
                    f"{_DFLASH}.__init__": "98aa43dcfdc872b1",
                    f"{_DFLASH}._build_draft_attn_metadata": "77de88d685f5424f",
                    f"{_DRAFT}.__init__": "7815bbcf1f819d28",
                    f"{_GPU}.cudagraph_utils:CudaGraphManager._init_candidates": "63797dbda0785d1c",
                    f"{_GPU}.states:RequestState.__init__": "710781037256c1fc",
                    f"{_GPU}.input_batch:InputBuffers": "42c3692e4797df8b",
                    f"{_GPU}.block_table:BlockTables": "f100baf05b8d9aee",
                },
            ),
        },
        left={
            "0.33.0": "vLLM's kernel copies temperatures and seeds too and marks padding: one launch, not four",
        },
    ),
    Part(
        "context K/V",
        {
            "0.26.0": Version(
                f"{_OURS}.context_kv:install",
                {
                    f"{_MODEL}Model.precompute_and_store_context_kv": "bc9ec66b7684ff13",
                    f"{_MODEL}Model._project_context_kv": "6760f2cd51274d93",
                    f"{_MODEL}Model._normalize_context_k": "7c4a2d8bb98a4c7f",
                    f"{_MODEL}Model._build_fused_kv_buffers": "bdc093254db47a54",
                    f"{_MODEL}Model._build_context_kv_buffers": "e6c3eaee863438c8",
                    f"{_FLASH}Impl.do_kv_cache_update": "406220a1ba8445df",
                },
            ),
            "0.33.0": Version(
                f"{_OURS}.context_kv:install",
                {
                    f"{_MODEL}Model.precompute_and_store_context_kv": "79ff512a05a17c49",
                    f"{_MODEL}Model._project_context_kv": "4af95b255d571c79",
                    f"{_MODEL}Model._normalize_context_k": "7c4a2d8bb98a4c7f",
                    f"{_MODEL}Model._build_fused_kv_buffers": "bdc093254db47a54",
                    f"{_MODEL}Model._build_context_kv_buffers": "e8bf677ac742203a",
                    f"{_FLASH}Impl.do_kv_cache_update": "406220a1ba8445df",
                },
            ),
        },
    ),
    Part(
        "sampling",
        {
            "0.26.0": Version(
                f"{_OURS}.sampling:install_0_26",
                {
                    f"{_DRAFT}._greedy_sample_draft": "2f1eca171383a362",
                    f"{_DRAFT}.sample_draft": "a31478e3be0d9409",
                    f"{_DFLASH}._generate_draft": "78dfa8f9f0b2251c",
                    f"{_MODEL}ForCausalLM.__init__": "e7868c29cf623ca9",
                    f"{_MODEL}ForCausalLM.compute_logits": "15c65c6344572863",
                    f"{_LOGITS}.__init__": "9d3c04b21fbbe369",
                    f"{_LOGITS}.forward": "623ff66badcde8e6",
                    f"{_LOGITS}._get_logits": "95dae45791d870e5",
                    f"{_LOGITS}._apply_head": "6f8281e5a6818d5d",
                    f"{_HEAD}.apply": "a4b103119d9814b6",
                },
            ),
            "0.33.0": Version(
                f"{_OURS}.sampling:install_0_33",
                {
                    f"{_DRAFT}.sample_draft": "f8c982c90ba2c1f7",
                    f"{_DRAFT}.compute_draft_logits": "65cf4996aad0534b",
                    f"{_DRAFT}._maybe_predict_acceptance": "86ccc79075b034de",
                    f"{_DFLASH}._generate_draft": "67185d678dc885ed",
                    f"{_MODEL}ForCausalLM.__init__": "cca2be625e560126",
                    f"{_MODEL}ForCausalLM.compute_logits": "15c65c6344572863",
                    f"{_LOGITS}.__init__": "384814fe73975d13",
                    f"{_LOGITS}.forward": "85b544ca3eff53d3",
                    f"{_LOGITS}._get_logits": "9556236747c98a0f",
                    f"{_LOGITS}._apply_head": "8c6519d221de62f8",
                    f"{_HEAD}.apply": "6689f7ddddbbf43b",
                },
            ),
        },
    ),
    Part(
        "draft attention, as backend CUSTOM",
        {
            "0.26.0": Version(
                f"{_OURS}.attention:install",
                {
                    f"{_FLASH}Impl.forward": "5fc740485145d52b",
                    f"{_FLASH}Impl.do_kv_cache_update": "406220a1ba8445df",
                    f"{_FLASH}Impl.__init__": "404d8b34a60b0c38",
                    f"{_FLASH}Backend": "9c77e52d2e7700ba",
                    f"{_FLASH}Metadata": "997b3dca7be24b26",
                    f"{_FLASH}MetadataBuilder.__init__": "c4c662e188361b4d",
                    f"{_FLASH}MetadataBuilder.build": "a09d3afbdb80c8d5",
                    f"{_REGISTRY}:register_backend": "62740d59ad8b661b",
                },
            ),
            "0.33.0": Version(
                f"{_OURS}.attention:install",
                {
                    f"{_FLASH}Impl.forward": "931e8aa0090edeb3",
                    f"{_FLASH}Impl.do_kv_cache_update": "406220a1ba8445df",
                    f"{_FLASH}Impl.__init__": "cc7ff77c46f9550e",
                    f"{_FLASH}Backend": "1fbf1d261f9b7c11",
                    f"{_FLASH}Metadata": "2c90eb4ab8a66796",
                    f"{_FLASH}MetadataBuilder.__init__": "f050f856c5f7565f",
                    f"{_FLASH}MetadataBuilder.build": "84dc065c8d9cecb8",
                    f"{_REGISTRY}:register_backend": "86320b69bbd639ad",
                },
            ),
        },
    ),
)
