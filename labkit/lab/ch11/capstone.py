"""Exercise 11.4, the capstone: a configuration that keeps a promise within a memory cap, graded on recorded steps.

Every time in it is a p90 of the recording that ships. What was not recorded cannot be promised: there is no value in
between and no value nearby. Refuses to know what a graph's memory is: that is part of the need, and an example.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.graphs.sizes import pad_to
from labkit.lab.exercises import Case, Exercise, Wrong, case
from labkit.measure.library import library
from labkit.measure.recordings import Recording

#: (backend, mode, size) → p90 of a recorded decode step in ms; of mode NONE the size is the batch.
P90 = Mapping[tuple[str, str, int], float]
CONTEXT = 512
FILE = "h200"


def recording() -> Recording:
    """The shipped recording that the capstone is graded on."""
    found: Recording = library().find(FILE).recording
    return found


def recorded_p90(model: str, backends: Sequence[str], sizes: Sequence[int], batches: Sequence[int]) -> dict[Any, float]:
    """What was recorded of graphs of `sizes` and of eager steps of `batches`; nothing where nothing was."""
    found: dict[Any, float] = {}
    for backend in backends:
        for mode, points in (("FULL", sizes), ("NONE", batches)):
            for size in points:
                row = recording().find(model=model, backend=backend, requested_mode=mode, batch=size, context=CONTEXT)
                if row is not None and row.mode == mode and row.size == size:
                    found[backend, mode, size] = row.p90_ms
    return found


def step_p90(backend: str, batch: int, sizes: Sequence[int], recorded: P90) -> float | None:
    """p90 of one batch under these sizes; None where that step was not recorded."""
    size = pad_to(batch, sizes)
    return recorded.get((backend, "NONE", batch) if size is None else (backend, "FULL", size))


def choose(need: Mapping[str, Any], recorded: P90) -> dict[str, Any] | None:
    """The configuration with the least mean p90 that keeps the promise for every batch, None where none does."""
    best, best_ms = None, math.inf
    most = need["cap_mib"] // need["graph_mib"]
    for backend in need["backends"]:
        for k in range(min(most, len(need["sizes"])) + 1):
            for sizes in itertools.combinations(need["sizes"], k):
                times = []
                for batch in need["batches"]:
                    size = pad_to(batch, sizes)
                    key = (backend, "NONE", batch) if size is None else (backend, "FULL", size)
                    times.append(recorded.get(key, math.inf))
                mean = sum(times) / len(times)
                if max(times) <= need["slo_ms"] and mean < best_ms:
                    mode = "FULL" if sizes else "NONE"
                    best, best_ms = {"backend": backend, "mode": mode, "sizes": list(sizes)}, mean
    return best


# --- needs -----------------------------------------------------------------------------------------------------------


def make_need(
    batches: Sequence[int], slo_ms: float, cap_mib: int, sizes: Sequence[int], *, graph_mib: int = 20,
    backends: Sequence[str] = ("TRITON_ATTN", "TORCH_SDPA"),
) -> dict[str, Any]:  # fmt: skip
    """A need as the exercise hands it over."""
    return {"batches": list(batches), "slo_ms": slo_ms, "cap_mib": cap_mib, "graph_mib": graph_mib,
            "sizes": list(sizes), "backends": list(backends)}  # fmt: skip


#: The need that the notebook ends with: a chat service of small batches, few graphs, 3 ms at the 90th percentile.
THE_MODEL = "qwen3-0.6b"
THE_NEED = make_need((1, 2, 8, 13, 32), 3.0, 60, (1, 2, 4, 8, 16, 32, 64))


def the_recorded() -> dict[Any, float]:
    """The recorded steps of THE_NEED."""
    return recorded_p90(THE_MODEL, THE_NEED["backends"], THE_NEED["sizes"], THE_NEED["batches"])


def _at(model: str, need: dict[str, Any], group: str) -> Case:
    return case(group, need, recorded_p90(model, need["backends"], need["sizes"], need["batches"]))


def _cases(rng: random.Random) -> Iterator[Case]:
    small, qwen = "smollm2-135m", "qwen3-0.6b"
    yield _at(small, make_need((1, 8), 2.0, 100, (1, 8)), "a promise")
    yield _at(qwen, make_need((2, 16), 4.0, 100, (4, 16, 64)), "a promise")
    yield _at(qwen, make_need((1, 16, 64), 5.0, 40, (1, 16, 64)), "memory")
    yield _at(small, make_need((1, 8, 32, 128), 9.0, 60, (1, 8, 32, 128)), "memory")
    yield _at(small, make_need((4,), 9.0, 10, (4, 8)), "memory")
    yield _at(qwen, make_need((1, 128), 20.0, 40, (1, 128), backends=["TORCH_SDPA"]), "no way to keep it")
    yield _at(small, make_need((1, 64), 5.0, 40, (1, 64), backends=["TORCH_SDPA"]), "no way to keep it")
    yield _at(small, make_need((24, 40), 9.0, 10, (8, 16)), "not recorded")
    yield _at(qwen, make_need((8, 48), 12.0, 20, (4, 8)), "not recorded")
    yield _at(qwen, make_need((8, 128), 30.0, 60, (8, 32, 128), backends=["TORCH_SDPA"]), "eager is faster")
    yield _at(qwen, make_need((1, 128), 40.0, 60, (1, 64, 128), backends=["TORCH_SDPA"]), "eager is faster")
    yield _at(small, make_need((1, 2), 0.5, 100, (1, 2)), "no way to keep it")
    yield _at(qwen, make_need((256,), 5.0, 100, (256,)), "no way to keep it")
    for _ in range(4):
        batches = sorted(rng.sample((1, 2, 4, 8, 16, 32), 3))
        sizes = sorted({*batches, rng.choice((24, 48, 64))})
        yield _at(rng.choice((small, qwen)), make_need(batches, rng.choice((3.0, 4.0, 7.0)), 100, sizes), "a promise")


def _without_cap(need: Mapping[str, Any], recorded: P90) -> dict[str, Any] | None:
    return choose({**need, "cap_mib": 10**6}, recorded)


def _mean_only(need: Mapping[str, Any], recorded: P90) -> dict[str, Any] | None:
    best = choose({**need, "slo_ms": math.inf}, recorded)
    if best is None:
        return None
    times = [step_p90(best["backend"], b, best["sizes"], recorded) or math.inf for b in need["batches"]]
    return best if sum(times) / len(times) <= need["slo_ms"] else None


def _nearest(need: Mapping[str, Any], recorded: P90) -> dict[str, Any] | None:
    """Eager steps that were not recorded get 6 ms: "it hardly depends on the batch"."""
    guessed = dict(recorded)
    for backend in need["backends"]:
        for batch in need["batches"]:
            guessed.setdefault((backend, "NONE", batch), 6.0)
    return choose(need, guessed)


def _always_a_graph(need: Mapping[str, Any], recorded: P90) -> dict[str, Any] | None:
    graphs = {key: ms for key, ms in recorded.items() if key[1] == "FULL"}
    return choose(need, graphs) or choose(need, recorded)


def _least_bad(need: Mapping[str, Any], recorded: P90) -> dict[str, Any] | None:
    return choose(need, recorded) or choose({**need, "slo_ms": math.inf}, recorded)


def _show(args: tuple[Any, ...]) -> str:
    need, recorded = args
    times = ", ".join(f"{backend} {mode} {size}: {ms:.2f}" for (backend, mode, size), ms in recorded.items())
    return f"choose({need!r},\n       recorded)  # p90 in ms: {times}"


CHOOSE = Exercise(
    id="11.4",
    title="Keep a promise",
    minutes=15,
    items=("A8", "B5"),
    ask="Write <code>choose(need, recorded)</code>. <code>need</code> has <code>batches</code> (each occurs equally "
    "often), <code>slo_ms</code> (the promise: the p90 of every batch's step stays within it), <code>cap_mib</code> "
    "and <code>graph_mib</code> (memory that graphs may take in all, and that one takes), <code>sizes</code> (those "
    "that may be captured, ascending) and <code>backends</code>. <code>recorded</code> maps <code>(backend, mode, "
    "size)</code> to a p90 in ms of the recorded H200: mode <code>\"FULL\"</code> for a graph of that size, "
    "<code>\"NONE\"</code> for an eager step of that batch. A batch runs in the smallest chosen size that holds it, "
    "and eagerly above the largest. A step that was not recorded cannot be promised. Return the choice with the least "
    "mean over the batches, of equal ones that with the fewest sizes, as <code>{\"backend\": …, \"mode\": \"FULL\" or "
    "\"NONE\", \"sizes\": […]}</code>; <code>None</code> where no choice keeps the promise.",
    solution=choose,
    cases=_cases,
    wrong=(
        Wrong("cap", _without_cap, "You capture more graphs than the memory cap has room for: <code>cap_mib // "
              "graph_mib</code> at most."),
        Wrong("mean", _mean_only, "You hold the promise against the mean. Every batch has to keep it; the mean only "
              "chooses among those that do."),
        Wrong("guess", _nearest, "You put in a number for a step that was not recorded. A promise needs a "
              "measurement."),
        Wrong("graphs always", _always_a_graph, "You give every batch a graph. A batch above the largest size runs "
              "eagerly, and here that is the faster way: TORCH_SDPA's graph gathers the longest context."),
        Wrong("least bad", _least_bad, "You return the best choice although it breaks the promise. Then the honest "
              "answer is <code>None</code>."),
    ),
    hints=(
        "Few enough choices to try them all: each backend, and each selection of sizes that the memory cap has room "
        "for.",
        "<code>itertools.combinations(sizes, k)</code> for k from 0 to <code>cap_mib // graph_mib</code>. For each "
        "batch <code>pad_to</code> (of <code>labkit.graphs.sizes</code>) gives its size or None; look its p90 up, and "
        "take infinity for what is not there. The largest has to be within the promise; keep the least mean.",
        "<code>key = (backend, \"NONE\", batch) if size is None else (backend, \"FULL\", size)</code>; "
        "<code>times.append(recorded.get(key, math.inf))</code>; then <code>if max(times) &lt;= need[\"slo_ms\"] and "
        "mean &lt; best_ms</code>. With no sizes the mode is <code>\"NONE\"</code>.",
    ),
    explanation="Three things that this course was about are in these lines: a batch is padded to a size, a graph "
    "costs memory, and what nobody measured is no argument. A real need has more batches, and start-up time as well; "
    "the search stays the same.",
    show=_show,
    redundant={"a promise": "the plain cases, with which a card should begin"},
)  # fmt: skip
