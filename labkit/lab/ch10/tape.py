"""The sources of the replay tape: the rules for any engine, and this machine's engine beside them. Refuses to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.config import CUDAGraphMode as Mode
from labkit.errors import ConfigError
from labkit.graphs.avoid import avoid
from labkit.graphs.sizes import default_capture_sizes
from labkit.lab.ch10 import rules
from labkit.lab.ch10.stream import Batch, parse
from labkit.lab.engine_room import EngineRoom, shared_room
from labkit.lab.fields import Choice, Control, Number, Text
from labkit.lab.runs import Context, Outcome, simulated
from labkit.measure.provenance import collect

if TYPE_CHECKING:
    from labkit.engine.report import StepReport

RULES = "rules of labkit"
OWN = "yours, typed"
#: Stream → batches. 520 tokens are above 512, the largest size by default.
STREAMS = {
    "decodes, and prompts that come in": "13d, 13d, 13d+512p, 14d, 14d+100p, 15d, 520p, 1d",
    "decodes only, more and more": "1d, 2d, 3d, 5d, 13d, 60d, 200d, 256d",
    "one long prompt in chunks": "6d+506p, 6d+506p, 6d+300p, 7d, 7d",
}  # fmt: skip
SMALL_STREAMS = {
    "decodes, and prompts that come in": "4d, 4d, 4d+20p, 5d, 3d+9p, 5d, 40p, 1d",
    "decodes only, more and more": "1d, 2d, 3d, 5d, 8d",
    "one long prompt in chunks": "2d+30p, 2d+30p, 2d+11p, 3d, 3d",
}  # fmt: skip
#: Tier → who has it, by the documents of vLLM and by labkit's own rules.
TIER_WORDS = {
    Tier.ALWAYS: "ALWAYS (FA3, Triton)", Tier.UNIFORM_BATCH: "UNIFORM_BATCH (FA2, FlashMLA)",
    Tier.UNIFORM_SINGLE_TOKEN_DECODE: "UNIFORM_SINGLE_TOKEN_DECODE (FlashInfer)", Tier.NEVER: "NEVER (xFormers)",
}  # fmt: skip
MAX_SEQS, MAX_TOKENS = 256, 8192
#: What the engine on a CPU is made for here: a step takes milliseconds.
SMALL_SEQS, SMALL_TOKENS, SMALL_LARGEST = 8, 64, 32
MODEL, PROMPT_CONTEXT = "tiny-llama", 16


class RulesSource:
    """Any number of layers, tier and mode: pure functions."""

    kind, label = "SIMULATED", RULES

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("mode", "Graph mode", [(m.name, m.name) for m in Mode], "FULL_AND_PIECEWISE",
                   help="cudagraph_mode that is asked for; tier and cut decide what is left of it."),
            Choice("tier", "Attention backend's tier", [(words, tier) for tier, words in TIER_WORDS.items()],
                   Tier.UNIFORM_BATCH, help="Which batches its kernels may be captured with."),
            Choice("cut", "The pass is", [(words, cut) for cut, words in rules.CUT_WORDS.items()], "compile",
                   help="What PIECEWISE graphs are made of."),
            Number("layers", "Layers", 1, 80, 32, help="Each has one attention."),
            Number("largest", "Largest size", 8, 1024, 512, points=(8, 16, 32, 64, 128, 256, 512, 1024),
                   unit="tokens", help="Above it a step runs eagerly."),
            *_stream_controls(values, STREAMS, MAX_SEQS, MAX_TOKENS),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run asks the rules that the engine itself asks; nothing is captured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return [
            f"Launches are computed for labkit's pass on a GPU: {rules.PER_LAYER} kernels a layer and "
            f"{rules.ATTENTION} for attention, {rules.FIRST} before and {rules.AFTER} after the layers.",
            *_batches_said(values, STREAMS),
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        batches, layers, cut = _batches(values, STREAMS, MAX_SEQS, MAX_TOKENS), int(values["layers"]), values["cut"]
        tier = Tier(values["tier"])
        found = rules.answer(
            batches, values["mode"], tier, cut, layers=layers, max_num_seqs=MAX_SEQS, max_tokens=MAX_TOKENS,
            largest=int(values["largest"]),
        )  # fmt: skip
        pieces = rules.num_pieces(layers, cut)
        title = f"{layers} layers, {values['mode']}, tier {tier.name}"
        notes = [*_trail(found.trail), *_avoided(values["mode"], tier, cut)]
        made = simulated(RULES, mode=values["mode"], tier=tier.name, cut=cut, layers=layers, largest=values["largest"])
        summary = f"{_cut_said(layers, cut, pieces)} {_tape_said(found)}"
        data = rules.drawn_data(found, layers, cut, title)
        return Outcome(data, {"what": title, **rules.row(found, layers, cut)}, summary, made, notes=tuple(notes))


class EngineSource:
    """The engine of this machine: every batch is really run, one step each, beside what the rules say of it."""

    kind = "LIVE"

    def __init__(self, gpu: str = "", room: EngineRoom | None = None) -> None:
        self.gpu, self.label = gpu, gpu or "this CPU"
        self.room = room or shared_room()

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("mode", "Graph mode", [(m.name, m.name) for m in Mode], "FULL_AND_PIECEWISE",
                   help="cudagraph_mode that is asked for; the backend's tier decides what is left of it."),
            Number("top", "Largest size", 4, SMALL_TOKENS, SMALL_LARGEST, points=(4, 8, 16, 32, 64),
                   unit="tokens", help="Above it a step runs eagerly."),
            *_stream_controls(values, SMALL_STREAMS, SMALL_SEQS, SMALL_TOKENS, "typed_here"),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run makes a small engine ({MODEL}), captures its graphs and runs every batch once: some seconds."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        said = [f"{MODEL} has 2 layers. Pieces come from a capture that breaks at attention; nothing is compiled."]
        if not self.gpu:
            said.append("Graphs are emulated on a CPU: the same choice, buffers and padding, and nothing saved.")
        return [*said, *_batches_said(values, SMALL_STREAMS)]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        batches = _batches(values, SMALL_STREAMS, SMALL_SEQS, SMALL_TOKENS)
        largest = int(values["top"])  # not "largest": what is kept of a control moves to the other source
        llm = self._prepare(values["mode"], largest, context)
        taken = llm.engine.plan.selection
        tier = next(c.tier for c in taken.candidates if c.name == taken.selected)
        layers = llm.model_config.num_layers
        found = rules.answer(
            batches, values["mode"], tier, "break", layers=layers, max_num_seqs=SMALL_SEQS, max_tokens=SMALL_TOKENS,
            largest=largest, backend=taken.selected,
        )  # fmt: skip
        reports: list[StepReport] = []
        for number, batch in enumerate(batches):
            context.check()
            context.stage(f"running {batch}", number, len(batches))
            reports.append(one_step(llm, batch))
        same = [(r.mode, r.size) == (s.way, s.size) for r, s in zip(reports, found.steps, strict=True)]
        title = f"{MODEL}, {values['mode']}, {taken.selected}"
        made = collect("LIVE", "panel 10", order="as the stream", n=1, device="auto" if self.gpu else "cpu")
        ran = [f"{rules.WORD[r.mode]}·{r.size}" for r in reports]
        agree = f"The engine ran {sum(same)} of {len(same)} steps as the rules say."
        wrong = [
            f"Step {i + 1} ({batches[i]}): the rules say {found.steps[i].way} {found.steps[i].size}, the engine ran "
            f"{reports[i].mode} {reports[i].size}." for i, ok in enumerate(same) if not ok
        ]  # fmt: skip
        data = rules.drawn_data(found, layers, "break", title)
        values_ = {
            "what": title, **rules.row(found, layers, "break"), "agree": sum(same), "ran": " ".join(ran),
            "ran_modes": [r.mode for r in reports], "ran_sizes": [r.size for r in reports],
        }  # fmt: skip
        notes = (*wrong, *_trail(llm.mode_trail))
        return Outcome(data, values_, f"{agree} {_tape_said(found)}", made, notes=notes)

    def _prepare(self, mode: str, largest: int, context: Context) -> Any:
        def progress(stage: str, done: int, total: int, detail: str) -> None:
            context.stage(f"{stage} {detail}", done, total)

        context.stage(f"loading {MODEL}", 0, 0)
        return self.room.prepare(
            MODEL, progress, enforce_eager=False, attention_backend=None, compilation_mode="NONE",
            max_num_seqs=SMALL_SEQS, max_num_batched_tokens=SMALL_TOKENS, max_model_len=256, cudagraph_mode=mode,
            cudagraph_capture_sizes=tuple(default_capture_sizes(SMALL_SEQS, SMALL_TOKENS, max_size=largest)),
            max_cudagraph_capture_size=None, num_gpu_blocks_override=None,
        )  # fmt: skip


def one_step(llm: Any, batch: Batch) -> StepReport:
    """Run exactly this batch: its decodes have a context already, its prompts are new."""
    from labkit.config import SamplingParams

    llm.reset()
    try:
        if batch.decodes:
            llm.prime(batch.decodes, PROMPT_CONTEXT, 4)
        vocab = llm.model_config.vocab_size
        for i, n in enumerate(batch.chunks):
            llm.add_request([(7919 * (i + 1) + 31 * j) % vocab for j in range(n)], SamplingParams(max_tokens=1))
        return llm.step()  # type: ignore[no-any-return]
    finally:
        llm.reset()


# --- controls and sentences ------------------------------------------------------------------------------------------


def _stream_controls(
    values: Mapping[str, Any], streams: Mapping[str, str], max_seqs: int, max_tokens: int, typed: str = "typed"
) -> list[Control]:
    chosen = Choice("stream", "Stream", [*((name, name) for name in streams), (OWN, OWN)],
                    help="Every batch is one step.")  # fmt: skip
    if values.get("stream") != OWN:
        return [chosen]
    first = next(iter(streams.values()))
    return [chosen, Text(typed, "Batches", first, _reader(max_seqs, max_tokens), placeholder="4d, 3d+20p, 1d",
                         help="d is a decode, p a prompt's chunk with so many tokens; + within a step.")]  # fmt: skip


def _reader(max_seqs: int, max_tokens: int) -> Callable[[str], str]:
    def read(text: str) -> str:
        return ", ".join(map(str, parse(text, max_seqs, max_tokens)))

    return read


def _batches(values: Mapping[str, Any], streams: Mapping[str, str], seqs: int, tokens: int) -> tuple[Batch, ...]:
    text = values.get("typed_here", values.get("typed")) if values["stream"] == OWN else streams[values["stream"]]
    return parse(text, seqs, tokens)


def _batches_said(values: Mapping[str, Any], streams: Mapping[str, str]) -> list[str]:
    return [] if values["stream"] == OWN else [f"The stream: {streams[values['stream']]} (d decodes, p prompt tokens)."]


def _cut_said(layers: int, cut: str, pieces: int) -> str:
    if pieces == 1:
        return "The pass is one piece, attention inside."
    many = len(set(rules.kinds(layers, cut)))
    return f"{layers} attention call{'s' * (layers > 1)} cut the pass into {pieces} pieces of {many} kinds."


def _tape_said(found: rules.Answer) -> str:
    parts = []
    for name, decodes in (("Batches of decodes alone", True), ("batches with a prompt", False)):
        ways = {step.way for step in found.steps if step.batch.is_uniform_decode == decodes}
        if ways:
            said = " or ".join({"NONE": "eagerly"}.get(way, way) for way in rules.WAYS[::-1] if way in ways)
            parts.append(f"{name} run {said}")
    total = sum(step.launches for step in found.steps)
    missed = sum("above the largest" in step.why for step in found.steps)
    if missed:
        parts[-1] += f" ({missed} {'is' if missed == 1 else 'are'} above the largest size, {max(found.sizes)})"
    said = f"In mode {found.mode.name}: {'; '.join(parts)}."
    return f"{said} On a GPU that is {total:,} launches for {len(found.steps)} steps."


def _trail(trail: Sequence[str]) -> list[str]:
    return [f"Mode: {line.rstrip('.')}." for line in trail]


def _avoided(mode: str, tier: Tier, cut: str) -> list[str]:
    """What would have kept the mode."""
    try:
        found = avoid(Mode[mode], tier, **rules.CUTS[cut])  # type: ignore[arg-type]
    except ConfigError:
        return []
    return [f"To keep {one.downgrade.before.name}: {one.change}" for one in found]
