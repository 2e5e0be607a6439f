# SPDX-License-Identifier: Apache-2.0
"""Who owns which block of the paged K/V cache, and which blocks hold a known prefix; no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

ROOT_PREFIX = 0
"""The prefix of no tokens."""

_Key = tuple[int, tuple[int, ...]]  # prefix before the block, the block's tokens


@dataclass(frozen=True)
class Prefix:
    """A run of full blocks found in the cache."""

    blocks: list[int]
    prefix_id: int  # names the tokens of all these blocks


class BlockPool:
    """Hands out blocks of kv_block_size slots; block 0 is the null block and is never owned.

    A block has as many owners as requests share it; without owners it is free. A published block keeps
    its tokens while it is free, until it is handed out again: least recently freed first, those that
    hold no prefix before those that do. Prefixes are compared token by token, never by a hash alone.
    """

    def __init__(
        self, num_blocks: int, kv_block_size: int, enable_prefix_caching: bool = False
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be >= 2 (block 0 is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """Every block is free and holds nothing."""
        self._free = OrderedDict.fromkeys(range(1, self.num_blocks))
        self._num_owners = [0] * self.num_blocks
        self._published: dict[_Key, tuple[int, int]] = {}  # to (block, prefix with the block)
        self._key_of: dict[int, _Key] = {}
        self._last_prefix_id = ROOT_PREFIX

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests own."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.kv_block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None when fewer are free (nothing is taken then)."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._num_owners[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Ends one ownership of each; only work enqueued later on the same stream may reuse them."""
        # The end of a prefix goes first: without its beginning it cannot be found.
        for block in reversed(blocks):
            self._num_owners[block] -= 1
            if self._num_owners[block] > 0:
                continue
            self._free[block] = None
            if block not in self._key_of:
                self._free.move_to_end(block, last=False)

    def match(self, token_ids: Sequence[int], max_tokens: int) -> Prefix:
        """The longest published run of full blocks at the start of token_ids, of at most max_tokens."""
        blocks, prefix_id, size = [], ROOT_PREFIX, self.kv_block_size
        for start in range(0, max_tokens - size + 1, size):
            found = self._published.get((prefix_id, tuple(token_ids[start : start + size])))
            if found is None:
                break
            block, prefix_id = found
            blocks.append(block)
        return Prefix(blocks, prefix_id)

    def share(self, blocks: Sequence[int]) -> None:
        """Adds an owner to each."""
        for block in blocks:
            self._free.pop(block, None)
            self._num_owners[block] += 1

    def publish(self, prefix_id: int, token_ids: Sequence[int], block: int) -> int:
        """Makes a full block findable: it holds token_ids behind the prefix. Returns the prefix with it."""
        if not self.enable_prefix_caching:
            return ROOT_PREFIX
        key = (prefix_id, tuple(token_ids))
        found = self._published.get(key)
        if found is not None:
            return found[1]
        self._last_prefix_id += 1
        self._published[key] = (block, self._last_prefix_id)
        self._key_of[block] = key
        return self._last_prefix_id

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._published[key]
