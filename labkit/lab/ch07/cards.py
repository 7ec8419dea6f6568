"""The cards of chapter 07: a learner's functions at work, the myth check, the row of the scoreboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.lab import scoreboard, ui
from labkit.lab.cards import Card, paragraph
from labkit.lab.ch07.exercises import BREAK_EVEN, ILLEGAL_LINES, rebind
from labkit.lab.ch07.lines import ALLOWED, LINES
from labkit.lab.ch07.recorded import recorded_sources
from labkit.lab.engine_room import shared_room
from labkit.lab.exercises import check
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.myths import COMPUTED, MEASURED, Myth, myth_card, recorded_myths
from labkit.lab.panel_html import short
from labkit.lab.plugged_run import PluggedRun, run_plugged
from labkit.lab.progress import solutions_wanted
from labkit.lab.runs import Context, Run
from labkit.measure.provenance import Kind

SCORE = "decode step, one graph"
PROMPTS = ("Once upon a time", "One, two, three,")
#: Graphs for every batch that occurs: a panel may have left the engine with others.
SETTINGS = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": (1, 2, 4)}


def _model() -> str | None:
    """The engine that is loaded, else a small one on a CPU, else the default."""
    if engine_missing() or shared_room().model:
        return None
    return None if gpu_name() else "tiny-llama"


def plug_in(answer: Any) -> Card:
    """Text by the engine while a learner's `replay` fills its buffers, launches its graphs and keeps their results.

    Under it the same with a `replay` that rebinds the name `graph.input`, used all the same.
    """
    yours, wrong = _plugged(replay=answer), _plugged(trust=True, replay=rebind)
    head = "<h3>{}</h3>"
    html = head.format("With your replay") + yours.html + head.format("With the name rebound") + wrong.html
    return Card(f"yours: {yours!r} | rebound: {wrong!r}", html)


def _plugged(**functions: Any) -> PluggedRun:
    return run_plugged(prompts=PROMPTS, max_tokens=6, model=_model(), settings=SETTINGS, **functions)


def reasons(answer: Callable[..., Any]) -> Card:
    """Every line of the chapter with a learner's verdict and the reason; nothing while the check is not passed."""
    fn = ILLEGAL_LINES.solution if solutions_wanted() else answer
    if not check(ILLEGAL_LINES, fn).passed:
        said = "Write `illegal_lines` first; then this table is yours."
        return Card("reasons: write illegal_lines first", paragraph(said))
    found = set(fn([text for text, _ in LINES], ["hidden", "logits"]))
    rows = [
        {
            "n": str(n), "line": f"<code>{ui.escape(text)}</code>", "says": "✗ refused" if n in found else "✓ taken",
            "why": ui.escape(reason or ALLOWED.get(text, "allowed: it only starts work, or is a comment")),
        } for n, (text, reason) in enumerate(LINES, 1)
    ]  # fmt: skip
    head = [("n", "line#"), ("line", "code"), ("says", "yours says"), ("why", "why")]
    return Card(f"reasons: {len(found)} of {len(LINES)} lines are refused", ui.table("Inside a capture", head, rows))


def paid_back(answer: Callable[..., Any], runs: Sequence[Run]) -> Card:
    """A learner's `break_even` on the runs of the panel; nothing while the check is not passed."""
    fn = BREAK_EVEN.solution if solutions_wanted() else answer
    if not check(BREAK_EVEN, fn).passed:
        said = "Write `break_even` first; then this table is yours."
        return Card("paid back: write break_even first", paragraph(said))
    rows = []
    for run in runs:
        took, eager, graph = (run.values[key] for key in ("capture_ms", "eager_ms", "graph_ms"))
        even = None if took is None else fn(*(max(1, round(1e6 * one)) for one in (took, eager, graph)))
        rows.append({
            "run": str(run.number), "what": ui.escape(run.values["what"]), "eager": short(eager),
            "graph": short(graph), "capture": "not known" if took is None else short(took),
            "even": "—" if took is None else "never" if even is None else f"{even:,}", "kind": ui.badge(run.kind),
        })  # fmt: skip
    head = [("run", "run#"), ("what", "what ran"), ("eager", "eager, ms#"), ("graph", "graph, ms#"),
            ("capture", "capture, ms#"), ("even", "paid for after, steps#"), ("kind", "kind")]  # fmt: skip
    return Card(f"paid back: {len(rows)} runs", ui.table("Your function on your runs", head, rows))


def myths() -> Card:
    """The claims of the source texts that this chapter touches."""
    panel = "the panel, source RECORDED"
    return myth_card([
        *recorded_myths({"replay-cost": panel}), _collapse(), _free(),
        *recorded_myths({"graphs-clearly": panel}), _padding_rows(),
    ])  # fmt: skip


def _pair() -> tuple[Any, Any, Any] | None:
    """Eager row, graph row and recording of the smallest recorded step, where there is one."""
    sources, _ = recorded_sources()
    return next(iter(sources[0]._pairs.values())) if sources else None


def _collapse() -> Myth:
    claim = "Hundreds or thousands of launches collapse into one."
    pair = _pair()
    if pair is None:
        return Myth(claim, "SIMULATED: of 8 launches one is left.", "holds", COMPUTED, "the panel, launch queue")
    eager, full, rec = pair
    return Myth(
        claim,
        f"RECORDED, {rec.provenance.device}: {eager.launches} launches of {eager.model} become {full.launches}: the "
        "graph and what the engine runs behind it, the LM head and the choice of tokens.",
        "holds for the forward pass", MEASURED, "the panel, source RECORDED",
    )  # fmt: skip


def _free() -> Myth:
    claim = "After the one launch the CPU is free to prepare the next step."
    pair = _pair()
    if pair is None:
        return Myth(claim, "No recording tells the phases of a step.", "open", COMPUTED, "the panel")
    _, full, rec = pair
    phases = full.phases_us
    return Myth(
        claim,
        f"RECORDED, {rec.provenance.device}, {full.model}: launching takes {phases.get('launch', 0) / 1e3:.2f} ms, and "
        f"then the host waits {phases.get('sample', 0) / 1e3:.2f} ms for the tokens. It would be free, if it did not "
        "need the tokens to go on; labkit does one step after the other.",
        "holds only for an engine that works ahead", MEASURED, "the panel, the bar of phases",
    )  # fmt: skip


def _padding_rows() -> Myth:
    return Myth(
        "To replay with a new input, copy it into the placeholder: input_placeholder.copy_(real_input).",
        "Computed by the second panel: copied inputs give the right results, a rebound name gives those of the "
        "capture. Two things are missing in the text: rows behind a shorter input need a harmless value, and a result "
        "that is to stay must be copied out before the next replay.",
        "holds, and is half of it", COMPUTED, "the second panel, exercise 07.1",
    )  # fmt: skip


def note_score(runs: Sequence[Run]) -> Card:
    """Put the smallest recorded pair on the board, whatever else the panel ran, and show the board.

    runs: of the panel; of several machines, the one that was looked at last counts.
    """
    sources, _ = recorded_sources()
    if not sources:
        return scoreboard.scoreboard(SCORE)
    seen = [run.source for run in runs if run.kind == str(Kind.RECORDED)]
    source = next((one for one in sources if one.label in seen[-1:]), sources[0])
    model, backend, context, batch = source.keys[0]
    found = source.run({"model": model, "backend": backend, "context": context, "batch": batch}, Context())
    took = found.values["capture_ms"]
    scoreboard.note(scoreboard.Score(
        SCORE, str(Kind.RECORDED), source.device, launches=found.values["launches"], step_ms=found.values["graph_ms"],
        startup_s=took / 1e3 if took else None,
    ))  # fmt: skip
    return scoreboard.scoreboard(SCORE)
