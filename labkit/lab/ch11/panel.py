"""The panels of chapter 11: the bill, and the switchboard. Refuses to know how a source gets its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from labkit.figures.bill import Bill, bill_figure
from labkit.figures.switchboard import Test, switchboard_figure
from labkit.lab.ch11.outcome import COLUMNS, paid_back
from labkit.lab.ch11.parts import Part, left_over
from labkit.lab.ch11.recorded import recorded_bills
from labkit.lab.ch11.simulated import SimulatedBill
from labkit.lab.ch11.step_model import ModelSwitches
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.runs import Run, Source

#: Bars of so many runs at most; older ones stay in the table.
SHOWN = 8
#: Settings in which two runs of a bill must agree, so that one can be paid back by the other.
ALIKE = ("batch", "tokens", "model")


def pairs(runs: Sequence[Run]) -> list[tuple[Run, Run, int | None]]:
    """(cheap start, dear start, requests until the dear one is paid back), each two runs of one source and question.

    Only neighbours of different start-up; a run whose start-up is not known is in none.
    """
    found = []
    for i, new in enumerate(runs):
        for old in runs[:i]:
            if _comparable(new, old):
                cheap, dear = sorted((old, new), key=lambda run: run.values["startup_s"])
                found.append((cheap, dear, _paid(cheap, dear)))
    return found


def _comparable(a: Run, b: Run) -> bool:
    known = a.values["startup_s"] is not None and b.values["startup_s"] is not None
    same = (a.kind, a.source) == (b.kind, b.source) and a.values["way"] != b.values["way"]
    return known and same and all(a.values[key] == b.values[key] for key in ALIKE)


def _paid(cheap: Run, dear: Run) -> int | None:
    extra = dear.values["startup_s"] - cheap.values["startup_s"]
    return paid_back(extra, dear.values["tokens"], cheap.values["step_ms"], dear.values["step_ms"],
                     dear.values["batch"])  # fmt: skip


_BRACKETS = ((10, "ones"), (100, "tens"), (1000, "hundreds"), (math.inf, "more"))


def _bracket(runs: Sequence[Run]) -> str | None:
    """Which option of the gate came out: SIMULATED --enforce-eager against -O2 with a cold cache, batch 1."""
    for cheap, dear, requests in pairs(runs):
        ways = cheap.values["key"], dear.values["key"]
        cold = dear.settings.get("cache") == "cold" and dear.kind == "SIMULATED"
        if ways == ("eager", "O2") and cold and dear.values["batch"] == 1:
            if requests is None:
                return "never"
            return next(name for most, name in _BRACKETS if requests < most)
    return None


GATE = Gate(
    "11.paid_back",
    "-O2 takes much longer to start than --enforce-eager, and every step is faster after that. One request at a time, "
    "200 tokens each, a small model: after how many requests is the longer start paid back?",
    options=[
        ("fewer than 10", "ones"), ("10 to 99", "tens"), ("100 to 999", "hundreds"), ("1,000 or more", "more"),
        ("never", "never"),
    ],
    answer=_bracket,
    explain="A request of 200 tokens is 200 steps, and every one of them is faster. What a start costs is divided by "
    "what one request saves.",
)  # fmt: skip


def bill_panel(**more: object) -> Panel:
    """The dashboard with every source; it opens on the model, whose prices the reader sets. `more` goes to `Panel`."""
    missing = engine_missing()
    recorded, absent = recorded_bills()
    live: list[Source] = []
    if not missing:
        from labkit.lab.ch11.live import LiveBill

        live.append(LiveBill(gpu_name()))
    model = SimulatedBill()
    panel = Panel(
        "11-bill", "The bill", [*live, *recorded, model], bill, COLUMNS, changed=changed, gate=GATE,
        absent=[f"No LIVE source: {missing}", *absent] if missing else absent,
        first_words="Predict, then press Run. Then choose another configuration and run again.", **more,  # type: ignore[arg-type]
    )  # fmt: skip
    panel.set(source=model.label)
    return panel


def bill(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """Runs of the newest run's source: four prices each, and their curves."""
    if not runs:
        return bill_figure([], "")
    new = runs[-1]
    alike = [run for run in runs if (run.kind, run.source) == (new.kind, new.source)]
    kept = {run.number for run in pinned}
    shown = [run for run in alike if run.number in kept or run in alike[-SHOWN:]][-SHOWN:]
    bills = [
        Bill(run.number, f"{run.number}: {run.values['way']}", run.values["startup_s"], run.values["mib"],
             run.values["step_ms"], run.values["looks"], run.data["requests"], run.data["total_s"])
        for run in shown
    ]  # fmt: skip
    return bill_figure(bills, new.kind, title=new.source)


def changed(new: Run, old: Run) -> str:
    """What the two starts come to, where both are of one source and question."""
    if not _comparable(new, old):
        return ""
    cheap, dear = sorted((old, new), key=lambda run: run.values["startup_s"])
    extra = dear.values["startup_s"] - cheap.values["startup_s"]
    requests = _paid(cheap, dear)
    if requests is None:
        late = f"{dear.values['way']} starts {extra:,.3g} s later"
        return f"{late} and its decode steps are no faster: for decodes it never pays."
    said = f"{requests:,} request{'s' * (requests != 1)} of {dear.values['tokens']} tokens"
    return f"{dear.values['way']} starts {extra:,.3g} s later, which {said} earn back."


# --- the switchboard -------------------------------------------------------------------------------------------------

MYSTERY_GATE = Gate(
    "11.first_switch",
    "One of eight parts of the engine computes something wrong. A test is one run with some switches turned. Which "
    "first test brings you to the culprit fastest, whichever it is?",
    options=[
        ("--enforce-eager: it takes four of the eight out at once", "eager"),
        ("another attention backend: attention is the hardest part", "backend"),
        ("cudagraph_mode NONE: graphs are what goes wrong most", "graphs"),
        ("one fused kernel after the other, beginning with the norm", "one"),
    ],
    answer="eager",
    explain="Whatever comes out, half of the suspects are left: 8, 4, 2, 1 in three tests. A switch that takes one "
    "part out tells you a lot if you are lucky, and if you are not, seven suspects are left.",
)  # fmt: skip


def switchboard(**more: object) -> Panel:
    """The mystery, in a small model of a step everywhere and in the running engine where there is one."""
    missing = engine_missing()
    live: list[Source] = []
    if not missing:
        from labkit.lab.ch11.planted import EngineSwitches

        live.append(EngineSwitches(gpu_name()))
    model = ModelSwitches()
    panel = Panel(
        "11-switchboard", "The switchboard", [*live, model], tests, TEST_COLUMNS, changed=why, gate=MYSTERY_GATE,
        absent=[f"No LIVE source: {missing}"] if missing else (),
        first_words="Run once with nothing turned: the answer is wrong. Then turn switches, and run again.", **more,  # type: ignore[arg-type]
    )  # fmt: skip
    panel.set(source=model.label)
    return panel


TEST_COLUMNS = [("case", "case"), ("turned", "turned"), ("wrong_word", "answer"), ("error", "largest difference")]


def tests_of(runs: Sequence[Run]) -> list[Run]:
    """The tests of the newest run's case, in order."""
    if not runs:
        return []
    new = runs[-1]
    mine = (new.kind, new.source, new.values["case"])
    return [run for run in runs if (run.kind, run.source, run.values["case"]) == mine]


def suspects_left(runs: Sequence[Run]) -> list[Part]:
    """The parts that no test of the newest run's case has cleared."""
    mine = tests_of(runs)
    names = mine[0].data["parts"] if mine else []
    return left_over([Part(*one) for one in names], [(run.data["off"], run.values["wrong"]) for run in mine])


def tests(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """Every test of the newest run's case against every part."""
    mine = tests_of(runs)[-SHOWN * 2 :]
    if not mine:
        return switchboard_figure([], [], [], "")
    parts = [(one[0], one[1]) for one in mine[0].data["parts"]]
    left = [part.key for part in suspects_left(runs)]
    made = [Test(run.number, run.data["off"], run.values["wrong"], run.data["difference"]) for run in mine]
    return switchboard_figure(parts, made, left, runs[-1].kind, case=runs[-1].values["case"],
                              unit=mine[-1].data["unit"])  # fmt: skip


def why(new: Run, old: Run) -> str:
    """What two tests of one case say together."""
    if (new.kind, new.source, new.values["case"]) != (old.kind, old.source, old.values["case"]):
        return ""
    if new.values["wrong"] == old.values["wrong"]:
        return "The answer did not change, so what was turned in between makes no difference to it."
    now = "right" if not new.values["wrong"] else "wrong again"
    return f"The answer is {now}: the culprit is among what was turned in between."
