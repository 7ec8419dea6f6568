"""What a step's time consists of: host phases one after another, the device beside them. Refuses to know how it ran.

The host's phases follow each other on one thread, so they add up. The device runs beside them: its time is no further
summand, but says which part of a phase was waiting. Without a GPU there is the host alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.engine.report import PHASES, StepReport
from labkit.errors import LabkitError
from labkit.measure.provenance import Kind
from labkit.measure.recordings import Recording, Row
from labkit.measure.stats import Summary, summary

#: Phases in words, in the order in which they run.
WORDS = {
    "schedule": "choose who runs", "dispatch": "choose the graph", "inputs": "fill the inputs",
    "prepare": "attention's preparation", "launch": "start the forward", "sample": "sample, and wait for the device",
    "commit": "append the tokens", "detokenize": "tokens to text",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a step, in microseconds. p10_us, p90_us: None where only the median was kept.

    lane: "host" or "device". name: a phase (see PHASES), "between" (host time in no phase) or "forward" (device).
    """

    lane: str
    name: str
    p50_us: float
    p10_us: float | None = None
    p90_us: float | None = None

    @property
    def words(self) -> str:
        """What the part is, for a reader."""
        return {"between": "between the phases", "forward": "the forward on the device"}.get(
            self.name, WORDS.get(self.name, self.name)
        )


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """A step of one configuration, taken apart. Medians; they need not add up to the median of the whole.

    wall: time of the step, from the call to the tokens on the host. n: steps it is made of; warm-up is not among them.
    host: the phases in order, then what is in none. serial_us: their sum.
    forward: from the forward's first to its last operation on the device, by events: gaps between kernels are inside
    it, the head and sampling are not. None without a GPU.
    hidden_us: the part of the forward that ran while the host was still starting it: they overlap.
    waiting_us: how long the host at least stood still for the forward after it had started all of it; what it waited
    for the head and for sampling is not in it. Both None without a GPU.
    """

    title: str
    kind: Kind
    mode: str
    n: int
    wall: Summary
    host: tuple[Part, ...]
    forward: Part | None
    hidden_us: float | None
    waiting_us: float | None

    @property
    def serial_us(self) -> float:
        return sum(part.p50_us for part in self.host)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Host parts in order, then the device's."""
        return (*self.host, *((self.forward,) if self.forward else ()))

    @property
    def bound(self) -> str:
        """What the forward was waiting for: "device", "host", or empty where there is no GPU.

        The device is the slower one where the forward outlasts the host's starting of it by more than a tenth.
        """
        launch = next((part.p50_us for part in self.host if part.name == "launch"), 0.0)
        if self.forward is None:
            return ""
        return "device" if self.forward.p50_us > 1.1 * launch else "host"

    @property
    def sentence(self) -> str:
        """The step in one or two sentences."""
        largest = max(self.host, key=lambda part: part.p50_us)
        share = largest.p50_us / self.serial_us if self.serial_us else 0.0
        out = (
            f"{self.title}: {self.wall.p50:,.0f} µs (p10–p90 {self.wall.p10:,.0f}–{self.wall.p90:,.0f}, n={self.n}, "
            f"{self.kind}); the largest host part is {largest.name} ({largest.words}), {largest.p50_us:,.0f} µs or "
            f"{share:.0%} of the host's time."
        )
        if self.forward is not None and self.hidden_us is not None and self.waiting_us is not None:
            out += (
                f" The forward takes {self.forward.p50_us:,.0f} µs on the device, {self.hidden_us:,.0f} µs of it while "
                f"the host still starts it; after that the host waits for it at least {self.waiting_us:,.0f} µs"
                f" ({'the device is the slower one' if self.bound == 'device' else 'the host is the slower one'})."
            )
        return out

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "title": self.title, "kind": str(self.kind), "mode": self.mode, "n": self.n,
            "wall_us": {"p10": self.wall.p10, "p50": self.wall.p50, "p90": self.wall.p90},
            "serial_us": self.serial_us, "hidden_us": self.hidden_us, "waiting_us": self.waiting_us,
            "bound": self.bound or None, "parts": [dataclasses.asdict(part) for part in self.parts],
        }  # fmt: skip


def decompose(
    reports: Sequence[StepReport], *, kind: Kind | str = Kind.LIVE, warmup: int = 0, title: str = ""
) -> Decomposition:
    """Steps of one mode and size, taken apart step by step; the first `warmup` are left out.

    Raises:
        LabkitError: no step is left, they ran in different configurations, or a time is not a time.
    """
    reports = list(reports)[warmup:]
    if not reports:
        raise LabkitError("a decomposition", "no step is left after the warm-up", "Take more steps.")
    ran = sorted({(r.mode, r.size) for r in reports})
    if len(ran) > 1:
        raise LabkitError(
            "a decomposition", f"the steps ran as {', '.join(f'{m} {s}' for m, s in ran)}", "Take apart one at a time."
        )
    names = [name for name in PHASES if any(name in r.phases_us for r in reports)]
    names += sorted({name for r in reports for name in r.phases_us} - set(names))
    columns = {name: [r.phases_us.get(name, 0.0) for r in reports] for name in names}
    columns["between"] = [max(0.0, r.wall_ms * 1e3 - r.host_us) for r in reports]
    host = tuple(_part("host", name, values) for name, values in columns.items())
    forward, hidden, waiting = None, None, None
    on_device = [r.device_us for r in reports if r.device_us is not None]
    if len(on_device) == len(reports):
        forward = _part("device", "forward", on_device)
        both = [overlap(d, r.phases_us) for d, r in zip(on_device, reports, strict=True)]
        hidden, waiting = summary([h for h, _ in both]).p50, summary([w for _, w in both]).p50
    (mode, size), last = ran[0], reports[-1]
    return Decomposition(
        title or _title(last.backend, mode, size, last.num_reqs), Kind(kind), mode, len(reports),
        summary([r.wall_ms * 1e3 for r in reports]), host, forward, hidden, waiting,
    )  # fmt: skip


def decompose_row(row: Row, kind: Kind | str, title: str = "") -> Decomposition:
    """A measured row, taken apart by the medians that it keeps; only the whole step has a spread then."""
    names = [name for name in PHASES if name in row.phases_us]
    names += sorted(set(row.phases_us) - set(names))
    wall = summary([ms * 1e3 for ms in row.samples_ms])
    between = max(0.0, wall.p50 - sum(row.phases_us.values()))
    host = tuple(Part("host", name, us) for name, us in (*((n, row.phases_us[n]) for n in names), ("between", between)))
    forward, hidden, waiting = None, None, None
    if row.device_us is not None:
        forward = Part("device", "forward", row.device_us)
        hidden, waiting = overlap(row.device_us, row.phases_us)
    return Decomposition(
        title or _title(row.backend, row.mode, row.size, row.batch, row.compile, row.model), Kind(kind), row.mode,
        row.n, wall, host, forward, hidden, waiting,
    )  # fmt: skip


def decompositions(recording: Recording) -> list[Decomposition]:
    """Every row of a recording, taken apart, in its order."""
    return [decompose_row(row, recording.provenance.kind) for row in recording.rows]


def overlap(device_us: float, phases_us: Mapping[str, float]) -> tuple[float, float]:
    """Of a forward on the device: how much ran while the host was starting it, and how much the host waited for.

    The device begins when the host begins to start the forward, as good as: what comes after the host has started all
    of it, the host waits for, at most as long as its next phase, `sample`, takes.
    """
    if not (math.isfinite(device_us) and device_us >= 0):
        raise LabkitError("a decomposition", f"device_us={device_us} is not a time", "Measure again.")
    launch, sample = phases_us.get("launch", 0.0), phases_us.get("sample", 0.0)
    hidden = min(device_us, launch)
    return hidden, min(device_us - hidden, sample)


def _part(lane: str, name: str, values: Sequence[float]) -> Part:
    found = summary(values)
    return Part(lane, name, found.p50, found.p10, found.p90)


def _title(backend: str, mode: str, size: int, batch: int, compile: str = "NONE", model: str = "") -> str:
    ran = mode if mode == "NONE" else f"{mode} {size}"
    compiled = "" if compile == "NONE" else f" {compile}"
    return f"{model + ', ' if model else ''}{backend} {ran}{compiled}, batch {batch}"
