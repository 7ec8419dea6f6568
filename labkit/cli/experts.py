"""`labkit bench moe`: have a layer of experts timed, then say how fast it reads weights. Measures nothing itself."""

from __future__ import annotations

import argparse

from labkit.cli.answer import Answer, Console
from labkit.cli.options import Parser, UsageError, one_of, whole, whole_list
from labkit.config import DTYPES


def bench_moe_options(parser: Parser) -> None:
    parser.add_argument(
        "--model", metavar="NAME", help="a shape with experts (default: qwen3-30b-a3b on a GPU, else tiny-qwen3-moe)"
    )
    parser.add_argument("--batch", type=whole_list(1), default=[1, 8], metavar="N,…", help="tokens (default 1,8)")
    parser.add_argument("--dtype", type=one_of(DTYPES), default="auto", metavar="NAME", help="(default auto)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda")
    parser.add_argument("--samples", type=whole(1), default=50, metavar="N", help="samples per row (default 50)")


def bench_moe(args: argparse.Namespace, console: Console) -> Answer:
    """Time one layer of experts, router included, against the bytes of the experts that work."""
    from labkit.bench.moe import bench_moe as run
    from labkit.llm import find_device
    from labkit.measure.provenance import Kind, collect
    from labkit.measure.recordings import SCHEMA

    if not args.batch:
        raise UsageError("labkit bench moe", "there is nothing to time", "As in --batch 1,8")
    device, _ = find_device(args.device)
    model = getattr(args, "model", None) or ("qwen3-30b-a3b" if device.type == "cuda" else "tiny-qwen3-moe")
    rows = run(model, args.batch, dtype=args.dtype, device=args.device, samples=args.samples)
    provenance = collect(Kind.LIVE, order="one batch size after another", n=args.samples, device=device.type)
    data = {"schema": SCHEMA, "provenance": provenance.as_dict(), "rows": [row.as_dict() for row in rows]}
    return Answer(data, "\n".join([provenance.label, *(row.sentence for row in rows)]))
