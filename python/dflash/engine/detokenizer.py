# SPDX-License-Identifier: Apache-2.0
"""Tokens to text as they come, and stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field

REPLACEMENT = "\ufffd"


@dataclass
class Detokenizer:
    """Incremental decoding of one request.

    Text is held back while it may end in half a character or in the beginning of a stop string.

    Args:
        tokenizer: a transformers tokenizer.
        stop_strings: the text ends before the first of them, or behind it with include_stop.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: stop strings completed by earlier tokens do not count.
    """

    tokenizer: object
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    text: str = ""  # everything released
    num_tokens: int = 0  # tokens up to the stop string, all of them without one
    stop_string: str | None = None  # the one that ended the text
    _ids: list[int] = field(default_factory=list)
    _prefix: int = 0  # tokens whose text is complete and in _decoded
    _context: int = 0  # where re-decoding starts: one piece before _prefix
    _decoded: str = ""
    _searched: int = 0  # characters in which no stop string ends

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, token_ids: list[int], last: bool = False) -> str:
        """Takes new tokens and returns the text that can be released now.

        After a stop string `stopped` holds and num_tokens is the token that completed it.
        """
        released = len(self.text)
        for token in token_ids:
            if self.stopped:
                break
            self._ids.append(token)
            self.num_tokens += 1
            self._decode(final=False)
            self._find_stop()
        if self.stopped:
            return self.text[released:]
        if last:
            self._decode(final=True)
            self._find_stop()
        if not self.stopped:
            held = 0 if last else self._held_back()
            self.text = self._decoded[: len(self._decoded) - held]
        return self.text[released:]

    def _decode(self, final: bool) -> None:
        """Decodes a window that starts before the new tokens, so that spaces and joins come out right."""
        before = self._text_of(self._ids[self._context : self._prefix])
        now = self._text_of(self._ids[self._context :])
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and not final):
            return
        self._decoded += now[len(before) :]
        self._context, self._prefix = self._prefix, len(self._ids)

    def _text_of(self, ids: list[int]) -> str:
        # Cleaning up drops spaces before punctuation: text would change behind what was released.
        return self.tokenizer.decode(  # pyright: ignore
            ids,
            skip_special_tokens=self.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def _find_stop(self) -> None:
        before, self._searched = self._searched, len(self._decoded)
        if self.num_tokens <= self.min_tokens:
            return
        places = [
            (self._decoded.find(s, max(0, before - len(s) + 1)), s) for s in self.stop_strings
        ]
        places = [place for place in places if place[0] >= 0]
        if not places:
            return
        start, self.stop_string = min(places)
        end = start + len(self.stop_string) if self.include_stop else start
        self.text = self._decoded[:end]

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self.stop_strings:
            for size in range(min(len(stop) - 1, len(self._decoded)), longest, -1):
                if self._decoded.endswith(stop[:size]):
                    longest = size
                    break
        return longest
