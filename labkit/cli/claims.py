"""`labkit claims`: the source texts' numbers beside ours, with verdicts. Refuses to measure, and to import torch."""

from __future__ import annotations

import argparse
import textwrap

from labkit.cli.answer import Answer, Console
from labkit.cli.options import Parser
from labkit.figures.claims import SYMBOLS, claims_summary
from labkit.measure.provenance import Kind
from labkit.measure.recordings import load, shipped
from labkit.models.shapes import SHAPES
from labkit.simulate.claims import TEXT_GB_S, Finding, findings
from labkit.simulate.step import H200


def claims_options(parser: Parser) -> None:
    parser.add_argument("--recording", metavar="FILE", action="append",
                        help="judge by this recording, not by what ships; may be given several times")  # fmt: skip


def claims(args: argparse.Namespace, console: Console) -> Answer:
    """Every claim with RECORDED and SIMULATED evidence and what follows from it."""
    named = getattr(args, "recording", None)
    recordings = [load(path) for path in named] if named else list(shipped())
    found = findings(recordings, SHAPES)
    idle = sorted(
        r.provenance.label for r in recordings if r.provenance.kind is not Kind.RECORDED or not r.provenance.gpu
    )
    notes = [f"Decides nothing, since only RECORDED rows of a GPU do: {label}" for label in idle]
    data = {
        "claims": [one.as_dict() for one in found],
        "notes": notes,
        "recordings": [recording.provenance.as_dict() for recording in recordings],
        "simulated": {"gb_s": TEXT_GB_S, "machine": H200.as_dict()},
    }
    origins = sorted({recording.provenance.label for recording in recordings}) or ["no recordings"]
    lines = [claims_summary(found), *origins, *notes, ""]
    return Answer(data, "\n".join([*lines, *(_describe(one) for one in found)]))


def _describe(one: Finding) -> str:
    claim = one.claim
    lines = [f"{SYMBOLS.get(one.verdict, '~')} {claim.words}", f"  theirs      {claim.claimed}  ({claim.text})"]
    lines += [f"  {str(e.kind).ljust(10)}  {e.value}  ({e.how})" for e in (*one.recorded, *one.simulated)]
    lines += textwrap.wrap(
        f"{one.verdict}. {one.why}", 100, initial_indent="  verdict     ", subsequent_indent=" " * 14
    )  # fmt: skip
    return "\n".join([*lines, ""])
