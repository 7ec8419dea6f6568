"""The cards of chapter 03: runs of the panel side by side, the myth check, the row of the scoreboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.lab import scoreboard, ui
from labkit.lab.cards import Card, paragraph
from labkit.lab.ch03 import exercises, memory
from labkit.lab.ch03.contenders import NAIVE, TILED
from labkit.lab.exercises import check
from labkit.lab.machine import has_default_model
from labkit.lab.myths import COMPUTED, DOCUMENTED, MEASURED, Myth, myth_card, recorded_myths
from labkit.lab.panel import Panel
from labkit.lab.plugged_run import PluggedRun, run_plugged
from labkit.lab.progress import solutions_wanted
from labkit.lab.runs import Run, machine
from labkit.measure.provenance import Kind

SCORE = "attention of one prompt, tiled"
OTHER_SCORE = "attention of one prompt, naive"
#: What `more_ways` runs where it is offered.
OTHER_WAYS = ("SDPA flash", "TORCH_SDPA")
#: What the engine runs while a merge is plugged in: the keys of TORCH_SDPA come in three parts then.
PROMPT = "The capital of France is"
SETTINGS = {"attention_backend": "TORCH_SDPA", "enforce_eager": True}
#: Merges that are known to be wrong, by name.
WRONG: dict[str, Callable[..., Any]] = {"mean": exercises.mean, "base two": exercises.base_two}


def judged(answer: Callable[..., Any], runs: Sequence[Run]) -> Card:
    """What a learner's `is_correct` is worth on the newest runs: their errors against those of naive attention."""
    fn = exercises.CORRECT.solution if solutions_wanted() else answer
    if not check(exercises.CORRECT, fn).passed:
        return Card(
            "judged: write is_correct first", paragraph("Write `is_correct` first; then it judges your runs here.")
        )
    import numpy as np

    rows = []
    for run in runs:
        if run.data["errors"] is None:
            continue
        found, naive = np.array(run.data["errors"]), np.array([run.values["naive_error"]])
        zero = np.zeros(1)
        bug = found + 10 * run.values["naive_error"]
        verdicts = [all(fn(np.array([e]), naive, zero) for e in errors) for errors in (found, bug)]
        said = ["correct" if ok else "wrong" for ok in verdicts]
        rows.append({
            "run": str(run.number), "what": ui.escape(f"{run.values['backend']}, {run.values['dtype']}"),
            "error": f"{run.values['error']:.2g}", "limit": f"{run.values['tolerance']:.2g}", "says": said[0],
            "bug": said[1], "kind": ui.badge(run.kind),
        })  # fmt: skip
    head = [("run", "run#"), ("what", "attention"), ("error", "largest error#"), ("limit", "limit#"),
            ("says", "yours says"), ("bug", "with a bug of ten times the rounding"), ("kind", "kind")]  # fmt: skip
    return Card(f"judged: {len(rows)} runs", ui.table("Your rule on your runs", head, rows))


def more_ways(panel: Panel) -> list[str]:
    """Run the panel for two more ways, where its source offers them; what it says of each."""
    control = next(one for one in panel.current.controls(panel.settings) if one.name == "backend")
    wanted = [key for _, key in control.options if key in OTHER_WAYS]
    for key in wanted:
        panel.set(backend=key)
        panel.run(wait=True, timeout=110)
    found = [run.summary for run in panel.runs[-len(wanted) :]] if wanted else []
    return found or ["No such way here: a formula knows naive and tiled attention alone."]


def plug_in(answer: Any) -> PluggedRun:
    """Text by the engine with a learner's `merge` in it; every call is compared with the engine's own."""
    return run_plugged(prompts=(PROMPT,), max_tokens=_num_tokens(), settings=SETTINGS, merge=answer)


def plug_in_wrong(name: str = "mean") -> PluggedRun:
    """The same with a merge that is known to be wrong, and used all the same."""
    return run_plugged(prompts=(PROMPT,), max_tokens=_num_tokens(), settings=SETTINGS, trust=True, merge=WRONG[name])


def _num_tokens() -> int:
    """Two words of a real model tell; the noise of a tiny one takes longer to turn into other noise."""
    return 2 if has_default_model() else 8


def myths(runs: Sequence[Run]) -> Card:
    """The claims of the source texts that this chapter touches; your own runs count where they tell."""
    return myth_card([
        _constant(runs),
        _bits(runs),
        *recorded_myths({"backend-throughput": "the latency panel of chapter 00, source RECORDED"}),
        Myth(
            "FLASH_ATTN is the default on Ampere and Hopper, FLASHINFER on Blackwell.",
            "So it is in vLLM 0.33, and in labkit after it. On Blackwell for workstations (sm_12x) FLASH_ATTN comes "
            "first as well; FLASHINFER does on sm_10x alone.",
            "holds", DOCUMENTED, "`labkit backends --gpu B200`, chapter 05",
        ),
    ])  # fmt: skip


def _constant(runs: Sequence[Run]) -> Myth:
    """FlashAttention's memory, from the longest run of something that stores no scores, else from the formula."""
    linear = [
        run
        for run in runs
        if run.values["backend"] in (TILED, "SDPA flash") and 0.7 < (run.values["growth"] or 0) < 1.3
    ]
    if linear:
        run = max(linear, key=lambda one: (one.kind == str(Kind.LIVE), one.values["longest"]))
        found = (
            f"{run.kind}, {machine(run.provenance)}: {run.values['backend']} takes {run.values['mib']:,.3g} MiB at "
            f"{run.values['longest']:,} tokens and grows as L^{run.values['growth']:.1f} there."
        )
        tag = MEASURED if run.kind == str(Kind.LIVE) else COMPUTED
    else:
        mib = [memory.tiled_bytes(n, 4, 64, 2) / 2**20 for n in (1024, 2048)]
        found, tag = f"SIMULATED: {mib[0]:.2f} MiB at 1,024 tokens in 4 heads, {mib[1]:.2f} MiB at 2,048.", COMPUTED
    return Myth(
        "FlashAttention needs O(1) memory.",
        f"{found} The matrix of scores is never stored, which is the point. Output and statistics are, one row a "
        "token, so that the memory is linear in the length.",
        "does not hold", tag, "the panel, exercise 03.4",
    )  # fmt: skip


def _bits(runs: Sequence[Run]) -> Myth:
    """Whether the same mathematics gives the same numbers."""
    told = [run for run in runs if run.values["same_pct"] is not None]
    found, tag = "Run a second way of computing it in the panel.", COMPUTED
    if told:
        run = next((one for one in reversed(told) if one.kind == str(Kind.LIVE)), told[-1])
        found = (
            f"{run.kind}, {machine(run.provenance)}: {run.values['backend']} in {run.values['dtype']} has the bits of "
            f"naive attention in {run.values['same_pct']:.0f} % of its results, and an error of "
            f"{run.values['error']:.2g} against {run.values['naive_error']:.2g}."
        )
        tag = MEASURED if run.kind == str(Kind.LIVE) else COMPUTED
    return Myth(
        "Backends are mathematically equivalent.",
        f"{found} Equivalent up to rounding: the sums are the same, their order is not.",
        "holds", tag, "the panel, exercise 03.3",
    )  # fmt: skip


def note_score(runs: Sequence[Run]) -> Card:
    """Put the memory of the newest naive and tiled run of one kind on the board, and show it."""
    for name, backend in ((OTHER_SCORE, NAIVE), (SCORE, TILED)):
        mine = [run for run in runs if run.values["backend"] == backend and run.values["mib"] is not None]
        if mine:
            last = mine[-1]
            scoreboard.note(scoreboard.Score(name, last.kind, machine(last.provenance), mib=last.values["mib"]))
    return scoreboard.scoreboard(SCORE)
