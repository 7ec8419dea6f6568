"""`labkit modes` and `labkit sizes`: the engine's own rules, asked without an engine. Refuses to import torch."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from labkit.attention.interface import AttentionCGSupport, Platform
from labkit.cli.answer import Answer, Console, table
from labkit.cli.options import Parser, add_engine_options, engine_config, one_of, whole
from labkit.config import CUDAGraphMode
from labkit.graphs.modes import DEFAULT_MODE, resolve
from labkit.graphs.sizes import SM10X_CAP, default_capture_sizes, padding_table


def modes_options(parser: Parser) -> None:
    parser.add_argument("--requested", type=one_of(tuple(CUDAGraphMode.__members__)), default=DEFAULT_MODE.name,
                        metavar="MODE",
                        help=f"the mode asked for (default {DEFAULT_MODE.name})")  # fmt: skip
    parser.add_argument("--tier", type=one_of(tuple(AttentionCGSupport.__members__)), default="ALWAYS", metavar="TIER",
                        help="how far the backend can be captured (default ALWAYS)")  # fmt: skip
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=False,
                        help="whether the model is compiled in pieces")  # fmt: skip
    parser.add_argument("--query-len", type=whole(1), default=1, metavar="N",
                        help="tokens per request in a decode step (default 1)")  # fmt: skip


def modes(args: argparse.Namespace, console: Console) -> Answer:
    """What a requested mode resolves to, and every decision on the way."""
    requested, tier = CUDAGraphMode[args.requested], AttentionCGSupport[args.tier]
    mode, trail = resolve(requested, tier, args.compiled, args.query_len)
    data = {
        "requested": requested.name, "tier": tier.name, "compiled": args.compiled, "query_len": args.query_len,
        "resolved": mode.name, "trail": trail,
    }  # fmt: skip
    runs = f"decode steps run {mode.decode_mode().name}, mixed steps run {mode.mixed_mode().name}"
    return Answer(data, "\n".join([*trail, runs]))


def sizes_options(parser: Parser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help="the GPU to answer for, such as H200 (default: a usual one)")
    parser.add_argument(
        "--query-len", type=whole(1), default=1, metavar="N", help="tokens per request in a decode step"
    )
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
    data = {"sizes": found, "padding": padding, "gpu": platform.name or None}
    return Answer(data, _describe(found))


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
