"""The exercises of chapter 03: one step of online softmax, the merge of two parts, a fair tolerance, memory by length.

Arrays are numpy's, so that the same functions go into the engine. Refuses to need torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from labkit.lab.compare import close
from labkit.lab.exercises import Case, Exercise, Wrong, case

Array = Any
State = tuple[float, float, Array]


def _generator(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.randrange(2**32))


# --- 03.1 ------------------------------------------------------------------------------------------------------------


def online_softmax(high: float, total: float, out: Array, scores: Array, values: Array) -> State:
    """One tile more: running maximum, running sum of exponentials, running sum of weighted values."""
    new = max(high, float(scores.max()))
    if new == -math.inf:
        return high, total, out
    shrink = math.exp(high - new)
    weights = np.exp(scores - new)
    return new, total * shrink + float(weights.sum()), out * shrink + weights @ values


def _tile(random_: np.random.Generator, keys: int = 4, shift: float = 0.0) -> tuple[Array, Array]:
    scores = np.round(random_.normal(shift, 1.0, keys), 2)
    return scores, np.round(random_.normal(0.0, 1.0, (keys, 3)), 2)


def _online_cases(rng: random.Random) -> Iterator[Case]:
    random_ = _generator(rng)
    nothing = (-math.inf, 0.0, np.zeros(3))
    hidden = np.full(3, -math.inf)
    for _ in range(3):
        yield case("the first tile", *nothing, *_tile(random_))
    for _ in range(4):
        before = online_softmax(*nothing, *_tile(random_))
        yield case("a larger score comes", *before, *_tile(random_, shift=4.0))
        yield case("no larger score comes", *before, *_tile(random_, shift=-5.0))
    yield case("a tile with nothing to see", *nothing, hidden, np.ones((3, 3)))
    yield case("a tile with nothing to see", *online_softmax(*nothing, *_tile(random_)), hidden, np.ones((3, 3)))
    large = np.array([900.0, 901.0])
    yield case("scores of 900", *nothing, large, np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))


def _never_rescaled(high: float, total: float, out: Array, scores: Array, values: Array) -> State:
    new = max(high, float(scores.max()))
    weights = np.exp(scores - (0.0 if new == -math.inf else new))
    return new, total + float(weights.sum()), out + weights @ values


def _only_the_sum(high: float, total: float, out: Array, scores: Array, values: Array) -> State:
    new, total_, out_ = online_softmax(high, total, out, scores, values)
    shrink = math.exp(high - new) if high > -math.inf else 0.0
    return new, total_, out_ + out * (1 - shrink)


def _maximum_of_the_tile(high: float, total: float, out: Array, scores: Array, values: Array) -> State:
    new = float(scores.max())
    if new == -math.inf:
        return high, total, out
    shrink, weights = math.exp(high - new), np.exp(scores - new)
    return new, total * shrink + float(weights.sum()), out * shrink + weights @ values


def _minus_infinity_from_itself(high: float, total: float, out: Array, scores: Array, values: Array) -> State:
    new = max(high, float(scores.max()))
    shrink = float(np.exp(np.float64(high) - new)) if new > -math.inf else math.nan
    weights = np.exp(scores - new) if new > -math.inf else np.full(len(scores), math.nan)
    return new, total * shrink + float(weights.sum()), out * shrink + weights @ values


def _normal_scores_only(high: float, total: float, out: Array, scores: Array, values: Array) -> State:
    new, total_, out_ = online_softmax(high, total, out, scores, values)
    return (new, total_, out_) if new < 700 else (new, math.inf, np.full_like(out_, math.nan))


ONLINE = Exercise(
    id="03.1",
    title="One tile more",
    minutes=8,
    items=("A3",),
    ask="Write <code>online_softmax(high, total, out, scores, values)</code> for one query. So far it has seen some "
    "keys: <code>high</code> is their largest score, <code>total</code> the sum of exp(score − high), <code>out</code> "
    "the sum of exp(score − high) · value, an array <code>[d]</code>. Now come <code>n</code> keys more: <code>scores "
    "[n]</code> and <code>values [n, d]</code>. Return the three for all keys together, <code>out</code> not divided "
    "by anything. Before the first key <code>high</code> is −inf and the others are 0. Scores of −inf are hidden keys; "
    "while nothing was visible yet, the three stay as they are.",
    solution=online_softmax,
    cases=_online_cases,
    wrong=(
        Wrong("never rescaled", _never_rescaled,
              "You change the maximum and leave what was summed relative to the old one. Both old sums have to shrink "
              "by exp(high − new)."),
        Wrong("only the sum", _only_the_sum,
              "You shrink the sum and not the output: numerator and denominator then belong to different maxima."),
        Wrong("maximum of the tile", _maximum_of_the_tile,
              "You take the maximum of this tile, not of all keys so far."),
        Wrong("inf minus inf", _minus_infinity_from_itself,
              "You compute −inf − (−inf), which is not a number. Where nothing is visible, nothing changes."),
        Wrong("no maximum taken off", _normal_scores_only,
              "You exponentiate large scores before the maximum is taken off: exp(900) is infinite."),
    ),
    hints=(
        "What do the old sums have to be multiplied by when the maximum they were taken relative to changes?",
        "new = max(high, largest new score); everything old times exp(high − new); new weights are exp(scores − new).",
        "<code>shrink = math.exp(high - new)</code>; <code>weights = np.exp(scores - new)</code>; then "
        "<code>total * shrink + weights.sum()</code> and <code>out * shrink + weights @ values</code>. First ask "
        "whether new is −inf.",
    ),
    explanation="exp(s − new) = exp(s − high) · exp(high − new): one factor moves everything old to the new maximum. "
    "So no score has to be kept, and softmax needs one pass. This is the step inside every kernel named Flash.",
    same=close(1e-6, 1e-9),
    redundant={"the first tile": "the simplest case, and the one where exp(−inf − new) = 0 does the right thing by "
        "itself"},
)  # fmt: skip

# --- 03.2 ------------------------------------------------------------------------------------------------------------


def merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Attention over two sets of keys, from attention over each: weights are exp(lse), relative to the larger."""
    top = np.maximum(lse_a, lse_b)
    safe = np.where(np.isneginf(top), 0.0, top)  # both empty: nothing may become inf − inf
    a, b = np.exp(lse_a - safe), np.exp(lse_b - safe)
    total = a + b
    out = (out_a * a[..., None] + out_b * b[..., None]) / np.where(total > 0, total, 1.0)[..., None]
    with np.errstate(divide="ignore"):
        return out, safe + np.log(total)


def _part(
    random_: np.random.Generator, shape: tuple[int, ...], low: float = -2.0, high: float = 2.0
) -> tuple[Array, Array]:
    return np.round(random_.normal(0.0, 1.0, (*shape, 2)), 2), np.round(random_.uniform(low, high, shape), 2)


def _merge_cases(rng: random.Random) -> Iterator[Case]:
    random_ = _generator(rng)
    for shape in ((1,), (2,), (2,), (2, 3), (3, 2)):
        yield case("two parts", *_part(random_, shape), *_part(random_, shape))
    for shape in ((1,), (2,)):
        out, lse = _part(random_, shape)
        empty = np.zeros_like(out), np.full(shape, -math.inf)
        yield case("one part is empty", out, lse, *empty)
        yield case("one part is empty", *empty, out, lse)
        yield case("both are empty", *empty, *empty)
    for _ in range(3):
        yield case("large scores", *_part(random_, (2,), 800.0, 802.0), *_part(random_, (2,), 800.0, 802.0))
        yield case("far apart", *_part(random_, (2,), 30.0, 40.0), *_part(random_, (2,), -40.0, -30.0))


def mean(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """A known wrong answer: both parts count the same, however much attention each has."""
    return (out_a + out_b) / 2, merge(out_a, lse_a, out_b, lse_b)[1]


def base_two(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """A known wrong answer: natural logarithms are read as base 2, as some libraries have them."""
    out, lse = merge(out_a, lse_a * math.log(2), out_b, lse_b * math.log(2))
    return out, lse / math.log(2)


def _overflows(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    with np.errstate(all="ignore"):
        a, b = np.exp(lse_a), np.exp(lse_b)
        total = a + b
        out = (out_a * a[..., None] + out_b * b[..., None]) / np.where(total > 0, total, 1.0)[..., None]
        return out, np.log(total)


def _both_empty(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    with np.errstate(all="ignore"):
        top = np.maximum(lse_a, lse_b)
        a, b = np.exp(lse_a - top), np.exp(lse_b - top)
        return (out_a * a[..., None] + out_b * b[..., None]) / (a + b)[..., None], top + np.log(a + b)


def _larger_lse(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    return merge(out_a, lse_a, out_b, lse_b)[0], np.maximum(lse_a, lse_b)


def _close_lse_only(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    small = np.isneginf(lse_a) != np.isneginf(lse_b)
    return np.where(small[..., None], (out_a + out_b) / 2, out), lse


MERGE = Exercise(
    id="03.2",
    title="Two parts, one result",
    minutes=10,
    items=("A3",),
    ask="Write <code>merge(out_a, lse_a, out_b, lse_b)</code>. The same queries attended to two different sets of "
    "keys. <code>out_a</code>, <code>out_b</code> are the two finished results <code>[..., d]</code>; "
    "<code>lse_a</code>, <code>lse_b</code> <code>[...]</code> are the natural logarithms of the sums of exp(score) in "
    "each. Return <code>(out, lse)</code> for all keys together. A part without keys is (0, −inf) and must change "
    "nothing; two of them give (0, −inf). Numpy arrays; <code>x[..., None]</code> adds the missing axis.",
    solution=merge,
    cases=_merge_cases,
    wrong=(
        Wrong("mean", mean, "You average the two. A part counts by the sum of its exponentials, exp(lse)."),
        Wrong("base two", base_two, "You read the logarithms as base 2. Some libraries store them so; here they are "
              "natural."),
        Wrong("overflow", _overflows, "You compute exp(lse) itself, which is infinite from 710 on. Take the larger one "
              "off."),
        Wrong("both empty", _both_empty, "You compute −inf − (−inf) where both parts are empty, and divide by zero."),
        Wrong("larger", _larger_lse, "You hand on the larger logarithm. The sums add up: log(exp(a) + exp(b))."),
        Wrong("an empty part counts", _close_lse_only, "You let a part without keys take half of the weight."),
    ),
    hints=(
        "How large a share of all the exponentials does each part have?",
        "Weights are exp(lse_a − top) and exp(lse_b − top) with top the larger of the two; divide by their sum.",
        "<code>total = a + b</code>; <code>out = (out_a * a[..., None] + out_b * b[..., None]) / total[..., "
        "None]</code>; <code>lse = top + np.log(total)</code>. Where top is −inf, use 0 in its place, and divide by 1.",
    ),
    explanation="A result was divided by its own sum. Multiplied by exp(lse) it is a numerator again, and numerators "
    "and sums of different keys just add up. Nothing here depends on how the keys were cut, so that kernels may cut as "
    "they like.",
    same=close(1e-6, 1e-9),
    redundant={
        "two parts": "the plain case; averaging and base 2 fail in it and elsewhere",
        "far apart": "the weight of one part vanishes, which a formula with sums of logarithms may get wrong",
    },
)  # fmt: skip

# --- 03.3 ------------------------------------------------------------------------------------------------------------


def is_correct(out: Array, dense: Array, exact: Array) -> bool:
    """At most twice as far from the exact result as dense attention in the same format, and 1e-5 more; all finite."""
    limit = 2 * np.abs(dense - exact).max() + 1e-5
    return bool(np.abs(out - exact).max() <= limit)  # a NaN compares as false


def _triple(random_: np.random.Generator, size: float, step: float) -> tuple[Array, Array, Array]:
    """A correct result, dense attention, and the exact one: rows of numbers around `size`, rounded to multiples of
    `step`, the correct one otherwise rounded than dense."""
    exact = size * random_.uniform(0.5, 1.5, (3, 4))
    dense = np.round(exact / step) * step
    out = np.where(random_.random(exact.shape) < 0.5, dense, np.floor(exact / step) * step)
    dense[0, 0], out[0, 0] = exact[0, 0] + 0.5 * step, exact[0, 0] - 0.4 * step
    return out, dense, exact


def _correct_cases(rng: random.Random) -> Iterator[Case]:
    random_ = _generator(rng)
    for _ in range(3):
        yield case("rounded in another way", *_triple(random_, 1.0, 2.0**-8))
        out, dense, exact = _triple(random_, 100.0, 0.5)
        yield case("large numbers, rounded", out, dense, exact)
    for _ in range(2):
        out, dense, exact = _triple(random_, 0.002, 2.0**-17)
        yield case("small numbers, all wrong", 1.5 * out, dense, exact)
        out, dense, exact = _triple(random_, 1.0, 2.0**-8)
        wrong = out.copy()
        wrong[rng.randrange(3), rng.randrange(1, 4)] += 0.02
        yield case("one number is wrong", wrong, dense, exact)
        wrong = out.copy()
        wrong[rng.randrange(3), rng.randrange(1, 4)] = math.nan
        yield case("not a number", wrong, dense, exact)
    exact = random_.uniform(0.5, 1.5, (3, 4))
    for sign in (1, -1):
        dense = exact + sign * 0.0039
        dense[0, 0] = exact[0, 0] + 0.004
        far = dense.copy()
        far[1, 1] = exact[1, 1] - sign * 0.0055
        yield case("as good as dense, on the other side", far, dense, exact)
    yield case("float32: a hair from exact", exact + 9e-6, exact.copy(), exact)


def _very_same(out: Array, dense: Array, exact: Array) -> bool:
    return bool(np.array_equal(out, dense))


def _fixed(out: Array, dense: Array, exact: Array) -> bool:
    return bool(np.abs(out - exact).max() <= 0.01)


def _on_average(out: Array, dense: Array, exact: Array) -> bool:
    worst = np.abs(dense - exact).max()
    return bool(np.isfinite(out).all() and np.abs(out - exact).mean() <= 2 * worst + 1e-5)


def _nan_passes(out: Array, dense: Array, exact: Array) -> bool:
    limit = 2 * np.abs(dense - exact).max() + 1e-5
    return not bool((np.abs(out - exact) > limit).any())


def _near_dense(out: Array, dense: Array, exact: Array) -> bool:
    return bool(np.abs(out - dense).max() <= 2 * np.abs(dense - exact).max() + 1e-5)


def _no_room(out: Array, dense: Array, exact: Array) -> bool:
    return bool(np.abs(out - exact).max() <= 2 * np.abs(dense - exact).max())


def _fixed_or_relative(out: Array, dense: Array, exact: Array) -> bool:
    small = float(np.abs(exact).max()) < 0.1
    return bool(np.isfinite(out).all()) if small else is_correct(out, dense, exact)


def _small_numbers_only(out: Array, dense: Array, exact: Array) -> bool:
    return is_correct(out, dense, exact) and bool(np.abs(out - exact).max() <= 0.05)


CORRECT = Exercise(
    id="03.3",
    title="Rounding, or a bug?",
    minutes=8,
    items=("A3",),
    ask="Write <code>is_correct(out, dense, exact)</code>, True or False. <code>out</code> is what a backend computed, "
    "<code>dense</code> what dense attention in the same number format made of the same inputs, <code>exact</code> the "
    "result in float64. Accept what is at most twice as far from <code>exact</code> as <code>dense</code> is at its "
    "worst, with 1e-5 on top. Reject everything else, also a result that is not a number.",
    solution=is_correct,
    cases=_correct_cases,
    wrong=(
        Wrong("the very same", _very_same, "You want the same bits as dense attention has. Another order of sums gives "
              "others."),
        Wrong("a fixed tolerance", _fixed,
              "You take one number for everything. What is rounding in large numbers is a bug in small ones."),
        Wrong("on average", _on_average, "You average. One wrong number among many correct ones then passes."),
        Wrong("NaN passes", _nan_passes,
              "You ask whether anything is above the limit. Every comparison with NaN is false: ask whether all is "
              "below."),
        Wrong("compared with dense", _near_dense,
              "You measure from dense attention. It has an error of its own, and may lie on the other side of the "
              "exact result."),
        Wrong("nothing on top", _no_room, "You leave the 1e-5 out: where dense happens to be exact, nothing could "
              "pass."),
        Wrong("small means right", _fixed_or_relative, "You call every small number correct. A small result may be "
              "wrong by half."),
        Wrong("an absolute limit too", _small_numbers_only,
              "You add a limit that does not grow with the numbers, and reject the rounding of large ones."),
    ),
    hints=(
        "Against what should a result be measured: against another rounded one, or against the exact one?",
        "limit = 2 · max |dense − exact| + 1e-5. Then compare max |out − exact| with it.",
        "<code>return bool(np.abs(out - exact).max() &lt;= limit)</code>. The maximum of an array with a NaN is NaN, "
        "and NaN &lt;= limit is False.",
    ),
    explanation="The error of dense attention in the same format says what rounding does to these very numbers. A "
    "backend may take sums in another order, so it gets twice that. This is the rule that every backend of labkit is "
    "tested with.",
    redundant={
        "rounded in another way": "the plain case; who wants the same bits fails here and with large numbers",
    },
)  # fmt: skip

# --- 03.4 ------------------------------------------------------------------------------------------------------------


def extra_bytes(length: int, heads: int, head_size: int, itemsize: int) -> tuple[int, int]:
    """(naive, tiled): scores and output; two float32 per query and output."""
    output = heads * length * head_size * itemsize
    return heads * length * length * itemsize + output, heads * length * 2 * 4 + output


def _memory_cases(rng: random.Random) -> Iterator[tuple[Any, ...]]:
    yield 1024, 1, 64, 2
    yield 2048, 1, 64, 2
    yield 1, 1, 1, 4
    for _ in range(8):
        yield 1 << rng.randint(5, 15), rng.choice((2, 4, 8, 32)), rng.choice((64, 96, 128)), rng.choice((2, 4))


def _constant(length: int, heads: int, head_size: int, itemsize: int) -> tuple[int, int]:
    return extra_bytes(length, heads, head_size, itemsize)[0], heads * 128 * 128 * itemsize


def _one_head(length: int, heads: int, head_size: int, itemsize: int) -> tuple[int, int]:
    return extra_bytes(length, 1, head_size, itemsize)


def _scores_of_head_size(length: int, heads: int, head_size: int, itemsize: int) -> tuple[int, int]:
    naive, tiled = extra_bytes(length, heads, head_size, itemsize)
    return heads * length * length * head_size * itemsize, tiled


def _narrow_statistics(length: int, heads: int, head_size: int, itemsize: int) -> tuple[int, int]:
    output = heads * length * head_size * itemsize
    return heads * length * length * itemsize + output, heads * length * 2 * itemsize + output


MEMORY = Exercise(
    id="03.4",
    title="How memory grows (optional)",
    minutes=6,
    items=("A3",),
    ask="Write <code>extra_bytes(length, heads, head_size, itemsize)</code>: the bytes that attention of one prompt "
    "stores beyond its inputs, as a pair (naive, tiled). Both write the output <code>[heads, length, "
    "head_size]</code>. Naive attention also stores one score for each pair of tokens in each head, tiled attention "
    "two float32 (4 bytes each) for each query in each head. Scores and output take <code>itemsize</code> bytes a "
    "number.",
    solution=extra_bytes,
    cases=_memory_cases,
    wrong=(
        Wrong("constant", _constant, "You count a tile. Tiles stay on the chip; what grows is what every query leaves "
              "behind."),
        Wrong("one head", _one_head, "You count one head. Each head has scores, statistics and output of its own."),
        Wrong("scores of head size", _scores_of_head_size, "You store a vector for each pair. A score is one number."),
        Wrong("narrow statistics", _narrow_statistics,
              "You store the statistics in the inputs' format. A sum of thousands of terms needs float32."),
    ),
    hints=(
        "Which of the arrays has two axes of the length?",
        "naive: heads · length · length scores and the output. tiled: heads · length pairs of float32, and the output.",
        "<code>output = heads * length * head_size * itemsize</code>; the pair is <code>(heads * length * length * "
        "itemsize + output, heads * length * 8 + output)</code>.",
    ),
    explanation="Twice the length is four times the scores, and twice everything else. So tiled attention needs little "
    "memory, in proportion to the length. It does not need none.",
)  # fmt: skip

EXERCISES = (ONLINE, MERGE, CORRECT, MEMORY)
