# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""The attention backend CUSTOM: FlashAttention's metadata and cache layout, dflash's kernel. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from dflash.integrations.vllm.attention import attend, batch_is_served, layer_refusal, say_left


class DFlashBackend(FlashAttentionBackend):
    """What vLLM asks of a backend class."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[DFlashImpl]:
        return DFlashImpl

    @staticmethod
    def get_builder_cls() -> type[DFlashMetadataBuilder]:
        return DFlashMetadataBuilder


class DFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """No schedule is computed ahead: the kernel reads lengths on the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule = False


class DFlashImpl(FlashAttentionImpl):
    """Layers and batches that are not served go FlashAttention's way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dflash_refusal = layer_refusal(self, AttentionType.DECODER)
        if self.dflash_refusal is not None:
            say_left(self.dflash_refusal)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scaled = output_scale is not None or output_block_scale is not None
        served = self.dflash_refusal is None and attn_metadata is not None and not scaled
        if served and batch_is_served(attn_metadata):
            return attend(self, query, kv_cache, attn_metadata, output)
        if attn_metadata is not None and self.dflash_refusal is None:
            say_left("an output scale" if scaled else "a batch that is not plain rows")
        return super().forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
