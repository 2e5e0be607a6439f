# SPDX-License-Identifier: Apache-2.0
"""Who owns which block of the paged K/V cache; no tensors."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Hands out blocks of kv_block_size slots; block 0 is the null block and is never owned."""

    def __init__(self, num_blocks: int, kv_block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be >= 2 (block 0 is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self._free = deque(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.kv_block_size)

    def allocate(self, num_slots: int) -> list[int] | None:
        """Blocks for `num_slots` slots, or None when too few are free (nothing is taken then)."""
        count = self.blocks_for(num_slots)
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        """Gives blocks back; only work enqueued later on the same stream may reuse them."""
        self._free.extend(blocks)
