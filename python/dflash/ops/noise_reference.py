# SPDX-License-Identifier: Apache-2.0
"""The sampler's noise in plain torch: the oracle of csrc/kernels/common/philox.h; never serves."""

from __future__ import annotations

import torch

TARGET, DRAFT, ACCEPTANCE, RESIDUAL = range(4)
"""Streams. TARGET is keyed by the sampled token's own position and offset 0, the others by the
anchor's position and the offset 1..N of the draft."""

_MASK = 0xFFFFFFFF


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a 32 x 32 bit product, in halves so that int64 does not overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32_10(key: int, counter: tuple[torch.Tensor, int, int, int]) -> list[torch.Tensor]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

    Args:
        key: 64 bits.
        counter: four words, the first an int64 tensor of any shape.

    Returns:
        Four int64 tensors of that shape with values in [0, 2^32).
    """
    c = [counter[0], *(torch.full_like(counter[0], word) for word in counter[1:])]
    k = [key & _MASK, (key >> 32) & _MASK]
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c[0])
        high1, low1 = _multiply(0xCD9E8D57, c[2])
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & _MASK, (k[1] + 0xBB67AE85) & _MASK]
    return c


def uniform(
    stream: int, seed: int, position: int, offset: int, tokens: torch.Tensor
) -> torch.Tensor:
    """Uniforms in (0, 1) of token ids: float64 holding the float32 value of the op."""
    where = position & (2**64 - 1)
    words = philox4x32_10(seed, (tokens >> 2, where & _MASK, stream << 24 | offset, where >> 32))
    word = torch.stack(words, dim=-1).gather(-1, (tokens & 3).unsqueeze(-1)).squeeze(-1)
    u = (word.to(torch.float32) + 0.5) * 2.0**-32
    return u.clamp_max(1.0 - 2.0**-24).double()


def exponential(
    stream: int, seed: int, position: int, offset: int, tokens: torch.Tensor
) -> torch.Tensor:
    """Standard exponentials of token ids."""
    return -torch.log1p(-uniform(stream, seed, position, offset, tokens))


def gumbel(
    stream: int, seed: int, position: int, offset: int, tokens: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel values of token ids: argmax(logit + gumbel) samples softmax(logit)."""
    return -exponential(stream, seed, position, offset, tokens).log()
