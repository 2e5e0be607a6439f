# SPDX-License-Identifier: Apache-2.0
"""From the host to the device, without waiting: pinned memory, few copies, none when nothing changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash.engine.request import Request


class RequestTable:
    """Who is in a batch, and on which blocks: one buffer, one copy to the device, none when nothing changed."""

    def __init__(self, max_reqs: int, max_blocks: int, device: torch.device) -> None:
        size, pinned = max_reqs * (1 + max_blocks), device.type == "cuda"
        self._max_reqs, self._max_blocks = max_reqs, max_blocks
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self.idx_mapping, self.block_table = self._cut(self._device)
        # NOTE: two, since the copy from the last one may still be under way.
        self._staging = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._blocks = torch.zeros(max_reqs, max_blocks, dtype=torch.int32)  # by state row
        self._num_blocks = [0] * max_reqs
        self._sent: tuple[list[int], int] | None = None

    def _cut(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = buffer[self._max_reqs :].view(self._max_reqs, self._max_blocks)
        return buffer[: self._max_reqs], table

    def reset(self, row: int) -> None:
        """The row has a new owner."""
        self._blocks[row] = 0
        self._num_blocks[row] = 0
        self._sent = None

    def send(self, requests: Sequence[Request], num_padded: int) -> None:
        """Rows and blocks of the requests; the rest of num_padded is inert."""
        rows = [request.row for request in requests]
        for request in requests:
            self._take_blocks(request)
        if self._sent == (rows, num_padded):
            return
        self._staging.reverse()
        idx_mapping, block_table = self._cut(self._staging[0])
        idx_mapping[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
        idx_mapping[len(rows) : num_padded] = -1
        block_table[: len(rows)] = self._blocks[rows]
        block_table[len(rows) : num_padded] = 0
        size = self._max_reqs + num_padded * self._max_blocks
        self._device[:size].copy_(self._staging[0][:size], non_blocking=True)
        self._sent = (rows, num_padded)

    def _take_blocks(self, request: Request) -> None:
        known, blocks = self._num_blocks[request.row], request.blocks
        if known == len(blocks):
            return
        self._blocks[request.row, known : len(blocks)] = torch.tensor(
            blocks[known:], dtype=torch.int32
        )
        self._num_blocks[request.row] = len(blocks)
        self._sent = None


def to_device(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host values on the device, without waiting for it."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def copy_to(buffer: torch.Tensor, values: list[int], size: int, padding: int) -> None:
    """The leading `size` entries of a device buffer from host values and padding, without waiting."""
    pinned = buffer.device.type == "cuda"
    padded = values + [padding] * (size - len(values))
    host = torch.tensor(padded, dtype=buffer.dtype, pin_memory=pinned)
    buffer[:size].copy_(host, non_blocking=True)
