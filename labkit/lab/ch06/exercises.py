"""The exercises of chapter 06: offsets, slots, names of blocks, waste. Refuses to run an engine."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from labkit.lab.exercises import Case, Exercise, Wrong, case

Requests = Sequence[tuple[int, int]]

# --- 06.1 ------------------------------------------------------------------------------------------------------------


def pack(requests: Requests) -> tuple[list[int], list[int]]:
    """(query_start_loc, positions) of requests as (new tokens, tokens in the cache)."""
    query_start_loc = [0]
    positions: list[int] = []
    for new, context in requests:
        query_start_loc.append(query_start_loc[-1] + new)
        positions += range(context, context + new)
    return query_start_loc, positions


def _pack_cases(rng: random.Random) -> Iterator[Case]:
    yield case("prompts", [(3, 0)])
    yield case("prompts", [(3, 0), (2, 0)])
    for _ in range(3):
        yield case("decodes", [(1, rng.randint(5, 99)) for _ in range(rng.randint(2, 4))])
    for _ in range(3):
        mixed = [(1, rng.randint(2, 40)), (rng.randint(2, 7), 0), (rng.randint(2, 5), rng.randint(1, 9))]
        rng.shuffle(mixed)
        yield case("a chunk behind a context", mixed)
    for _ in range(2):
        yield case("a row without tokens", [(2, 0), (0, 0), (1, rng.randint(3, 9))])
    yield case("no request", [])


def _no_zero(requests: Any) -> Any:
    starts, positions = pack(requests)
    return (starts[1:], positions) if requests else (starts, positions)


def _no_total(requests: Any) -> Any:
    starts, positions = pack(requests)
    return starts[:-1] if requests else starts, positions


def _from_zero(requests: Any) -> Any:
    starts, _ = pack(requests)
    return starts, [p for new, _ in requests for p in range(new)]


def _chunk_from_zero(requests: Any) -> Any:
    starts, _ = pack(requests)
    return starts, [p for new, c in requests for p in (range(c, c + 1) if new == 1 else range(new))]


def _one_on(requests: Any) -> Any:
    starts, _ = pack(requests)
    return starts, [p + (new == 1 and c > 0 and all(n == 1 for n, _ in requests)) for new, c in requests
                    for p in range(c, c + new)]  # fmt: skip


def _empty_rows_left_out(requests: Any) -> Any:
    return pack([(new, c) for new, c in requests if new])


def _nothing(requests: Any) -> Any:
    return pack(requests) if requests else ([], [])


PACK = Exercise(
    id="06.1",
    title="One row for everybody",
    minutes=7,
    items=("B4",),
    ask="Write <code>pack(requests)</code>. <code>requests</code> is a list of pairs: new tokens of this step, tokens "
    "that are in the cache already. All new tokens are laid into one row, request after request. Return two lists: "
    "<code>query_start_loc</code>, where each request begins in that row, with the number of all tokens at its end, "
    "and <code>positions</code>, for every token its place in its own request, counted from 0. A request may have no "
    "new tokens. Without requests the lists are <code>[0]</code> and <code>[]</code>.",
    solution=pack,
    cases=_pack_cases,
    wrong=(
        Wrong("no zero", _no_zero, "Your offsets begin with the end of the first request. They are bounds: one more "
                                   "than there are requests, and the first is 0."),
        Wrong("no total", _no_total, "The last bound is missing: without the number of all tokens nobody knows where "
                                     "the last request ends."),
        Wrong("from zero", _from_zero, "You count positions from 0 for every request. A decode behind 40 tokens is at "
              "position 40; at 0 its rotary embedding would be that of the first token."),
        Wrong("chunk from zero", _chunk_from_zero, "You continue decodes behind their context, and begin chunks at 0. "
                                                   "A chunk may be a later part of a prompt, too."),
        Wrong("one on", _one_on, "Your decodes are one position too far: with 40 tokens in the cache, at 0 to 39, the "
                                 "new one is at 40."),
        Wrong("left out", _empty_rows_left_out, "You leave out a request without tokens. It has a row in every other "
              "list, so it needs its bound here: the same number twice."),
        Wrong("nothing", _nothing, "Without requests there is still one bound, 0."),
    ),
    hints=(
        "Go through the requests once, with two lists that grow.",
        "The next bound is the last one plus the new tokens. The positions of a request begin behind its context.",
        "<code>query_start_loc = [0]</code>; for each request append <code>query_start_loc[-1] + new</code> and extend "
        "positions by <code>range(context, context + new)</code>.",
    ),
    explanation="These two lists, with <code>seq_lens</code> (context + new) and the block table, are all that a "
                "kernel for variable lengths needs to tell requests apart. A decode is a request with one token: "
                "nothing here asks which kind it is.",
    redundant={"prompts": "the simplest case comes first"},
)  # fmt: skip

# --- 06.2 ------------------------------------------------------------------------------------------------------------


def slot_mapping(block_ids: Sequence[int], start: int, n: int, block_size: int) -> list[int]:
    """Where K and V of positions start … start + n − 1 are written: one slot for each."""
    slots = []
    for position in range(start, start + n):
        block = block_ids[position // block_size]
        slots.append(block * block_size + position % block_size)
    return slots


def _slot_cases(rng: random.Random) -> Iterator[Case]:
    yield case("one block from its beginning", [5], 0, 4, 16)
    yield case("one block from its beginning", [3], 0, 16, 16)
    for _ in range(3):
        start = rng.randint(1, 15)
        yield case("a chunk that begins inside of a block", [7], start, rng.randint(1, 16 - start), 16)
    for _ in range(4):
        blocks = rng.sample(range(1, 90), 5)[:4]
        blocks[1] = blocks[0] + 2
        yield case("blocks that do not lie together", blocks, 0, rng.randint(20, 60), 16)
    for size in (4, 8):
        yield case("another page size", [2], 0, size, size)
    for block in (1 << 27, (1 << 28) + 3):
        yield case("a large cache", [block], 0, 3, 16)


def _as_positions(block_ids: Any, start: int, n: int, block_size: int) -> list[int]:
    return list(range(start, start + n))


def _block_start(block_ids: Any, start: int, n: int, block_size: int) -> list[int]:
    right = slot_mapping(block_ids, start, n, block_size)
    return [slot - start % block_size for slot in right]


def _runs_on(block_ids: Any, start: int, n: int, block_size: int) -> list[int]:
    first = block_ids[start // block_size] * block_size + start % block_size
    return list(range(first, first + n))


def _sixteen(block_ids: Any, start: int, n: int, block_size: int) -> list[int]:
    return slot_mapping(block_ids, start, n, 16)


def _one_back(block_ids: Any, start: int, n: int, block_size: int) -> list[int]:
    return [block_ids[p // block_size - 1] * block_size + p % block_size for p in range(start, start + n)]


def _narrow(block_ids: Any, start: int, n: int, block_size: int) -> list[int]:
    with np.errstate(over="ignore"):
        right = [np.int32(b) * np.int32(block_size) for b in np.array(block_ids, dtype=np.int64).astype(np.int32)]
    return [int(right[p // block_size]) + p % block_size for p in range(start, start + n)]


SLOT_MAPPING = Exercise(
    id="06.2",
    title="From a position to a slot",
    minutes=8,
    items=("B4",),
    ask="Write <code>slot_mapping(block_ids, start, n, block_size)</code>: a list with the slots of positions "
    "<code>start</code> to <code>start + n - 1</code> of one request. <code>block_ids</code> are its blocks in order "
    "of position: the first holds positions 0 to <code>block_size - 1</code>, and so on. A slot is the block's number "
    "times <code>block_size</code>, plus the place inside of the block. A cache can have more slots than 32 bits "
    "count; whole numbers of Python do not mind.",
    solution=slot_mapping,
    cases=_slot_cases,
    wrong=(
        Wrong("positions", _as_positions, "You use positions as slots. Then every request writes to the same place, "
                                          "and nobody reads what they wrote."),
        Wrong("block start", _block_start, "You begin a chunk at the start of its block: it overwrites the tokens of "
                                           "the chunk before."),
        Wrong("runs on", _runs_on, "You find the first slot and count on. The next block of a request may lie "
                                   "anywhere; the slot behind the first block belongs to somebody else."),
        Wrong("sixteen", _sixteen, "You take pages of 16 whatever they are."),
        Wrong("one back", _one_back, "You look one block back. For the first block that is entry −1, which Python "
                                     "takes as the last one: no error, and the wrong page."),
        Wrong("narrow", _narrow, "You multiply in 32 bits: block 134,217,728 times 16 is 2 to the power of 31, one "
                                 "more than fits, and comes out negative."),
    ),
    hints=(
        "One position at a time: which entry of block_ids, and which place in that block?",
        "<code>position // block_size</code> is the entry, <code>position % block_size</code> the place.",
        "<code>[block_ids[p // block_size] * block_size + p % block_size for p in range(start, start + n)]</code>",
    ),
    explanation="Going token by token, and not block by block, is what lets a chunk begin in the middle of a block. "
                "The engine calls this for every chunk, and with the result as 64-bit numbers the kernel writes K and "
                "V. Rows of padding get slot −1: a kernel has to skip it, for −1 is a valid index in Python and in C "
                "alike.",
    redundant={"one block from its beginning": "the simplest case comes first"},
)  # fmt: skip

# --- 06.3 ------------------------------------------------------------------------------------------------------------


def block_hash(parent: bytes | None, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the parent's hash and the block's tokens: a name for the whole prefix up to here."""
    data = parent if parent is not None else bytes(32)
    for token in token_ids:
        data += token.to_bytes(8, "little", signed=True)
    return hashlib.sha256(data).digest()


def _hash_cases(rng: random.Random) -> Iterator[Case]:
    def tokens(n: int = 4) -> list[int]:
        return sorted(rng.randint(1, 200) for _ in range(n))

    yield case("a first block", None, [1, 2, 3, 4])
    yield case("a first block", None, tokens(16))
    for _ in range(4):
        yield case("a block behind another", rng.randbytes(32), tokens())
    yield case("tokens in another order", None, [9, 4, 7, 2])
    yield case("tokens in another order", None, [12, 3, 1, 2])
    for _ in range(2):
        yield case("token ids above 255", None, [300, 70_000, 128_255, 200_000])


def _no_parent(parent: Any, token_ids: Any) -> Any:
    return block_hash(None, token_ids)


def _unordered(parent: Any, token_ids: Any) -> Any:
    return block_hash(parent, sorted(token_ids))


def _one_byte(parent: Any, token_ids: Any) -> Any:
    return block_hash(parent, [token % 256 for token in token_ids])


def _no_zeros(parent: Any, token_ids: Any) -> Any:
    data = b"".join(token.to_bytes(8, "little", signed=True) for token in token_ids)
    return hashlib.sha256((parent or b"") + data).digest()


def _big_endian(parent: Any, token_ids: Any) -> Any:
    data = b"".join(token.to_bytes(8, "big", signed=True) for token in token_ids)
    return hashlib.sha256((parent or bytes(32)) + data).digest()


def _as_text(parent: Any, token_ids: Any) -> Any:
    return hashlib.sha256((parent or bytes(32)) + "".join(map(str, token_ids)).encode()).digest()


BLOCK_HASH = Exercise(
    id="06.3",
    title="A name for everything up to here",
    minutes=8,
    items=("B4",),
    ask="Write <code>block_hash(parent, token_ids)</code>: the SHA-256 (<code>hashlib.sha256(…).digest()</code>, 32 "
        "bytes) of the parent's hash followed by the block's tokens. <code>parent</code> is the hash of the block "
        "before, or None for a request's first block: then 32 zero bytes (<code>bytes(32)</code>) stand in its place. "
        "Each token id is written as 8 bytes, little-endian and signed: <code>token.to_bytes(8, 'little', "
        "signed=True)</code>.",
    solution=block_hash,
    cases=_hash_cases,
    wrong=(
        Wrong("no parent", _no_parent, "You leave out the parent. Then “is the” gets the same name behind every "
                                       "beginning, and a request would read K and V that were computed after other "
                                       "words."),
        Wrong("unordered", _unordered, "You forget the order of the tokens: “man bites dog” gets the name of “dog "
                                       "bites man”."),
        Wrong("one byte", _one_byte, "You keep one byte of each token: ids 300 and 44 become the same."),
        Wrong("no zeros", _no_zeros, "A first block begins with 32 zero bytes in place of the parent."),
        Wrong("big-endian", _big_endian, "You write a token's bytes from the large end; 'little' begins with the small "
                                         "one."),
        Wrong("text", _as_text, "You write tokens as text, one behind the other: 12, 3 and 1, 23 become the same."),
    ),
    hints=(
        "Bytes can be added: <code>a + b</code>. Collect everything, hash once.",
        "Begin with the parent or, where that is None, with <code>bytes(32)</code>; then eight bytes for each token.",
        "<code>data = parent if parent is not None else bytes(32)</code>; in a loop <code>data += token.to_bytes(8, "
        "'little', signed=True)</code>; at the end <code>hashlib.sha256(data).digest()</code>.",
    ),
    explanation="K and V of a token depend on all tokens before it. So two blocks may be shared only if everything up "
                "to their end is equal, and chaining the hashes makes one comparison of that. The engine compares "
                "tokens and parent as well before it shares, so that a bad hash costs hits and no correctness.",
    redundant={"a first block": "the simplest case comes first"},
)  # fmt: skip

# --- 06.4 ------------------------------------------------------------------------------------------------------------


def padded_waste(requests: Requests) -> float:
    """Per cent of the scores of a padded rectangle that nobody needs."""
    useful = sum(new * context + new * (new + 1) // 2 for new, context in requests)
    longest_new = max(new for new, _ in requests)
    longest_end = max(new + context for new, context in requests)
    return 100 * (1 - useful / (len(requests) * longest_new * longest_end))


def _waste_cases(rng: random.Random) -> Iterator[Case]:
    yield case("decodes of one length", [(1, 9)])
    yield case("decodes of one length", [(1, 40)] * 4)
    for _ in range(3):
        yield case("decodes of several lengths", [(1, 5 * i + rng.randint(1, 4)) for i in range(1, 5)])
    for _ in range(3):
        yield case("one prompt", [(rng.randint(3, 64), 0)])
    for _ in range(4):
        yield case("decodes and a prompt", [*((1, rng.randint(100, 300)) for _ in range(3)), (rng.randint(8, 32), 0)])


def _rows_only(requests: Any) -> float:
    longest = max(new for new, _ in requests)
    return 100 * (1 - sum(new for new, _ in requests) / (len(requests) * longest))


def _not_causal(requests: Any) -> float:
    useful = sum(new * (context + new) for new, context in requests)
    padded = len(requests) * max(n for n, _ in requests) * max(n + c for n, c in requests)
    return 100 * (1 - useful / padded)


def _two_longest(requests: Any) -> float:
    useful = sum(new * context + new * (new + 1) // 2 for new, context in requests)
    new, context = max(n for n, _ in requests), max(c for _, c in requests)
    return 100 * (1 - useful / (len(requests) * new * (new + context)))


def _share(requests: Any) -> float:
    return padded_waste(requests) / 100


def _without_itself(requests: Any) -> float:
    useful = sum(new * context + new * (new - 1) // 2 for new, context in requests)
    padded = len(requests) * max(n for n, _ in requests) * max(n + c for n, c in requests)
    return 100 * (1 - useful / padded)


def _own_keys(requests: Any) -> float:
    useful = sum(new * context + new * (new + 1) // 2 for new, context in requests)
    longest = max(new for new, _ in requests)
    return 100 * (1 - useful / sum(longest * (new + context) for new, context in requests))


def _decodes_fit(requests: Any) -> float:
    return 0.0 if all(new == 1 for new, _ in requests) else padded_waste(requests)


def _alone(requests: Any) -> float:
    return 0.0 if len(requests) == 1 else padded_waste(requests)


PADDED_WASTE = Exercise(
    id="06.4",
    title="What a rectangle wastes",
    minutes=7,
    items=("A4",),
    ask="Write <code>padded_waste(requests)</code>, in per cent. <code>requests</code> is a list of pairs: new tokens "
        "(1 or more), tokens in the cache. Useful are the scores that a causal mask keeps: each new token sees the "
        "whole context, all new tokens before it, and itself. Padded to a rectangle, every request is computed with "
        "the most new tokens of any request and the most keys (context + new) of any request. Return the share of the "
        "rectangle's scores that is not useful, times 100.",
    solution=padded_waste,
    cases=_waste_cases,
    wrong=(
        Wrong("rows only", _rows_only, "You count rows of queries. Keys are padded as well: a request with 17 of them "
                                       "is computed over those of the longest."),
        Wrong("not causal", _not_causal, "You count every key for every new token as useful. A prompt's first token "
                                         "sees itself alone."),
        Wrong("two longest", _two_longest, "You add the most new tokens and the longest context, of two different "
                                           "requests. The most keys are those of one request."),
        Wrong("share", _share, "You return a share between 0 and 1; per cent were asked for."),
        Wrong("without itself", _without_itself, "You leave out that each token sees itself."),
        Wrong("decodes fit", _decodes_fit, "You take decodes for a perfect rectangle. They have one query each, and as "
              "many keys as their contexts are long: the shorter ones are padded."),
        Wrong("alone", _alone, "You find no waste in a single request. Half of its square is above the diagonal, and "
                               "masked."),
        Wrong("own keys", _own_keys, "You pad the queries and leave each request its own keys. A rectangle has one "
                                     "width for all."),
    ),
    hints=(
        "Two sums: what is useful, request by request, and one product for the rectangle.",
        "Useful: <code>new * context + new * (new + 1) / 2</code>. The rectangle: number of requests × most new "
        "tokens × most keys.",
        "<code>100 * (1 - useful / (len(requests) * max(new) * max(new + context)))</code>, with the two maxima each "
        "over all requests.",
    ),
    explanation="Decodes alone make a narrow rectangle, and a prompt alone is wasted by half, by the causal mask. "
                "Both in one rectangle waste nearly everything. So a scheduler that mixes the two needs kernels that "
                "take offsets and lengths in place of a rectangle: with the one but not the other, the mix would cost "
                "more than it saves.",
    redundant={"decodes of one length": "there is nothing to waste, and only a wrong unit would show"},
)  # fmt: skip

EXERCISES = (PACK, SLOT_MAPPING, BLOCK_HASH, PADDED_WASTE)
