"""The panels of chapter 06: a packed step, blocks by hand, and who waits for whom. Refuses to know any source's "
"insides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.blocks import blocks_figure
from labkit.figures.packing import Costs, Packed, packing_figure
from labkit.figures.points import drawn
from labkit.figures.requests import requests_figure
from labkit.lab.ch06 import blocks, waits
from labkit.lab.ch06.calls import CallsSource, recorded_calls
from labkit.lab.ch06.packing import RULES, PackingSource
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.runs import Run

COLUMNS = [
    ("num_tokens", "tokens"), ("decodes", "decodes"), ("chunks", "chunks"), ("waste", "waste as a rectangle, %"),
    ("unified_us", "one call, µs"), ("split_us", "two calls, µs"), ("padded_us", "rectangle, µs"),
]  # fmt: skip
_STEP = ("names", "tokens", "starts", "blocks", "query_start_loc", "block_size")

GATE = Gate(
    "06.calls",
    "A step has 3 decodes and a chunk of 512 tokens. Is its attention faster in one call for all, or in two calls, "
    "decodes and chunk apart? (A run with times tells: LIVE or RECORDED.)",
    options=[
        ("one call", "one"), ("two calls: each kernel has its best shape", "two"), ("no difference is shown", "same"),
    ],
    answer=lambda runs: _calls_answer(runs),
    explain=lambda runs: _calls_explained(runs),
)  # fmt: skip
WAIT_GATE = Gate(
    "06.chunks",
    "A long prompt arrives while others decode. It is cut into small chunks in place of running whole. What becomes of "
    "the time until the prompt's own first token?",
    options=[("it gets shorter", "shorter"), ("it stays", "same"), ("it gets longer", "longer")],
    answer=lambda runs: _chunks_answer(runs),
    explain="Every chunk is a step with its fixed part, and with everybody's decodes in it. The longest wait of the "
    "others shrinks, at best to that fixed part; the prompt itself waits longer. That is the trade.",
)


def packing_panel(**more: Any) -> Panel:
    """One step of requests that a learner writes; it opens on the rules. `more` goes to `Panel`."""
    missing = engine_missing()
    recorded, absent = recorded_calls()
    live = [] if missing else [CallsSource(gpu_name())]
    if missing:
        absent = [f"No LIVE source: {missing}", *absent]
    panel = Panel(
        "06-packing", "One batch, two shapes", [*live, *recorded, PackingSource()], packing, COLUMNS,
        changed=packing_changed, gate=GATE, absent=absent,
        first_words="Predict, then press Run. Write other requests: 5@12 is 5 new tokens behind 12 that are there.",
        **more,
    )  # fmt: skip
    panel.set(source=RULES)
    return panel


def packing(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest run's step and what it takes."""
    if not runs or not runs[-1].finished:
        return packing_figure(None, None)
    new = runs[-1]
    data = new.data
    spread = None if data["spread"] is None else [(low, high) for low, high in data["spread"]]
    costs = Costs(new.number, data["ways"], data["costs"], spread, f"{data['unit']} · {new.kind}", data["texts"])
    packed = Packed(new.number, *(data[key] for key in _STEP))
    total = new.values["num_tokens"]
    return packing_figure(packed, costs, f"A step of {total:,} token{'s' * (total != 1)} · {new.source} · {new.kind}")


def packing_changed(new: Run, old: Run) -> str:
    """Why a step is another one, or takes another time."""
    parts = []
    if new.values["num_tokens"] != old.values["num_tokens"]:
        parts.append(f"{old.values['num_tokens']:,} tokens before, {new.values['num_tokens']:,} now")
    if round(new.values["waste"]) != round(old.values["waste"]):
        longest = max(new.data["tokens"])
        parts.append(
            f"a rectangle would waste {new.values['waste']:.0f} % in place of {old.values['waste']:.0f} %, as every "
            f"request is padded to the {longest:,} new token{'s' * (longest != 1)} of the longest"
        )
    if not parts and new.data["blocks"] != old.data["blocks"]:
        parts.append("the same tokens lie in other pages")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def blocks_panel(**more: Any) -> Panel:
    """Pages by hand, moment by moment."""
    return Panel(
        "06-blocks", "Pages of the KV cache, by hand", [blocks.BlocksSource()], pages, blocks.COLUMNS,
        changed=pages_changed, first_words="Press Run, then move on to the next moment and run again.", **more,
    )  # fmt: skip


def pages(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest run's blocks and tables."""
    if not runs or not runs[-1].finished:
        return blocks_figure(None, {})
    new = runs[-1]
    return blocks_figure(new.number, new.data, f"{new.values['moment']} · {new.kind}")


def pages_changed(new: Run, old: Run) -> str:
    """Which blocks changed hands."""
    taken = [b for b in new.data["blocks"] if new.data["owners"][b] and not old.data["owners"][b]]
    given = [b for b in new.data["blocks"] if old.data["owners"][b] and not new.data["owners"][b]]
    parts = [f"Taken: blocks {', '.join(map(str, taken))}."] if taken else []
    if given:
        kept = [b for b in given if new.data["states"][b] == "cached"]
        parts.append(f"Given back: blocks {', '.join(map(str, given))}"
                     + (f", of which {', '.join(map(str, kept))} can still be found." if kept else "."))  # fmt: skip
    return " ".join(parts)


def waits_panel(**more: Any) -> Panel:
    """Waits of decodes and of a prompt under several schedulings; it opens on the model."""
    missing = engine_missing()
    recorded, absent = waits.recorded_sources()
    live = [] if missing else [waits.EngineSource(gpu_name())]
    if missing:
        absent = [f"No LIVE source: {missing}", *absent]
    model = waits.ModelSource()
    panel = Panel(
        "06-waits", "Who waits for whom", [*live, *recorded, model], schedulings, waits.COLUMNS,
        changed=waits_changed, gate=WAIT_GATE, absent=absent, **more,
    )  # fmt: skip
    panel.set(source=model.label)
    return panel


def schedulings(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest run's waits."""
    if not runs or not runs[-1].finished:
        return go.Figure()
    new = runs[-1]
    recording = waits.recording_of(new.data)
    figure = requests_figure(recording, recording.rows)
    for trace in figure.data:
        what, name = trace.meta
        if what in ("waits", "ttft"):
            trace.meta = drawn(new.number, y=f"{what} {name}")
    return figure


def waits_changed(new: Run, old: Run) -> str:
    """What the change did to the trade between the two."""
    if new.values["chunk"] != old.values["chunk"]:
        smaller = "Smaller" if new.values["chunk"] < old.values["chunk"] else "Larger"
        return f"{smaller} chunks, {smaller.lower()} steps with a part of the prompt in them."
    if new.values["what"] != old.values["what"]:
        return f"The traffic is another one: {old.values['what']} before, {new.values['what']} now."
    return ""


def _calls_answer(runs: Sequence[Run]) -> str | None:
    """What the newest timed run of three decodes and a chunk of 512 shows."""
    for run in reversed(runs):
        shape = sorted(run.data["tokens"]) == [1, 1, 1, 512] and sum(run.data["decode"]) == 3
        if shape and run.values["verdict"] is not None:
            return str(run.values["verdict"])
    return None


def _calls_explained(runs: Sequence[Run]) -> str:
    run = next(r for r in reversed(runs) if r.values["verdict"] is not None)
    return f"{run.kind} on {run.source}: {run.summary} Both ways exist in engines, so it is a matter of measuring."


def _chunks_answer(runs: Sequence[Run]) -> str | None:
    for run in reversed(runs):
        whole, chunked = run.values["whole_ttft"], run.values["chunk_ttft"]
        if chunked is not None:
            return "longer" if chunked > 1.05 * whole else "shorter" if chunked < 0.95 * whole else "same"
    return None
