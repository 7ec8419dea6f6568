"""`labkit bench` with its kinds, and `labkit record`: have it measured, then say what came out. Measures nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cli.answer import Answer, Console, milliseconds, number, table
from labkit.cli.options import Parser, UsageError, add_engine_options, engine_config, one_of, whole, whole_list
from labkit.config import ATTENTION_BACKENDS, DTYPES
from labkit.measure.recordings import MIN_SAMPLES

if TYPE_CHECKING:
    from labkit.bench.attention import AttentionRow
    from labkit.bench.steps import Comparison
    from labkit.measure.provenance import Provenance
    from labkit.measure.recordings import Recording, Row

#: Engine settings that `bench` leaves at its own default: a measured step needs no prefix cache.
_OWN = ("enable_prefix_caching",)
#: Random weights time like real ones, and need no download.
_MODEL = "smollm2-135m"


# --- bench ---------------------------------------------------------------------------------------------------------


def bench_options(parser: Parser) -> None:
    parser.add_argument("--batch", type=whole_list(1), default=[1], metavar="N,…", help="requests per step (default 1)")
    parser.add_argument("--context", type=whole_list(1), default=[512], metavar="N,…",
                        help="tokens of KV before the first step, primed (default 512)")  # fmt: skip
    parser.add_argument(
        "--size", type=whole(1), metavar="N", help="the one capture size to use (default: as the engine pads)"
    )
    parser.add_argument("--steps", type=whole(1), default=100, metavar="N", help="measured steps per row (default 100)")
    parser.add_argument("--warmup", type=whole(0), default=10, metavar="N", help="steps before them (default 10)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the chart")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the rows as a recording (50 steps or more)")
    add_engine_options(parser, leave_out=_OWN, model=_MODEL)


def bench(args: argparse.Namespace, console: Console) -> Answer:
    """Time decode steps, eager and in the asked graph mode, and put them beside what they should cost."""
    from labkit.bench import bench as run
    from labkit.bench import comparisons

    if not args.batch or not args.context:
        raise UsageError("labkit bench", "needs at least one batch and one context", "As in --batch 1,8 --context 512")
    config = engine_config(args, model=_MODEL)
    writable(getattr(args, "html", None), getattr(args, "out", None))
    if hasattr(args, "out") and args.steps < MIN_SAMPLES:
        raise UsageError(
            f"labkit bench --steps {args.steps}",
            f"a recording needs {MIN_SAMPLES} steps a row",
            "Drop --out, or take more.",
        )
    recording, notes = run(
        config, args.batch, args.context, size=getattr(args, "size", None), steps=args.steps, warmup=args.warmup,
        progress=console.progress,
    )  # fmt: skip
    pairs = comparisons(recording)
    if hasattr(args, "out"):
        recording.save(args.out)
    if hasattr(args, "html"):
        from labkit.cli.page import write_page

        write_page(args.html, recording, [sentence(c) for c in pairs])
    data = {**recording.as_dict(), "comparisons": [c.as_dict() for c in pairs], "notes": notes}
    return Answer(data, "\n".join([step_table(recording), "", *(sentence(c) for c in pairs), *notes]))


def writable(*paths: Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise UsageError(
                f"file {str(path)!r}", "its folder does not exist", "Make the folder, or name another file."
            )


def step_table(recording: Recording) -> str:
    """Rows of steps as aligned text, with their origin on top."""
    rows = recording.rows
    head = f"{describe(rows[0])}\n{recording.provenance.label}" if rows else recording.provenance.label
    lines = [
        (
            "context",
            "batch",
            "mode",
            "ran as",
            "p50 ms",
            "p10-p90",
            "n",
            "launches",
            "device us",
            "tok/s",
            "GB/s",
            "floor",
        )
    ]
    for row in rows:
        share = f"{row.floor_ms / row.p50_ms:.0%}" if row.floor_ms else "-"
        lines.append(
            (
                number(row.context), number(row.batch), row.requested_mode, ran_as(row), milliseconds(row.p50_ms),
                f"{milliseconds(row.p10_ms)}-{milliseconds(row.p90_ms)}", str(row.n), number(row.launches),
                number(row.device_us), number(row.tok_s), number(row.gb_s), share,
            )
        )  # fmt: skip
    text = f"{head}\n\n{table(lines, left=(2, 3))}"
    first = next((r for r in rows if r.floor_ms), None)
    if first is not None and first.gb_s and first.floor_ms:
        copy = first.gb_s * first.p50_ms / first.floor_ms
        text += f"\n\nfloor: share of a copy's {number(copy)} GB/s that reading weights and KV once makes of a step"
    cost = rows[0].launch_cost_us if rows else {}
    if cost:
        text += "\nhost us per launch: " + ", ".join(f"{kind} {us:.1f}" for kind, us in cost.items())
    return text


def describe(row: Row) -> str:
    """One line on what all rows share."""
    version = f" {row.backend_version}" if row.backend_version else ""
    primed = ", primed KV" if row.primed else ""
    return f"{row.model}, {row.weights} weights, {row.dtype}, {row.backend}{version}{primed}"


def ran_as(row: Row) -> str:
    """`FULL 8`, `NONE`, or `FULL 8 (emulated)`."""
    return f"{row.mode} {row.size}" + (" (emulated)" if row.emulated else "") if row.mode != "NONE" else "NONE"


def sentence(pair: Comparison) -> str:
    """Graph against eager in one or two sentences."""
    eager, graph = pair.eager, pair.graph
    where = f"batch {pair.batch}, context {pair.context}"
    faster = f"{graph.requested_mode} against NONE: {pair.ratio.text}"
    if pair.ratio.shown:
        faster = f"NONE takes {pair.ratio.text} as long as {graph.requested_mode}"
    out = f"{where}: {faster}"
    if graph.launches is not None and eager.launches is not None:
        out += f"; {counted(graph)} instead of {counted(eager)}"
    out += "."
    if pair.explained_us is not None and pair.limit_us is not None:
        verdict = "within" if pair.fair else "ABOVE"
        out += (
            f"\n  NONE {number(eager.p50_ms * 1e3)} us is {verdict} 1.3 x {number(pair.explained_us)} us (launches x "
            f"cost) + {number(eager.host_outside_us)} us (host outside the forward) = {number(pair.limit_us)} us"
        )
        out += "." if pair.fair else ": something besides launching slows it."
        if pair.bare_limit_us is not None:
            inside = "within" if eager.p50_ms * 1e3 <= pair.bare_limit_us else "ABOVE"
            out += f" With the bare cost of a Triton launch the limit is {number(pair.bare_limit_us)} us: {inside}."
    return out


def counted(row: Row) -> str:
    """`1 graph launch and 3 launches`, `412 launches`."""
    graphs, others = row.graph_launches, (row.launches or 0) - row.graph_launches
    parts = [f"{graphs} graph launch{'es' if graphs > 1 else ''}"] if graphs else []
    if others or not graphs:
        parts.append(f"{others} launch{'' if others == 1 else 'es'}")
    return " and ".join(parts)


# --- bench attention -----------------------------------------------------------------------------------------------


def bench_attention_options(parser: Parser) -> None:
    parser.add_argument("--attention-backend", type=one_of(ATTENTION_BACKENDS), metavar="NAME",
                        help="which one (default: TRITON_ATTN on a GPU, else TORCH_SDPA)")  # fmt: skip
    parser.add_argument("--batch", type=whole_list(1), default=[1, 8, 32, 128], metavar="N,…",
                        help="requests with one new token each (default 1,8,32,128)")  # fmt: skip
    parser.add_argument("--context", type=whole_list(1), default=[1024], metavar="N,…",
                        help="tokens of KV of each (default 1024)")  # fmt: skip
    parser.add_argument(
        "--mixed", action="store_true", default=False, help="also a batch that mixes chunks and decodes"
    )
    parser.add_argument("--num-heads", type=whole(1), default=32, metavar="N", help="query heads (default 32)")
    parser.add_argument("--num-kv-heads", type=whole(1), default=8, metavar="N", help="KV heads (default 8)")
    parser.add_argument("--head-size", type=whole(1), default=128, metavar="N", help="(default 128)")
    parser.add_argument("--block-size", type=whole(1), default=16, metavar="N", help="tokens per page (default 16)")
    parser.add_argument("--dtype", type=one_of(DTYPES), default="auto", metavar="NAME", help="(default auto)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda")
    parser.add_argument(
        "--sets", type=whole(1), metavar="N", help="KV sets to rotate over (default: 4 or more, beyond the cache)"
    )
    parser.add_argument("--samples", type=whole(1), default=50, metavar="N", help="samples per row (default 50)")


def bench_attention(args: argparse.Namespace, console: Console) -> Answer:
    """Time a backend's kernels: warm and rotated, eager and in a graph."""
    from labkit.bench.attention import MIXED, AttentionShape
    from labkit.bench.attention import bench_attention as run
    from labkit.engine.plan import resolve_dtype
    from labkit.llm import find_device
    from labkit.measure.provenance import Kind, collect
    from labkit.measure.recordings import SCHEMA

    device, platform = find_device(args.device)
    dtype, _ = resolve_dtype(args.dtype, platform)
    heads: dict[str, Any] = {
        "num_heads": args.num_heads, "num_kv_heads": args.num_kv_heads, "head_size": args.head_size,
        "block_size": args.block_size, "dtype": dtype,
    }  # fmt: skip
    shapes = [AttentionShape.decode(batch, context, **heads) for context in args.context for batch in args.batch]
    if args.mixed:
        shapes.append(AttentionShape(tuple(q for q, _ in MIXED), tuple(kv for _, kv in MIXED), **heads))
    name = getattr(args, "attention_backend", "TRITON_ATTN" if device.type == "cuda" else "TORCH_SDPA")
    rows: list[AttentionRow] = []
    for shape in shapes:
        rows += run(
            name,
            shape,
            device=args.device,
            samples=args.samples,
            sets=getattr(args, "sets", None),
            progress=console.progress,
        )
    provenance = collect(
        Kind.LIVE, order="for each shape: warm then rotated, in a graph then eager", n=args.samples, primed=True,
        device=device.type,
    )  # fmt: skip
    data = {"schema": SCHEMA, "provenance": provenance.as_dict(), "rows": [row.as_dict() for row in rows]}
    return Answer(data, attention_table(rows, provenance))


def attention_table(rows: list[AttentionRow], provenance: Provenance) -> str:
    """Attention rows as aligned text."""
    first = rows[0]
    version = f" {first.backend_version}" if first.backend_version else ""
    head = (
        f"{first.backend}{version}, heads {first.num_heads}/{first.num_kv_heads}/{first.head_size}, {first.dtype}, "
        f"pages of {first.block_size}\n{provenance.label}"
    )
    lines = [("kind", "batch", "KV", "sets", "launch", "p50 us", "p10-p90", "n", "GB/s of KV", "prepare us")]
    for row in rows:
        lines.append(
            (
                row.kind, number(row.batch), row.kv, str(row.sets), row.launch, number(row.p50_us, 1),
                f"{number(row.p10_us, 1)}-{number(row.p90_us, 1)}", str(row.n), number(row.gb_s),
                number(row.prepare_us, 1),
            )
        )  # fmt: skip
    return f"{head}\n\n{table(lines, left=(0, 2, 4))}"


# --- bench import --------------------------------------------------------------------------------------------------


def bench_import_options(parser: Parser) -> None:
    parser.add_argument("--samples", type=whole(1), default=10, metavar="N", help="fresh processes (default 10)")


def bench_import(args: argparse.Namespace, console: Console) -> Answer:
    """Time `import labkit` in fresh processes."""
    from labkit.bench.imports import bench_import as run
    from labkit.measure.provenance import Kind, collect
    from labkit.measure.recordings import SCHEMA

    row = run(samples=args.samples)
    provenance = collect(Kind.LIVE, order="one process after another", n=row.n, device="cpu")
    data = {"schema": SCHEMA, "provenance": provenance.as_dict(), "rows": [row.as_dict()]}
    text = (
        f"{provenance.label}\nimport {row.module}: p50 {milliseconds(row.p50_ms)} ms, "
        f"p10-p90 {milliseconds(row.p10_ms)}-{milliseconds(row.p90_ms)}, n={row.n}; "
        f"loads {', '.join(row.heavy) if row.heavy else 'neither torch nor any other heavy package'}"
    )
    return Answer(data, text)


# --- record --------------------------------------------------------------------------------------------------------


def record_options(parser: Parser) -> None:
    from labkit.bench.suites import SUITES

    parser.add_argument("--suite", type=one_of(tuple(SUITES)), default="slice", metavar="NAME",
                        help=f"one of {', '.join(SUITES)} (default slice)")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to (default SUITE.json.gz); resumed if it exists"
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda")


def record(args: argparse.Namespace, console: Console) -> Answer:
    """Measure a suite into a file."""
    from labkit.bench.suites import record as run

    out = getattr(args, "out", Path(f"{args.suite}.json.gz"))
    writable(out)
    recording = run(args.suite, out, device=args.device, progress=console.progress)
    size = out.stat().st_size / 1024
    console.note(f"{len(recording.rows)} rows in {out.name} ({size:.0f} KiB)")
    return Answer(recording.as_dict(), step_table(recording))
