"""Splits measured here: the engine's kernel on a GPU; on a CPU the proof that splitting changes nothing. No widgets.

On a GPU each number of splits is a call of `labkit.bench.attention`. A CPU has no multiprocessors, so that there the
same sums are taken in torch, cut into as many parts, and merged: what is shown is that the result stays.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.lab.ch04.outcome import Found, call_words, outcome, plural
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome
from labkit.measure.provenance import collect
from labkit.measure.stats import summary

if TYPE_CHECKING:
    import torch

    from labkit.measure.attention import AttentionRow

SPLITS = (1, 2, 4, 8, 16, 32, 64)
SAMPLES = 20
KV_LENS = {"cpu": (512, 2048, 8192), "cuda": (512, 2048, 8192, 32_768, 131_072)}
HEAD_SIZE = 64


class SplitBench:
    """TRITON_ATTN on this GPU, a call at a time."""

    kind = "LIVE"

    def __init__(self, gpu: str) -> None:
        self.label = gpu

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        lens = KV_LENS["cuda"]
        return [
            Number("kv_len", "KV length", lens[0], lens[-1], 32_768, points=lens, unit="tokens",
                   help="Keys that a request's last token sees."),
            Number("q_len", "New tokens", 1, 512, 1, help="What each request brings: 1 is a decode, more is a chunk."),
            Number("batch", "Requests", 1, 32, 1, help="How many requests the call serves."),
            Choice("heads", "Heads", [("32 query, 8 KV", (32, 8)), ("32 query, 32 KV", (32, 32))],
                   help="Of 128 numbers each."),
            Number("num_splits", "Splits", 0, SPLITS[-1], 1, points=(0, *SPLITS),
                   help="How many programs share the keys of one. 0 is what the backend chooses by itself."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run times {len(SPLITS) + 1} numbers of splits, a few seconds in all; the first run compiles kernels."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["Each call is timed over rotated K and V, in a graph, so that neither the cache nor the host helps."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        import torch

        rows: list[AttentionRow] = []
        # What was asked for comes first: a run that is stopped has it.
        order = [values["num_splits"], *(n for n in (0, *SPLITS) if n != values["num_splits"])]
        for done, splits in enumerate(order):
            if rows and context.should_stop():
                break
            context.check()
            context.stage(f"measuring {splits or 'its own'} splits", done, len(order))
            rows.append(timed(values, splits, "cuda"))
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return bench_outcome(rows, sms, "cuda", stopped=len(rows) < len(order))


def timed(values: Mapping[str, Any], splits: int, device: str, backend: str = "TRITON_ATTN") -> AttentionRow:
    """One number of splits, rotated and in a graph; eager where nothing can be captured."""
    from labkit.bench.attention import MIN_SETS, AttentionOptions, AttentionShape, bench_attention

    q_len, kv_len, batch = int(values["q_len"]), int(values["kv_len"]), int(values["batch"])
    heads, kv_heads = values["heads"]
    dtype = "bfloat16" if device == "cuda" else "float32"
    shape = AttentionShape((q_len,) * batch, (max(kv_len, q_len),) * batch, heads, kv_heads, dtype=dtype)
    rows = bench_attention(
        backend, shape, AttentionOptions(num_splits=splits), device=device, samples=SAMPLES, sets=MIN_SETS
    )
    rotated = [row for row in rows if row.kv == "rotated"]
    return next((row for row in rotated if row.launch == "graph"), rotated[0])


def bench_outcome(rows: Sequence[AttentionRow], sms: int, device: str, stopped: bool = False) -> Outcome:
    """Rows of one call, the one that was asked for first, as a run."""
    first = rows[0]
    ran = {row.num_splits: row for row in reversed(rows)}
    points = [(n, ran[n].p50_us) for n in sorted(ran)]
    q_len, kv_heads = first.query_lens[0], first.num_kv_heads
    per_program = max(1, first.batch * kv_heads)
    programs = per_program * first.num_splits if q_len == 1 else None
    per_sm = tuple(max(0, -(-(programs - i) // sms)) for i in range(sms)) if programs else ()
    found = Found(
        first.backend, call_words(first.batch, q_len, first.context), first.batch, q_len, first.context, kv_heads,
        first.num_splits, programs, first.p50_us, points, sms if programs else None, per_sm,
    )  # fmt: skip
    said = f"{plural(first.num_splits, 'split')}: {first.p50_us:,.1f} µs a call, reading K and V at "
    said += f"{first.gb_s:,.0f} GB/s. Fastest here: {plural(found.best, 'split')}, {min(us for _, us in points):,.1f} "
    said += "µs"
    own = next((row for row in rows if row.num_splits_asked == 0), None)
    said += f"; by itself {first.backend} takes {own.num_splits}." if own else "."
    if programs:
        said += f" {programs:,} programs for {sms} SMs."
    made = collect("LIVE", "panel 04", order="the number asked for first", n=SAMPLES, primed=True, device=device)
    return outcome(found, made, said, first.samples_us, stopped=stopped)


class SplitProof:
    """Decodes in torch on this CPU, whole and in parts."""

    kind, label = "LIVE", "this CPU, in torch"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        lens = KV_LENS["cpu"]
        return [
            Number("kv_len", "KV length", lens[0], lens[-1], lens[-1], points=lens, unit="tokens",
                   help="Keys that each request's one new token sees."),
            Number("batch", "Requests", 1, 4, 1, help="How many requests the call serves."),
            Number("kv_heads", "KV heads", 1, 8, 8, points=(1, 2, 4, 8), help=f"Of {HEAD_SIZE} numbers, four queries "
                  f"each."),
            Number("num_splits", "Splits", 1, SPLITS[-1], 1, points=SPLITS, help="Parts that the keys are cut into."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run computes {len(SPLITS)} numbers of splits, about a second."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return [
            "A CPU has no multiprocessors: the parts run one after another here, so that nothing gets faster. What "
            "can be seen is that the result stays, and how many programs a GPU would get."
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        import torch

        batch, kv_len, kv_heads = int(values["batch"]), int(values["kv_len"]), int(values["kv_heads"])
        chosen = int(values["num_splits"])
        with torch.inference_mode():
            q, k, v = _tensors(batch, kv_heads, kv_len)
            whole = split_attention(q, k, v, 1)
            points, differences = [], []
            samples: tuple[float, ...] = ()
            for done, splits in enumerate(SPLITS):
                context.check()
                context.stage(f"measuring {splits} splits", done, len(SPLITS))
                us = _sample(q, k, v, splits)
                points.append((splits, summary(us).p50))
                differences.append(float((split_attention(q, k, v, splits) - whole).abs().max()))
                if splits == chosen:
                    samples = tuple(us)
        at = SPLITS.index(chosen)
        programs = batch * kv_heads * chosen
        found = Found(
            "torch, cut and merged", call_words(batch, 1, kv_len), batch, 1, kv_len, kv_heads, chosen, programs,
            points[at][1], points, difference=differences[at], differences=differences,
        )  # fmt: skip
        made = collect("LIVE", "panel 04", order="splits ascending", n=len(samples), device="cpu")
        said = f"{batch} × {kv_heads} KV heads × {plural(chosen, 'split')} = {programs} programs; "
        said += f"{points[at][1]:,.0f} µs on this CPU. "
        worst = max(differences)
        said += f"Cut into up to {SPLITS[-1]} parts and merged, no result is off by more than {worst:.1g}: rounding of "
        said += "float32, since the same terms are added in another order."
        return outcome(found, made, said, samples)


def split_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: int) -> torch.Tensor:
    """Attention of q `[batch, kv_heads, group, d]` over k and v `[batch, kv_heads, keys, d]`, in parts that are "
    "merged."""
    import torch

    outs, lses = [], []
    for keys, values in zip(k.chunk(splits, 2), v.chunk(splits, 2), strict=True):
        scores = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append((scores - lse).exp() @ values)
        lses.append(lse)
    weights = torch.stack(lses).softmax(0)
    return (torch.stack(outs) * weights).sum(0)


def _sample(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: int) -> list[float]:
    us = []
    for _ in range(5):
        begin = time.perf_counter_ns()
        split_attention(q, k, v, splits)
        us.append((time.perf_counter_ns() - begin) / 1e3)
    return us


@functools.lru_cache(maxsize=4)
def _tensors(batch: int, kv_heads: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    random = torch.Generator().manual_seed(kv_len)
    q = torch.randn(batch, kv_heads, 4, HEAD_SIZE, generator=random)
    k, v = (torch.randn(batch, kv_heads, kv_len, HEAD_SIZE, generator=random) for _ in range(2))
    return q, k, v
