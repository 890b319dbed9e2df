"""Streams of tokens against decoding them at once, and stop strings against a search in the whole text."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from llmforge.serving.detokenize import Detokenizer, StopStrings

SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m" / "tokenizer.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
text_of_users = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@functools.cache
def byte_level() -> Tokenizer:
    """The sample checkpoint's: byte-level BPE, in which emoji and rare characters are several tokens."""
    return Tokenizer.from_file(str(SAMPLE))


@functools.cache
def sentencepiece() -> Tokenizer:
    """As Llama 2's: spaces are U+2581, one before the text; unknown characters fall back to byte tokens."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,!é你"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "▁")]
    pieces += [a + b for a, b in merges]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """As Unigram models': Metaspace splits at spaces and, decoding, drops the one before the first word."""
    pieces = [("<unk>", 0.0), ("</s>", -9.0), ("▁", -2.0), ("▁the", -1.5), ("▁in", -1.6)]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz.,!é你"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


TOKENIZERS = [byte_level, sentencepiece, metaspace]


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=text_of_users)
@example(text="👩‍👩‍👧‍👦 你好,世界 Ünïcödé")
@example(text="  the  in the   ")
@example(text="🤔" * 20)
def test_a_stream_adds_up_to_the_text_and_never_shows_half_a_character(tokenizer, text):
    ids = tokenizer().encode(text).ids
    whole = tokenizer().decode(ids)
    chunks = stream(tokenizer(), ids)
    assert "".join(chunks) == whole
    assert not any(REPLACEMENT in chunk for chunk in chunks if REPLACEMENT not in text)


@pytest.mark.parametrize("tokenizer", [byte_level, metaspace])
@given(data=st.data())
def test_any_tokens_add_up_to_what_decoding_them_at_once_gives(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer().get_vocab_size() - 1), max_size=40))
    assert "".join(stream(tokenizer(), ids)) == tokenizer().decode(ids)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_text_comes_as_soon_as_it_is_certain(tokenizer):
    chunks = stream(tokenizer(), tokenizer().encode("the cat in the hat").ids)
    assert chunks[0] == "the"
    assert chunks[-1] == ""
    assert max(len(chunk) for chunk in chunks) <= 4


def test_an_emoji_comes_whole_with_its_last_token():
    ids = byte_level().encode("a🤔b").ids
    assert len(ids) > 4
    assert [chunk for chunk in stream(byte_level(), ids) if chunk] == ["a", "🤔", "b"]


def test_a_text_that_ends_inside_a_character_shows_that_at_the_end_only():
    ids = byte_level().encode("a🤔").ids[:-1]
    chunks = stream(byte_level(), ids)
    assert chunks[0] == "a"
    assert chunks[-1] == REPLACEMENT
    assert not any(chunks[1:-1])


def test_special_tokens_are_not_shown_and_do_not_break_a_character():
    ids = byte_level().encode("x🤔y").ids
    assert "".join(stream(byte_level(), [0, *ids[:2], 0, *ids[2:], 0])) == "x🤔y"


def test_after_a_flush_a_new_text_begins():
    detokenizer = Detokenizer(metaspace())
    ids = metaspace().encode("the in").ids
    first = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert first == "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "the in"


def first_stop(whole: str, stops: list[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that a reader of one character after another would find first."""
    for end in range(1, len(whole) + 1):
        complete = [end - len(stop) for stop in stops if whole[:end].endswith(stop)]
        if complete:
            return min(complete), end
    return None


@pytest.mark.parametrize("include", [False, True])
@given(
    pieces=st.lists(st.text("abé🤔", max_size=4), max_size=12),
    stops=st.lists(st.text("abé🤔", min_size=1, max_size=4), max_size=3),
)
@example(pieces=["abc"], stops=["abc", "b"])  # "b" is complete first
@example(pieces=["aab"], stops=["ab"])
def test_stop_strings_cut_where_a_reader_of_single_characters_finds_the_first(include, pieces, stops):
    finder = StopStrings(stops, include=include)
    shown, whole, cut = "", "", None
    for piece in pieces:
        shown += finder.push(piece)
        whole += piece
        place = first_stop(whole, stops)
        cut = place and place[include]
        assert whole[:cut].startswith(shown)
        assert finder.found == (place is not None)
        if place is None:  # held back: nothing but what may become a stop string
            held = whole[len(shown) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert shown + finder.flush() == whole[:cut]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(deadline=None)  # the first example loads the tokenizer
@given(data=st.data())
def test_stop_strings_are_found_across_the_borders_of_tokens(tokenizer, data):
    """A stop string cut out of the text itself: in the middle of tokens, of emoji sequences, of byte fallbacks."""
    ids = tokenizer().encode(data.draw(text_of_users.filter(bool))).ids
    whole = tokenizer().decode(ids)
    if not whole:
        return
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 8))]
    detokenizer, finder = Detokenizer(tokenizer()), StopStrings([stop])
    shown = [finder.push(detokenizer.push(token)) for token in ids]
    shown += [finder.push(detokenizer.flush()), finder.flush()]
    assert finder.found
    assert "".join(shown) == whole[: whole.find(stop)]


@given(
    pieces=st.lists(st.tuples(st.text("ab", max_size=3), st.booleans()), max_size=12),
    stop=st.text("ab", min_size=1, max_size=4),
)
def test_a_piece_that_may_not_stop_is_text_whatever_it_completes(pieces, stop):
    finder, shown, whole, cut = StopStrings([stop]), "", "", None
    for piece, may_stop in pieces:
        before = len(whole)
        shown += finder.push(piece, may_stop=may_stop)
        whole += piece
        # An occurrence counts if it ends in a piece that may stop, and nothing of it was certain to be text before.
        if cut is None and may_stop:
            cut = next((e - len(stop) for e in range(before + 1, len(whole) + 1) if whole[:e].endswith(stop)), None)
        assert finder.found == (cut is not None)
        assert whole[:cut].startswith(shown)
    assert shown + finder.flush() == whole[:cut]


def test_stop_strings_take_time_for_new_text_alone():
    """Ten times the text takes about ten times as long, not a hundred times."""

    def seconds(pieces: int) -> float:
        finder = StopStrings(["\n\nUser:", "x" * 30, "</answer>"])
        start = time.thread_time()
        for _ in range(pieces):
            finder.push("so \n\nUse")
        return time.thread_time() - start

    seconds(100)
    assert seconds(40_000) < 40 * max(min(seconds(4000) for _ in range(3)), 1e-4)


def test_a_stop_string_across_pieces_is_never_shown():
    finder = StopStrings(["\nUser:"])
    assert [finder.push(piece) for piece in ("Fine.", "\n", "Us", "ually \nUse", "r: more")] == [
        "Fine.",
        "",
        "",
        "\nUsually ",
        "",
    ]
    assert finder.found
    assert finder.push("never") == ""


def test_special_tokens_have_text_only_where_it_is_asked_for() -> None:
    tokenizer = byte_level()
    shown, hidden = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    ids = [shown, *tokenizer.encode("grün 😀").ids, hidden, shown, *tokenizer.encode("x").ids]
    detokenizer = Detokenizer(tokenizer, {shown})
    pieces = [*(detokenizer.push(token) for token in ids), detokenizer.flush()]
    assert pieces[0] == "<|im_start|>"
    assert "".join(pieces) == "<|im_start|>grün 😀<|im_start|>x"
    assert "".join(stream(tokenizer, ids)) == "grün 😀x"
