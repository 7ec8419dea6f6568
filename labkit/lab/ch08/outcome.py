"""A list of sizes under some traffic, as an outcome of the panel. Refuses to know what was measured, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.errors import ConfigError
from labkit.graphs.advisor import fit
from labkit.graphs.sizes import pad_to
from labkit.lab.ch08.lists import KS, advised
from labkit.lab.runs import Outcome
from labkit.lab.settings import show_sizes
from labkit.measure.provenance import Provenance
from labkit.measure.stats import Measurement

COLUMNS = [
    ("list", "list"), ("traffic", "traffic"), ("sizes", "sizes"), ("waste_pct", "padding, %"),
    ("misses", "eager steps"), ("runs_13", "13 runs as"), ("step_ms", "ms/step"), ("capture_s", "capture, s"),
    ("mib", "graphs, MiB"),
]  # fmt: skip
EAGER = "eager"


def outcome(
    name: str, what: str, traffic: Mapping[int, int], sizes: Sequence[int], made: Provenance, *,
    step_ms: float | None = None, capture_s: float | None = None, mib: float | None = None,
    samples: Sequence[float] = (), why: str = "", notes: Sequence[str] = (), stopped: bool = False,
) -> Outcome:  # fmt: skip
    """A run.

    Args:
        name: of the list. what: the traffic's name. step_ms: mean time of a step of this traffic. capture_s, mib: of
            all graphs. None: not measured. samples: ms, what two pins are compared by.
    """
    found = fit(traffic, sizes)
    last = max(*traffic, sizes[-1], 1)
    tokens = list(range(1, last + 1))
    runs_as = [pad_to(n, sizes) for n in tokens]
    ks, best = _best(traffic, sizes[-1])
    data = {
        "tokens": tokens, "runs_as": runs_as, "eager_tokens": [n for n in sorted(traffic) if n > sizes[-1]],
        "step_tokens": sorted(traffic), "step_counts": [traffic[n] for n in sorted(traffic)], "advice_sizes": ks,
        "advice_waste_pct": best, "size_list": list(sizes),
    }  # fmt: skip
    values = {
        "list": name, "traffic": what, "sizes": len(sizes), "waste_pct": 100 * found.waste,
        "coverage_pct": 100 * found.coverage, "misses": found.steps - found.covered, "padded": found.padded_tokens,
        "largest": sizes[-1], "step_ms": step_ms, "capture_s": capture_s, "mib": mib,
        **{f"runs_{n}": _runs_as(n, sizes) for n in (13, 520)},
    }  # fmt: skip
    said = (
        f"{_named(sizes)}: {found.waste:.1%} of the tokens that run are padding, and "
        f"{found.steps - found.covered:,} of {found.steps:,} steps are eager. {_reason(traffic, sizes)}"
    )
    measured = Measurement(made.kind, tuple(samples), name) if samples else None
    return Outcome(data, values, f"{said} {why}".strip(), made, measured, tuple(notes), "", stopped)


def _named(sizes: Sequence[int]) -> str:
    shown = show_sizes(sizes)
    return f"Sizes {shown}" if "sizes)" in shown or len(sizes) > 1 else f"The one size {shown}"


def _runs_as(n: int, sizes: Sequence[int]) -> str:
    size = pad_to(n, sizes)
    return EAGER if size is None else str(size)


def _best(traffic: Mapping[int, int], largest: int) -> tuple[list[int], list[float]]:
    """The best lists' padding in %, by number of sizes; nothing where all of the traffic is above the largest."""
    pairs = tuple(traffic.items())
    ks: list[int] = []
    waste: list[float] = []
    for k in KS:
        try:
            found = advised(pairs, k, largest)
        except ConfigError:
            break
        if ks and len(found.sizes) == ks[-1]:
            break
        ks.append(len(found.sizes))
        waste.append(100 * found.waste)
    return ks, waste


def _reason(traffic: Mapping[int, int], sizes: Sequence[int]) -> str:
    """Where most of the padding comes from."""
    by_size: dict[int, int] = {}
    for n, count in traffic.items():
        size = pad_to(n, sizes)
        if size is not None and size > n:
            by_size[size] = by_size.get(size, 0) + (size - n) * count
    if not by_size:
        return "No step that has a graph is padded."
    worst = max(by_size, key=lambda size: by_size[size])
    below = max((size for size in sizes if size < worst), default=0)
    share = by_size[worst] / sum(by_size.values())
    return f"{share:.0%} of the padding is in the graph of {worst}, which takes every step from {below + 1} tokens on."
