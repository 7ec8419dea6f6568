"""The cards of chapter 08: a learner's functions at work, the myth check, the row of the scoreboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.graphs.advisor import TRAFFIC, advise, fit, powers_of_two
from labkit.graphs.sizes import default_capture_sizes
from labkit.graphs.sizes import pad_to as rule
from labkit.lab import scoreboard, ui
from labkit.lab.cards import Card, paragraph
from labkit.lab.ch08.exercises import BEST_SIZES, POOL_MIB, padded_tokens, to_the_largest
from labkit.lab.ch08.lists import BUDGET
from labkit.lab.engine_room import shared_room
from labkit.lab.exercises import check
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.myths import COMPUTED, DOCUMENTED, MEASURED, UNTESTED, Myth, myth_card
from labkit.lab.plugged_run import PluggedRun, run_plugged
from labkit.lab.progress import solutions_wanted
from labkit.lab.runs import Run, machine
from labkit.measure.library import library

SCORE = "graphs of the default list"
PROMPTS = ("Once upon a time", "One, two, three,", "The quick brown fox")
#: Sizes far apart, so that a wrong choice shows.
SETTINGS = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": (1, 2, 4, 8), "max_num_seqs": 8}
#: A short day of a small service, for which every list can be tried.
SMALL = {1: 300, 2: 120, 3: 60, 6: 200, 7: 180, 12: 40, 13: 90, 24: 10}


def plug_in(answer: Any) -> Card:
    """Text by the engine with a learner's `pad_to` in it; under it one that pads to the largest, used all the same."""
    yours, wrong = _plugged(pad_to=answer), _plugged(trust=True, pad_to=to_the_largest)
    head = "<h3>{}</h3>"
    html = head.format("With your pad_to") + yours.html + head.format("Padded to the largest size") + wrong.html
    return Card(f"yours: {yours!r} | to the largest: {wrong!r}", html)


def _plugged(**functions: Any) -> PluggedRun:
    small = not engine_missing() and not shared_room().model and not gpu_name()
    return run_plugged(
        prompts=PROMPTS, max_tokens=6, model="tiny-llama" if small else None, settings=SETTINGS, **functions
    )


def against_advisor(answer: Callable[..., Any]) -> Card:
    """A learner's `best_sizes` beside the advisor and powers of two, on a small day; nothing until it passes."""
    fn = BEST_SIZES.solution if solutions_wanted() else answer
    if not check(BEST_SIZES, fn).passed:
        said = "Write `best_sizes` first; then this table is yours."
        return Card("against the advisor: write best_sizes first", paragraph(said))
    rows = []
    for k in (1, 2, 3, 4, 5):
        mine, theirs = list(fn(dict(SMALL), k)), advise(SMALL, k)
        powers = powers_of_two(max(SMALL))[-k:]
        rows.append({
            "k": str(k), "mine": f"<code>{ui.escape(mine)}</code>", "padded": f"{padded_tokens(SMALL, mine):,}",
            "advisor": f"{theirs.padded_tokens:,}", "powers": f"{fit(SMALL, powers).padded_tokens:,}",
        })  # fmt: skip
    head = [("k", "k#"), ("mine", "your sizes"), ("padded", "padded tokens, yours#"), ("advisor", "the advisor's#"),
            ("powers", "the k largest powers of two#")]  # fmt: skip
    note = "SIMULATED: counted over 1,000 steps that were made up for this table."
    return Card("against the advisor: 5 lists", ui.table("The best k sizes", head, rows) + paragraph(note, quiet=True))


def orders(answer: Callable[..., Any]) -> Card:
    """A learner's `pool_mib` on the default list in three orders; nothing while the check is not passed."""
    fn = POOL_MIB.solution if solutions_wanted() else answer
    if not check(POOL_MIB, fn).passed:
        return Card("orders: write pool_mib first", paragraph("Write `pool_mib` first; then this table is yours."))
    sizes = default_capture_sizes(256, BUDGET)
    middle = [*sizes[::2], *sizes[1::2]]
    named = {"largest first": sizes[::-1], "smallest first": sizes, "every second, then the others": middle}
    rows = [{"order": name, "mib": f"{fn([[size] for size in order]):,}"} for name, order in named.items()]
    head = [("order", "order"), ("mib", "MiB of the pool#")]
    said = f"SIMULATED: {len(sizes)} graphs that need one tensor of 1 MiB per token. Real graphs have many tensors."
    return Card("orders: 3 orders", ui.table("What the order costs", head, rows) + paragraph(said, quiet=True))


def myths(runs: Sequence[Run]) -> Card:
    """The claims of the source texts that this chapter touches."""
    return myth_card([_fifty_one(), _thirteen(), _above(), _powers(), _ten_mib(runs)])


def _fifty_one() -> Myth:
    ours = default_capture_sizes(256, BUDGET)
    old = [1, 2, 4, *range(8, 513, 8)]
    return Myth(
        "The default list is 1, 2, 4, every 8 to 248, every 16 from 256 to 512.",
        f"Computed by the engine's own rule, which follows vLLM 0.33: {len(ours)} sizes with max_num_seqs = 256. Older "
        f"texts count {len(old)}, for the list went on in steps of 8. And the list depends on the engine: with "
        f"max_num_seqs = 13 it has {len(default_capture_sizes(13, BUDGET))} sizes.",
        "holds for 256 sequences", COMPUTED, "exercise 08.1",
    )  # fmt: skip


def _thirteen() -> Myth:
    few = default_capture_sizes(13, BUDGET)
    return Myth(
        "A batch of 13 runs in the graph of 16, with 3 empty rows.",
        f"Computed: as {rule(13, default_capture_sizes(256, BUDGET))} with max_num_seqs = 256, as {rule(13, few)} with "
        "max_num_seqs = 13, since the list holds that number itself. The rows are not empty: they are computed.",
        "depends on max_num_seqs", COMPUTED, "the panel, max_num_seqs",
    )  # fmt: skip


def _above() -> Myth:
    return Myth(
        "Only batches above the largest size fall back to launching each kernel.",
        "By the rule that is one reason of three. A batch of a kind for which the mode has no graph runs eagerly, too "
        "(a mixed batch under FULL_DECODE_ONLY), and so does one whose capture failed.",
        "is one reason of three", DOCUMENTED, "labkit/graphs/dispatcher.py, chapter 10",
    )  # fmt: skip


def _powers() -> Myth:
    chat = TRAFFIC["chat"]
    powers, default = fit(chat, powers_of_two(512)), fit(chat, default_capture_sizes(256, BUDGET))
    best = advise(chat, len(powers.sizes))
    return Myth(
        "Capture graphs for common batch sizes: 1, 2, 4, 8, 16, 32 and so on.",
        f"SIMULATED over the traffic “chat”: {len(powers.sizes)} powers of two pad {powers.waste:.0%} of what runs, "
        f"the default list {default.waste:.0%}, the best {len(best.sizes)} sizes {best.waste:.1%}.",
        "works, at a price", COMPUTED, "the panel, powers of two",
    )  # fmt: skip


def _ten_mib(runs: Sequence[Run]) -> Myth:
    claim = "Every graph takes about 10 MiB, so that a denser list costs memory."
    steps = library().of("steps")
    captured = [(one.provenance, c) for one in steps for c in one.recording.captures if c.mode == "FULL"]
    live = next((run for run in reversed(runs) if run.values["mib"]), None)
    if captured:
        made = captured[0][0]
        mine = [c for origin, c in captured if origin is made and c.model == captured[0][1].model]
        each = sum(c.mib for c in mine) / len(mine)
        found = f"RECORDED, {made.device}: {each:.1f} MiB on average over {len(mine)} FULL graphs of {mine[0].model}."
        return Myth(claim, found, "depends on the model", MEASURED, "the panel, RECORDED")
    if live is not None:
        each = live.values["mib"] / live.values["sizes"]
        found = (
            f"{live.kind}, {machine(live.provenance)}: {each:.1f} MiB on average over {live.values['sizes']} graphs."
        )
        return Myth(claim, found, "depends on the model", MEASURED, "the panel, LIVE on a GPU")
    return Myth(
        claim,
        "Reported for TensorRT-LLM (its issue 12895: 220 → 490 MiB, with up to 1.5 times the throughput). No recording "
        "here has the memory of single graphs yet; a GPU under LIVE measures its own.",
        "reported, not measured here", UNTESTED, "the panel, LIVE on a GPU",
    )  # fmt: skip


def note_score(runs: Sequence[Run]) -> Card:
    """Put what capturing took on the board, of the newest run that measured it, and show the board."""
    told = [run for run in runs if run.values["step_ms"] is not None]
    best = next((run for run in reversed(told) if run.values["capture_s"] is not None), told[-1] if told else None)
    if best is not None:
        row = best.values
        scoreboard.note(scoreboard.Score(SCORE, best.kind, machine(best.provenance), step_ms=row["step_ms"],
                                         mib=row["mib"], startup_s=row["capture_s"]))  # fmt: skip
    return scoreboard.scoreboard(SCORE)
