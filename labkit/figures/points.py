"""Names in a figure: which trace shows which numbers of which run, so that a check can find them. Draws nothing.

`meta` of a trace is [key, run, plot], whose y is what the run has under that key, or, from `drawn`, [name, run, plot,
{axis: key}]. The keys name entries of the run's row or of its data. Run 0 is none: labels and guides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def drawn(run: int | Sequence[int], *, plot: str = "main", **axes: str) -> list[Any]:
    """`meta` of a trace that shows numbers of runs.

    Args:
        run: the number of the run whose list is drawn; or several numbers, one for each point in order.
        plot: "main", or another name where a run is drawn twice ("pinned").
        axes: trace attribute → key of what it holds: `drawn(3, y="samples_ms")`, `drawn([1, 2], x="run", y="ms")`.
    """
    if not axes:
        raise ValueError("name at least one axis: drawn(run, y='key')")
    numbers = run if isinstance(run, int) else list(run)
    return ["+".join(axes.values()), numbers, plot, dict(axes)]


def first_difference(traces: Iterable[Any], runs: Mapping[int, Mapping[str, Any]]) -> str:
    """What the first trace shows that the runs do not say, as a sentence; "" when all that is drawn is so.

    Args:
        traces: of a figure. Those without a `meta` from `drawn` are decoration and are skipped.
        runs: by number, everything that is known of each by key.
    """
    for trace in traces:
        for numbers, axis, key in _named(trace):
            missing = [n for n in numbers if n not in runs] or [n for n in numbers if key not in runs[n]]
            if missing:
                return f"{trace.name or trace.type}: run {missing[0]} with {key!r} is drawn, and there is none"
            several = len(numbers) > 1 or isinstance(trace.meta[1], (list, tuple))
            wanted = [runs[n][key] for n in numbers] if several else _as_list(runs[numbers[0]][key])
            shown = _as_list(getattr(trace, axis))
            for i in range(max(len(wanted), len(shown))):
                if i >= len(wanted) or i >= len(shown) or not _equal(wanted[i], shown[i]):
                    have = shown[i] if i < len(shown) else "nothing"
                    want = wanted[i] if i < len(wanted) else "nothing"
                    return f"{trace.name or trace.type}: {axis}[{i}] shows {have}, {key!r} holds {want}"
    return ""


def runs_drawn(traces: Iterable[Any]) -> set[int]:
    """The numbers of the runs that a figure shows something of."""
    return {number for trace in traces for numbers, _, _ in _named(trace) for number in numbers}


def _named(trace: Any) -> Iterator[tuple[list[int], str, str]]:
    meta = trace.meta
    if not isinstance(meta, (list, tuple)) or len(meta) not in (3, 4) or meta[1] == 0:
        return
    axes = meta[3] if len(meta) == 4 else {"y": meta[0]}
    numbers = [meta[1]] if isinstance(meta[1], int) else list(meta[1])
    yield from ((numbers, axis, key) for axis, key in axes.items())


def _as_list(values: Any) -> list[Any]:
    if values is None:
        return []
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        return [values]
    return list(values)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)) or hasattr(a, "tolist"):
        left, right = _as_list(a), _as_list(b)
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b)
