"""The cards of chapter 04: six batches, one kernel for all, a learner's splits in the engine, myths, the scoreboard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from labkit.errors import LabkitError
from labkit.lab import scoreboard, trial, ui
from labkit.lab.cards import Card, paragraph
from labkit.lab.ch04 import exercises
from labkit.lab.exercises import check
from labkit.lab.hook import bound
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.myths import COMPUTED, DOCUMENTED, Myth, myth_card
from labkit.lab.plugged_run import PluggedRun, run_plugged
from labkit.lab.progress import solutions_wanted
from labkit.lab.runs import Run, machine
from labkit.simulate.occupancy import CHIPS, Call, plan

H200 = next(chip for chip in CHIPS if chip.name == "H200")
#: The board's row of this chapter.
SCORE = "attention of a lone decode, split"
OTHER_SCORE = "attention of a lone decode, unsplit"
#: A prompt of several tiles of keys for the small model; on a CPU it runs in Triton's interpreter.
PROMPT = "A lone request reads its whole past."
WRONG: dict[str, Callable[..., Any]] = {"never split": exercises.never_split, "fill once": exercises.fill_once}
#: Without a GPU there are no multiprocessors to fill, so that a number is asked for there.
CPU_SPLITS = 3


def regimes(answer: Callable[..., Any]) -> Card:
    """What a learner's `regime` says of six batches; nothing while it does not pass its check."""
    fn = exercises.REGIME.solution if solutions_wanted() else answer
    if not check(exercises.REGIME, fn).passed:
        return Card("regimes: write regime first", paragraph("Write `regime` first; then this table is yours."))
    rows = []
    for name, (query_lens, kv_lens) in exercises.BATCHES.items():
        flops, moved = exercises.work(query_lens, kv_lens, 32, 8, 128)
        kind, bound_ = trial.call(fn, (query_lens, kv_lens, 32, 8, 128, exercises.RIDGE)).value
        rows.append({"name": ui.escape(name), "kind": ui.escape(kind), "intensity": f"{flops / moved:,.0f}",
                     "bound": ui.escape(bound_)})  # fmt: skip
    head = [("name", "batch"), ("kind", "yours: kind"), ("intensity", "operations for each byte#"),
            ("bound", "yours: bound")]  # fmt: skip
    said = f"SIMULATED: counted, not measured. 32 query and 8 KV heads of 128; a GPU with {exercises.RIDGE:g} "
    said += "operations a byte."
    return Card(f"regimes: {len(rows)} batches", ui.table("Six batches", head, rows) + paragraph(said, quiet=True))


def one_kernel() -> Card:
    """How the engine's own kernel is launched for three batches on an H200: by its rules, one kernel each time."""
    calls = {
        "a prompt of 4,096": Call(4096, 4096), "64 decodes over 2,048": Call(1, 2048, 64),
        "a lone decode over 32,768": Call(1, 32_768),
    }  # fmt: skip
    rows = []
    for name, call in calls.items():
        made = plan(call, H200)
        also = " and merge_splits_kernel" if made.splits > 1 else ""
        rows.append({
            "name": name, "kernel": f"paged_attention_kernel{also}", "tile": f"{made.tile.block_m} × "
            f"{made.tile.block_n}",
            "programs": f"{made.working:,}", "splits": str(made.splits),
        })  # fmt: skip
    head = [("name", "batch"), ("kernel", "kernel"), ("tile", "tile: query rows × keys#"), ("programs", "programs#"),
            ("splits", "splits#")]  # fmt: skip
    said = "SIMULATED: what TRITON_ATTN's rules plan for an H200 with 32 query and 8 KV heads of 128; nothing was "
    said += "launched."
    return Card(f"one kernel: {len(rows)} batches", ui.table("One kernel", head, rows) + paragraph(said, quiet=True))


class Plugged(Card):
    """A run with a learner's choice in it. ran: the run itself, None where none was possible. alone, ours: splits that
    were planned for each batch, and how often."""

    def __init__(self, line: str, html: str, ran: PluggedRun | None, alone: Counter[int], ours: Counter[int]) -> None:
        super().__init__(line, html)
        self.ran, self.alone, self.ours = ran, alone, ours


def plug_in(answer: Any) -> Plugged:
    """Text by the engine with a learner's `choose_num_splits` in TRITON_ATTN's plan; compared with the engine's own."""
    return _plugged(answer, trust=False)


def plug_in_wrong(name: str = "never split") -> Plugged:
    """The same with a choice that is known to be wrong, and used all the same."""
    return _plugged(WRONG[name], trust=True)


def _plugged(answer: Any, trust: bool) -> Plugged:
    if engine_missing():
        ran = run_plugged(trust=trust, choose_num_splits=answer)
        return Plugged(repr(ran), ran.html, ran, Counter(), Counter())
    from labkit.attention import triton_attn

    on_gpu = bool(gpu_name())
    planned = {True: Counter[int](), False: Counter[int]()}
    own, make = triton_attn.choose_num_splits, triton_attn.TritonAttentionBackend._make_plan

    def noted(self: Any, *key: int) -> Any:
        made = make(self, *key)
        planned[triton_attn.choose_num_splits is own][made.splits] += 1
        return made

    def anew(self: Any, metadata: Any) -> Any:  # its own keeps what an earlier run was told
        return self._make_plan(metadata.num_reqs, metadata.num_tokens, metadata.max_query_len, metadata.max_seq_len)

    settings = {
        "attention_backend": "TRITON_ATTN", "enforce_eager": True, "block_size": 16,
        "num_splits": 0 if on_gpu else CPU_SPLITS,
    }  # fmt: skip
    try:
        with (
            bound(triton_attn.TritonAttentionBackend, "_make_plan", noted),
            bound(triton_attn.TritonAttentionBackend, "plan", anew),
        ):
            ran = run_plugged(
                prompts=(PROMPT,), max_tokens=2, model=None if on_gpu else "tiny-llama", settings=settings, trust=trust,
                choose_num_splits=answer,
            )  # fmt: skip
    except LabkitError as error:  # Triton is not there, or was loaded without its interpreter
        return Plugged("choose_num_splits: not run, TRITON_ATTN does not run here", paragraph(str(error)), None,
                       Counter(), Counter())  # fmt: skip
    alone, ours = planned[True], planned[False]
    rows = [{"who": who, "splits": ", ".join(map(str, sorted(found))) or "–"}
            for who, found in (("the engine's own", alone), ("yours", ours))]  # fmt: skip
    table = ui.table("Splits planned", [("who", "chosen by"), ("splits", "splits of its batches")], rows)
    where = "on this GPU" if on_gpu else (
        f"in Triton's interpreter, with num_splits={CPU_SPLITS}: a CPU has no multiprocessors to fill, so that the "
        "rule is asked for a number"
    )  # fmt: skip
    line = f"{ran!r}; splits {sorted(alone)} alone, {sorted(ours)} with it"
    return Plugged(line, table + paragraph(f"LIVE, {where}.", quiet=True) + ran.html, ran, alone, ours)


def myths() -> Card:
    """The claims of the source texts that this chapter touches."""
    share = plan(Call(1, 32_768), H200)
    return myth_card([
        Myth(
            "An engine selects FlashAttention-2 for prefill and FlashDecoding for decode: two kernels.",
            "SIMULATED, by the rules of labkit's own kernel: prompts, decodes and mixed batches go through one kernel "
            "that takes any lengths. Its tile and its number of splits differ, and a split call gets a second, small "
            "kernel that merges. Other engines do have two kernels and split a mixed batch; both exist.",
            "holds for some engines", COMPUTED, "the card “One kernel”, chapter 06",
        ),
        Myth(
            "FlashDecoding parallelizes across KV length, not just heads.",
            f"SIMULATED: a lone decode over 32,768 tokens has {share.working} programs without it, and "
            f"{share.working * share.splits} with {share.splits} splits. The rules see no other way to give 132 "
            "multiprocessors work.",
            "holds", COMPUTED, "the panel, exercises 04.1 and 04.2",
        ),
        Myth(
            "FlashAttention kernels have no answer to a lone decode.",
            "The library takes a number of splits in the same call (num_splits), and chooses one by itself.",
            "does not hold", DOCUMENTED, "labkit/attention/flash_attn.py",
        ),
    ])  # fmt: skip


def note_score(runs: Sequence[Run]) -> Card:
    """Put the newest lone decode, unsplit and split, on the board, both of one origin, and show it."""
    lone = [r for r in runs if (r.values["batch"], r.values["q_len"]) == (1, 1) and r.values["share_pct"] is not None]
    for kind, where in dict.fromkeys((r.kind, machine(r.provenance)) for r in lone):
        same = [r for r in lone if (r.kind, machine(r.provenance)) == (kind, where)]
        for name, split in ((OTHER_SCORE, False), (SCORE, True)):
            found = [r for r in same if (r.values["splits"] > 1) is split]
            if found:
                last = found[-1].values
                scoreboard.note(
                    scoreboard.Score(name, kind, where, busy_pct=last["share_pct"], step_ms=last["us"] / 1e3)
                )
    return scoreboard.scoreboard(SCORE)
