"""`labkit modes` and `labkit sizes`: the engine's own rules, asked without an engine. Refuses to import torch."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.attention.interface import AttentionCGSupport, Platform
from labkit.cli.answer import Answer, Console, table
from labkit.cli.options import Parser, add_engine_options, engine_config, one_of, whole
from labkit.config import ATTENTION_BACKENDS, MLA_ATTENTION_BACKENDS, CUDAGraphMode, EngineConfig
from labkit.errors import ConfigError
from labkit.graphs.advisor import TRAFFIC, Fit, advise, fit, powers_of_two, read_traffic
from labkit.graphs.avoid import Avoidance, avoid
from labkit.graphs.modes import DEFAULT_MODE, resolve
from labkit.graphs.sizes import DEFAULT_CAP, SM10X_CAP, default_capture_sizes, padding_table

if TYPE_CHECKING:
    from labkit.measure.recordings import Recording


def modes_options(parser: Parser) -> None:
    parser.add_argument("--requested", type=one_of(tuple(CUDAGraphMode.__members__)), default=DEFAULT_MODE.name,
                        metavar="MODE",
                        help=f"the mode asked for (default {DEFAULT_MODE.name})")  # fmt: skip
    parser.add_argument("--tier", type=one_of(tuple(AttentionCGSupport.__members__)), default="ALWAYS", metavar="TIER",
                        help="how far the backend can be captured (default ALWAYS)")  # fmt: skip
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=False,
                        help="whether the model is compiled in pieces")  # fmt: skip
    parser.add_argument("--split", action=argparse.BooleanOptionalAction, default=True,
                        help="whether a compiled model is cut at attention (splitting_ops is not empty)")  # fmt: skip
    parser.add_argument("--breakable", action=argparse.BooleanOptionalAction, default=False,
                        help="whether a capture is broken at attention (piecewise_method is break, which is what the "
                        "engine does where nothing is compiled)")  # fmt: skip
    parser.add_argument("--pooling", action=argparse.BooleanOptionalAction, default=False,
                        help="whether the model pools instead of generating")  # fmt: skip
    parser.add_argument("--query-len", type=whole(1), default=1, metavar="N",
                        help="tokens per request in a decode step (default 1)")  # fmt: skip
    names = one_of((*ATTENTION_BACKENDS, *MLA_ATTENTION_BACKENDS))
    parser.add_argument("--attention-backend", type=names, metavar="NAME",
                        help="the backend that has this tier, for its name and its recorded costs")  # fmt: skip
    costs = parser.add_argument_group("where to look up the cost of a downgrade")
    costs.add_argument("--model", metavar="MODEL", help="a recorded model (default: the first that was recorded)")
    costs.add_argument("--batch", type=whole(1), default=1, metavar="N",
                       help="requests per step; the nearest recorded batch answers (default 1)")  # fmt: skip


def modes(args: argparse.Namespace, console: Console) -> Answer:
    """What a requested mode resolves to, every decision on the way, and what would avoid it."""
    requested, tier = CUDAGraphMode[args.requested], AttentionCGSupport[args.tier]
    backend = getattr(args, "attention_backend", None)
    question: dict[str, Any] = {"pooling": args.pooling, "split": args.split, "breakable": args.breakable}
    mode, trail = resolve(
        requested, tier, args.compiled, args.query_len, backend=backend or "the backend", **question
    )  # fmt: skip
    recordings, notes = _recordings()
    found = avoid(
        requested, tier, args.compiled, args.query_len, backend=backend, recordings=recordings,
        model=_recorded_name(getattr(args, "model", None)), batch=args.batch, **question,
    )  # fmt: skip
    data = {
        "requested": requested.name, "tier": tier.name, "compiled": args.compiled, "query_len": args.query_len,
        **question, "resolved": mode.name, "trail": trail, "avoid": [one.as_dict() for one in found], "notes": notes,
    }  # fmt: skip
    runs = f"decode steps run {mode.decode_mode().name}, mixed steps run {mode.mixed_mode().name}"
    return Answer(data, "\n".join([*trail, runs, *map(_remedy, found), *(notes if found else [])]))


def _remedy(one: Avoidance) -> str:
    step = f"{one.downgrade.before.name} → {one.downgrade.after.name}"
    return f"\n{step}\n  to avoid it: {one.change}\n  cost: {one.cost}"


def _recordings() -> tuple[Sequence[Recording], list[str]]:
    """What ships with the package; nothing, and a note, where the package that reads samples is missing."""
    try:
        from labkit.measure.recordings import shipped
    except ModuleNotFoundError as error:
        return (), [f"Recordings were not read: {error}."]
    return shipped(), []


def _recorded_name(model: str | None) -> str | None:
    """A model as recordings name it: the default model is recorded under the name of its shape."""
    from labkit.models.shapes import DEFAULT_MODEL, model_names

    if model is None:
        return None
    known = {option.casefold(): option for option in model_names()}
    name = known.get(model.casefold(), Path(model).name)
    return "smollm2-135m" if name == DEFAULT_MODEL else name


def sizes_options(parser: Parser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help="the GPU to answer for, such as H200 (default: a usual one)")
    parser.add_argument(
        "--query-len", type=whole(1), default=1, metavar="N", help="tokens per request in a decode step"
    )
    parser.add_argument("--traffic", metavar="FILE",
                        help="also count waste and coverage for this histogram of tokens per step: a file with a JSON "
                        "object {tokens: steps} or one number of tokens per line, or a built-in synthetic one, "
                        f"{', '.join(TRAFFIC)}")  # fmt: skip
    parser.add_argument("--advise", type=whole(1), metavar="K",
                        help="with --traffic: the K sizes that waste least")  # fmt: skip
    add_engine_options(parser)


def sizes(args: argparse.Namespace, console: Console) -> Answer:
    """The capture sizes of a configuration and the size that every number of tokens is padded to."""
    from labkit.engine.plan import capture_sizes

    config = engine_config(args)
    platform = _platform(getattr(args, "gpu", None))
    found = capture_sizes(config, platform)
    if args.query_len > 1 and config.cudagraph_capture_sizes is None:
        cap = {"cap": SM10X_CAP} if platform.capability and platform.capability[0] == 10 else {}
        found = default_capture_sizes(
            config.max_num_seqs, config.max_num_batched_tokens, args.query_len,
            max_size=config.max_cudagraph_capture_size, **cap,
        )  # fmt: skip
    padding = {str(n): size for n, size in enumerate(padding_table(found)) if n}
    data: dict[str, Any] = {"sizes": found, "padding": padding, "gpu": platform.name or None}
    text = _describe(found)
    widest = config.max_num_seqs * args.query_len
    data["notes"] = []
    if widest > found[-1]:
        note = f"max_num_seqs={config.max_num_seqs} allows decode batches of up to {widest} tokens: those above "
        data["notes"].append(f"{note}{found[-1]} have no graph.")
        text += f"\n{data['notes'][0]}"
    asked, k = getattr(args, "traffic", None), getattr(args, "advise", None)
    if asked is None:
        if k is not None:
            raise ConfigError(
                f"--advise {k}", "advice is for some traffic, and none was named",
                f"Add --traffic with a file, or with one of {', '.join(TRAFFIC)}.",
            )  # fmt: skip
        return Answer(data, text)
    counts, origin = _traffic(asked)
    here = fit(counts, found)
    data["traffic"] = {"name": asked, "origin": origin, "histogram": {str(n): c for n, c in counts.items()}}
    data["fit"] = here.as_dict()
    text += f"\n\nTraffic: {asked}, {origin}, {here.steps:,} steps of {min(counts)} to {max(counts)} tokens.\n\n"
    if k is None:
        return Answer(data, text + _compare([("this list", here)]))
    advice = advise(counts, k, _largest(config, platform))
    others = {
        "this list": here,
        f"its first {k}": fit(counts, found[:k]),
        "powers of two": fit(counts, powers_of_two(max(advice.sizes))),
    }
    data["advice"] = {"k": k, **advice.as_dict()}
    data["compared"] = [{"name": name, **one.as_dict()} for name, one in others.items()]
    lines = [f"cudagraph_capture_sizes for it: {', '.join(map(str, advice.sizes))}"]
    if advice.coverage < 1:
        eager = advice.steps - advice.covered
        lines.append(f"{eager:,} steps are above {advice.sizes[-1]} tokens and stay eager.")
    return Answer(
        data, "\n".join([text + _compare([(f"advice, {len(advice.sizes)}", advice), *others.items()]), *lines])
    )


def _traffic(asked: str) -> tuple[dict[int, int], str]:
    """A histogram by name or from a file, and where it is from."""
    if asked in TRAFFIC:
        return TRAFFIC[asked], "synthetic"
    path = Path(asked).expanduser()
    try:
        return read_traffic(path.read_text(encoding="utf-8"), path.name), "from a file"
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"--traffic {asked}", f"cannot be read ({why})", f"Name a file, or one of {', '.join(TRAFFIC)}."
        ) from None


def _largest(config: EngineConfig, platform: Platform) -> int:
    """The largest size that may be captured: the limit that is set or the GPU's, and never above the token budget."""
    cap = SM10X_CAP if platform.capability and platform.capability[0] == 10 else DEFAULT_CAP
    return min(config.max_cudagraph_capture_size or cap, config.max_num_batched_tokens)


def _compare(fits: Sequence[tuple[str, Fit]]) -> str:
    rows = [("sizes", "number", "waste", "coverage", "padded tokens")]
    for name, one in fits:
        rows.append(
            (name, str(len(one.sizes)), f"{one.waste:.2%}", f"{one.coverage:.2%}", f"{one.padded_tokens:,}")
        )  # fmt: skip
    notes = ("waste: padding among all tokens that run.", "coverage: steps with a graph; the others pad nothing.")
    return "\n".join([table(rows), "", *notes])


def _platform(gpu: str | None) -> Platform:
    from labkit.attention.registry import platform_for_gpu

    return platform_for_gpu(gpu) if gpu else Platform("cuda")


def _describe(found: Sequence[int]) -> str:
    rows = [("tokens", "run as", "padding at most")]
    for low, high in zip([0, *found], found, strict=False):
        span = f"{low + 1}-{high}" if high > low + 1 else str(high)
        rows.append((span, str(high), str(high - low - 1)))
    head = f"{len(found)} sizes: {_ranges(found)}"
    shown = rows if len(rows) <= 20 else [*rows[:8], ("...", "...", "..."), *rows[-4:]]
    return f"{head}\n\n{table(shown, left=())}\n\nAbove {found[-1]} tokens a step runs eagerly, unpadded."


def _ranges(found: Sequence[int]) -> str:
    """`1, 2, 4, 8 … 248 by 8, 256 … 512 by 16`."""
    out: list[str] = []
    steps = [(b - a, a, b) for a, b in itertools.pairwise(found)]
    i = 0
    while i < len(found):
        j = i
        while j + 1 < len(found) and steps[j][0] == steps[i][0]:
            j += 1
        if j - i >= 3:
            out.append(f"{found[i]} … {found[j]} by {steps[i][0]}")
            i = j + 1
        else:
            out.append(str(found[i]))
            i += 1
    return ", ".join(out)
