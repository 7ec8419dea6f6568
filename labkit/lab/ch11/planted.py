"""The switchboard over the running engine: a bug is planted, text is written with and without it, and it is gone.

Every bug sits where the engine itself calls, and acts only on the path that a switch takes away. Refuses to leave
anything behind: names are bound for the length of a run, and the settings of somebody else's engine are put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from labkit.lab.ch11.parts import Part, culprit, switched_off
from labkit.lab.ch11.step_model import out_of_play, test_outcome
from labkit.lab.engine_room import EngineRoom, shared_room
from labkit.lab.fields import Choice, Control, Number, Toggle
from labkit.lab.hook import bound
from labkit.lab.machine import has_default_model
from labkit.lab.plugging import plug
from labkit.lab.runs import Context, Outcome
from labkit.measure.provenance import collect
from labkit.models.shapes import DEFAULT_MODEL

PARTS: tuple[Part, ...] = (
    Part("replay", "the graph's input buffers", "--enforce-eager"),
    Part("kernel", "the inner kernel of TORCH_SDPA", "sdpa_kernel"),
    Part("prefix", "blocks from the prefix cache", "--no-enable-prefix-caching"),
    Part("chunk", "slots of a later chunk of a prompt", "--max-num-batched-tokens"),
)
EFFECTS: dict[str, dict[Any, tuple[str, ...]]] = {
    "level": {"eager": ("replay",)},
    "kernel": {"math": ("kernel",)},
    "plain_prefix": {True: ("prefix",)},
    "whole_prompts": {True: ("chunk",)},
}
CASES = 4
PROMPT = "A GPU that waits for its host is like a kitchen that waits for its orders: everybody is"
NUM_TOKENS = 6
#: Largest difference of a log-probability that two runs of one engine with one setting may show.
TOLERANCE = 1e-4
TINY = "tiny-llama"
BLOCK, BUDGET, WIDE = 4, 18, 128
#: What others who drive the same engine afterwards should set anew.
PLAIN = {"block_size": None, "sdpa_kernel": "auto", "enable_prefix_caching": True, "cudagraph_capture_sizes": None}


class EngineSwitches:
    """This machine's engine. room: None takes the one that the panels share."""

    kind = "LIVE"

    def __init__(self, gpu: str, room: EngineRoom | None = None) -> None:
        self.gpu, self.label = gpu, f"the engine on {gpu or 'this CPU'}"
        self._room, self._own = room, False
        #: What the engine alone writes, by its settings: it writes the same every time.
        self._alone: dict[tuple[Any, ...], _Written] = {}

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        models = [("tiny-llama (noise for text, at once)", TINY)]
        if has_default_model():
            models.append((f"{DEFAULT_MODEL} (real text, slower)", DEFAULT_MODEL))
        return [
            Number("case", "Case", 1, CASES, 1, help="Each case has another wrong part."),
            Choice("model", "Model", models, models[-1][1] if self.gpu else TINY, help="What writes."),
            Choice("level", "Graphs", [("as it is served", "served"), ("--enforce-eager", "eager")],
                   help="Eager replays nothing."),
            Choice("kernel", "Inner kernel", [("auto", "auto"), ("math", "math")],
                   help="Of TORCH_SDPA: math is the plain way that torch has for every machine."),
            Toggle("plain_prefix", "no prefix caching", help="Every block is computed, none is found."),
            Toggle("whole_prompts", "prompts in one go", help="A token budget that no prompt is cut by."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        slow = values["model"] != TINY and not self.gpu
        return f"Run writes some text with and without the bug: {'some ten seconds' if slow else 'seconds'}."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return [out_of_play(switched_off(values, EFFECTS), PARTS)]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        off, case = switched_off(values, EFFECTS), int(values["case"])
        room, model = self._room or shared_room(), values["model"]
        wanted = {
            "attention_backend": "TORCH_SDPA", "block_size": BLOCK, "max_num_seqs": 2, "max_model_len": 256,
            "num_gpu_blocks_override": 200, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2],
            "compilation_mode": "NONE", "enforce_eager": values["level"] == "eager", "sdpa_kernel": values["kernel"],
            "enable_prefix_caching": not values["plain_prefix"],
            "max_num_batched_tokens": WIDE if values["whole_prompts"] else BUDGET,
        }  # fmt: skip
        context.stage(f"loading {model}", 0, 0)
        known = room.llm.engine.asked if room.llm is not None and room.model == model else None
        if room.llm is None or room.model != model:
            self._own = True  # nobody else's settings are in it
        before = {} if self._own or known is None else {name: getattr(known, name) for name in wanted}
        llm = room.prepare(model, lambda *args: None, **wanted)
        key = (model, *(values[name] for name in EFFECTS))
        try:
            context.check()
            if key not in self._alone:
                self._alone[key] = _write(llm, context, "writing text, the engine alone")
            right = self._alone[key]
            with BUGS[culprit(PARTS, case)]():
                got = _write(llm, context, "writing text, with the bug")
        finally:
            _forget(llm)
            if before:
                llm.reconfigure(**before)
        difference = [abs(a - b) for a, b in zip(right.logprobs, got.logprobs, strict=True)]
        wrong = right.token_ids != got.token_ids or max(difference) > TOLERANCE
        made = collect("LIVE", "panel 11", order="alone, then with the bug", n=len(difference),
                       device="auto" if self.gpu else "cpu")  # fmt: skip
        notes = [f"{model} alone: “…{_printable(right.text)}”"]
        if right.text != got.text:
            notes.append(f"With the bug: “…{_printable(got.text)}”")
        elif wrong:
            notes.append("The text is the same, and the log-probabilities of its tokens are not: a bug may hide so.")
        return test_outcome(case, off, PARTS, difference, wrong, made,
                            "difference of a log-probability", notes)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Written:
    """Both times' tokens with their log-probabilities, and the second text."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


def _write(llm: Any, context: Context, stage: str) -> _Written:
    """The same prompt twice, so that the second one finds its beginning in the prefix cache."""
    from labkit.config import SamplingParams

    _forget(llm)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    outs = []
    for turn in range(2):
        context.stage(stage, turn, 2)
        outs += llm.generate([PROMPT], params)
    return _Written(
        tuple(token for out in outs for token in out.token_ids),
        tuple(float(one.logprob) for out in outs for one in out.logprobs), outs[-1].text,
    )  # fmt: skip


def _printable(text: str) -> str:
    """Without what no page can show; a tiny model writes much of it."""
    return "".join(c if c.isprintable() and c != "\ufffd" else "·" for c in text)


def _forget(llm: Any) -> None:
    """Nothing that one run put into the cache serves the other."""
    llm.reset()
    llm.engine.pool.reset_prefix_cache()


# --- the bugs --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stale_positions() -> Iterator[None]:
    """A replay reads the positions of the step before: somebody rebound the buffer in place of copying into it."""
    from labkit.engine.runner import Runner

    own = Runner._launch

    def launch(self: Any, graph: Any, descriptor: Any, view: Any, step: Any) -> Any:
        if graph is not None:
            view.positions.sub_(2).clamp_(min=0)
        return own(self, graph, descriptor, view, step)

    with bound(Runner, "_launch", launch):
        yield


@contextlib.contextmanager
def _unscaled_kernel() -> Iterator[None]:
    """The kernel that torch chooses by itself forgets the scale; the plain one does not."""
    from labkit.attention.sdpa import TorchSDPABackend

    own = TorchSDPABackend._sdpa

    def sdpa(self: Any, query: Any, keys: Any, values: Any, mask: Any, scale: float) -> Any:
        return own(self, query, keys, values, mask, scale if self.spec.sdpa_kernel == "math" else 8 * scale)

    with bound(TorchSDPABackend, "_sdpa", sdpa):
        yield


@contextlib.contextmanager
def _block_found_twice() -> Iterator[None]:
    """In place of the first block the last one that was found. (Another order alone would change nothing.)"""
    from labkit.scheduling import scheduler

    own = scheduler.cached_prefix

    def cached(request: Any, pool: Any) -> Any:
        hits = own(request, pool)
        return [hits[-1], *hits[1:]] if hits else hits

    with bound(scheduler, "cached_prefix", cached):
        yield


def _late_chunk(block_ids: Sequence[int], start: int, n: int, block_size: int) -> list[int]:
    """A known wrong slot mapping: a chunk that begins within a block begins it anew."""
    begin = start - start % block_size
    return [block_ids[p // block_size] * block_size + p % block_size for p in range(begin, begin + n)]


@contextlib.contextmanager
def _shifted_slots() -> Iterator[None]:
    """The learner's plug, with a function that is wrong and used all the same."""
    with plug(trust=True, slot_mapping=_late_chunk):
        yield


BUGS: Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "replay": _stale_positions, "kernel": _unscaled_kernel, "prefix": _block_found_twice, "chunk": _shifted_slots,
}  # fmt: skip
