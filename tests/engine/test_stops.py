"""When a request ends: token ids, lengths, and stop strings against a brute-force search."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import SamplingParams
from labkit.scheduling.request import Request
from labkit.scheduling.stops import StopStrings, ending_token_ids, finish_reason

EOS = (1, 106)


def request(output, prompt_len=4, **params):
    return Request("r", [7] * prompt_len, SamplingParams(**params), EOS, output_token_ids=output)


# (name, output so far with the new token last, parameters, expected)
RULES = [
    ("plain token goes on", [5], {}, None),
    ("c50 first eos of the set", [5, 1], {}, "stop"),
    ("c50 second eos of the set", [5, 106], {}, "stop"),
    ("stop id", [5, 9], {"stop_token_ids": (8, 9)}, "stop"),
    ("an earlier eos is not looked at", [1, 5], {}, None),
    ("c50 ignore_eos passes over both", [106], {"ignore_eos": True}, None),
    ("c50 ignore_eos passes over both (first)", [1], {"ignore_eos": True}, None),
    ("ignore_eos keeps stop ids", [9], {"ignore_eos": True, "stop_token_ids": (9,)}, "stop"),
    ("a stop id that is an eos stops under ignore_eos", [106], {"ignore_eos": True, "stop_token_ids": (106,)}, "stop"),
    ("c50 eos before min_tokens", [5, 106], {"min_tokens": 3}, None),
    ("stop id before min_tokens", [5, 9], {"min_tokens": 3, "stop_token_ids": (9,)}, None),
    ("eos at min_tokens", [5, 5, 106], {"min_tokens": 3}, "stop"),
    ("eos after min_tokens", [5, 5, 5, 1], {"min_tokens": 3}, "stop"),
    ("one short of max_tokens", [5] * 15, {"max_tokens": 16}, None),
    ("max_tokens", [5] * 16, {"max_tokens": 16}, "length"),
    ("c50 eos exactly at max_tokens", [5] * 15 + [106], {"max_tokens": 16}, "stop"),
    ("ignored eos exactly at max_tokens", [5] * 15 + [106], {"max_tokens": 16, "ignore_eos": True}, "length"),
    ("c50 ignore_eos runs to max_tokens", [106] * 16, {"max_tokens": 16, "ignore_eos": True}, "length"),
    ("min_tokens = max_tokens", [106] * 4, {"max_tokens": 4, "min_tokens": 4, "ignore_eos": True}, "length"),
    ("one short of max_model_len", [5] * 59, {"max_tokens": 100}, None),
    ("max_model_len", [5] * 60, {"max_tokens": 100}, "length"),
    ("max_model_len ends a request that owes min_tokens", [5] * 60, {"max_tokens": 100, "min_tokens": 80}, "length"),
    ("eos exactly at max_model_len", [5] * 59 + [1], {"max_tokens": 100}, "stop"),
]


@pytest.mark.parametrize(("output", "params", "expected"), [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_finish_reason(output, params, expected):
    assert finish_reason(request(output, **params), output[-1], max_model_len=64) == expected


def test_c45_a_prompt_one_short_of_the_model_length_gives_exactly_one_token():
    assert finish_reason(request([5], prompt_len=63, max_tokens=10), 5, max_model_len=64) == "length"
    assert finish_reason(request([5], prompt_len=62, max_tokens=10), 5, max_model_len=64) is None


def test_c50_ending_ids_are_the_union_of_all_sets():
    assert ending_token_ids(request([], stop_token_ids=(9, 1))) == {1, 106, 9}


def first_completed_match(text: str, stops: list[str], allowed_from: int = 0) -> tuple[int, int] | None:
    """Independent reference: try every end, then every stop string, longest first."""
    for end in range(allowed_from + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), end
    return None


def held_back(text: str, stops: list[str]) -> int:
    return max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)


PIECES = st.lists(st.text(alphabet="abc", max_size=5), max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(PIECES, STOPS)
def test_stop_strings_against_brute_force(pieces, stops):
    matcher, read = StopStrings(stops), ""
    expected = first_completed_match("".join(pieces), stops)
    for piece in pieces:
        found = matcher.feed(piece)
        read += piece
        if found:
            assert found == expected and found.end <= len(read)
            return
        assert matcher.num_held == held_back(read, stops)
    assert expected is None


@given(PIECES, PIECES, STOPS)
def test_matches_completed_while_stopping_is_forbidden_are_passed_over(early, late, stops):
    matcher, before = StopStrings(stops), "".join(early)
    assert all(matcher.feed(piece, may_stop=False) is None for piece in early)
    found = next(filter(None, (matcher.feed(piece) for piece in late)), None)
    assert found == first_completed_match(before + "".join(late), stops, allowed_from=len(before))


def test_a_match_may_begin_inside_one_that_was_passed_over():
    matcher = StopStrings(["aba"])
    assert matcher.feed("aba", may_stop=False) is None
    assert matcher.feed("ba") == (2, 5)


@pytest.mark.parametrize("pieces", [["abcd"], ["a", "b", "c", "d"], ["ab", "cd"], ["abc", "d"]])
def test_the_match_does_not_depend_on_where_the_text_was_cut(pieces):
    matcher = StopStrings(["abcd", "bc"])
    found = [m for p in pieces if (m := matcher.feed(p))]
    assert found[0] == (1, 3)


def test_the_longest_of_two_matches_with_the_same_end_is_cut():
    assert StopStrings(["b", "ab"]).feed("xab") == (1, 3)


def test_without_stop_strings_nothing_is_held():
    matcher = StopStrings([])
    assert matcher.feed("anything") is None and matcher.num_held == 0


def test_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; import labkit.scheduling.stops"
    subprocess.run([sys.executable, "-c", code], check=True)
