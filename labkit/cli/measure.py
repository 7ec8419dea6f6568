"""`labkit bench` with its kinds: have it measured, then say what came out. Measures nothing itself."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cli.answer import Answer, Console, milliseconds, number, table
from labkit.cli.options import Parser, UsageError, add_engine_options, engine_config, one_of, whole, whole_list, words
from labkit.cli.step_tables import decomposition_table, form_table, sentence, step_table
from labkit.config import ATTENTION_BACKENDS, DTYPES, KV_CACHE_LAYOUTS
from labkit.errors import BackendError
from labkit.measure.recordings import MIN_SAMPLES

if TYPE_CHECKING:
    from labkit.bench.forms import Form
    from labkit.config import EngineConfig
    from labkit.measure.attention import AttentionRecording
    from labkit.measure.memory import MemoryReport

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
    parser.add_argument("--compile-table", type=words, nargs="?", const=[], metavar="MODEL,…",
                        help="instead: the step of each model (default: --model) eager, compiled, in graphs, in both, "
                        "by torch's reduce-overhead, and in pieces")  # fmt: skip
    parser.add_argument("--mixed", type=_mixed, metavar="NxC",
                        help="instead: N decodes beside a chunk of C tokens, as in 8x256, in each mode")  # fmt: skip
    parser.add_argument("--decompose", action="store_true", default=False, help="also: what each step's time consists "
                        "of, host phases and device, and where memory goes")  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the charts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the rows as a recording (50 steps or more)")
    add_engine_options(parser, leave_out=_OWN, model=_MODEL)


def bench(args: argparse.Namespace, console: Console) -> Answer:
    """Time decode steps, eager and in the asked graph mode, and put them beside what they should cost."""
    from labkit.bench import bench as run
    from labkit.bench import comparisons
    from labkit.bench.memory import memory_report
    from labkit.measure.decompose import decompositions

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
    if hasattr(args, "compile_table") or hasattr(args, "mixed"):
        return _bench_forms(args, config, console)
    memory: list[MemoryReport] = []
    recording, notes = run(
        config, args.batch, args.context, size=getattr(args, "size", None), steps=args.steps, warmup=args.warmup,
        progress=console.progress, observe=lambda llm: memory.append(memory_report(llm)),
    )  # fmt: skip
    pairs, steps = comparisons(recording), decompositions(recording)
    parts = [*(one.sentence for one in steps), *(one.sentence for one in memory)]
    if hasattr(args, "out"):
        recording.save(args.out)
        console.note(f"{len(recording.rows)} rows in {args.out.name}; `labkit recordings add` shows it in the panels.")
    if hasattr(args, "html"):
        from labkit.cli.page import write_page

        write_page(args.html, recording, [*(sentence(c) for c in pairs), *parts], memory)
    data = {
        **recording.as_dict(), "comparisons": [c.as_dict() for c in pairs], "notes": notes,
        "decompositions": [one.as_dict() for one in steps], "memory": [one.as_dict() for one in memory],
    }  # fmt: skip
    text = [step_table(recording), "", *(sentence(c) for c in pairs), *notes]
    if args.decompose:
        text += ["", decomposition_table(steps), "", *parts]
    return Answer(data, "\n".join(text))


def _mixed(word: str) -> tuple[int, int]:
    """Reads `8x256`: decodes and the tokens of the chunk beside them."""
    found = _prefills(word)
    if len(found) != 1:
        raise argparse.ArgumentTypeError("takes one pair, as in 8x256")
    return found[0]


def _bench_forms(args: argparse.Namespace, config: EngineConfig, console: Console) -> Answer:
    """The two tables of forms: compilation and graphs apart and together, or a mixed step in every graph mode."""
    from labkit.bench.forms import COMPILE_TABLE, bench_forms, mode_forms

    if hasattr(args, "compile_table") and hasattr(args, "mixed"):
        raise UsageError("labkit bench", "--compile-table and --mixed are two tables", "Ask for one after the other.")
    if hasattr(args, "html"):
        raise UsageError("labkit bench --html", "a table of forms has no chart", "Drop --html; --out keeps the rows.")
    forms: Sequence[Form] = COMPILE_TABLE
    batches, chunk, models = args.batch, 0, getattr(args, "compile_table", None)
    if hasattr(args, "mixed"):
        batches, chunk = [args.mixed[0]], args.mixed[1]
        forms = mode_forms(config.compilation_mode or "NONE")
    recording, results, notes = bench_forms(
        config, forms, models or (), batches, args.context, chunk=chunk, steps=args.steps, warmup=args.warmup,
        progress=console.progress,
    )  # fmt: skip
    if hasattr(args, "out"):
        recording.save(args.out)
    data = {**recording.as_dict(), "forms": [one.as_dict() for one in results], "notes": notes}
    return Answer(data, "\n".join([form_table(recording, results), "", *notes]).rstrip())


def writable(*paths: Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise UsageError(
                f"file {str(path)!r}", "its folder does not exist", "Make the folder, or name another file."
            )


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
