"""The claims of the source texts as a table: plain rows, and HTML with headings that a screen reader can follow.
Refuses to judge: verdicts come with the findings.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from labkit.simulate.claims import FAILS, HOLDS, OPEN, Evidence, Finding

HEAD = ("claim", "theirs", "ours, RECORDED", "ours at their bandwidth, SIMULATED", "verdict")
#: A symbol beside each verdict's words.
SYMBOLS = {HOLDS: "✓", FAILS: "✗", OPEN: "○"}
NOTHING = "not recorded"


def claims_rows(findings: Iterable[Finding], *, how: bool = True) -> list[tuple[str, ...]]:
    """One row of text per finding, in the order of HEAD. how: each value with what it is of."""
    return [
        (
            finding.claim.words, finding.claim.claimed, _values(finding.recorded, how) or NOTHING,
            _values(finding.simulated, how) or "-", f"{SYMBOLS.get(finding.verdict, '~')} {finding.verdict}",
        ) for finding in findings
    ]  # fmt: skip


def claims_summary(findings: Sequence[Finding]) -> str:
    """`18 claims: 6 hold, 3 do not hold, 8 are open, 1 is folklore.`, the words of the verdicts themselves."""
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.verdict] = counts.get(finding.verdict, 0) + 1
    return f"{len(findings)} claims. " + "; ".join(f"{verdict}: {n}" for verdict, n in counts.items()) + "."


def claims_html(findings: Sequence[Finding]) -> str:
    """A table element with a caption; every value says its kind in the head of its column."""
    cells = []
    for finding, row in zip(findings, claims_rows(findings), strict=True):
        words = [html.escape(cell).replace("\n", "<br>") for cell in row]
        body = "".join(f"<td>{cell}</td>" for cell in words[1:-1])
        why = html.escape(finding.why)
        cells.append(f'<tr><th scope="row">{words[0]}</th>{body}<td><b>{words[-1]}</b><br>{why}</td></tr>')
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in HEAD)
    caption = html.escape(claims_summary(findings))
    return (
        f'<table class="labkit-claims"><caption>{caption}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(cells)}</tbody></table>"
    )


def _values(evidence: Iterable[Evidence], how: bool) -> str:
    return "\n".join(f"{one.value} ({one.how})" if how else one.value for one in evidence)
