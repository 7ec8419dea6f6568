"""`labkit split`: a model cut at attention, piece by piece, and what fusing each piece saves."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cli.answer import Answer, Console, table
from labkit.cli.options import Parser, add_engine_options, engine_config, whole
from labkit.config import SPLITTING_OPS, EngineConfig
from labkit.errors import ConfigError

if TYPE_CHECKING:
    from labkit.graphs.xray import PieceXray

_FIELDS = ("model", "dtype", "device", "splitting_ops")


def split_options(parser: Parser) -> None:
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True,
                        help="compile each class, to count its kernels after fusion (cached; --no-compile only "
                        "traces)")  # fmt: skip
    parser.add_argument("--fusions", action="store_true", default=False,
                        help="also list each class's kernels with the operators that were fused into them")  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE",
                        help="write a page with the fusion groups and the code of every class")  # fmt: skip
    parser.add_argument("--code", type=whole(0), metavar="CLASS", help="also show the code generated for a class")
    rest = [f.name for f in dataclasses.fields(EngineConfig) if f.name not in _FIELDS]
    add_engine_options(parser, leave_out=rest)


def split(args: argparse.Namespace, console: Console) -> Answer:
    """The pieces of a model, which of them are the same code, and their kernels before and after fusion."""
    import torch

    from labkit.cli.machine import model_shape, this_platform
    from labkit.cli.measure import writable
    from labkit.engine.compiled import compile_model, split_model
    from labkit.engine.plan import resolve_dtype
    from labkit.graphs.compiler import count_eager_kernels
    from labkit.models.decoder import Decoder

    writable(getattr(args, "html", None))
    config = engine_config(args)
    platform = this_platform(config.device)
    dtype, _ = resolve_dtype(config.dtype, platform)
    ops = SPLITTING_OPS if config.splitting_ops is None else tuple(config.splitting_ops)
    # Only shapes are read: the weights stay as they are allocated.
    decoder = Decoder(model_shape(config.model), dtype=getattr(torch, dtype), device=platform.device_type)
    report = None
    classes: list[tuple[int, int, int | None]]
    if getattr(args, "compile", True):
        made = compile_model(decoder, ops, progress=console.progress)
        program, report = made.forward.program, made.report
        classes = [(c.ops, c.kernels_before, c.kernels_after) for c in report.classes]
    else:
        console.progress("tracing", 0, 1, config.model)
        found = split_model(decoder, ops)
        program = found.program
        counted = [count_eager_kernels(piece) for piece in found.representatives]
        classes = [(n, before, None) for n, before in zip(found.ops, counted, strict=True)]
    piece_list: list[dict[str, Any]] = [
        {"index": index, "class": piece.cls, "ops": classes[piece.cls][0],
         "kernels_before": classes[piece.cls][1], "kernels_after": classes[piece.cls][2]}
        for index, piece in enumerate(program.pieces)
    ]  # fmt: skip
    data: dict[str, Any] = {
        "pieces": len(piece_list), "classes": program.num_classes, "piece_list": piece_list, "model": config.model,
        "dtype": dtype, "device": platform.device_type, "splitting_ops": list(ops),
    }  # fmt: skip
    if report is not None:
        data["from_cache"] = report.from_cache
        data["ms"] = {"trace": report.trace_ms, "compile": report.compile_ms, "load": report.load_ms}
    text = _describe(data, program.num_classes, len(program.instructions) - len(piece_list))
    page = getattr(args, "html", None)
    if report is not None and (args.fusions or page):
        from labkit.graphs.xray import piece_xrays

        pieces = piece_xrays(report.classes)
        data["fusions"] = [{k: v for k, v in piece.as_dict().items() if k != "code"} for piece in pieces]
        text += "\n\n" + _describe_fusions(pieces)
        if page:
            _write_page(page, pieces, text)
    code = getattr(args, "code", None)
    if code is not None:
        if report is None or code >= program.num_classes:
            raise ConfigError(
                f"--code {code}",
                "nothing was compiled" if report is None else f"there are {program.num_classes} classes, from 0",
                "Leave out --no-compile, and name a class of the table.",
            )
        data["code"] = report.classes[code].code
        text += "\n\n" + data["code"]
    return Answer(data, text)


def _describe_fusions(pieces: Sequence[PieceXray]) -> str:
    rows = [("class", "call", "role", "operators in it")]
    for piece in pieces:
        for fusion in piece.fusions:
            rows.append((str(piece.index), fusion.kernel, fusion.role, ", ".join(fusion.ops)))
    return table(rows, left=(1, 2, 3))


def _write_page(path: Path, pieces: Sequence[PieceXray], text: str) -> None:
    from labkit.cli.page import write_figures
    from labkit.figures.xray import fusion_figure
    from labkit.measure.provenance import Kind, collect

    origin = collect(Kind.LIVE).label
    code = "\n\n".join(f"# --- class {piece.index} ---\n{piece.code}" for piece in pieces)
    write_figures(path, "Inside the compiled pieces", [fusion_figure(pieces, "LIVE")], [text], [origin], code)


def _describe(data: dict[str, Any], num_classes: int, attention: int) -> str:
    rows = [("class", "pieces", "which", "ops", "kernels before", "after fusion")]
    for cls in range(num_classes):
        mine = [p for p in data["piece_list"] if p["class"] == cls]
        first, last = mine[0]["index"], mine[-1]["index"]
        which = str(first) if first == last else f"{first} … {last}"
        after = "-" if mine[0]["kernels_after"] is None else str(mine[0]["kernels_after"])
        rows.append((str(cls), str(len(mine)), which, str(mine[0]["ops"]), str(mine[0]["kernels_before"]), after))
    before = sum(p["kernels_before"] for p in data["piece_list"])
    head = (
        f"{data['model']}, {data['dtype']}, {data['device']}: {data['pieces']} pieces around {attention} attention "
        f"calls, {num_classes} different ones"
    )
    lines = [head, "", table(rows, left=(2,)), ""]
    total = f"whole pass, attention not counted: {before} kernels one operator at a time"
    if data["piece_list"][0]["kernels_after"] is not None:
        total += f", {sum(p['kernels_after'] for p in data['piece_list'])} after fusion"
    lines.append(total)
    if "ms" in data:
        ms = data["ms"]
        lines.append(
            f"read from the cache in {ms['load'] / 1e3:.1f} s" if data["from_cache"]
            else f"traced in {ms['trace'] / 1e3:.1f} s, compiled in {ms['compile'] / 1e3:.1f} s"
        )  # fmt: skip
    return "\n".join(lines)
