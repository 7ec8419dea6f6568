"""The same prompts twice: by the engine alone, and with a learner's functions in it. Refuses to know what they do.

Uses the engine that the panels share, while no panel uses it, and leaves its settings as they were. Without an engine
the card says so, and nothing fails: a notebook goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.errors import LabkitError
from labkit.lab.cards import Card, escape, paragraph, rows
from labkit.lab.engine_room import EngineRoom, shared_room
from labkit.lab.machine import engine_missing, has_default_model
from labkit.lab.plugging import Plugged, plug
from labkit.lab.worker import device

if TYPE_CHECKING:
    from labkit.engine.report import StepReport

PROMPTS = (
    "A GPU that waits for its host is like a kitchen that waits for its orders:",
    "The quick brown fox",
    "One, two, three,",
)
#: Small enough for a CPU: a few requests, so that several sizes of batch occur.
SETTINGS: Mapping[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "num_gpu_blocks_override": 80,
}  # fmt: skip
#: What a reader is told under the steps, and beside text of random weights.
WAYS = (
    "“FULL 2: 5” reads: five steps ran as a FULL graph of 2 tokens; “NONE 55: 1”: one step of 55 tokens ran without a "
    "graph. Alone is the engine without your function."
)
NOISE = (
    "The model is a tiny one with random weights: its text means nothing, and it shows every difference as well. ⟨381⟩ "
    "is a token without a letter."
)


@dataclasses.dataclass(frozen=True)
class Ran:
    """What the engine wrote, and how. reports: of all steps. cached_tokens: prompt tokens that the prefix cache had."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    reports: tuple[StepReport, ...]

    @property
    def cached_tokens(self) -> int:
        return sum(r.num_cached_tokens for r in self.reports)

    @property
    def ways(self) -> str:
        """Steps by how they ran: "FULL 4: 7, NONE 24: 1"."""
        counts: dict[str, int] = {}
        for report in self.reports:
            if report.num_tokens:
                key = f"{report.mode} {report.size}"
                counts[key] = counts.get(key, 0) + 1
        return ", ".join(f"{key}: {count}" for key, count in sorted(counts.items()))


class PluggedRun(Card):
    """Both runs on one card; prints as the functions' line, and whether the text stayed the same.

    plugged: what came of the functions, None where nothing ran. alone, ours: the two runs, None where nothing ran, and
    `ours` where the engine refused to go on.
    """

    def __init__(self, line: str, html: str, plugged: Plugged | None, alone: Ran | None, ours: Ran | None) -> None:
        super().__init__(line, html)
        self.plugged, self.alone, self.ours = plugged, alone, ours

    @property
    def same_text(self) -> bool | None:
        """None where there are no two runs."""
        if self.alone is None or self.ours is None:
            return None
        return self.alone.token_ids == self.ours.token_ids


def run_plugged(
    *,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = 8,
    trust: bool = False,
    model: str | None = None,
    settings: Mapping[str, Any] | None = None,
    room: EngineRoom | None = None,
    **functions: Any,
) -> PluggedRun:
    """Generate text with functions in the engine's place, and without; see `labkit.lab.plug` for names and `trust`.

    All prompts run together, and then the first one again, which shows what the prefix cache found.

    Args:
        model: None takes the one that is loaded, else the default model where it is installed, else a tiny one.
        settings: fields of EngineConfig on top of `SETTINGS`. Merging: TORCH_SDPA. Splits: TRITON_ATTN. Pieces:
            compilation_mode="VLLM_COMPILE".

    Raises:
        ConfigError: there is no such hook point, or something that is not a function was given.
    """
    plugged = plug(trust=trust, **functions)
    names = ", ".join(functions)
    missing = engine_missing()
    if missing:
        return PluggedRun(f"{names}: not run, no engine here", paragraph(missing), None, None, None)
    room = room or shared_room()
    model = model or room.model or ("smollm2-135m-instruct" if has_default_model() else "tiny-llama")
    wanted = {**SETTINGS, "enforce_eager": False, **(settings or {})}
    with device():
        known = room.llm.engine.asked if room.llm is not None and room.model == model else None
        before = {name: getattr(known, name) for name in wanted} if known is not None else {}
        llm = room.prepare(model, lambda *args: None, **wanted)
        plugged = plug(trust=trust, llm=llm, **functions)
        alone: Ran | None = None
        try:
            alone = _run(llm, prompts, max_tokens)
            with plugged:
                ours = _run(llm, prompts, max_tokens)
        except LabkitError as error:  # a trusted answer may leave the engine nothing to run
            said = paragraph(f"The engine cannot go on: {error}")
            return PluggedRun(f"{plugged!r}; the engine refused", said + plugged.card().html, plugged, alone, None)
        finally:
            _forget(llm)
            if before:
                llm.reconfigure(**before)
    return _card(plugged, prompts, alone, ours, noise=llm.weights == "random")


def _run(llm: Any, prompts: Sequence[str], max_tokens: int) -> Ran:
    from labkit.config import SamplingParams

    _forget(llm)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    outputs: dict[str, Any] = {}
    reports: list[StepReport] = []
    order: list[str] = []
    for together in (prompts, prompts[:1]):
        order += [llm.add_request(prompt, params) for prompt in together]
        while llm.has_unfinished:
            reports.append(llm.step())
            outputs |= {out.request_id: out for out in reports[-1].outputs}
    done = [outputs[i] for i in order]
    return Ran(tuple(o.text for o in done), tuple(o.token_ids for o in done), tuple(reports))


def _forget(llm: Any) -> None:
    """Nothing that one run put into the cache serves the other."""
    llm.reset()
    llm.engine.pool.reset_prefix_cache()


def _card(plugged: Plugged, prompts: Sequence[str], alone: Ran, ours: Ran, noise: bool = False) -> PluggedRun:
    same = alone.token_ids == ours.token_ids
    word = "the same text" if same else "other text"
    parts = [plugged.card().html, paragraph(f"With it the engine writes {word}.")]
    if noise:
        parts.append(paragraph(NOISE, quiet=True))
    if same:
        parts.append(rows({prompt: text for prompt, text in zip(prompts, ours.texts, strict=False)}))
    else:
        shown = [(p, a, b) for p, a, b in zip(prompts, alone.texts, ours.texts, strict=False) if a != b]
        for prompt, before, after in shown:
            parts.append(paragraph(f"<b>{escape(prompt)}</b>", html=True))
            parts.append(rows({"the engine's": before, "with yours": after}))
    parts.append(rows({"steps alone": alone.ways, "steps with it": ours.ways}) + paragraph(WAYS, quiet=True))
    if alone.cached_tokens or ours.cached_tokens:
        cached = {"alone": f"{alone.cached_tokens} tokens", "with it": f"{ours.cached_tokens} tokens"}
        parts.append(paragraph("Found in the prefix cache:") + rows(cached))
    return PluggedRun(f"{plugged!r}; {word}", "".join(parts), plugged, alone, ours)
