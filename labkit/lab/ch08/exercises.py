"""The exercises of chapter 08: the default list, the padding rule, the best list for some traffic, the graphs' pool.

Refuses to know what a graph computes. The first two have the signatures under which the engine calls its own.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from labkit.graphs import sizes as rules
from labkit.lab.exercises import Case, Exercise, Wrong, case

# --- 08.1 ------------------------------------------------------------------------------------------------------------


def default_capture_sizes(max_num_seqs: int, max_num_batched_tokens: int, cap: int) -> list[int]:
    """1, 2, 4, every 8 below 256, every 16 from there, up to a ceiling; and the two limits themselves."""
    ceiling = min(2 * max_num_seqs, cap, max_num_batched_tokens)
    found = {1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16), max_num_seqs, max_num_batched_tokens}
    return sorted(size for size in found if size <= ceiling)


def _default_cases(rng: random.Random) -> Iterator[Case]:
    usual, between, budget, few = (
        "the usual engine", "a number of sequences between sizes", "a token budget below the cap", "few sequences"
    )  # fmt: skip
    yield case(few, 8, 8192, 512)
    yield case(usual, 256, 8192, 512)
    yield case(between, 13, 8192, 512)
    yield case(budget, 256, 300, 512)
    yield case("a larger cap", 512, 8192, 1024)
    for _ in range(3):
        yield case(few, rng.choice((8, 16, 24, 32)), 8192, 512)
        yield case(usual, rng.choice((256, 512)), rng.choice((2048, 8192)), 512)
        yield case(between, rng.choice((3, 13, 21, 100, 250)), 8192, 512)
        yield case(budget, 256, rng.choice((100, 250, 300, 390)), 512)
        yield case("a larger cap", 512, 8192, rng.choice((768, 1024)))


def _without_seqs(max_num_seqs: int, max_num_batched_tokens: int, cap: int) -> list[int]:
    ceiling = min(2 * max_num_seqs, cap, max_num_batched_tokens)
    found = {1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16), max_num_batched_tokens}
    return sorted(size for size in found if size <= ceiling)


def _without_budget(max_num_seqs: int, max_num_batched_tokens: int, cap: int) -> list[int]:
    ceiling = min(2 * max_num_seqs, cap, max_num_batched_tokens)
    found = {1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16), max_num_seqs}
    return sorted(size for size in found if size <= ceiling)


def _every_eight(max_num_seqs: int, max_num_batched_tokens: int, cap: int) -> list[int]:
    ceiling = min(2 * max_num_seqs, cap, max_num_batched_tokens)
    found = {1, 2, 4, *range(8, ceiling + 1, 8), max_num_seqs, max_num_batched_tokens}
    return sorted(size for size in found if size <= ceiling)


def _up_to_the_cap(max_num_seqs: int, max_num_batched_tokens: int, cap: int) -> list[int]:
    return default_capture_sizes(max(max_num_seqs, cap), max_num_batched_tokens, cap)[:-1] + [
        min(cap, max_num_batched_tokens)
    ]  # fmt: skip


def _cap_is_512(max_num_seqs: int, max_num_batched_tokens: int, cap: int) -> list[int]:
    return default_capture_sizes(max_num_seqs, max_num_batched_tokens, 512)


def _up_to_seqs(max_num_seqs: int, max_num_batched_tokens: int, cap: int) -> list[int]:
    return [s for s in default_capture_sizes(max_num_seqs, max_num_batched_tokens, cap) if s <= max_num_seqs]


DEFAULT_SIZES = Exercise(
    id="08.1",
    title="The list that nobody wrote",
    minutes=8,
    items=("A7",),
    ask="Write <code>default_capture_sizes(max_num_seqs, max_num_batched_tokens, cap)</code>, the list that an engine "
    "takes when none is given: 1, 2, 4, then every 8 from 8 to 248, then every 16 from 256; and "
    "<code>max_num_seqs</code> and <code>max_num_batched_tokens</code> themselves. Nothing is larger than the ceiling, "
    "which is the least of 2 · max_num_seqs, cap and max_num_batched_tokens. Ascending, each size once.",
    solution=default_capture_sizes,
    cases=_default_cases,
    wrong=(
        Wrong("without the sequences", _without_seqs, "You leave out <code>max_num_seqs</code> itself. A full batch is "
              "the commonest of all, and would be padded."),
        Wrong("without the budget", _without_budget, "You leave out <code>max_num_batched_tokens</code> itself, where "
              "it is below the ceiling's other terms."),
        Wrong("every 8 all the way", _every_eight, "You go on in steps of 8 above 256. Up to 512 that makes 67 sizes: "
              "vLLM's list of earlier years."),
        Wrong("up to the cap", _up_to_the_cap, "Your list goes up to the cap whatever the number of sequences is. With "
              "few of them most of these graphs are never used."),
        Wrong("cap 512", _cap_is_512, "You take 512 for the cap. It is an argument: on some GPUs it is 1024."),
        Wrong("up to the sequences", _up_to_seqs, "You stop at <code>max_num_seqs</code>. Steps with chunks of prompts "
              "have more tokens than sequences; the rule goes up to twice as many."),
    ),
    redundant={
        "few sequences": "the shortest lists, easy to compare by eye",
        "the usual engine": "the list that the chapter talks about; steps of 8 above 256 show here first",
    },
    hints=(
        "Begin with the ceiling: the least of three numbers. Then collect, then drop what is above it.",
        "<code>range(8, 256, 8)</code> ends at 248; <code>range(256, ceiling + 1, 16)</code> is empty below 256. A set "
        "takes care of duplicates.",
        "<code>found = {1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16), max_num_seqs, "
        "max_num_batched_tokens}</code>; then <code>sorted(s for s in found if s &lt;= ceiling)</code>.",
    ),
    explanation="3 + 31 + 17 = 51 sizes for 256 sequences and a cap of 512. Small sizes lie close together, because "
    "there one row of padding is a large share; large ones may lie further apart. And the one batch that everybody "
    "meets, a full one, gets its own.",
)  # fmt: skip


# --- 08.2 ------------------------------------------------------------------------------------------------------------


def pad_to(num_tokens: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that holds `num_tokens`; None above the largest."""
    at = bisect.bisect_left(sizes, num_tokens)
    return sizes[at] if at < len(sizes) else None


def _pad_cases(rng: random.Random) -> Iterator[Case]:
    usual = rules.default_capture_sizes(256, 8192)
    yield case("between two sizes", 13, [1, 2, 4, 8, 16])
    yield case("exactly a size", 8, [1, 2, 4, 8, 16])
    yield case("above the largest", 520, usual)
    yield case("below the smallest", 1, [4, 8])
    for _ in range(4):
        sizes = sorted(rng.sample(range(4, 300, 3), rng.randint(3, 20)))
        at = rng.randrange(1, len(sizes))
        yield case("between two sizes", sizes[at] - 1, sizes)
        yield case("exactly a size", sizes[at], sizes)
        yield case("above the largest", sizes[-1] + rng.randint(1, 90), sizes)
        yield case("below the smallest", rng.randint(1, sizes[0] - 1), sizes)


def _next_always(num_tokens: int, sizes: Sequence[int]) -> int | None:
    at = bisect.bisect_right(sizes, num_tokens)
    return sizes[at] if at < len(sizes) else None if num_tokens > sizes[-1] else sizes[-1]


def to_the_largest(num_tokens: int, sizes: Sequence[int]) -> int | None:
    """Right about what fits exactly, and wasteful with everything else."""
    if num_tokens in sizes or num_tokens < sizes[0]:
        return pad_to(num_tokens, sizes)
    return sizes[-1] if num_tokens <= sizes[-1] else None


def _largest_above(num_tokens: int, sizes: Sequence[int]) -> int:
    return pad_to(num_tokens, sizes) or sizes[-1]


def _index(num_tokens: int, sizes: Sequence[int]) -> int:
    return bisect.bisect_left(sizes, num_tokens)


def _misses_below(num_tokens: int, sizes: Sequence[int]) -> int | None:
    return None if num_tokens < sizes[0] else pad_to(num_tokens, sizes)


PAD_TO = Exercise(
    id="08.2",
    title="Where a batch runs",
    minutes=6,
    items=("A7",),
    ask="Write <code>pad_to(num_tokens, sizes)</code>: the smallest of <code>sizes</code> (ascending) that holds a "
    "step of <code>num_tokens</code>, or <code>None</code> where none does and the step runs eagerly. The engine asks "
    "this in every step, so use <code>bisect</code>, which needs six looks at 51 sizes.",
    solution=pad_to,
    cases=_pad_cases,
    wrong=(
        Wrong("next size always", _next_always, "You take the next size even where one fits exactly. "
              "<code>bisect_left</code> finds the place of an equal one, <code>bisect_right</code> the one behind."),
        Wrong("to the largest", to_the_largest, "You pad to the largest size, not to the nearest one above."),
        Wrong("the largest above it", _largest_above, "Above the largest size there is no graph. A step of 520 tokens "
              "cannot run in 512 rows; it runs eagerly: return None."),
        Wrong("the place", _index, "You return the place in the list, and not the size that stands there."),
        Wrong("nothing below", _misses_below, "A step below the smallest size fits into it as well."),
    ),
    hints=(
        "<code>bisect_left(sizes, n)</code> gives a place in the list. Which size stands there?",
        "All sizes before that place are smaller than n, the one at it is not. And if it is behind the last?",
        "<code>at = bisect.bisect_left(sizes, num_tokens)</code>; "
        "<code>sizes[at] if at &lt; len(sizes) else None</code>.",
    ),
    explanation="The same tokens come out whatever size a step runs in; only time is lost. So a wrong rule of this "
    "kind shows in no text, and a report of sizes and padding is the way to find it.",
)  # fmt: skip


# --- 08.3 ------------------------------------------------------------------------------------------------------------


def padded_tokens(traffic: Mapping[int, int], sizes: Sequence[int]) -> int:
    """Padding of all steps together; every step must fit."""
    return sum(steps * (min(s for s in sizes if s >= tokens) - tokens) for tokens, steps in traffic.items())


def best_sizes(traffic: Mapping[int, int], k: int) -> list[int]:
    """The k sizes with the least padding: every choice of observed numbers that has the largest one is tried."""
    *others, largest = sorted(traffic)
    choices = itertools.combinations(others, min(k - 1, len(others)))
    return min(([*some, largest] for some in choices), key=lambda sizes: padded_tokens(traffic, sizes))


def _unique(traffic: Mapping[int, int], k: int) -> bool:
    *others, largest = sorted(traffic)
    found = sorted(
        padded_tokens(traffic, [*some, largest]) for some in itertools.combinations(others, min(k - 1, len(others)))
    )
    return len(found) == 1 or found[0] < found[1]


def _best_cases(rng: random.Random) -> Iterator[Case]:
    yield case("one size", {3: 5, 8: 2}, 1)
    yield case("a few sizes", {1: 50, 2: 3, 7: 20, 8: 20, 30: 1}, 3)
    yield case("as many sizes as numbers", {2: 1, 5: 4, 9: 2}, 3)
    made: dict[str, int] = {}
    while min(made.get(group, 0) for group in ("a few sizes", "one loud number")) < 4:
        tokens = sorted(rng.sample(range(1, 64), rng.randint(5, 8)))
        traffic = {n: rng.randint(1, 40) for n in tokens}
        group = rng.choice(("a few sizes", "one loud number"))
        if group == "one loud number":
            traffic[tokens[rng.randrange(1, len(tokens) - 1)]] = 2000
        k = rng.randint(2, 4)
        if _unique(traffic, k):
            made[group] = made.get(group, 0) + 1
            yield case(group, traffic, k)
    for _ in range(3):
        tokens = sorted(rng.sample(range(1, 64), 4))
        yield case("as many sizes as numbers", {n: rng.randint(1, 40) for n in tokens}, rng.randint(4, 6))
        yield case("one size", {n: rng.randint(1, 40) for n in tokens}, 1)


def _most_frequent(traffic: Mapping[int, int], k: int) -> list[int]:
    largest = max(traffic)
    loud = sorted((n for n in traffic if n != largest), key=lambda n: -traffic[n])[: k - 1]
    return sorted([*loud, largest])


def _evenly(traffic: Mapping[int, int], k: int) -> list[int]:
    tokens = sorted(traffic)
    return sorted({tokens[-1 - i * len(tokens) // k] for i in range(min(k, len(tokens)))})


def _unweighted(traffic: Mapping[int, int], k: int) -> list[int]:
    return best_sizes(dict.fromkeys(traffic, 1), k)


def _largest_missing(traffic: Mapping[int, int], k: int) -> list[int]:
    return sorted(sorted(traffic, key=lambda n: -traffic[n])[:k])


def _too_many(traffic: Mapping[int, int], k: int) -> list[int]:
    return best_sizes(traffic, k + 1)


def _repeats(traffic: Mapping[int, int], k: int) -> list[int]:
    found = best_sizes(traffic, k)
    return [*found, *[found[-1]] * (k - len(found))]


BEST_SIZES = Exercise(
    id="08.3",
    title="The best k sizes",
    minutes=12,
    items=("A7",),
    ask="Write <code>best_sizes(traffic, k)</code>. <code>traffic</code> maps a number of tokens to the number of "
    "steps that have it. Return the list of at most k sizes, ascending, that holds every step and pads the fewest "
    "tokens in all. Only observed numbers of tokens need to be considered, and the largest of them must be in the "
    "list. Where k is larger than the number of observed ones, take each of them once. Try all choices: "
    "<code>itertools.combinations</code>.",
    solution=best_sizes,
    cases=_best_cases,
    wrong=(
        Wrong("the most frequent", _most_frequent, "You take the numbers that occur most often. Two frequent ones "
              "close together do not both need a size; a rarer one far below its size may cost more."),
        Wrong("evenly spread", _evenly, "You spread the sizes evenly over the observed numbers, whatever their steps."),
        Wrong("without counts", _unweighted, "You count every number of tokens once. What occurs in many steps pads in "
              "many steps."),
        Wrong("the largest is missing", _largest_missing, "Your list does not hold the largest step, which would run "
              "eagerly. A list that serves nothing pads nothing."),
        Wrong("one too many", _too_many, "You return k + 1 sizes: the largest counts as one of the k."),
        Wrong("repeated", _repeats, "You fill the list up by repeating a size."),
    ),
    redundant={"a few sizes": "the ordinary case; every wrong answer but the repeated one shows here",
               "one size": "the smallest k there is: everything runs in the largest",
               "one loud number": "traffic in which counts decide"},
    hints=(
        "The largest observed number is in every list. So k − 1 others are to be chosen.",
        "For one list: each number of tokens runs in the smallest size that holds it; weigh the difference with its "
        "steps. Take the minimum over all choices.",
        "<code>*others, largest = sorted(traffic)</code>; then <code>min(([*some, largest] for some in "
        "itertools.combinations(others, min(k - 1, len(others)))), key=…)</code>.",
    ),
    explanation="Sizes other than observed ones cannot be better: lower such a size to the next observed number, and "
    "it pads less. Trying everything is fine for ten numbers and hopeless for two hundred; the lab's advisor finds the "
    "same list step by step, from the best shorter lists.",
)  # fmt: skip


# --- 08.4 ------------------------------------------------------------------------------------------------------------


def pool_mib(graphs: Sequence[Sequence[int]]) -> int:
    """MiB of the pool after all captures: a tensor takes the smallest free block that holds it, else a new one."""
    blocks: list[int] = []
    for tensors in graphs:
        free = sorted(blocks)  # all that earlier graphs use may be used again
        for mib in tensors:
            at = bisect.bisect_left(free, mib)
            if at < len(free):
                free.pop(at)
            else:
                blocks.append(mib)
    return sum(blocks)


def _pool_cases(rng: random.Random) -> Iterator[Case]:
    falling, rising, inside, several = "largest first", "smallest first", "several tensors at once", "blocks that fit"
    yield case(falling, [[16], [8], [4]])
    yield case(rising, [[4], [8], [16]])
    yield case(inside, [[8, 8], [8, 8]])
    yield case(several, [[10], [4], [4, 10]])
    for _ in range(4):
        sizes = sorted(rng.sample(range(2, 60), rng.randint(3, 6)))
        yield case(rising, [[s] for s in sizes])
        yield case(falling, [[s] for s in reversed(sizes)])
        yield case(inside, [[s, s] for s in reversed(sizes)])
        a, b, c = sorted(rng.sample(range(5, 40), 3))
        yield case(several, [[b, c], [a, c]])


def _sum_of_all(graphs: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, graphs))


def _largest_graph(graphs: Sequence[Sequence[int]]) -> int:
    return max(map(sum, graphs))


def _never_taken(graphs: Sequence[Sequence[int]]) -> int:
    blocks: list[int] = []
    for tensors in graphs:
        for mib in tensors:
            if not any(block >= mib for block in blocks):
                blocks.append(mib)
    return sum(blocks)


def _first_that_fits(graphs: Sequence[Sequence[int]]) -> int:
    blocks: list[int] = []
    for tensors in graphs:
        free = sorted(blocks, reverse=True)
        for mib in tensors:
            if free and free[0] >= mib:
                free.pop(0)
            else:
                blocks.append(mib)
    return sum(blocks)


def _exact_only(graphs: Sequence[Sequence[int]]) -> int:
    blocks: list[int] = []
    for tensors in graphs:
        free = list(blocks)
        for mib in tensors:
            if mib in free:
                free.remove(mib)
            else:
                blocks.append(mib)
    return sum(blocks)


POOL_MIB = Exercise(
    id="08.4",
    title="Why the largest comes first",
    minutes=10,
    items=("A7",),
    ask="Graphs share a pool of memory, since only one of them runs at a time. Write <code>pool_mib(graphs)</code>: "
    "<code>graphs</code> are captured in order, each is the list of the tensors, in whole MiB, that it holds at the "
    "same time. A tensor takes the smallest block of the pool that holds it and that its own graph does not use yet; "
    "where there is none, a new block of exactly its size is made. Blocks are never cut and never given back. Return "
    "the MiB of all blocks in the end.",
    solution=pool_mib,
    cases=_pool_cases,
    wrong=(
        Wrong("sum of all", _sum_of_all, "You give every graph memory of its own. They never run at the same time, so "
              "that a later one may use the blocks of an earlier one."),
        Wrong("the largest graph", _largest_graph, "That is the least that could do. Captured in a bad order, the pool "
              "has small blocks that the larger graphs cannot use."),
        Wrong("blocks are never taken", _never_taken, "Two tensors of one graph take the same block. They are held at "
              "the same time and need one each."),
        Wrong("the first that fits", _first_that_fits, "You take a large block for a small tensor, and the large one "
              "that follows needs a new block. Take the smallest that fits."),
        Wrong("only equal ones", _exact_only, "You use a block again only for a tensor of the very same size. A larger "
              "block holds it, too."),
    ),
    redundant={
        "largest first": "the order that engines take; memory of its own for each graph shows here",
        "smallest first": "the order that wastes; whoever answers with the largest graph fails here",
        "several tensors at once": "two tensors of one size, without anything else to go wrong",
    },
    hints=(
        "Keep a list of blocks. At the beginning of each graph all of them are free.",
        "Within a graph a block that was taken is not free any more. Sort the free ones, and take the first that is "
        "not smaller than the tensor.",
        "<code>free = sorted(blocks)</code> for each graph; <code>at = bisect.bisect_left(free, mib)</code>; "
        "<code>free.pop(at)</code> if there is one, else <code>blocks.append(mib)</code>.",
    ),
    explanation="Largest first, every later graph fits into what is there, and the pool is as large as the largest "
    "graph. Smallest first, each graph is too large for every block of the ones before, and all of them add up. So "
    "engines capture from the largest size down.",
)  # fmt: skip

EXERCISES = (DEFAULT_SIZES, PAD_TO, BEST_SIZES, POOL_MIB)
