"""The cards of chapter 09: a learner's rules beside the real compiler, the myth check, the row of the scoreboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.lab import scoreboard, trial, ui
from labkit.lab.cards import Card, paragraph
from labkit.lab.ch09.exercises import COUNT_LAUNCHES
from labkit.lab.ch09.fusion import recorded
from labkit.lab.ch09.kernels import labels
from labkit.lab.ch09.recorded import recorded_sources
from labkit.lab.exercises import check
from labkit.lab.myths import DOCUMENTED, Myth, myth_card, recorded_myths
from labkit.lab.progress import solutions_wanted
from labkit.lab.runs import Context

SCORE = "decode step, compiled and in a graph"


def against_inductor(answer: Callable[..., Any]) -> Card:
    """What a learner's `count_launches` says of real pieces, beside what the compiler made of them."""
    fn = COUNT_LAUNCHES.solution if solutions_wanted() else answer
    if not check(COUNT_LAUNCHES, fn).passed:
        line = "against the compiler: write count_launches first"
        return Card(line, paragraph("Write `count_launches` first; then this table compares it with the compiler."))
    rows = []
    for fused in recorded().values():
        for label, kind in zip(labels(fused), fused.kinds, strict=True):
            mine = trial.call(fn, ([k for _, k in kind.ops],)).value
            rows.append({
                "model": ui.escape(fused.model), "piece": ui.escape(label), "before": str(kind.before),
                "mine": str(mine[1]), "real": str(kind.after), "same": "✓" if mine[1] == kind.after else "✗",
            })  # fmt: skip
    head = [("model", "model"), ("piece", "piece"), ("before", "one by one#"), ("mine", "your rules#"),
            ("real", "Inductor#"), ("same", "same")]  # fmt: skip
    right = sum(row["same"] == "✓" for row in rows)
    said = (
        "RECORDED on a CPU, where Inductor writes C++. Your rules are simple ones: where they differ, the compiler "
        "had a reason of its own. Qwen3 normalises queries and keys: two reductions, but neither needs the other's "
        "result, so that one loop computes both."
    )
    table = ui.table("Your rules and the compiler", head, rows)
    return Card(f"against the compiler: {right} of {len(rows)} pieces alike", table + paragraph(said, quiet=True))


def myths() -> Card:
    """The claims of the source texts that this chapter touches."""
    panel = "the panel, source RECORDED"
    switch = Myth(
        "torch.compile with mode=\"reduce-overhead\" is how an engine compiles a model.",
        "That mode lets torch record graphs by itself, one compilation for every size. vLLM and labkit let torch "
        "compile pieces and record the graphs on their own; `compilation_mode=\"STOCK_TORCH_COMPILE\"` is the other "
        "way.",
        "does not hold", DOCUMENTED, "labkit/graphs/whole.py and compiler.py",
    )  # fmt: skip
    level = Myth(
        "`{\"level\": 3}` in --compilation-config turns torch.compile on.",
        "That was the switch of older releases. Today's documents have -O0 to -O3, and mode and cudagraph_mode inside "
        "the compilation config; both are on by default.",
        "dated", DOCUMENTED, "`labkit export vllm`, chapter 11",
    )  # fmt: skip
    cells = {name: panel for name in ("8b-eager", "8b-graphs", "8b-compile", "8b-both", "int4-third")}
    return myth_card([*recorded_myths(cells), switch, level])


def note_score(runs: Sequence[Any]) -> Card:
    """Put the newest recorded step that is compiled and in a graph on the board, or look one up, and show the board."""
    done = [run for run in runs if run.kind == "RECORDED" and run.values["both_ms"] is not None]
    if done:
        values, made = done[-1].values, done[-1].provenance
    else:
        values, made = {}, None
        for source in recorded_sources()[0]:
            model, backend, context, batch = source.keys[0]
            asked = {"model": model, "backend": backend, "context": context, "batch": batch}
            outcome = source.run(asked, Context())
            if outcome.values["both_ms"] is not None:
                values, made = outcome.values, outcome.provenance
                break
    if made is not None:
        scoreboard.note(scoreboard.Score(
            SCORE, str(made.kind), made.device, launches=values["both_launches"], step_ms=values["both_ms"],
            startup_s=values.get("cold_s"),
        ))  # fmt: skip
    return scoreboard.scoreboard(SCORE)
