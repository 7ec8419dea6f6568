"""`labkit bench requests`: have one traffic run under several schedulings, and say what was shown. Measures nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from labkit.cli.answer import Answer, Console, milliseconds, number, table
from labkit.cli.options import Parser, UsageError, add_engine_options, engine_config, whole, whole_list
from labkit.measure.storage import MIN_SAMPLES
from labkit.measure.traffic import RequestRecording, RequestRow, SchedulingPair

#: What the schedulings themselves set, and what a measured traffic needs no say in.
_OWN = ("enable_prefix_caching", "enable_chunked_prefill", "long_prefill_token_threshold", "prefill_first")
#: Random weights time like real ones, and need no download.
_MODEL = "smollm2-135m"


def bench_requests_options(parser: Parser) -> None:
    parser.add_argument("--decodes", type=whole(1), default=8, metavar="N", help="requests under way (default 8)")
    parser.add_argument("--context", type=whole(1), default=512, metavar="N",
                        help="tokens of KV of each at the start, primed (default 512)")  # fmt: skip
    parser.add_argument("--prompt", type=whole(2), default=2048, metavar="N",
                        help="tokens of a prompt that arrives (default 2048)")  # fmt: skip
    parser.add_argument("--prompts", type=whole(1), default=1, metavar="N",
                        help="how many arrive, one before each step (default 1)")  # fmt: skip
    parser.add_argument("--after", type=whole(2), default=8, metavar="N", help="steps before they do (default 8)")
    parser.add_argument("--chunk", type=whole_list(1), default=[256, 64], metavar="N,…",
                        help="chunk sizes to try beside whole prompts; empty for none (default 256,64)")  # fmt: skip
    parser.add_argument("--runs", type=whole(1), default=20, metavar="N", help="runs of each (default 20)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"keep the rows as a recording ({MIN_SAMPLES} runs "
                        "or more)")  # fmt: skip
    add_engine_options(parser, leave_out=_OWN, model=_MODEL)


def bench_requests(args: argparse.Namespace, console: Console) -> Answer:
    """Time to first token and waits between tokens when long prompts arrive, for each way of sharing steps."""
    from labkit.bench.requests import Traffic, schedulings
    from labkit.bench.requests import bench_requests as run
    from labkit.cli.measure import writable

    writable(getattr(args, "out", None))
    if hasattr(args, "out") and args.runs < MIN_SAMPLES:
        what = f"labkit bench requests --runs {args.runs}"
        raise UsageError(what, f"a recording needs {MIN_SAMPLES} runs", "Drop --out, or take more.")
    config = engine_config(args, model=_MODEL)
    traffic = Traffic(args.decodes, args.context, args.prompt, args.prompts, args.after)
    recording, notes = run(config, traffic, schedulings(args.chunk), runs=args.runs, progress=console.progress)
    if hasattr(args, "out"):
        recording.save(args.out)
    pairs = recording.pairs(base="whole")
    data = {**recording.as_dict(), "comparisons": [pair.as_dict() for pair in pairs], "notes": notes}
    return Answer(data, "\n\n".join(filter(None, [request_table(recording, pairs), "\n".join(notes)])))


def request_table(recording: RequestRecording, pairs: Sequence[SchedulingPair] = ()) -> str:
    """Rows of requests as aligned text, one block per traffic, then what was shown."""
    blocks: dict[tuple[object, ...], list[RequestRow]] = {}
    for row in recording.rows:
        blocks.setdefault(row.traffic, []).append(row)
    parts = [recording.provenance.label]
    for rows in blocks.values():
        lines = [("scheduling", "TTFT p50 ms", "p10-p90", "ITL p50 ms", "p99", "worst", "while prompts run",
                  "otherwise", "waits", "runs")]  # fmt: skip
        for row in rows:
            lines.append(
                (
                    row.scheduling, milliseconds(row.p50_ttft_ms),
                    f"{milliseconds(row.p10_ttft_ms)}-{milliseconds(row.p90_ttft_ms)}", milliseconds(row.p50_itl_ms),
                    milliseconds(row.p99_itl_ms), milliseconds(row.worst_itl_ms), milliseconds(row.spikes.p50),
                    milliseconds(row.others.p50), number(len(row.samples_itl_ms)), str(row.runs),
                )
            )  # fmt: skip
        said = [pair.sentence for pair in pairs if pair.first in rows]
        parts.append("\n".join([describe(rows[0]), "", table(lines), *([""] if said else []), *said]))
    parts.append(
        "TTFT: from a prompt's arrival to its first token. ITL: wait between two tokens of a decoding request;\n"
        "while prompts run, otherwise: its median when prompts were computed in it and when none was.\n"
        f"order: {recording.provenance.order}"
    )
    return "\n\n".join(parts)


def describe(row: RequestRow) -> str:
    """The traffic in one line."""
    what = "a prompt" if row.prompts == 1 else f"{row.prompts} prompts, one a step,"
    return (
        f"{row.model}, {row.weights} weights, {row.dtype}, {row.backend}, {row.requested_mode}: "
        f"{row.decodes} decode{'s' * (row.decodes > 1)} at {number(row.context)} tokens (primed), after {row.lead} "
        f"steps {what} of {number(row.prompt)}"
    )
