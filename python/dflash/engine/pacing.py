# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt may come between two iterations of running requests."""

from __future__ import annotations

SMALLEST_CHUNK = 16
"""Tokens; smaller chunks cost as much as this one."""

NEW_WEIGHT = 0.3
"""Of a new measurement in the running means."""


class PrefillPacer:
    """Keeps an iteration and the chunk in front of it within a target, by what both took before.

    Args:
        target_seconds: between two tokens of a running request; None = no bound.
        max_tokens: of any chunk.
    """

    def __init__(self, target_seconds: float | None, max_tokens: int) -> None:
        self.target_seconds = target_seconds
        self.max_tokens = max_tokens
        self._token_seconds: float | None = None
        self._decode_seconds = 0.0

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Records a chunk."""
        self._token_seconds = _mean(self._token_seconds, seconds / num_tokens)

    def decoded(self, seconds: float) -> None:
        """Records an iteration."""
        self._decode_seconds = _mean(self._decode_seconds or None, seconds)

    def budget(self) -> int:
        """Prompt tokens of the next chunk while requests are running."""
        if self.target_seconds is None or not self._token_seconds:
            return self.max_tokens
        room = self.target_seconds - self._decode_seconds
        smallest = min(SMALLEST_CHUNK, self.max_tokens)
        return max(smallest, min(self.max_tokens, int(room / self._token_seconds)))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + NEW_WEIGHT * (new - old)
