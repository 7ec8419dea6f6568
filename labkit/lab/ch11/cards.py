"""The cards of chapter 11: a learner's functions at work, the claims, the thirteen items, the last scoreboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.config import EngineConfig
from labkit.figures.claims import HEAD, claims_rows, claims_summary
from labkit.lab import progress, scoreboard, trial, ui
from labkit.lab.cards import Card, code, escape, paragraph, rows
from labkit.lab.ch11 import capstone
from labkit.lab.ch11.capstone import CHOOSE, THE_MODEL, THE_NEED, step_p90, the_recorded
from labkit.lab.ch11.exercises import FIND_CULPRIT, PAY_BACK
from labkit.lab.ch11.panel import pairs, tests_of
from labkit.lab.ch11.parts import Part, fewest_tests
from labkit.lab.chapter import Chapter, chapters
from labkit.lab.exercises import Exercise, check
from labkit.lab.items import ITEMS, exercises_for
from labkit.lab.myths import DOCUMENTED, MEASURED, UNTESTED
from labkit.lab.panel import Panel
from labkit.lab.plugged_run import run_plugged
from labkit.lab.progress import solutions_wanted
from labkit.lab.runs import Run
from labkit.measure.library import library
from labkit.models.shapes import SHAPES
from labkit.simulate.claims import FAILS, HOLDS, findings
from labkit.vllm_options import to_vllm

SCORE = "decode step, one graph"
#: Lines of a table at most.
MOST = 10
SIGNS = {"passed": "✓ passed", "tried": "~ tried", "open": "○ open", "no exercise yet": "– no exercise here"}


def _ready(exercise: Exercise, answer: Any) -> Callable[..., Any] | None:
    """The learner's function where it passes its check, the solution where solutions are asked for, else None."""
    fn = exercise.solution if solutions_wanted() else answer
    with progress.paused():
        return fn if check(exercise, fn).passed else None


def _first(what: str, name: str) -> Card:
    return Card(f"{what}: write {name} first", paragraph(f"Write `{name}` first; then it works here."))


# --- the bill --------------------------------------------------------------------------------------------------------


def paid_back(answer: Any, runs: Sequence[Run]) -> Card:
    """A learner's `requests_to_pay_back` on every two runs of the bill that may be compared."""
    fn = _ready(PAY_BACK, answer)
    if fn is None:
        return _first("paid back", PAY_BACK.name)
    found = []
    every = pairs(runs)
    plain = [one for one in every if one[0].values["key"] == "eager"] or every
    for cheap, dear, _ in plain[-MOST:]:
        extra = dear.values["startup_s"] - cheap.values["startup_s"]
        args = (extra, dear.values["tokens"], cheap.values["step_ms"], dear.values["step_ms"], dear.values["batch"])
        n = trial.call(fn, args).value
        found.append({
            "what": escape(f"{dear.values['way']} over {cheap.values['way']}"), "extra": f"{extra:,.3g}",
            "steps": f"{cheap.values['step_ms']:.3g} → {dear.values['step_ms']:.3g}",
            "n": "never" if n is None else f"{n:,}", "kind": ui.badge(dear.kind, dear.source),
        })  # fmt: skip
    head = [("what", "configuration"), ("extra", "starts later by, s#"), ("steps", "a step, ms#"),
            ("n", "requests until paid back#"), ("kind", "from")]  # fmt: skip
    table = ui.table("Paid back", head, found) if found else paragraph("Run two configurations of one source first.")
    return Card(f"paid back: {len(found)} pairs", table)


# --- the switchboard -------------------------------------------------------------------------------------------------

#: What takes one part out of play, in either source.
_SWITCH: Mapping[str, Mapping[str, Any]] = {
    "norm": {"plain_norm": True}, "rotation": {"plain_rotation": True}, "activation": {"plain_activation": True},
    "merge": {"backend": "TORCH_SDPA"}, "prefix": {"plain_prefix": True}, "kv": {"plain_kv": True},
    "sampler": {"plain_sampler": True}, "kernel": {"kernel": "math"}, "chunk": {"whole_prompts": True},
}  # fmt: skip


def _settings(off: Sequence[str], kind: str) -> dict[str, Any]:
    """The switches that take exactly these parts out, and put all others in."""
    level = "served" if "replay" not in off else "eager" if kind == "LIVE" else "no graphs"
    found: dict[str, Any] = {"level": level}
    for key, switch in _SWITCH.items():
        for name, value in switch.items():
            plain: Any = {"backend": "FLASH_ATTN", "kernel": "auto"}.get(name, False)
            found[name] = value if key in off else found.get(name, plain)
    return found


def solve(answer: Any, panel: Panel, case: int = 1, source: str = "") -> Card:
    """Let a learner's `find_culprit` turn the panel's switches, one run for each test; what it found, and how soon.

    Args:
        source: "LIVE" or "SIMULATED"; "" takes LIVE where it is there.
    """
    fn = _ready(FIND_CULPRIT, answer)
    if fn is None:
        return _first("solve", FIND_CULPRIT.name)
    kinds = [one.kind for one in panel.sources]
    kind = source or kinds[0]
    if kind not in kinds:
        return Card(f"solve: no {kind} source here", paragraph(f"No {kind} source here; see the panel."))
    panel.set(source=kind, case=case)
    before = len(panel.runs)

    def is_wrong(off: Any) -> bool:
        known = {name: value for name, value in _settings(list(off), kind).items() if name in panel.settings}
        panel.set(**known)
        panel.run(wait=True, timeout=110)
        return bool(panel.runs[-1].values["wrong"])

    parts = _parts(panel, kind)
    found = fn([part.key for part in parts], is_wrong)
    tests, fewest = len(panel.runs) - before, fewest_tests(len(parts))
    label = next((part.label for part in parts if part.key == found), str(found))
    said = f"{kind}, case {case}: “{escape(label)}”, found in {tests} test{'s' * (tests != 1)}."
    aside = f"Halving needs {fewest} for {len(parts)} parts; one part after the other needs up to {len(parts) - 1}."
    lines = [{"run": str(run.number), "turned": escape(", ".join(run.data["off"]) or "nothing"),
              "answer": escape(run.values["wrong_word"])} for run in panel.runs[before:]]  # fmt: skip
    head = [("run", "run#"), ("turned", "parts that were off"), ("answer", "answer")]
    html = paragraph(f"<b>{said}</b>", html=True) + paragraph(aside) + ui.table("The tests", head, lines)
    return Card(f"solve: {found} in {tests} tests", html)


def _parts(panel: Panel, kind: str) -> Sequence[Part]:
    from labkit.lab.ch11 import step_model

    if kind == "SIMULATED":
        return step_model.PARTS
    from labkit.lab.ch11 import planted

    return planted.PARTS


def num_tests(panel: Panel) -> int:
    """Tests of the newest case so far."""
    return len(tests_of(panel.runs))


# --- the capstone ----------------------------------------------------------------------------------------------------


def defend(answer: Any) -> Card:
    """A learner's choice for the notebook's need: the promise batch by batch, the engine with it, vLLM's command."""
    fn = _ready(CHOOSE, answer)
    if fn is None:
        return _first("defend", CHOOSE.name)
    recorded = the_recorded()
    choice = trial.call(fn, (THE_NEED, recorded)).value
    if choice is None:
        return Card("defend: no choice", paragraph("No choice keeps the promise."))
    origin = capstone.recording().provenance
    lines = []
    for batch in THE_NEED["batches"]:
        ms = step_p90(choice["backend"], batch, choice["sizes"], recorded)
        size = next((one for one in choice["sizes"] if one >= batch), None)
        lines.append({
            "batch": str(batch), "runs": "eagerly" if size is None else f"graph of {size}",
            "p90": "not recorded" if ms is None else f"{ms:.2f}",
            "kept": "✓ kept" if ms is not None and ms <= THE_NEED["slo_ms"] else "✗ broken",
        })  # fmt: skip
    head = [("batch", "batch#"), ("runs", "runs"), ("p90", "p90, ms#"), ("kept", f"within {THE_NEED['slo_ms']:g} ms")]
    said = f"{THE_MODEL}: {choice['backend']}, {choice['mode']}, sizes {choice['sizes']}"
    taken = len(choice["sizes"]) * THE_NEED["graph_mib"]
    parts = [
        paragraph(f"<b>{escape(said)}</b> {ui.badge('RECORDED', origin.device)}", html=True),
        ui.table("The promise", head, lines),
        paragraph(f"{len(choice['sizes'])} graphs of {THE_NEED['graph_mib']} MiB (example) take {taken} of "
                  f"{THE_NEED['cap_mib']} MiB."),
        *_plugged(choice), *_exported(choice),
    ]  # fmt: skip
    return Card(f"defend: {said}", "".join(parts))


def _plugged(choice: Mapping[str, Any]) -> list[str]:
    """The engine here with the chosen sizes in place of its own list."""
    from labkit.lab.ch11.planted import PLAIN

    sizes = list(choice["sizes"])
    if not sizes:
        return []

    def default_capture_sizes(max_num_seqs: int, max_num_batched_tokens: int, cap: int) -> list[int]:
        return [size for size in sizes if size <= max_num_batched_tokens]

    ran = run_plugged(trust=True, model="tiny-llama", max_tokens=6, default_capture_sizes=default_capture_sizes,
                      settings={"cudagraph_mode": "FULL_DECODE_ONLY", **PLAIN})  # fmt: skip
    if ran.alone is None or ran.ours is None:
        return [paragraph("Here no engine runs that could be started with these sizes.")]
    same = "the same text" if ran.same_text else "other text"
    return [
        paragraph("The engine here, started with your sizes where it would take its own list (LIVE, tiny-llama):"),
        rows({"steps with its own": ran.alone.ways, "steps with yours": ran.ours.ways}),
        paragraph(f"It writes {same}: padding changes what a step costs, never what it says."),
    ]


def _exported(choice: Mapping[str, Any]) -> list[str]:
    config = EngineConfig(
        model=THE_MODEL, attention_backend=choice["backend"],
        cudagraph_mode="FULL_DECODE_ONLY" if choice["sizes"] else "NONE",
        cudagraph_capture_sizes=choice["sizes"] or None,
    )  # fmt: skip
    return [paragraph("The same for vLLM, as `labkit export vllm` writes it:"), code(to_vllm(config).command)]


# --- the end of the course -------------------------------------------------------------------------------------------


def claims() -> Card:
    """Every claim of the two source texts with what is recorded, what is simulated, and a verdict."""
    found = findings(library().recordings, SHAPES)
    keys = ("claim", "theirs", "recorded", "simulated", "verdict")
    tags = {HOLDS: MEASURED, FAILS: MEASURED}
    lines = []
    for finding, row in zip(found, claims_rows(found), strict=True):
        tag = tags.get(finding.verdict, UNTESTED) if finding.recorded else (
            "computed here" if finding.verdict in tags else UNTESTED
        )  # fmt: skip
        wide = {"claim": 130, "theirs": 50, "recorded": 160, "simulated": 150, "verdict": 190}
        cells = [escape(text).replace("\n", "<br>") for text in row]
        cells[-1] = f"<b>{cells[-1]}</b> ({tag})<br>{escape(finding.why)}"
        lines.append({key: _wrapped(cell, wide[key]) for key, cell in zip(keys, cells, strict=True)})
    said = claims_summary(found)
    more = (
        f"Beside these, three on the switches: `--enforce-eager=false` and `level: 3` are no arguments of vLLM 0.33 "
        f"({DOCUMENTED}: its sources; exercise 11.2 tests both), and nothing that follows a backslash on its line is "
        "part of the command (the shell says so)."
    )
    head = list(zip(keys, HEAD, strict=True))
    return Card(f"claims: {len(found)}", paragraph(said) + ui.table("Claims", head, lines) + paragraph(more))


def self_check() -> Card:
    """The thirteen items with the learner's status, the exercises that serve each, and links to their notebooks."""
    notes, found = progress.load(), chapters()
    every = [exercise for chapter in found for exercise in chapter.exercises]
    lines, passed = [], 0
    for item in ITEMS:
        mine = exercises_for(item.key, every)
        words = [notes.exercise(exercise.id).word for exercise in mine]
        word = _word(words)
        passed += word == "passed"
        where = [one for one in found if one.number in item.chapters]
        lines.append({
            "key": f"<b>{item.key}</b>",
            "text": _wrapped(f"I can {escape(item.text)}", 230),
            "status": escape(SIGNS[word]),
            "exercises": _wrapped(", ".join(f"{e.id} {_sign(w)}" for e, w in zip(mine, words, strict=True)), 130),
            "where": _wrapped("<br>".join(_link(chapter) for chapter in where), 200),
        })  # fmt: skip
    head = [("key", ""), ("text", "item"), ("status", "status"), ("exercises", "exercises"), ("where", "chapter")]
    said = f"{passed} of {len(ITEMS)} items have passed."
    return Card("self-check: 13 items", paragraph(said) + ui.table("Self-check", head, lines))


def _wrapped(html: str, width: int) -> str:
    return f'<div style="white-space:normal;min-width:{width}px">{html or "–"}</div>'


def _word(words: Sequence[str]) -> str:
    if not words:
        return "no exercise yet"
    if all(word == "passed" for word in words):
        return "passed"
    return "tried" if any(word != "open" for word in words) else "open"


def _sign(word: str) -> str:
    return SIGNS[word][0]


def _link(chapter: Chapter) -> str:
    return f'<a href="{escape(chapter.notebook)}">{chapter.key} {escape(chapter.title)}</a>'


def note_score(runs: Sequence[Run]) -> Card:
    """Put the newest step that ran as one graph on the board, or the recorded one, and show the whole board."""
    mine = [run for run in runs if run.values["mode"] == "FULL" and run.kind != "SIMULATED"]
    if mine:
        last = mine[-1]
        launches = last.values["looks"] if last.provenance.gpu else None
        scoreboard.note(scoreboard.Score(SCORE, last.kind, last.provenance.device, launches=launches,
                                         step_ms=last.values["step_ms"], mib=last.values["mib"],
                                         startup_s=last.values["startup_s"]))  # fmt: skip
    return scoreboard.scoreboard(SCORE)
