"""Which graphs some steps ran in, what padding came to, which steps missed a graph and why. Refuses to know an engine.

Everything is summed up from step reports, whether they were made a moment ago or read from a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from labkit.config import CUDAGraphMode as Mode
from labkit.graphs.dispatcher import GraphDispatcher, Miss

if TYPE_CHECKING:
    from labkit.engine.report import StepReport

_ORDER = ("FULL", "PIECEWISE", "NONE")


@dataclasses.dataclass(frozen=True)
class PaddingLine:
    """Steps that ran in one graph, or eagerly for one reason.

    mode: the runtime mode. size: tokens of the graph; None for eager steps, which run in their own number of tokens.
    miss: why they were eager, where the mode has graphs. real_tokens, padded_tokens: summed over the steps.
    fewest, most: real tokens of the smallest and of the largest step.
    """

    mode: str
    size: int | None
    miss: Miss | None
    steps: int
    real_tokens: int
    padded_tokens: int
    fewest: int
    most: int

    @property
    def name(self) -> str:
        """The mode, with the reason where it is a miss."""
        return f"{self.mode}: {self.miss.value}" if self.miss else self.mode

    @property
    def share(self) -> float:
        """Padding among the tokens that ran, 0…1."""
        return self.padded_tokens / (self.real_tokens + self.padded_tokens)

    @property
    def ran(self) -> str:
        """The size, or the span of an eager line's steps."""
        if self.size is not None:
            return str(self.size)
        return str(self.most) if self.fewest == self.most else f"{self.fewest}–{self.most}"


@dataclasses.dataclass(frozen=True)
class PaddingReport:
    """Real and padded tokens per graph, eager steps by reason: the counterpart of vLLM's cudagraph metrics.

    lines: FULL graphs by size, PIECEWISE ones by size, then eager steps. unused: graphs as (mode, size) that no step
    ran in; empty where no dispatcher was given. backends: who ran attention. emulated: "graphs" were the CPU's
    emulation.
    """

    lines: tuple[PaddingLine, ...]
    unused: tuple[tuple[str, int], ...] = ()
    backends: tuple[str, ...] = ()
    emulated: bool = False

    @classmethod
    def of(cls, reports: Iterable[StepReport], dispatcher: GraphDispatcher | None = None) -> PaddingReport:
        """Sum up the steps that ran; idle ones are left out.

        Args:
            dispatcher: of the mode and sizes that the steps ran under; a fresh one does, and nothing is counted in it.
                It says which eager steps are misses and why. Without it eager steps are not told apart.

        A report has no request states. An eager batch with a decode's token counts is taken for a decode where that
        explains it; else, where mixed batches have no graphs, for one-token prompts or last chunks; else its graph was
        not captured.
        """
        steps = [report for report in reports if report.num_tokens]
        groups: dict[tuple[str, int | None, Miss | None], list[StepReport]] = {}
        for report in steps:
            eager = report.mode == "NONE"
            miss = _miss(report, dispatcher) if eager and dispatcher else None
            groups.setdefault((report.mode, None if eager else report.size, miss), []).append(report)
        order = [*Miss]
        keys = sorted(groups, key=lambda k: (_ORDER.index(k[0]), k[1] or 0, order.index(k[2]) if k[2] else -1))
        lines = [_line(*key, groups[key]) for key in keys]
        captured = [(key.mode, key.size) for key in dispatcher.capture_order()] if dispatcher else []
        hit = {(line.mode, line.size) for line in lines}
        return cls(
            tuple(lines),
            tuple(sorted({key for key in captured if key not in hit}, key=lambda k: (_ORDER.index(k[0]), k[1]))),
            tuple(dict.fromkeys(report.backend for report in steps)),
            any(report.emulated for report in steps),
        )

    @property
    def steps(self) -> int:
        return sum(line.steps for line in self.lines)

    @property
    def hits(self) -> int:
        """Steps that ran in a graph."""
        return sum(line.steps for line in self.lines if line.size is not None)

    @property
    def misses(self) -> dict[Miss, int]:
        """Steps that ran eagerly although the mode has graphs, by reason."""
        return {line.miss: line.steps for line in self.lines if line.miss is not None}

    @property
    def real_tokens(self) -> int:
        return sum(line.real_tokens for line in self.lines)

    @property
    def padded_tokens(self) -> int:
        return sum(line.padded_tokens for line in self.lines)

    @property
    def share(self) -> float:
        """Padding among all tokens that ran, 0…1; 0 where nothing ran."""
        ran = self.real_tokens + self.padded_tokens
        return self.padded_tokens / ran if ran else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """Plain values for JSON and data frames, one object per line."""
        return [
            {**dataclasses.asdict(line), "miss": line.miss.value if line.miss else None, "share": line.share}
            for line in self.lines
        ]

    def markdown(self) -> str:
        """The table, and under it in words how many steps had a graph and why the others had none."""
        head = ("mode", "tokens that ran", "steps", "real tokens", "padded tokens", "padding")
        cells = [(line.name, line.ran, *_numbers(line)) for line in self.lines]
        if len(cells) != 1:
            cells.append(("all", "", *_numbers(self)))
        table = ["| " + " | ".join(row) + " |" for row in (head, ("---", *["---:"] * 5), *cells)]
        return "\n".join([*table, "", self.summary])

    @property
    def summary(self) -> str:
        """Hits, misses by reason and graphs that nothing ran in, in a sentence each."""
        if not self.steps:
            return "No step ran."
        said = [
            f"{self.hits:,} of {self.steps:,} steps ran in a graph{', emulated on a CPU' if self.emulated else ''}."
        ]
        said += [f"{count:,} ran eagerly: {miss.value}." for miss, count in self.misses.items()]
        if self.unused:
            said.append(f"{len(self.unused):,} graphs were not used.")
        return " ".join(said)


def _miss(report: StepReport, dispatcher: GraphDispatcher) -> Miss | None:
    if dispatcher.mode is Mode.NONE:
        return None
    query_len = dispatcher.query_len
    is_decode = report.max_query_len == query_len and report.num_tokens == report.num_reqs * query_len
    missed = dispatcher.miss(report.num_tokens, is_decode) or dispatcher.miss(report.num_tokens, False)
    return missed or Miss.NOT_CAPTURED


def _line(mode: str, size: int | None, miss: Miss | None, steps: list[StepReport]) -> PaddingLine:
    real = [step.num_tokens for step in steps]
    return PaddingLine(
        mode, size, miss, len(steps), sum(real), sum(step.num_padded for step in steps), min(real), max(real)
    )  # fmt: skip


def _numbers(one: PaddingLine | PaddingReport) -> tuple[str, ...]:
    return (f"{one.steps:,}", f"{one.real_tokens:,}", f"{one.padded_tokens:,}", f"{one.share:.1%}")
