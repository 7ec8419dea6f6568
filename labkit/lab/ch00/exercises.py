"""The one exercise of chapter 00: how many rows of padding a batch gets. Refuses to choose the sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from labkit.lab.exercises import Case, Exercise, Wrong, case


def padding_rows(num_tokens: int, sizes: list[int]) -> int:
    """Rows that no request uses when `num_tokens` run in the smallest size that holds them; 0 when none does."""
    fitting = [size for size in sizes if size >= num_tokens]
    return min(fitting) - num_tokens if fitting else 0


def _cases(rng: random.Random) -> Iterator[Case]:
    yield case("between two sizes", 13, [1, 2, 4, 8, 16])
    for _ in range(12):
        sizes = sorted(rng.sample(range(2, 200, 2), rng.randint(3, 8)))
        below = rng.randrange(len(sizes) - 1)
        yield case("between two sizes", sizes[below] + 1, sizes)
    for _ in range(4):
        sizes = sorted(rng.sample(range(1, 200), rng.randint(2, 8)))
        yield case("exactly a size", rng.choice(sizes), sizes)
    for _ in range(4):
        sizes = sorted(rng.sample(range(1, 200), rng.randint(1, 8)))
        yield case("above the largest", sizes[-1] + rng.randint(1, 50), sizes)


def _next_size_always(num_tokens: int, sizes: list[int]) -> int:
    above = [size for size in sizes if size > num_tokens]
    return min(above) - num_tokens if above else 0


def _largest_for_the_rest(num_tokens: int, sizes: list[int]) -> int:
    fitting = [size for size in sizes if size >= num_tokens]
    return min(fitting) - num_tokens if fitting else max(sizes) - num_tokens


def _to_the_largest(num_tokens: int, sizes: list[int]) -> int:
    return 0 if num_tokens in sizes else max(0, max(sizes) - num_tokens)


PADDING_ROWS = Exercise(
    id="00.1",
    title="Rows that nobody uses",
    minutes=5,
    items=(),
    ask="Write <code>padding_rows(num_tokens, sizes)</code>. A batch of <code>num_tokens</code> runs in the graph of "
    "the smallest size that holds it. Return how many of its rows no request uses, a whole number. "
    "<code>sizes</code> is a list of whole numbers, ascending. A batch above the largest size runs without a graph, "
    "so it has no padding: return 0.",
    solution=padding_rows,
    cases=_cases,
    wrong=(
        Wrong("next size always", _next_size_always, "You take a size above the batch even where one fits exactly."),
        Wrong("negative", _largest_for_the_rest, "You use the largest size for a batch that does not fit into it."),
        Wrong("largest", _to_the_largest, "You pad every batch up to the largest size, not to the nearest one above."),
    ),
    hints=(
        "Which of the sizes can hold the batch at all?",
        "Of those, take the smallest. How many rows are left when the batch is in?",
        "<code>fitting = [size for size in sizes if size &gt;= num_tokens]</code>; then "
        "<code>min(fitting) - num_tokens</code>, unless the list is empty.",
    ),
    explanation="A graph was recorded for a fixed number of rows, so a smaller batch is filled up to it. The rows at "
    "the end are computed and thrown away. Above the largest size there is no graph to fill.",
)

EXERCISES = (PADDING_ROWS,)
