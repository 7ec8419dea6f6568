"""Streaming text equals the decoding of the whole output, whatever the cut. References: bytes.decode, str.find."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from labkit.config import SamplingParams
from labkit.engine.detokenizer import Detokenizer
from labkit.models.tokenizer import ByteTokenizer

CHILI = "\U0001f336"  # four bytes in UTF-8
SPECIAL = b""


class Pieces:
    """A tokenizer whose token i is the i-th of the given byte strings; counts how often each is asked for."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.asked = pieces, [0] * len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        self.asked[token_id] += 1
        return self.pieces[token_id]


def stream(pieces, final=True, prompt=(), **params):
    """(deltas, detokenizer) after pushing the pieces one by one, the last one as final."""
    detokenizer = Detokenizer(Pieces(*pieces), prompt, SamplingParams(max_tokens=1000, **params))
    deltas = [detokenizer.push([i], final=final and i == len(pieces) - 1) for i in range(len(pieces))]
    return deltas, detokenizer


def cut(data: bytes, *sizes: int) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces, data = [*pieces, data[:size]], data[size:]
    assert not data
    return pieces


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 2), (3, 1), (1, 1, 2), (2, 1, 1), (1, 1, 1, 1)])
def test_c51_a_split_character_appears_whole_with_its_last_byte(sizes):
    pieces = [b"a", *cut(CHILI.encode(), *sizes), b"b"]
    deltas, detokenizer = stream(pieces)
    assert deltas == ["a", *[""] * (len(sizes) - 1), CHILI, "b"]
    assert detokenizer.text == f"a{CHILI}b"


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_c51_finishing_inside_a_character_gives_one_replacement_character(num_bytes):
    tail = CHILI.encode()[:num_bytes]
    deltas, _ = stream([b"a", tail])
    assert deltas == ["a", "\ufffd"] and "".join(deltas) == (b"a" + tail).decode(errors="replace")


def test_c51_what_is_held_back_comes_out_with_a_final_call_without_tokens():
    deltas, detokenizer = stream([b"a", b"\xf0\x9f", b"b", b"\xf0\x9f"], final=False)
    assert deltas == ["a", "", "\ufffdb", ""]
    assert detokenizer.push([], final=True) == "\ufffd"


def test_c51_a_prompt_that_ends_inside_a_character_is_neither_repeated_nor_completed():
    head, tail = cut(CHILI.encode(), 2, 2)
    detokenizer = Detokenizer(Pieces(b"prompt ", head, tail, b"x"), [0, 1], SamplingParams())
    deltas = [detokenizer.push([2]), detokenizer.push([3], final=True)]
    assert "".join(deltas) == (tail + b"x").decode(errors="replace") == "\ufffd\ufffdx"


def test_c51_a_replacement_character_that_the_model_wrote_is_shown_at_once():
    pieces = [b"a", *["\ufffd".encode()] * 50, b"b"]
    deltas, detokenizer = stream(pieces)
    assert deltas == ["a", *["\ufffd"] * 50, "b"]
    assert detokenizer._tokenizer.asked == [1] * 52


def test_every_token_is_decoded_once_even_when_nothing_can_be_shown():
    tokenizer = Pieces(b"a" * 100)
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=("a" * 30_000 + "b",)))
    assert all(detokenizer.push([0]) == "" for _ in range(300))
    assert tokenizer.asked == [300]
    assert detokenizer.push([], final=True) == "a" * 30_000


def test_special_tokens_are_skipped_even_inside_a_character():
    head, tail = cut(CHILI.encode(), 2, 2)
    deltas, _ = stream([b"a", head, SPECIAL, tail, SPECIAL])
    assert deltas == ["a", "", "", CHILI, ""]


def test_a_character_split_by_another_is_shown_with_what_follows_it():
    deltas, _ = stream([b"\xe2\x82", b"x", "€".encode()])
    assert deltas == ["", "\ufffdx", "€"]


STOP_TABLE = [
    ("in one token", [b"one STOP two"], ("STOP",), ["one "]),
    ("over three tokens", [b"one S", b"TO", b"P two", b"more"], ("STOP",), ["one ", "", "", ""]),
    ("a beginning that does not go on", [b"S", b"TO", b"x"], ("STOP",), ["", "", "STOx"]),
    ("a beginning at the very end", [b"one ST"], ("STOP",), ["one ST"]),
    ("only what may be a beginning is held", [b"one ST", b"S", b"x"], ("STOP",), ["one ", "ST", "Sx"]),
    ("starting over inside a beginning", [b"aab", b"aac", b"x"], ("aabaac",), ["", "", ""]),
    ("failing back to a shorter beginning", [b"aaa", b"b"], ("aab",), ["a", ""]),
    ("first of two strings", [b"x", b"2 1"], ("1", "2"), ["x", ""]),
    ("completed first wins over started first", [b"ab", b"cd"], ("abcd", "bc"), ["", "a"]),
    ("the same in one token", [b"abcd"], ("abcd", "bc"), ["a"]),
    ("across a split character", [b"a\xf0\x9f", b"\x8c\xb6b"], (f"{CHILI}b",), ["a", ""]),
    ("a stop string of a split character", [b"a\xf0\x9f", b"\x8c\xb6b"], (CHILI,), ["a", ""]),
    ("a replacement character flushed at the end", [b"a\xf0"], ("\ufffd",), ["a"]),
    ("no stop string", [b"one", b" two"], (), ["one", " two"]),
]


@pytest.mark.parametrize(("pieces", "stop", "expected"), [r[1:] for r in STOP_TABLE], ids=[r[0] for r in STOP_TABLE])
def test_stop_strings(pieces, stop, expected):
    deltas, detokenizer = stream(pieces, stop=stop)
    assert deltas == expected
    assert detokenizer.text == "".join(expected)


def test_the_token_that_completed_a_stop_string_is_known_and_ends_the_text():
    detokenizer = Detokenizer(Pieces(b"a", b"ST", b"OP", b"more"), [], SamplingParams(stop=("STOP",)))
    assert detokenizer.push([0, 1]) == "a" and not detokenizer.found_stop
    assert detokenizer.push([2, 3], final=True) == ""
    assert (detokenizer.found_stop, detokenizer.num_tokens, detokenizer.text) == (True, 3, "a")
    assert detokenizer.push([3], final=True) == "" and detokenizer.text == "a" and detokenizer.num_tokens == 3


def test_a_final_call_closes_the_text():
    detokenizer = Detokenizer(Pieces(b"a"), [], SamplingParams())
    assert detokenizer.push([0], final=True) == "a"
    assert detokenizer.push([0]) == "" and detokenizer.text == "a"


# Stop string "b" over the tokens "a", "b", "cb": (min_tokens, deltas, found).
MIN_TABLE = [
    (0, ["a", "", ""], True),
    (2, ["a", "", ""], True),
    (3, ["a", "b", "c"], True),
    (4, ["a", "b", "cb"], False),
]


@pytest.mark.parametrize(("min_tokens", "expected", "found"), MIN_TABLE)
def test_stop_strings_completed_before_min_tokens_do_not_count(min_tokens, expected, found):
    deltas, detokenizer = stream([b"a", b"b", b"cb"], stop=("b",), min_tokens=min_tokens)
    assert deltas == expected and detokenizer.found_stop is found


# Text and junk: whole characters, their halves, surrogates, overlong forms, continuation bytes without a beginning.
FRAGMENTS = [
    b"a",
    b"\xc3",
    b"\xa9",
    b"\xe2\x82",
    b"\xac",
    b"\xf0\x9f",
    b"\x8c\xb6",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\xff",
]
FRAGMENTS += [b"\xed\xa0\x80", b"\xc0\xaf", "\ufffd".encode()]
BYTES = st.one_of(
    st.binary(max_size=30),
    st.text(max_size=12).map(str.encode),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map(b"".join),
)
CUTS = st.lists(st.integers(0, 5), max_size=40)


def random_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    pieces = []
    for size in cuts:
        pieces, data = [*pieces, data[:size]], data[size:]
    return [*pieces, data]


def push_groups(detokenizer, num, group):
    """Push `num` tokens, `group` at a time; the last push is final."""
    starts = range(0, num, group)
    return [detokenizer.push(range(i, min(i + group, num)), final=i == starts[-1]) for i in starts]


@given(BYTES, CUTS, st.integers(1, 3))
@example(CHILI.encode() * 3, [1] * 12, 1)
def test_deltas_are_the_full_decoding_for_any_bytes_and_any_cut(data, cuts, group):
    pieces = random_pieces(data, cuts)
    detokenizer = Detokenizer(Pieces(*pieces), [], SamplingParams())
    deltas = push_groups(detokenizer, len(pieces), group)
    assert "".join(deltas) == detokenizer.text == data.decode("utf-8", errors="replace")


@given(
    st.text(alphabet=f"ab{CHILI}", max_size=30),
    CUTS,
    st.lists(st.text(alphabet=f"ab{CHILI}", min_size=1, max_size=5), max_size=3),
    st.integers(1, 3),
)
def test_stopped_text_is_the_full_decoding_cut_at_the_first_stop_string(text, cuts, stops, group):
    pieces = random_pieces(text.encode(), cuts)
    detokenizer = Detokenizer(Pieces(*pieces), [], SamplingParams(stop=tuple(stops)))
    deltas = push_groups(detokenizer, len(pieces), group)
    # Reference: the match with the smallest end; of those, the smallest start.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(deltas) == detokenizer.text == expected
    assert detokenizer.found_stop is bool(ends)


@given(st.text(alphabet="ab", max_size=30), CUTS, st.text(alphabet="ab", min_size=1, max_size=4), st.integers(0, 40))
def test_min_tokens_holds_for_stop_strings_of_any_cut(text, cuts, stop, min_tokens):
    pieces = random_pieces(text.encode(), cuts)
    _, detokenizer = stream(pieces, stop=(stop,), min_tokens=min_tokens)
    shielded = sum(len(p) for p in pieces[: max(min_tokens - 1, 0)])
    start = next((i for i in range(len(text)) if text.startswith(stop, i) and i + len(stop) > shielded), None)
    assert detokenizer.text == text[:start]
    assert detokenizer.found_stop is (start is not None)


@given(BYTES, CUTS)
def test_deltas_are_what_the_tokenizers_library_decodes(data, cuts):
    decoders = pytest.importorskip("tokenizers.decoders")
    # The byte-level alphabet: printable Latin-1 stands for itself, every other byte for the next character from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    pieces = random_pieces(data, cuts)
    deltas, _ = stream(pieces)
    assert "".join(deltas) == decoders.ByteLevel().decode(["".join(map(alphabet.get, p)) for p in pieces])


@given(st.lists(st.one_of(st.integers(0, 255), st.integers(256, 400)), max_size=30))
def test_deltas_are_what_the_models_tokenizer_decodes(ids):
    tokenizer = ByteTokenizer(300)  # some ids lie beyond its vocabulary, as padded embeddings have them
    detokenizer = Detokenizer(tokenizer, [], SamplingParams())
    deltas = [*(detokenizer.push([i]) for i in ids), detokenizer.push([], final=True)]
    assert "".join(deltas) == tokenizer.decode(ids)
