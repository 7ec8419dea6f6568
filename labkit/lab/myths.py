"""A chapter's myth check: claims of the course's source texts beside what we know, each with how we know it.

Refuses to judge: verdicts on recorded claims come from `labkit.simulate.claims`, a chapter's own from its cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from labkit.lab import ui
from labkit.lab.cards import Card, paragraph
from labkit.measure.library import library
from labkit.models.shapes import SHAPES
from labkit.simulate.claims import FAILS, FOLKLORE, HOLDS, Finding, findings

#: How a claim is known, beside what that means.
MEASURED, COMPUTED, DOCUMENTED, UNTESTED = "measured here", "computed here", "documented", "folklore"
TAGS = {
    MEASURED: "labkit measured it, on the machine that is named",
    COMPUTED: "it follows from numbers that are shown; there is nothing to measure",
    DOCUMENTED: "the maker of the software or the hardware says so",
    UNTESTED: "it is repeated; no measurement of ours says yes or no",
}
_SIGNS = {HOLDS: "✓", FAILS: "✗"}


@dataclasses.dataclass(frozen=True)
class Myth:
    """One claim.

    claim: in our words. found: what we know, every number with its kind. verdict: "holds", "does not hold", …
    tag: a key of TAGS. cell: which cell or exercise tests it.
    """

    claim: str
    found: str
    verdict: str
    tag: str
    cell: str

    def __post_init__(self) -> None:
        if self.tag not in TAGS:
            raise ValueError(f"myth {self.claim!r}: no tag {self.tag!r}; there are {', '.join(TAGS)}")


def recorded_myths(cells: dict[str, str]) -> tuple[Myth, ...]:
    """Claims of `labkit claims` as myths, judged by every recording that ships or is the user's own.

    Args:
        cells: id of a claim → which cell tests it, in the order wanted.

    Raises:
        KeyError: there is no claim of that id.
    """
    found = {one.claim.id: one for one in findings(library().recordings, SHAPES)}
    return tuple(_myth(found[name], cell) for name, cell in cells.items())


def myth_card(myths: Sequence[Myth]) -> Card:
    """The claims as a table, with the meaning of each tag that occurs under it."""
    rows = [
        {
            "claim": _wrapped(one.claim), "found": _wrapped(one.found),
            "verdict": f"<b>{_SIGNS.get(one.verdict, '○')} {ui.escape(one.verdict)}</b><br>{ui.escape(one.tag)}",
            "cell": ui.escape(one.cell),
        } for one in myths
    ]  # fmt: skip
    columns = [
        ("claim", "claim"),
        ("found", "what we know"),
        ("verdict", "verdict, and how known"),
        ("cell", "test it"),
    ]
    used = [tag for tag in TAGS if any(one.tag == tag for one in myths)]
    meaning = " ".join(f"{tag}: {TAGS[tag]}." for tag in used)
    line = f"myth check: {len(myths)} claim{'s' * (len(myths) != 1)}"
    return Card(line, ui.table("Myth check", columns, rows) + paragraph(meaning, quiet=True))


def _myth(one: Finding, cell: str) -> Myth:
    evidence = [f"{e.kind}: {e.value} ({e.how})." for e in (*one.recorded, *one.simulated)]
    tag = MEASURED if one.recorded else COMPUTED if one.verdict in (HOLDS, FAILS) else UNTESTED
    verdict = "open" if one.verdict not in (HOLDS, FAILS, FOLKLORE) else one.verdict
    return Myth(one.claim.words, " ".join([*evidence, one.why]), verdict, tag, cell)


def _wrapped(text: str) -> str:
    return f'<div style="white-space:normal;min-width:220px;max-width:460px">{ui.escape(text)}</div>'
