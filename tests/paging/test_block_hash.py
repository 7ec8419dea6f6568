"""Block hashes: canonical bytes, chained, the same in every process."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.paging.block_hash import block_hash

TOKENS = st.lists(st.integers(-(2**31), 2**40), max_size=20)


def by_hand(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(parent + b"".join(t.to_bytes(8, "little", signed=True) for t in tokens)).digest()


@given(TOKENS, TOKENS)
def test_hash_is_sha256_of_parent_and_tokens(first: list[int], second: list[int]) -> None:
    parent = block_hash(None, first)
    assert parent == by_hand(bytes(32), first)
    assert block_hash(parent, second) == by_hand(parent, second)


def test_hash_is_the_same_in_every_process() -> None:
    code = "from labkit.paging.block_hash import block_hash as h; print(h(h(None, [1, 2, 3]), [4, 5]).hex())"
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == block_hash(block_hash(None, [1, 2, 3]), [4, 5]).hex()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param([1, 2], [2, 1], id="order"),
        pytest.param([1], [1, 0], id="length"),
        pytest.param([1, 256], [257, 0], id="bytes do not run together"),
        pytest.param([-1], [2**32 - 1], id="sign"),
    ],
)
def test_different_tokens_have_different_hashes(a: list[int], b: list[int]) -> None:
    assert block_hash(None, a) != block_hash(None, b)


def test_the_same_tokens_after_another_prefix_have_another_hash() -> None:
    a, b = block_hash(None, [1, 1]), block_hash(None, [2, 2])
    assert len({block_hash(parent, [7, 7]) for parent in (None, a, b)}) == 3


def test_a_token_that_is_no_integer_is_an_error() -> None:
    with pytest.raises(struct.error):
        block_hash(None, [1.5])  # type: ignore[list-item]
