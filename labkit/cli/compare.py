"""`labkit compare transformers`: have it measured beside labkit, then say what came out. Measures nothing itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from labkit.cli.answer import Answer, Console, milliseconds, number, table
from labkit.cli.options import Parser, UsageError, add_engine_options, engine_config, whole, whole_list, words
from labkit.measure.beside import BesideRecording, beside_pairs
from labkit.measure.storage import MIN_SAMPLES

_OWN = ("enable_prefix_caching",)

#: What a reader must know to read the table.
WHAT_A_STEP_IS = (
    "A step is the time from one token of the batch on the host to the next, with every request decoding; prefill is "
    "left out. labkit's also turns tokens into text."
)


def compare_transformers_options(parser: Parser) -> None:
    parser.add_argument("--batch", type=whole_list(1), default=[1], metavar="N,…", help="requests (default 1)")
    parser.add_argument(
        "--context", type=whole(1), default=64, metavar="N", help="tokens of each prompt, all equally long (default 64)"
    )
    parser.add_argument("--ways", type=words, metavar="WAY,…",
                        help="of static, compiled, continuous (default: all; on a CPU not compiled, which takes "
                        "minutes there)")  # fmt: skip
    parser.add_argument("--steps", type=whole(1), default=64, metavar="N", help="measured steps per row (default 64)")
    parser.add_argument("--warmup", type=whole(0), default=8, metavar="N", help="steps before them (default 8)")
    parser.add_argument("--rounds", type=whole(1), default=4, metavar="N", help="rounds that take turns (default 4)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the chart")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the rows as a recording (50 steps or more)")
    add_engine_options(parser, leave_out=_OWN)


def compare_transformers(args: argparse.Namespace, console: Console) -> Answer:
    """Time decode steps of transformers and of labkit, on the same weights and prompts, in one process."""
    from labkit.bench.beside import compare_transformers as run
    from labkit.cli.measure import writable

    if not args.batch:
        raise UsageError("labkit compare transformers --batch", "names no batch", "As in --batch 1,4.")
    out, html = getattr(args, "out", None), getattr(args, "html", None)
    writable(html, out)
    if out is not None and args.steps < MIN_SAMPLES:
        raise UsageError(
            f"labkit compare transformers --steps {args.steps}", f"a recording needs {MIN_SAMPLES} steps a row",
            "Drop --out, or take more.",
        )  # fmt: skip
    recording, notes = run(
        engine_config(args), args.batch, args.context, ways=getattr(args, "ways", None), steps=args.steps,
        warmup=args.warmup, rounds=args.rounds, progress=console.progress,
    )  # fmt: skip
    pairs = beside_pairs(recording)
    sentences = [*(pair.sentence for pair in pairs), WHAT_A_STEP_IS]
    if out is not None:
        recording.save(out)
    if html is not None:
        from labkit.cli.page import write_beside_page

        write_beside_page(html, recording, sentences)
    data = {**recording.as_dict(), "comparisons": [pair.as_dict() for pair in pairs], "notes": notes}
    return Answer(data, beside_table(recording, [*sentences, *notes]))


def beside_table(recording: BesideRecording, sentences: list[str]) -> str:
    """Rows of engines side by side as aligned text, the settings of each way once, then sentences."""
    lines = [("engine", "way", "batch", "context", "p50 ms", "p10-p90", "n", "tok/s", "tokens")]
    for row in recording.rows:
        spread = f"{milliseconds(row.p10_ms)}-{milliseconds(row.p90_ms)}"
        way = f"{row.way} (emulated)" if row.emulated else row.way
        lines.append(
            (
                f"{row.engine} {row.version}", way, number(row.batch), number(row.context), milliseconds(row.p50_ms),
                spread, number(row.n), number(row.tok_s), row.agreement,
            )
        )  # fmt: skip
    settings = {
        f"{row.name}:": ", ".join(f"{name}={value}" for name, value in row.settings.items()) for row in recording.rows
    }
    rows = recording.rows
    head = f"{rows[0].model} ({rows[0].weights} weights), {rows[0].dtype}\n" if rows else ""
    parts = [head + recording.provenance.label, table(lines, left=(0, 1, 8)) if rows else "Nothing ran."]
    parts += ["\n".join(f"{name} {value}" for name, value in settings.items()), "\n".join(sentences)]
    parts.append("\n".join(f"{way} did not run: {why}." for way, why in recording.refused.items()))
    return "\n\n".join(part for part in parts if part)
