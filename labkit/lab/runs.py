"""What a panel asks of a source, and what it gets: a run with its data, words and origin. Refuses to know widgets."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from labkit.errors import LabkitError
from labkit.lab.fields import Control
from labkit.measure.provenance import Kind, Provenance, package_version, source_commit
from labkit.measure.stats import Measurement

#: What a SIMULATED origin has in place of a processor.
MODEL = "model: "


class Stopped(Exception):
    """Stop was pressed before anything could be measured."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What a source may do while it runs; every call is safe on the worker thread.

    should_stop: whether Stop was pressed; ask between steps, never inside a capture.
    stage: `stage(text, done, total)` says what is under way. A text that begins with loading, reconfiguring, profiling,
        compiling or capturing is one that Stop cannot break off, and the panel says so.
    partial: `partial(data)` draws what there is so far: the figure gets a run that is not `finished`.
    """

    should_stop: Callable[[], bool] = lambda: False
    stage: Callable[[str, int, int], None] = lambda text, done, total: None
    partial: Callable[[Any], None] = lambda data: None

    def check(self) -> None:
        """Leave the run here if Stop was pressed.

        Raises:
            Stopped: it was; the panel adds nothing and says so.
        """
        if self.should_stop():
            raise Stopped


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a source hands back.

    data: what the figure draws, plain values (numbers, strings, lists, mappings, frozen dataclasses of these).
    values: one row of the table, by the panel's column keys; numbers stay numbers. A list may be here for the figure,
        without being a column.
    summary: one sentence: what came out, and why.
    measurement: samples of what two pins are compared by, None where a ratio would mean nothing.
    quantity: what these samples are, "" for a time ("A takes 2 times as long"), else its name ("2 times the memory").
    notes: sentences that a reader needs beside the summary. stopped: Stop ended it early, and this is what ran.
    """

    data: Any
    values: Mapping[str, Any]
    summary: str
    provenance: Provenance | None
    measurement: Measurement | None = None
    notes: tuple[str, ...] = ()
    quantity: str = ""
    stopped: bool = False


class Source(Protocol):
    """Something that a panel can ask: an engine, a recording, a model. It is shown as "kind · label".

    Beside these a source may have `restore(data) -> data`, which makes of stored JSON what `Outcome.data` was.
    """

    @property
    def kind(self) -> str:
        """LIVE, RECORDED or SIMULATED."""

    @property
    def label(self) -> str:
        """The machine, or the model's name."""

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        """What can be chosen here, given what is chosen now ({} at first). A control that does nothing is not here."""

    def cost(self, values: Mapping[str, Any]) -> str:
        """What Run will take, as a sentence: "about 3 s: 2 captures"."""

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        """Sentences on what these values will do, shown under the controls."""

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        """Measure, look up or compute. Called on the worker thread; a LabkitError becomes a card."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a panel. source: its label. settings: the controls' values by name.

    earlier: it was brought back from before the kernel started. finished: False while it is still coming in; then only
    `data` is there.
    """

    number: int
    kind: str
    source: str
    settings: Mapping[str, Any]
    outcome: Outcome
    earlier: bool = False
    finished: bool = True

    @property
    def data(self) -> Any:
        return self.outcome.data

    @property
    def values(self) -> Mapping[str, Any]:
        return self.outcome.values

    @property
    def summary(self) -> str:
        return self.outcome.summary

    @property
    def notes(self) -> tuple[str, ...]:
        return self.outcome.notes

    @property
    def stopped(self) -> bool:
        return self.outcome.stopped

    @property
    def provenance(self) -> Provenance:
        if self.outcome.provenance is None:
            raise LabkitError(f"run {self.number}", "has no origin", "Give Outcome a Provenance.")
        return self.outcome.provenance


class AnyRun(Protocol):
    """What the frame asks of a run."""

    @property
    def number(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def provenance(self) -> Provenance: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def earlier(self) -> bool: ...


def simulated(model: str, /, **parameters: Any) -> Provenance:
    """The origin of numbers that a model computed, with the parameters that it had. Loads no torch.

    Args:
        model: its name ("launch queue"). parameters: whatever the numbers depend on, with units in the names.
    """
    given = ", ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
                      for name, value in parameters.items())  # fmt: skip
    packages = {"python": platform.python_version()}
    packages |= {name: version for name in ("labkit", "numpy") if (version := package_version(name))}
    commit, dirty = source_commit()
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = f"{MODEL}{model}" + (f" ({given})" if given else "")
    return Provenance(Kind.SIMULATED, None, None, said, packages, commit, dirty, "", date, "", 1)


def machine(made: Provenance) -> str:
    """The short name of what a run ran on: a GPU, "CPU", or "model: …"."""
    if made.kind is Kind.SIMULATED:
        return made.cpu.removeprefix(MODEL).split(" (")[0]
    return made.gpu or "CPU"


def origin(made: Provenance) -> str:
    """Where the numbers of a run come from, in one line without its kind: machine, versions, date."""
    versions = " · ".join(f"{name} {made.packages[name]}" for name in ("torch", "triton") if name in made.packages)
    primed = "KV primed with seeded values" if made.primed else ""
    return " · ".join(part for part in (made.gpu or made.cpu, versions, made.date[:10], primed) if part)
