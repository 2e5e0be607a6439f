# SPDX-License-Identifier: Apache-2.0
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dflash.engine.detokenizer import Detokenizer


class Bytes:
    """A tokenizer whose tokens are bytes: a character may take up to four."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return bytes(ids).decode("utf-8", errors="replace")


def pieces(data: bytes, size: int):
    return [list(data[i : i + size]) for i in range(0, len(data), size)]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.integers(1, 7))
def test_pieces_join_to_the_text_and_never_split_a_character(text, size):
    detokenizer = Detokenizer(Bytes())
    parts = pieces(text.encode(), size) or [[]]
    released = [detokenizer.push(part, last=i == len(parts) - 1) for i, part in enumerate(parts)]
    assert "".join(released) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in released)


@settings(max_examples=100, deadline=None)
@given(st.text("abc", max_size=30), st.text("abc", min_size=1, max_size=4), st.integers(1, 9))
def test_text_ends_before_the_first_stop_string(text, stop, size):
    detokenizer = Detokenizer(Bytes(), (stop,))
    parts = pieces(text.encode(), size) or [[]]
    released = ""
    for i, part in enumerate(parts):
        released += detokenizer.push(part, last=i == len(parts) - 1)
        if detokenizer.stopped:
            break
    where = text.find(stop)
    assert released == (text if where < 0 else text[:where])
    assert detokenizer.stopped == (where >= 0)
    if where >= 0:
        assert detokenizer.num_tokens == where + len(stop)


def test_stop_inside_an_accepted_run_counts_the_tokens_up_to_it():
    detokenizer = Detokenizer(Bytes(), ("END",))
    assert detokenizer.push(list(b"one EN")) == "one "
    assert detokenizer.push(list(b"D and more")) == ""
    assert detokenizer.stopped and detokenizer.num_tokens == 7 and detokenizer.text == "one "


def test_half_a_character_at_the_end_is_shown_as_such():
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.push(list("é".encode())[:1]) == ""
    assert detokenizer.push([], last=True) == "\ufffd"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 4))
def test_a_tokenizer_that_cleans_up_spaces_is_kept_from_it(ids, size):
    """Cleaned, "do n't" grows into a shorter text: a window would drop what follows."""
    words = {word: i for i, word in enumerate(["do", "n't", ".", "'", "s", "x"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words)), clean_up_tokenization_spaces=True
    )
    detokenizer = Detokenizer(tokenizer)
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    released = [detokenizer.push(part, last=i == len(parts) - 1) for i, part in enumerate(parts)]
    assert "".join(released) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
