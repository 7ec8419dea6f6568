"""The same weights and prompts in labkit and in transformers, in one process. Refuses to print and to judge.

transformers runs in three ways: `generate` with a static cache, eager and compiled, and its continuous batching with
its own CUDA graphs and the fastest attention that loads there. Its model holds labkit's own tensors, as views. All ways
take turns; a step is what `measure.beside` says it is; decoding is greedy, and the tokens must agree with labkit's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.bench.steps import Progress, ShouldStop, rotations
from labkit.bench.theirs import (
    Continuous,
    Stamps,
    Static,
    Tokens,
    in_fp32,
    needs_transformers,
    quieter,
    to_transformers,
)
from labkit.config import CUDAGraphMode, EngineConfig, SamplingParams
from labkit.errors import ConfigError, LabkitError, did_you_mean
from labkit.graphs.sizes import default_capture_sizes, pad_to
from labkit.measure.beside import OURS, BesideRecording, BesideRow, decode_steps, load_beside
from labkit.measure.provenance import Kind, ProvenanceError, collect, package_version
from labkit.measure.stats import summary

if TYPE_CHECKING:
    from labkit.llm import LLM

THEIRS = "transformers"
#: Option → what the way is called in a row.
WAYS = {"static": "static cache, eager", "compiled": "static cache, compiled", "continuous": "continuous batching"}
#: Steps that a batch may take to get all its requests started, on top of those that are measured.
STARTING = 16
#: fp32 logits of two correct computations differ by this share of the largest one.
FP32_ERROR = 1e-4
#: labkit may be this much farther from fp32 than transformers in the same dtype.
ERROR_FACTOR = 1.25

Run = Callable[[Tokens, int], tuple[Tokens, Stamps]]


def _quiet(stage: str, done: int, total: int, detail: str) -> None:
    pass


@dataclasses.dataclass
class _Way:
    """One contender: who it is, and a function from prompts and a number of tokens to tokens and their times."""

    engine: str
    version: str
    way: str
    run: Run
    settings: Callable[[], dict[str, str]]
    close: Callable[[], None] = lambda: None
    emulated: bool = False
    samples: list[float] = dataclasses.field(default_factory=list)
    tokens: Tokens = dataclasses.field(default_factory=list)


def compare_transformers(
    config: EngineConfig,
    batches: Sequence[int] = (1,),
    context: int = 64,
    *,
    ways: Sequence[str] | None = None,
    steps: int = 64,
    warmup: int = 8,
    rounds: int = 4,
    command: str | None = None,
    progress: Progress = _quiet,
    should_stop: ShouldStop | None = None,
) -> tuple[BesideRecording, list[str]]:
    """Decode steps of every way at every batch, with labkit's eager and graph step beside them.

    Args:
        config: labkit's side; prefix caching is off, and without a list of sizes only the batches' are captured.
        context: tokens of each prompt; all are equally long, so that a static cache needs no padding.
        ways: of `WAYS`; None takes all, without the compiled one on a CPU, where compiling takes minutes.
        steps: samples of a row, rounded up to equal rounds; as many rounds take turns, each in another order.

    Returns:
        The rows, and sentences a reader should see.

    Raises:
        ConfigError: an unknown way, or a batch or length that labkit's settings do not hold.
    """
    from labkit.llm import LLM

    if rounds < 1 or steps < 1 or warmup < 0 or context < 1:
        raise ConfigError("compare", "needs at least one round, one step and one token of context", "Raise them.")
    for way in ways or ():
        if way not in WAYS:
            raise ConfigError(f"way={way!r}", "there is no such way", did_you_mean(way, WAYS))
    needs_transformers()
    each = -(-steps // rounds)
    length = context + warmup + each + STARTING + 1
    config = _own_config(config, batches, length)
    rows: list[BesideRow] = []
    refused: dict[str, str] = {}
    with LLM(config=config, progress=progress) as llm, quieter():
        default = [way for way in WAYS if way != "compiled" or llm.device.type == "cuda"]
        chosen = list(dict.fromkeys(ways or default))
        if max(batches) > llm.config.max_num_seqs or length > (llm.config.max_model_len or length):
            raise ConfigError(
                f"batch {max(batches)} of {length} tokens", f"max_num_seqs={llm.config.max_num_seqs} and max_model_len="
                f"{llm.config.max_model_len} do not hold it", "Raise them, or take less.",
            )  # fmt: skip
        graphs = llm.cudagraph_mode
        for batch in batches:
            if should_stop is not None and should_stop():
                break
            prompts = make_prompts(batch, context, llm.model_config.vocab_size)
            contenders = [*_our_ways(llm, graphs), *(_their_way(llm, way, batch, length) for way in chosen)]
            taken = _take_turns(contenders, prompts, warmup, each, rounds, progress, refused)
            rows += _rows(llm, taken, prompts, rounds)
        notes, device = list(llm.notes), llm.device.type
    provenance = collect(
        Kind.LIVE, command, order=f"{rounds} rounds, each starting one way later: " + ", ".join(
            dict.fromkeys(row.name for row in rows)), n=min((row.n for row in rows), default=0), device=device,
    )  # fmt: skip
    version = package_version(THEIRS) or "unknown"
    provenance = provenance.replace(packages={**provenance.packages, THEIRS: version})
    return BesideRecording(provenance, tuple(rows), refused), notes


def record_beside(
    out: Path,
    *,
    command: str | None = None,
    device: str = "auto",
    models: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    context: int | None = None,
    steps: int = 64,
    progress: Progress = _quiet,
    should_stop: ShouldStop | None = None,
) -> BesideRecording:
    """Compare every model at every batch into `out`, saved batch by batch; an interrupted run goes on.

    None takes what suits the device: three models at up to 128 requests of 512 tokens on a GPU, the default model at
    1 and 4 requests of 64 tokens on a CPU.

    Raises:
        ProvenanceError: the file holds rows of another machine, version or commit.
        RecordingError: the file is damaged or cannot be written.
    """
    from labkit.llm import find_device

    on_gpu = find_device(device)[0].type == "cuda"
    models = models or (("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b") if on_gpu else ("smollm2-135m-instruct",))
    batches, context = batches or ((1, 8, 32, 128) if on_gpu else (1, 4)), context or (512 if on_gpu else 64)
    kept = load_beside(out) if out.exists() else None
    for at, model in enumerate(models):
        for batch in batches:
            name = Path(model).name
            if kept and any((r.model, r.batch, r.context) == (name, batch, context) for r in kept.rows):
                continue
            if should_stop is not None and should_stop():
                return kept or BesideRecording(collect(Kind.RECORDED, command, device=device), ())
            progress("recording", at * len(batches) + batches.index(batch), len(models) * len(batches), name)
            config = EngineConfig(model=model, device=device, max_model_len=max(1024, context + 256))
            found, _ = compare_transformers(config, (batch,), context, steps=steps, command=command, progress=progress)
            kept = _joined(kept, found, out.name)
            kept.save(out)
    return load_beside(out) if kept else BesideRecording(collect(Kind.RECORDED, command, device=device), ())


def _joined(kept: BesideRecording | None, new: BesideRecording, name: str) -> BesideRecording:
    """Rows of an earlier run and of this one in one recording, if machine and code are the same."""
    origin = new.provenance.replace(kind=Kind.RECORDED)
    if kept is None:
        return dataclasses.replace(new, provenance=origin)
    differences = origin.same_machine(kept.provenance)
    if differences:
        raise ProvenanceError(
            f"resuming {name}", f"it was recorded elsewhere: {'; '.join(differences)}",
            "Name another file, or remove this one.",
        )  # fmt: skip
    origin = origin.replace(n=min(origin.n, kept.provenance.n))
    return BesideRecording(origin, (*kept.rows, *new.rows), {**kept.refused, **new.refused})


def make_prompts(batch: int, context: int, vocab_size: int) -> Tokens:
    """`batch` different prompts of `context` token ids, the same on every machine."""
    return [[(i * 7919 + k * 104_729 + i * k * 31) % vocab_size for k in range(context)] for i in range(batch)]


def _own_config(config: EngineConfig, batches: Sequence[int], length: int) -> EngineConfig:
    changes: dict[str, Any] = {"enable_prefix_caching": False}
    if config.cudagraph_capture_sizes is None and not config.enforce_eager:
        default = default_capture_sizes(config.max_num_seqs, config.max_num_batched_tokens)
        sizes = {pad_to(batch, default) or default[-1] for batch in batches}
        changes["cudagraph_capture_sizes"] = tuple(sorted(sizes))
    return config.replace(**changes)


# --- taking turns --------------------------------------------------------------------------------------------------


def _take_turns(
    contenders: Sequence[_Way], prompts: Tokens, warmup: int, steps: int, rounds: int, progress: Progress,
    refused: dict[str, str],
) -> list[_Way]:  # fmt: skip
    """Let every contender run once unmeasured, then in rounds. One that fails is refused with its reason."""
    alive = list(contenders)
    num_tokens = warmup + steps + STARTING + 1

    def run(one: _Way) -> bool:
        try:
            return _one_turn(one, prompts, num_tokens, warmup, steps)
        except Exception as error:  # another engine fails in its own ways
            if one.engine == OURS:
                raise
            refused[f"{one.way}, batch {len(prompts)}"] = _said(error)
            alive.remove(one)
            one.close()
            return False

    try:
        for i, one in enumerate(contenders):
            progress("warming up", i, len(contenders), one.way)
            if run(one):
                one.samples.clear()
        for number, order in enumerate(rotations(list(alive), rounds)):
            for one in order:
                if one in alive:
                    progress("measuring", number, rounds, f"batch {len(prompts)}, {one.engine} {one.way}")
                    run(one)
    finally:
        for one in alive:
            one.close()
    return alive


def _one_turn(one: _Way, prompts: Tokens, num_tokens: int, warmup: int, steps: int) -> bool:
    tokens, stamps = one.run(prompts, num_tokens)
    if [len(t) for t in tokens] != [num_tokens] * len(prompts):
        raise LabkitError(f"{num_tokens} tokens", f"{[len(t) for t in tokens]} came", "It must not stop by itself.")
    one.tokens = one.tokens or tokens
    one.samples += decode_steps(stamps, warmup, steps)
    return True


def _said(error: Exception) -> str:
    text = str(error) if isinstance(error, LabkitError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:400]


def _rows(llm: LLM, taken: Sequence[_Way], prompts: Tokens, rounds: int) -> Iterator[BesideRow]:
    if not taken:
        return
    reference = taken[0]  # labkit's eager step comes first
    judge = _Judge(llm)
    for one in taken:
        found = summary(one.samples)
        p10, p50, p90 = (round(x, 5) for x in (found.p10, found.p50, found.p90))
        agrees, agreement = (
            (True, "the reference") if one is reference else judge(prompts, reference.tokens, one.tokens)
        )
        yield BesideRow(
            engine=one.engine, version=one.version, way=one.way, settings=one.settings(),
            model=Path(llm.config.model).name, weights=llm.weights, dtype=llm.config.dtype, batch=len(prompts),
            context=len(prompts[0]), p10_ms=p10, p50_ms=p50, p90_ms=p90, n=found.n, samples_ms=tuple(one.samples),
            rounds=rounds, tok_s=round(len(prompts) / p50 * 1e3, 2), agreement=agreement,
            agrees=agrees, emulated=one.emulated,
        )  # fmt: skip


# --- labkit --------------------------------------------------------------------------------------------------------


def _our_ways(llm: LLM, graphs: CUDAGraphMode) -> Iterator[_Way]:
    """The eager step, and the mode `graphs` that the settings came to, unless that is none."""
    for mode in dict.fromkeys((CUDAGraphMode.NONE, graphs)):

        def run(prompts: Tokens, num_tokens: int, mode: CUDAGraphMode = mode) -> tuple[Tokens, Stamps]:
            if llm.cudagraph_mode is not mode:
                llm.reconfigure(cudagraph_mode=mode)
            return generate_ours(llm, prompts, num_tokens)

        compiled = llm.config.compilation_mode or "NONE"
        settings = {
            "attention_backend": llm.selection.selected or "", "cudagraph_mode": mode.name,
            "compilation_mode": compiled, "cudagraph_capture_sizes": ",".join(map(str, llm.capture_sizes)),
        }  # fmt: skip
        way = "eager" if mode is CUDAGraphMode.NONE else f"{mode.name} graphs"
        if compiled != "NONE":
            way += f", {compiled}"
        emulated = llm.emulated_graphs and mode is not CUDAGraphMode.NONE
        version = package_version(OURS) or "unknown"
        yield _Way(OURS, version, way, run, lambda found=settings: dict(found), emulated=emulated)  # type: ignore[misc]


def generate_ours(llm: LLM, prompts: Tokens, num_tokens: int) -> tuple[Tokens, Stamps]:
    """Greedy tokens of each prompt, and when each was on the host."""
    llm.reset()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    tokens: dict[str, list[int]] = {i: [] for i in ids}
    stamps: dict[str, list[float]] = {i: [] for i in ids}
    while llm.has_unfinished:
        report = llm.step()
        now = time.perf_counter()
        for output in report.outputs:
            new = len(output.token_ids) - len(tokens[output.request_id])
            tokens[output.request_id] = list(output.token_ids)
            stamps[output.request_id] += [now] * new
    return [tokens[i] for i in ids], [stamps[i] for i in ids]


def _their_way(llm: LLM, way: str, batch: int, length: int) -> _Way:
    version = package_version(THEIRS) or "unknown"
    model = to_transformers(llm.engine.model.decoder)
    made = Continuous(model, batch, length) if way == "continuous" else Static(model, compiled=way == "compiled")
    return _Way(THEIRS, version, WAYS[way], made.run, made.settings, made.close)


# --- the numerics rule ---------------------------------------------------------------------------------------------


class _Judge:
    """Whether two greedy continuations agree: equal, or first different where rounding decides."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._models: tuple[Any, Any] | None = None

    def __call__(self, prompts: Tokens, ours: Tokens, theirs: Tokens) -> tuple[bool, str]:
        """Whether they agree, and the finding in words."""
        differences = []
        for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
            at = next((k for k, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
            if at is not None:
                gap, allowed = self._gap([*prompt, *mine[:at]], mine[at], other[at])
                differences.append((gap - allowed, gap, allowed, at))
        if not differences:
            return True, "same tokens"
        _, gap, allowed, at = max(differences)
        many = f"{len(differences)} of {len(prompts)} requests"
        where = f"first at token {at}, where the two logits are {gap:.2g} apart"
        fine = gap <= allowed
        why = f"rounding explains up to {allowed:.2g}" if fine else f"rounding explains only {allowed:.2g}"
        return fine, f"{many} differ, {where}; {why}"

    def _gap(self, prefix: list[int], mine: int, other: int) -> tuple[float, float]:
        """Distance of two tokens' logits after `prefix` in fp32, and what two correct computations may differ by."""
        import torch

        if self._models is None:
            same = to_transformers(self._llm.engine.model.decoder)
            exact = same if same.dtype == torch.float32 else in_fp32(same)
            self._models = same, exact
        same, exact = self._models
        ids = torch.tensor([prefix], device=same.device)
        with torch.inference_mode():
            reference = exact(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
            rounded = same(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        error = (rounded - reference).abs().max().item() if same is not exact else 0.0
        error = max(error, FP32_ERROR * max(1.0, reference.abs().max().item()))
        return abs((reference[mine] - reference[other]).item()), 2 * ERROR_FACTOR * error
