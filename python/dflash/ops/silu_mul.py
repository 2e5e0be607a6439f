# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
    """SwiGLU's product: silu(gate) * up.

    Args:
        gate_up: [T, 2 * I] float32, float16 or bfloat16; gate in the first I columns, up after it.
        output: [T, I], same dtype; allocated when absent.

    Returns:
        output.
    """
    if output is None:
        output = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    torch.ops.dflash.silu_mul(gate_up, output)
    return output


@torch.library.register_fake("dflash::silu_mul")
def _(gate_up: torch.Tensor, output: torch.Tensor) -> None:
    return None


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in plain torch, in fp32; never serves."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
