"""`labkit bench` with its kinds, and `labkit record`: have it measured, then say what came out. Measures nothing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cli.answer import Answer, Console, milliseconds, number, table
from labkit.cli.options import Parser, UsageError, add_engine_options, engine_config, one_of, whole, whole_list, words
from labkit.config import ATTENTION_BACKENDS, DTYPES, KV_CACHE_LAYOUTS
from labkit.errors import BackendError
from labkit.measure.recordings import MIN_SAMPLES

if TYPE_CHECKING:
    from labkit.bench.steps import Comparison
    from labkit.measure.attention import AttentionRecording
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
    parser.add_argument("--attention-backend", type=_backends, metavar="NAME,…",
                        help="which ones, or all (default: TRITON_ATTN on a GPU, else TORCH_SDPA)")  # fmt: skip
    parser.add_argument("--batch", type=whole_list(1), default=[1, 8, 32, 128], metavar="N,…",
                        help="requests with one new token each; empty for none (default 1,8,32,128)")  # fmt: skip
    parser.add_argument("--context", type=whole_list(1), default=[1024], metavar="N,…",
                        help="tokens of KV of each (default 1024)")  # fmt: skip
    parser.add_argument("--prefill", type=_prefills, default=[], metavar="NxL,…",
                        help="also N prompts of L tokens without a past, as in 8x1024")  # fmt: skip
    parser.add_argument("--chunk", type=whole(2), metavar="N",
                        help="also each batch of decodes beside one chunk of N tokens")  # fmt: skip
    parser.add_argument(
        "--mixed", action="store_true", default=False, help="also a batch that mixes chunks and decodes of all sizes"
    )
    parser.add_argument("--split-mixed-batches", action="store_true", default=False,
                        help="run mixed batches in two calls as well, decodes and chunks, and compare")  # fmt: skip
    parser.add_argument("--batch-invariant", action="store_true", default=False,
                        help="run everything batch-invariant as well, and compare")  # fmt: skip
    parser.add_argument("--num-splits", type=whole_list(0), default=[0], metavar="N,…",
                        help="KV splits to try; 0 leaves the choice to the backend (default 0)")  # fmt: skip
    parser.add_argument("--flash-attn-version", type=whole(2), metavar="N", help="2, 3 or 4 (default: the backend's)")
    parser.add_argument("--num-heads", type=whole(1), default=32, metavar="N", help="query heads (default 32)")
    parser.add_argument("--num-kv-heads", type=whole(1), default=8, metavar="N", help="KV heads (default 8)")
    parser.add_argument("--head-size", type=whole(1), default=128, metavar="N", help="(default 128)")
    parser.add_argument("--block-size", type=whole(1), metavar="N", help="tokens per page (default: the backend's)")
    parser.add_argument("--kv-cache-layout", type=one_of(KV_CACHE_LAYOUTS), default="NHD", metavar="NAME",
                        help="NHD or HND (default NHD)")  # fmt: skip
    parser.add_argument("--dtype", type=one_of(DTYPES), default="auto", metavar="NAME", help="(default auto)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda")
    parser.add_argument(
        "--sets", type=whole(1), metavar="N", help="KV sets to rotate over (default: 4 or more, beyond the cache)"
    )
    parser.add_argument("--samples", type=whole(1), default=50, metavar="N", help="samples per row (default 50)")
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True,
                        help="rows of the kernel library's own call, where there is one (default: yes)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the rows as a recording (50 samples or more)")


def _backends(word: str) -> list[str]:
    """Reads names of backends separated by commas; `all` stands for every one and gives an empty list."""
    if word.casefold() == "all":
        return []
    names = [one_of(ATTENTION_BACKENDS)(name) for name in words(word)]
    if not names:
        raise argparse.ArgumentTypeError("no backend is named")
    return list(dict.fromkeys(names))


def _prefills(word: str) -> list[tuple[int, int]]:
    """Reads `8x1024,1x8192`: prompts and the tokens of each."""
    out = []
    for part in words(word):
        found = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", part)
        if not found:
            raise argparse.ArgumentTypeError(f"{part!r} does not read like 8x1024")
        out.append((int(found[1]), int(found[2])))
    return out


def bench_attention(args: argparse.Namespace, console: Console) -> Answer:
    """Time backends' kernels: warm and rotated, eager and in a graph, labkit's call and the library's own."""
    from labkit.bench.attention import MIXED, AttentionOptions, AttentionShape, attention_pairs, backends_to_time
    from labkit.bench.attention import bench_attentions as run
    from labkit.engine.plan import resolve_dtype
    from labkit.llm import find_device

    writable(getattr(args, "out", None))
    if hasattr(args, "out") and args.samples < MIN_SAMPLES:
        raise UsageError(
            f"labkit bench attention --samples {args.samples}",
            f"a recording needs {MIN_SAMPLES} samples a row",
            "Drop --out, or take more.",
        )
    device, platform = find_device(args.device)
    dtype, _ = resolve_dtype(args.dtype, platform)
    heads: dict[str, Any] = {
        "num_heads": args.num_heads, "num_kv_heads": args.num_kv_heads, "head_size": args.head_size,
        "block_size": getattr(args, "block_size", None), "dtype": dtype,
    }  # fmt: skip
    points_of = [(batch, context) for context in args.context for batch in args.batch]
    shapes = [AttentionShape.decode(batch, context, **heads) for batch, context in points_of]
    shapes += [AttentionShape.prefill(batch, length, **heads) for batch, length in args.prefill]
    if hasattr(args, "chunk"):
        shapes += [AttentionShape.mixed(batch, context, args.chunk, **heads) for batch, context in points_of]
    if args.mixed:
        shapes.append(AttentionShape(tuple(q for q, _ in MIXED), tuple(kv for _, kv in MIXED), **heads))
    if not shapes or not args.num_splits:
        raise UsageError("labkit bench attention", "there is nothing to time", "As in --batch 1,8 or --prefill 8x1024")
    common = {"flash_attn_version": getattr(args, "flash_attn_version", None), "kv_cache_layout": args.kv_cache_layout}
    points = []
    for shape in shapes:
        for invariant in (False, True)[: 1 + args.batch_invariant]:
            for split in (False, True)[: 1 + (args.split_mixed_batches and shape.kind == "mixed")]:
                points += [(shape, AttentionOptions(n, split, invariant, **common)) for n in args.num_splits]
    default = ["TRITON_ATTN" if device.type == "cuda" else "TORCH_SDPA"]
    names = getattr(args, "attention_backend", default) or backends_to_time(args.device)
    recording = run(
        names, points, device=args.device, samples=args.samples, sets=getattr(args, "sets", None), bare=args.bare,
        progress=console.progress,
    )  # fmt: skip
    if not recording.rows:
        why = "; ".join(f"{name}: {why}" if len(names) > 1 else why for name, why in recording.refused.items())
        raise BackendError(f"attention_backend={','.join(names)!r}", why, "`labkit backends` says who can serve.")
    if hasattr(args, "out"):
        recording.save(args.out)
    pairs = attention_pairs(recording)
    data = {**recording.as_dict(), "comparisons": [pair.as_dict() for pair in pairs]}
    return Answer(data, attention_table(recording, [pair.sentence for pair in pairs]))


def attention_table(recording: AttentionRecording, sentences: Sequence[str] = ()) -> str:
    """Attention rows as aligned text, then comparisons, then who was refused and why."""
    rows = recording.rows
    first = rows[0]
    versions = dict.fromkeys(f"{row.backend} {row.backend_version or ''}".rstrip() for row in rows)
    head = (
        f"{', '.join(versions)}\nheads {first.num_heads}/{first.num_kv_heads}/{first.head_size}, {first.dtype}\n"
        f"{recording.provenance.label}"
    )
    lines = [
        (
            "kind", "batch", "context", "backend", "pages", "splits", "KV", "sets", "launch", "p50 us", "p10-p90", "n",
            "GB/s of KV", "TFLOP/s", "prepare us",
        )
    ]  # fmt: skip
    for row in rows:
        lines.append(
            (
                row.kind, number(row.batch), number(row.context), row.name, str(row.block_size), str(row.num_splits),
                row.kv, str(row.sets), row.launch, number(row.p50_us, 1),
                f"{number(row.p10_us, 1)}-{number(row.p90_us, 1)}", str(row.n), number(row.gb_s),
                number(row.tflop_s, 1), number(row.prepare_us, 1) if row.call == "labkit" else "-",
            )
        )  # fmt: skip
    parts = [head, table(lines, left=(0, 3, 6, 8)), "\n".join(sentences)]
    parts.append("\n".join(f"{name} did not run everything: {why}." for name, why in recording.refused.items()))
    return "\n\n".join(part for part in parts if part)


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
    from labkit.bench.suites import ATTENTION, SUITES

    names = (*SUITES, ATTENTION)
    parser.add_argument("--suite", type=one_of(names), default="slice", metavar="NAME",
                        help=f"one of {', '.join(names)} (default slice)")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to (default SUITE.json.gz); resumed if it exists"
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda")


def record(args: argparse.Namespace, console: Console) -> Answer:
    """Measure a suite into a file."""
    from labkit.bench.suites import ATTENTION, record_attention
    from labkit.bench.suites import record as run

    out = getattr(args, "out", Path(f"{args.suite}.json.gz"))
    writable(out)
    if args.suite == ATTENTION:
        calls = record_attention(out, device=args.device, progress=console.progress)
        console.note(f"{len(calls.rows)} rows in {out.name} ({out.stat().st_size / 1024:.0f} KiB)")
        return Answer(calls.as_dict(), attention_table(calls))
    recording = run(args.suite, out, device=args.device, progress=console.progress)
    size = out.stat().st_size / 1024
    console.note(f"{len(recording.rows)} rows in {out.name} ({size:.0f} KiB)")
    return Answer(recording.as_dict(), step_table(recording))
