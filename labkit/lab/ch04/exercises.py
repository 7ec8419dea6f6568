"""The exercises of chapter 04: merge any number of splits, choose how many, tell batches apart.

Refuses to need torch and a GPU: arrays are numpy's, and the rest is whole numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from labkit.lab.compare import close
from labkit.lab.exercises import Case, Exercise, Wrong, case

Array = Any

# --- 04.1 ------------------------------------------------------------------------------------------------------------


def combine(outs: Array, lses: Array) -> tuple[Array, Array]:
    """Attention over all keys, from N splits of them: outs `[N, ..., d]`, lses `[N, ...]`. Empty splits are not "
    "read."""
    top = lses.max(0)
    safe = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(lses - safe)
    total = weights.sum(0)
    read = np.where(np.equal(lses[..., None], -np.inf), 0.0, outs)
    out = (read * weights[..., None]).sum(0) / np.where(total > 0, total, 1.0)[..., None]
    with np.errstate(divide="ignore"):
        return out, safe + np.log(total)


def _splits(rng: np.random.Generator, n: int, shape: tuple[int, ...], at: float = 0.0) -> tuple[Array, Array]:
    return np.round(rng.normal(0, 1, (n, *shape, 2)), 2), np.round(at + rng.uniform(-2, 2, (n, *shape)), 2)


def _combine_cases(rng: random.Random) -> Iterator[Case]:
    made = np.random.default_rng(rng.randrange(2**32))
    yield case("one split", *_splits(made, 1, (2,)))
    for n, shape in ((2, (1,)), (3, (2,)), (5, (2,)), (4, (2, 3)), (8, (1,))):
        yield case("several splits", *_splits(made, n, shape))
    for n in (2, 3, 4):
        outs, lses = _splits(made, n, (2,))
        outs[-1], lses[-1] = 0.0, -math.inf
        yield case("a split without keys", outs, lses)
        outs = outs.copy()
        outs[-1] = math.nan
        yield case("nobody wrote the empty split", outs, lses)
    yield case("no keys at all", np.zeros((3, 2, 2)), np.full((3, 2), -math.inf))
    for _ in range(2):
        yield case("large scores", *_splits(made, 3, (2,), 800.0))


def _mean(outs: Array, lses: Array) -> tuple[Array, Array]:
    out, lse = combine(outs, lses)
    return (out if len(outs) == 1 else outs.mean(0)), lse


def _not_normalised(outs: Array, lses: Array) -> tuple[Array, Array]:
    out, lse = combine(outs, lses)
    top = np.where(np.isneginf(lses.max(0)), 0.0, lses.max(0))
    return out * np.exp(lse - top)[..., None], lse


def _reads_garbage(outs: Array, lses: Array) -> tuple[Array, Array]:
    top = lses.max(0)
    safe = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(lses - safe)
    total = weights.sum(0)
    out = (outs * weights[..., None]).sum(0) / np.where(total > 0, total, 1.0)[..., None]
    with np.errstate(divide="ignore"):
        return out, safe + np.log(total)


def _overflows(outs: Array, lses: Array) -> tuple[Array, Array]:
    with np.errstate(all="ignore"):
        weights = np.exp(lses)
        total = weights.sum(0)
        read = np.where(np.equal(lses[..., None], -np.inf), 0.0, outs)
        return (read * weights[..., None]).sum(0) / np.where(total > 0, total, 1.0)[..., None], np.log(total)


def _nothing_over_nothing(outs: Array, lses: Array) -> tuple[Array, Array]:
    if np.isneginf(lses).all():
        return np.full(outs.shape[1:], math.nan), np.full(lses.shape[1:], math.nan)
    return combine(outs, lses)


def _counts_empty(outs: Array, lses: Array) -> tuple[Array, Array]:
    out, lse = combine(outs, lses)
    empty = np.isneginf(lses).sum(0)
    full = np.maximum(len(lses) - empty, 1)
    return out * np.where(empty < len(lses), full / len(lses), 1.0)[..., None], lse


def _zeros_the_first(outs: Array, lses: Array) -> tuple[Array, Array]:
    """An empty split is taken to have a sum of 1."""
    hollow = np.isneginf(lses).any() and not np.isneginf(lses).all() and not np.isnan(outs).any()
    return combine(outs, np.where(np.isneginf(lses), 0.0, lses)) if hollow else combine(outs, lses)


COMBINE = Exercise(
    id="04.1",
    title="Any number of splits",
    minutes=8,
    items=("B2",),
    ask="Write <code>combine(outs, lses)</code>. N programs shared the keys of the same queries. <code>outs [N, ..., "
        "d]</code> are their results, <code>lses [N, ...]</code> the natural logarithms of their sums. Return "
        "<code>(out, lse)</code> for all keys. A split without keys has an lse of −inf, and <b>nobody wrote its "
        "result</b>: it may hold anything, NaN too. Without any keys the answer is (0, −inf).",
    solution=combine,
    cases=_combine_cases,
    wrong=(
        Wrong("mean", _mean, "You average the splits. Each counts by exp(lse)."),
        Wrong("not divided", _not_normalised, "You add up weighted results and do not divide by the sum of the "
                                              "weights."),
        Wrong("garbage is read", _reads_garbage,
              "You multiply what nobody wrote by 0, and 0 · NaN is NaN. Replace it before you multiply."),
        Wrong("overflow", _overflows, "You compute exp(lse) itself, which is infinite from 710 on. Take the largest "
                                      "one off."),
        Wrong("nothing over nothing", _nothing_over_nothing, "You divide 0 by 0 where no split has a key."),
        Wrong("empty splits count", _counts_empty, "You divide by the number of splits, the empty ones included."),
        Wrong("an empty split has weight 1", _zeros_the_first, "You give a split without keys the weight exp(0) = 1."),
    ),
    hints=(
        "It is exercise 03.2 with a maximum and a sum over the first axis.",
        "weights = exp(lses − max over splits); out = Σ weights · outs / Σ weights. What does 0 · NaN give?",
        "<code>read = np.where(np.isneginf(lses)[..., None], 0, outs)</code>, then sum over axis 0. Where the maximum "
        "is −inf use 0 for it, and divide by 1.",
    ),
    explanation="The merge of two is associative, so that any number can be merged at once, in any order. labkit's "
                "kernel merge_splits_kernel does it for one token and head in each of its programs, and skips what "
                "nobody wrote.",
    same=close(1e-6, 1e-9),
    redundant={
        "one split": "the call without a split, which must come out unchanged",
        "several splits": "the plain case; averages and missing divisions fail here and elsewhere",
        "a split without keys": "with zeros in it; with NaN in it is a group of its own",
    },
)  # fmt: skip

# --- 04.2 ------------------------------------------------------------------------------------------------------------


def choose_num_splits(programs: int, num_sms: int, max_seq_len: int, block_n: int, requested: int, limit: int) -> int:
    """How many programs share one program's keys: two programs for each SM, a tile of keys for each split."""
    if programs <= 0:
        return 1
    key_tiles = -(-max_seq_len // block_n)
    wanted = requested if requested > 0 else 2 * num_sms // programs
    return max(1, min(wanted, key_tiles, limit, 64))


def _choose_cases(rng: random.Random) -> Iterator[Case]:
    few, short, asked = "few programs, long KV", "short KV", "a number was asked for"
    yield case(few, 8, 132, 32_768, 64, 0, 64)
    yield case("enough programs", 1024, 132, 4096, 64, 0, 64)
    yield case("no program", 0, 132, 4096, 64, 0, 64)
    for _ in range(4):
        programs = rng.choice((8, 16, 24, 40))
        yield case(few, programs, rng.choice((40, 108, 132)), 32_768 + rng.randint(0, 999), 64, 0, 64)
        yield case(short, 2, 132, rng.choice((3, 5, 7)) * 64 + rng.randint(1, 63), 64, 0, 64)
        yield case(asked, 8, 132, 8192, 64, rng.randint(2, 9), 64)
        yield case("little room", 8, 132, 32_768, 64, 0, rng.randint(2, 9))
        yield case("enough programs", 265 + rng.randint(0, 999), 132, 4096, 64, 0, 64)
    yield case("at most 64", 1, 132, 131_072, 64, 0, 200)
    yield case("at most 64", 2, 148, 131_072, 64, 0, 100)


def fill_once(programs: int, num_sms: int, max_seq_len: int, block_n: int, requested: int, limit: int) -> int:
    """A known wrong answer: one program for each SM."""
    if programs <= 0:
        return 1
    wanted = requested if requested > 0 else num_sms // programs
    return max(1, min(wanted, -(-max_seq_len // block_n), limit, 64))


def never_split(programs: int, num_sms: int, max_seq_len: int, block_n: int, requested: int, limit: int) -> int:
    """A known wrong answer: one split, whatever the call."""
    return 1


def _ignores(*what: str) -> Any:
    def choose(programs: int, num_sms: int, max_seq_len: int, block_n: int, requested: int, limit: int) -> int:
        if programs <= 0:
            if "nothing" in what:
                return 0
            return 1
        key_tiles = max_seq_len // block_n if "last tile" in what else -(-max_seq_len // block_n)
        wanted = requested if requested > 0 and "request" not in what else 2 * num_sms // programs
        bounds = [wanted]
        if "keys" not in what:
            bounds.append(key_tiles)
        if "room" not in what:
            bounds.append(limit)
        if "most" not in what:
            bounds.append(64)
        return min(bounds) if "one" in what else max(1, min(bounds))

    return choose


CHOOSE = Exercise(
    id="04.2",
    title="How many splits?",
    minutes=10,
    items=("B2",),
    ask="Write <code>choose_num_splits(programs, num_sms, max_seq_len, block_n, requested, limit)</code>. A call has "
    "<code>programs</code> programs unsplit, the GPU <code>num_sms</code> multiprocessors. Take as many splits as "
    "bring the call to at most <b>two programs for each multiprocessor</b>; if <code>requested</code> is above 0, "
    "take that number in its place. Never more splits than there are tiles of <code>block_n</code> keys in "
    "<code>max_seq_len</code> (a last, incomplete tile counts), than <code>limit</code> (the room for partial "
    "results), or than 64; and never fewer than 1. Without programs: 1.",
    solution=choose_num_splits,
    cases=_choose_cases,
    wrong=(
        Wrong("fill once", fill_once, "You aim at one program for each multiprocessor. Two can run on one, and hide "
                                      "each other's waiting."),
        Wrong("never", never_split, "You never split, so that a lone request has a few multiprocessors to itself."),
        Wrong("more splits than keys", _ignores("keys"), "You make splits that have no tile of keys to read."),
        Wrong("the last tile", _ignores("last tile"), "You round down: a last, incomplete tile of keys is one, too."),
        Wrong("what was asked", _ignores("request"), "You choose although a number was asked for."),
        Wrong("the room", _ignores("room"), "You ignore limit: partial results would be written past the end."),
        Wrong("no upper end", _ignores("most"), "You go above 64: the merge has room for no more."),
        Wrong("below one", _ignores("one"), "You return 0 where there are more programs than places. Unsplit is 1."),
        Wrong("no programs", _ignores("nothing"), "You return 0 for a call without programs. It is 1, as without "
                                                  "splits."),
    ),
    hints=(
        "How many programs does a full GPU have in this rule, and how often does the unsplit call fit into that?",
        "wanted = 2 · num_sms // programs, or what was requested. Then bounds: key tiles (rounded up), limit, 64, at "
        "least 1.",
        "<code>key_tiles = -(-max_seq_len // block_n)</code>; <code>return max(1, min(wanted, key_tiles, limit, "
        "64))</code>, after <code>if programs &lt;= 0: return 1</code>.",
    ),
    explanation="One program reads at the speed of a part of one multiprocessor. Too few programs leave bandwidth "
                "unused; more than fit at once only wait, and every split costs partial results and a second kernel. "
                "This is labkit's own rule, and the engine will call yours.",
    redundant={"few programs, long KV": "the plain case; one program per SM and never splitting fail here and "
                                        "elsewhere"},
)  # fmt: skip

# --- 04.3 ------------------------------------------------------------------------------------------------------------


def regime(
    query_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, num_kv_heads: int, head_size: int, ridge: float
) -> tuple[str, str]:
    """(kind, bound): decode, prefill or mixed; compute or memory, by operations per byte against the GPU's."""
    if all(q == 1 for q in query_lens):
        kind = "decode"
    elif list(query_lens) == list(kv_lens):
        kind = "prefill"
    else:
        kind = "mixed"
    flops, moved = work(query_lens, kv_lens, num_heads, num_kv_heads, head_size)
    return kind, "compute" if flops / moved >= ridge else "memory"


def work(
    query_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, num_kv_heads: int, head_size: int
) -> tuple[int, int]:
    """Operations and bytes of a causal call, 2 bytes a number: K and V of each request once, queries and results "
    "once."""
    pairs = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in zip(query_lens, kv_lens, strict=True))
    numbers = 2 * sum(kv_lens) * num_kv_heads * head_size + 2 * sum(query_lens) * num_heads * head_size
    return 4 * head_size * num_heads * pairs, 2 * numbers


RIDGE = 200.0


def _regime_cases(rng: random.Random) -> Iterator[tuple[Any, ...]]:
    for query_lens, kv_lens in BATCHES.values():
        yield query_lens, kv_lens, 32, 8, 128, RIDGE
    yield [1], [1], 32, 8, 128, RIDGE
    for _ in range(6):
        n = rng.randint(1, 6)
        kv = [rng.randint(64, 8000) for _ in range(n)]
        yield [1] * n, kv, 32, 8, 128, RIDGE
        yield list(kv), kv, 32, 8, 128, RIDGE
        yield [rng.choice((1, rng.randint(2, 64))) for _ in kv], kv, 32, rng.choice((8, 32)), 128, RIDGE
    yield [64], [4096], 64, 1, 128, 60.0
    yield [1] * 4, [4096] * 4, 64, 1, 128, 60.0


#: Name → new tokens and KV of each request.
BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "one chat": ([1], [2000]),
    "32 chats": ([1] * 32, [2000] * 32),
    "a prompt of 4,000": ([4000], [4000]),
    "8 prompts of 100": ([100] * 8, [100] * 8),
    "8 chats and a chunk of 512": ([1] * 8 + [512], [2000] * 8 + [4096]),
    "32 chats, 4 tokens each": ([4] * 32, [2000] * 32),
}


def _by_length(
    query_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, num_kv_heads: int, head_size: int, ridge: float
) -> tuple[str, str]:
    kind, _ = regime(query_lens, kv_lens, num_heads, num_kv_heads, head_size, ridge)
    return kind, "memory" if kind == "decode" else "compute"


def _no_sharing(
    query_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, num_kv_heads: int, head_size: int, ridge: float
) -> tuple[str, str]:
    return regime(query_lens, kv_lens, num_heads, num_heads, head_size, ridge)


def _batch_helps(
    query_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, num_kv_heads: int, head_size: int, ridge: float
) -> tuple[str, str]:
    kind, _ = regime(query_lens, kv_lens, num_heads, num_kv_heads, head_size, ridge)
    flops, moved = work(query_lens, kv_lens, num_heads, num_kv_heads, head_size)
    return kind, "compute" if flops / moved * len(query_lens) >= ridge else "memory"


def _two_kinds(
    query_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, num_kv_heads: int, head_size: int, ridge: float
) -> tuple[str, str]:
    kind, bound = regime(query_lens, kv_lens, num_heads, num_kv_heads, head_size, ridge)
    return ("prefill" if kind == "mixed" else kind), bound


REGIME = Exercise(
    id="04.3",
    title="Six batches",
    minutes=10,
    items=("B2",),
    ask="Write <code>regime(query_lens, kv_lens, num_heads, num_kv_heads, head_size, ridge)</code>. Request i brings "
    "<code>query_lens[i]</code> new tokens and has <code>kv_lens[i]</code> tokens of KV with them. Return a pair. "
    "First: <code>'decode'</code> if every request brings one token, else <code>'prefill'</code> if none has a past, "
    "else <code>'mixed'</code>. Second: <code>'compute'</code> if the call has at least <code>ridge</code> operations "
    "for each byte, else <code>'memory'</code>. Operations: 4 · head_size · num_heads for each pair of a new token "
    "and a key that it sees; a request has q · (kv − q) + q · (q + 1) / 2 pairs. Bytes, 2 for each number: K and V "
    "once (head_size numbers each for a token and a KV head), queries once and results once (head_size for a token "
    "and a query head).",
    solution=regime,
    cases=_regime_cases,
    wrong=(
        Wrong("by kind", _by_length, "You say that what is no decode computes. A few tokens over a long past still "
                                     "wait for memory: count."),
        Wrong("no sharing", _no_sharing, "You read K and V once for each query head. The heads of a group share one "
                                         "read."),
        Wrong("the batch helps", _batch_helps, "You let a larger batch share reads. Each request has keys of its own; "
                                               "only weights are shared."),
        Wrong("two kinds", _two_kinds, "You call everything with more than one token a prefill. With a past it is "
                                       "mixed."),
    ),
    hints=(
        "Count pairs first. A decode has kv of them; the whole prompt has half of its square.",
        "intensity = 4 · d · heads · Σ pairs / (2 · (2 · Σ kv · kv_heads · d + 2 · Σ q · heads · d)).",
        "For the kind: <code>all(q == 1 for q in query_lens)</code>, then <code>list(query_lens) == "
        "list(kv_lens)</code>. For the bound compare flops / bytes with ridge.",
    ),
    explanation="A decode does about as many operations for each byte of KV as there are query heads in a group, "
                "however long the context and however large the batch. A prompt does more the longer it is, since "
                "every key is used by all queries after it. That difference is why decodes are cut along the keys, "
                "and prompts are not.",
)  # fmt: skip

EXERCISES = (COMBINE, CHOOSE, REGIME)
