"""The launch queue against a second model of the same rules: a loop over events instead of maxima of times."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import ConfigError
from labkit.measure.spans import StepTimeline
from labkit.simulate.queue import Work, launches_of, run_queue

PIECES = st.none() | st.integers(0, 3)
TIMES = st.integers(0, 40).map(float)  # whole numbers: sums are exact, so results can be equal


def works(pieces: st.SearchStrategy = PIECES) -> st.SearchStrategy[list[Work]]:
    one = st.builds(Work, st.just("k"), st.sampled_from(("gemm", "norm", "copy")), TIMES, TIMES, pieces)
    return st.lists(one, max_size=25)


def by_events(
    work: list[Work], *, graph: bool = False, graph_launch_us: float, per_node_us: float, host_per_node_us: float,
    depth: int, host_before_us: float, sync_us: float,
) -> dict:  # fmt: skip
    """The same story told by a clock that jumps from event to event, with a host and a device that react to them."""
    todo: list[list[int]] = []
    for i, kernel in enumerate(work):
        joins = graph and i > 0
        joins = joins or (not graph and i > 0 and kernel.piece is not None and kernel.piece == work[i - 1].piece)
        if joins:
            todo[-1].append(i)
        else:
            todo.append([i])
    replay = [graph or work[group[0]].piece is not None for group in todo]
    events: list[tuple[float, int, str, int]] = [(host_before_us, 0, "host is free", -1)]
    unfinished, ready, running = 0, [], False
    host_free, next_group, count = True, 0, 0
    calls: list[tuple[float, float]] = []
    ran: dict[int, tuple[float, float]] = {}
    pending: list[tuple[int, float]] = []  # the rest of the launch that the device works on
    device_end = now = host_end = 0.0
    host_free = False
    while events:
        now, _, what, which = heapq.heappop(events)
        if what == "host is free":
            host_free, host_end = True, now
        elif what == "launched":
            host_free, host_end = True, now
            ready.append(which)
        elif what == "kernel ends":
            device_end = now
            if not pending:
                running, unfinished = False, unfinished - 1
        if host_free and next_group < len(todo) and unfinished < depth:
            group = todo[next_group]
            cost = (
                graph_launch_us + host_per_node_us * len(group) if replay[next_group] else work[group[0]].launch_us
            )  # fmt: skip
            calls.append((now, now + cost))
            count += 1
            heapq.heappush(events, (now + cost, count, "launched", next_group))
            next_group, unfinished, host_free = next_group + 1, unfinished + 1, False
        if not running and ready:
            group = ready.pop(0)
            running = True
            pending = [(i, per_node_us if replay[group] else 0.0) for i in todo[group]]
            start = True
        else:
            start = what == "kernel ends"
        if running and start and pending:
            i, gap = pending.pop(0)
            ran[i] = (now + gap, now + gap + work[i].device_us)
            count += 1
            heapq.heappush(events, (ran[i][1], count, "kernel ends", i))
    wall = max(host_end, device_end) + sync_us if todo or sync_us else host_end
    return {"wall": wall, "calls": calls, "ran": [ran[i] for i in range(len(work))]}


@given(
    work=works(), graph=st.booleans(), graph_launch_us=TIMES, per_node_us=TIMES, host_per_node_us=TIMES,
    depth=st.integers(1, 6) | st.just(1024), host_before_us=TIMES, sync_us=TIMES,
)  # fmt: skip
def test_equals_an_event_loop(work: list[Work], **how: object) -> None:
    expected = by_events(work, **how)  # type: ignore[arg-type]
    got = run_queue(work, **how)  # type: ignore[arg-type]
    got.check()
    begun = [span for span in got.host if span.name.startswith(("launch", "replay"))]
    assert [(s.begin_us, s.end_us) for s in begun] == expected["calls"]
    assert [(s.begin_us, s.end_us) for s in got.device] == expected["ran"]
    assert got.wall_us == expected["wall"]


@given(work=works(), depth=st.integers(1, 30))
def test_what_must_hold_for_any_work(work: list[Work], depth: int) -> None:
    got = run_queue(work, depth=depth, graph_launch_us=9.0)
    assert StepTimeline.from_dict(got.as_dict()).launches == got.launches
    for span in got.device:
        assert span.launch is not None and got.host[span.launch].end_us <= span.begin_us
    assert all(a.end_us <= b.begin_us for a, b in zip(got.device, got.device[1:], strict=False))
    assert all(a.end_us <= b.begin_us for a, b in zip(got.host, got.host[1:], strict=False))
    assert got.wall_us >= sum(kernel.device_us for kernel in work)
    assert got.wall_us >= run_queue(work, graph_launch_us=9.0).wall_us  # a shallower queue never helps


def many(n: int, device_us: float, launch_us: float) -> list[Work]:
    return [Work(f"k{i}", "gemm", device_us, launch_us) for i in range(n)]


@pytest.mark.parametrize(
    ("n", "device_us", "launch_us", "wall"),
    [
        (50, 100.0, 10.0, 10.0 + 50 * 100.0),  # all large: one launch in sight, the others behind kernels
        (50, 3.0, 10.0, 50 * 10.0 + 3.0),  # all small: every launch in sight, one kernel after the last
        (1, 7.0, 10.0, 17.0),
        (0, 7.0, 10.0, 0.0),
        (50, 10.0, 10.0, 510.0),  # the crossing point
    ],
)
def test_closed_forms(n: int, device_us: float, launch_us: float, wall: float) -> None:
    assert run_queue(many(n, device_us, launch_us)).wall_us == pytest.approx(wall)


def test_a_graph_shows_one_launch() -> None:
    got = run_queue(many(50, 3.0, 10.0), graph=True, graph_launch_us=10.0, per_node_us=1.0)
    assert got.wall_us == pytest.approx(10 + 50 * 4)
    assert (got.mode, got.launches, got.graph_launches) == ("FULL", 1, 1)
    assert run_queue(many(50, 100.0, 10.0), graph=True, graph_launch_us=10.0).wall_us == pytest.approx(5010.0)


def test_a_full_queue_blocks_the_host() -> None:
    got = run_queue(many(10, 100.0, 1.0), depth=2)
    assert got.host[2].begin_us == pytest.approx(101.0)  # the third launch waits for the first kernel's end
    assert run_queue(many(10, 100.0, 1.0)).host[2].begin_us == pytest.approx(2.0)


def test_pieces_make_replays_and_copies_are_no_launches() -> None:
    work = [
        Work("a", "gemm", 1, 5, 0), Work("b", "norm", 1, 5, 0), Work("attention", "attention", 1, 5),
        Work("c", "gemm", 1, 5, 1), Work("copy", "copy", 1, 5),
    ]  # fmt: skip
    got = run_queue(work)
    assert (got.mode, got.launches, got.graph_launches) == ("PIECEWISE", 3, 2)
    assert [(replay, len(kernels)) for replay, kernels in launches_of(work)] == [
        (True, 2), (False, 1), (True, 1), (False, 1),
    ]  # fmt: skip
    assert run_queue([]).launches == 0


def test_bad_numbers_are_sentences() -> None:
    with pytest.raises(ConfigError, match="zero or more"):
        Work("k", "gemm", -1.0, 1.0)
    with pytest.raises(ConfigError, match="sync_us"):
        run_queue([], sync_us=float("nan"))
    with pytest.raises(ConfigError, match="at least one launch"):
        run_queue([], depth=0)
