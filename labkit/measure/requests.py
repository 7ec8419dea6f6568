"""What users of an engine feel: queue time, time to first token, time between tokens. Refuses to know the engine.

Everything is computed from the reports of steps that really ran, by their own clock. A token counts as there when its
step has ended, which is when it is on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from labkit.engine.report import StepReport
from labkit.errors import LabkitError


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """One request from arrival to end. All times in milliseconds on one clock, that of `StepReport.begun_at_ms`.

    started_ms: begin of the first step that ran tokens of it; None while it waits.
    token_ms, token_steps: when each token came, and in which report (by index). Tokens of one step count once.
    ended_ms: end of the step that finished it, None while it lives.
    """

    request_id: str
    arrived_ms: float
    started_ms: float | None
    token_ms: tuple[float, ...]
    token_steps: tuple[int, ...]
    ended_ms: float | None
    finish_reason: str | None = None

    @property
    def queue_ms(self) -> float | None:
        """From arrival to the first step that ran tokens of it."""
        return None if self.started_ms is None else self.started_ms - self.arrived_ms

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token: from arrival until the first token was there."""
        return self.token_ms[0] - self.arrived_ms if self.token_ms else None

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Inter-token latencies: entry i is the wait between token i and token i + 1."""
        return tuple(b - a for a, b in zip(self.token_ms, self.token_ms[1:], strict=False))

    @property
    def e2e_ms(self) -> float | None:
        """From arrival to the end."""
        return None if self.ended_ms is None else self.ended_ms - self.arrived_ms


def request_times(reports: Sequence[StepReport], arrivals: Mapping[str, float]) -> dict[str, RequestTimes]:
    """The times of every request in `arrivals`, in its order; other requests in the reports are not looked at.

    Args:
        reports: consecutive steps, oldest first.
        arrivals: request id → when it arrived, in ms on the reports' clock (`time.perf_counter() * 1e3`).

    Raises:
        LabkitError: reports without stamps or out of order, or a request that ran before it arrived.
    """
    _check_order(reports)
    known: dict[str, int] = dict.fromkeys(arrivals, 0)
    started: dict[str, float] = {}
    tokens: dict[str, list[tuple[float, int]]] = {name: [] for name in arrivals}
    ended: dict[str, tuple[float, str]] = {}
    for index, report in enumerate(reports):
        for name in report.scheduled:
            if name in known:
                started.setdefault(name, report.begun_at_ms)
        for output in report.outputs:
            name = output.request_id
            if name not in known:
                continue
            if len(output.token_ids) > known[name]:
                known[name] = len(output.token_ids)
                tokens[name].append((report.ended_at_ms, index))
            if output.finish_reason is not None:
                ended[name] = (report.ended_at_ms, output.finish_reason)
    out = {}
    for name, arrived in arrivals.items():
        begun, (end, reason) = started.get(name), ended.get(name, (None, None))
        if begun is not None and begun < arrived:
            raise LabkitError(
                f"request {name!r}",
                f"it ran at {begun:.3f} ms and arrived at {arrived:.3f} ms",
                "Stamp an arrival before the step that may serve it.",
            )
        stamps = tuple(ms for ms, _ in tokens[name])
        out[name] = RequestTimes(name, arrived, begun, stamps, tuple(i for _, i in tokens[name]), end, reason)
    return out


def _check_order(reports: Sequence[StepReport]) -> None:
    last = 0.0
    for report in reports:
        if report.begun_at_ms <= 0:
            raise LabkitError(f"step {report.step_id}", "its report has no stamp", "Pass reports of LLM.step().")
        if report.begun_at_ms < last:
            raise LabkitError(
                f"step {report.step_id}", "it began before the one in front of it ended", "Pass steps in their order."
            )
        last = report.ended_at_ms


def prompt_steps(reports: Sequence[StepReport], times: Mapping[str, RequestTimes], names: Collection[str]) -> set[int]:
    """Indices of the reports that computed tokens of these requests' prompts: all up to the first token of each."""
    found = set()
    for name in names:
        first = times[name].token_steps[0] if times[name].token_steps else len(reports)
        found |= {i for i, report in enumerate(reports[: first + 1]) if name in report.scheduled}
    return found


def waits_in(times: RequestTimes, steps: Collection[int]) -> tuple[int, ...]:
    """Which inter-token latencies of a request contain one of these steps, by their index in `itl_ms`.

    With the steps of a long prompt, these are the waits that it may have made longer: its spikes.
    """
    pairs = zip(times.token_steps, times.token_steps[1:], strict=False)
    return tuple(i for i, (a, b) in enumerate(pairs) if any(a < step <= b for step in steps))


@dataclasses.dataclass(frozen=True)
class Waits:
    """Percentiles of `n` waits (numpy's linear interpolation) and the longest of them, in the waits' unit."""

    p50: float
    p99: float
    worst: float
    n: int


def summarize(waits: Sequence[float]) -> Waits:
    """The percentiles by which waits are judged. With fewer than a hundred, p99 is little less than the worst.

    Raises:
        LabkitError: there are none, or one is not a finite number.
    """
    values = np.asarray(waits, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise LabkitError("waits", "there are none, or one is not a finite number", "Let a request get two tokens.")
    p50, p99 = np.percentile(values, (50, 99))
    return Waits(float(p50), float(p99), float(values.max()), int(values.size))
