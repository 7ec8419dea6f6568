"""Attention measured here and now: error against float64, time, and the most memory held. Refuses to know widgets.

On a CPU every time is of the call alone. On a GPU the engine's backends are timed by `labkit.bench.attention`, whose
clock is the device's; the two ways that this chapter writes down are timed by the same clock.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.lab.ch03 import contenders, memory
from labkit.lab.ch03.contenders import NAIVE, Contender
from labkit.lab.ch03.outcome import Curve, outcome
from labkit.lab.fields import Choice, Control
from labkit.lab.runs import Context, Outcome
from labkit.measure.provenance import collect
from labkit.measure.stats import summary

if TYPE_CHECKING:
    import torch

HEAD_SIZE = 64
DTYPES = ("float32", "bfloat16", "float16")
HEADS = (1, 4, 8)
LENGTHS = {"cpu": (256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
SHORTEST = 64
#: At each length: samples at most and at least, and seconds after which no more than the least are taken.
SAMPLES, LEAST, BUDGET_S = 15, 3, 0.2


class LiveAttention:
    """This machine: the chapter's own two ways, and every backend of the engine that serves here."""

    kind = "LIVE"

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self.device = "cuda" if gpu else "cpu"
        self.label = gpu or "this CPU"
        self._known: dict[str, list[Contender]] = {}
        self.refused: dict[str, str] = {}

    def contenders(self, dtype: str) -> list[Contender]:
        if dtype not in self._known:
            from labkit.llm import find_backends, find_device

            _, platform = find_device(self.device)
            found, refused = contenders.offered(dtype, platform, find_backends(platform))
            self._known[dtype] = found
            self.refused |= refused
        return self._known[dtype]

    def absent(self) -> list[str]:
        """Sentences on backends that are not offered here."""
        if self.device == "cpu":
            return [contenders.GPU_ONLY]
        self.contenders("bfloat16")
        return [f"Not here: {label} ({why})." for label, why in self.refused.items()]

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        dtype = values.get("dtype", "bfloat16")
        served = self.contenders(dtype)
        lengths = LENGTHS[self.device]
        return [
            Choice("backend", "Attention", [(one.label, one.key) for one in served], NAIVE,
                   help="Who computes it. All get the same numbers."),
            Choice("dtype", "Format", [(d, d) for d in DTYPES], "bfloat16",
                   help="Number format of the inputs and of the result. float32 has 24 significant bits, float16 11, "
                        "bfloat16 8."),
            Choice("length", "Longest", [(f"{n:,} tokens", n) for n in lengths], lengths[1],
                   help=f"Longest prompt: lengths from {SHORTEST} up to this one are measured, each twice the one "
                        f"before."),
            Choice("heads", "Heads", [(str(n), n) for n in HEADS], 4, help=f"Of {HEAD_SIZE} numbers each."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        count = len(lengths_up_to(values["length"]))
        return f"Run measures {count} lengths, {'some seconds' if self.gpu else 'about 1 to 6 s'} in all."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        heads, longest = values["heads"], values["length"]
        scores = memory.naive_bytes(longest, heads, 0, memory.ITEMSIZE[values["dtype"]]) / 2**20
        return [
            f"One causal prompt. All scores of {longest:,} tokens in {heads} heads would be {scores:,.0f} MiB.",
            "Every result is compared with the same computation in float64.",
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        import torch

        one, lengths = contenders.find(values["backend"]), lengths_up_to(values["length"])
        points: list[_Point] = []
        with torch.inference_mode():
            for done, length in enumerate(lengths):
                if points and context.should_stop():
                    break
                context.check()
                context.stage(f"measuring {length:,} tokens", done, len(lengths))
                points.append(self._point(one, values["dtype"], values["heads"], length))
        made = collect(
            "LIVE", "panel 03", order="lengths ascending", n=min(len(p.us) for p in points), device=self.device
        )
        last = points[-1]
        ran = lengths[: len(points)]
        curve = Curve(
            one.key, values["dtype"], values["heads"], ran, [summary(p.us).p50 for p in points],
            [summary(p.us).p10 for p in points], [summary(p.us).p90 for p in points],
            [p.bytes for p in points] if all(p.bytes is not None for p in points) else None,
            errors=last.errors, naive_error=last.naive_error, same_bits=last.same_bits,
        )  # fmt: skip
        return outcome(curve, made, last.us, stopped=len(points) < len(lengths))

    def _point(self, one: Contender, dtype: str, heads: int, length: int) -> _Point:
        import torch

        from labkit.measure.peak import peak_bytes

        q, k, v, exact, plain = _case(self.device, dtype, heads, length)
        attend = contenders.call(one, q, k, v)
        out = attend()
        errors = [float(e) for e in (out.double() - exact).abs().amax((1, 2))]
        plain_errors = (plain.double() - exact).abs().amax()
        same = None if one.key == NAIVE else float((out == plain).double().mean())
        us = self._time(one, attend, dtype, heads, length)
        held = peak_bytes(attend, self.device)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return _Point(us, held, errors, float(plain_errors), same)

    def _time(self, one: Contender, attend: Any, dtype: str, heads: int, length: int) -> list[float]:
        if self.device == "cuda":
            return gpu_us(one, attend, dtype, heads, length)
        us: list[float] = []
        begin = time.perf_counter()
        while len(us) < LEAST or (len(us) < SAMPLES and time.perf_counter() - begin < BUDGET_S):
            started = time.perf_counter_ns()
            attend()
            us.append((time.perf_counter_ns() - started) / 1e3)
        return us


class _Point:
    """One length. bytes: held at most, None where nothing counts them. errors: the largest of each head."""

    def __init__(
        self, us: list[float], held: int | None, errors: list[float], naive_error: float, same_bits: float | None
    ) -> None:
        self.us, self.bytes, self.errors, self.naive_error, self.same_bits = us, held, errors, naive_error, same_bits


def gpu_us(one: Contender, attend: Any, dtype: str, heads: int, length: int, device: str = "cuda") -> list[float]:
    """Device µs of single calls, started one by one, on one set of K and V."""
    from labkit.measure import clocks

    if not one.backend:  # the bench knows the engine's backends
        return clocks.sample_us(attend, samples=SAMPLES, device=device)
    from labkit.bench.attention import MIN_SETS, AttentionOptions, AttentionShape, bench_attention

    shape = AttentionShape.prefill(1, length, num_heads=heads, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=dtype)
    rows = bench_attention(
        one.backend,
        shape,
        AttentionOptions(flash_attn_version=one.version),
        device=device,
        samples=SAMPLES,
        sets=MIN_SETS,
    )
    return list(next(row for row in rows if (row.kv, row.launch) == ("warm", "eager")).samples_us)


def lengths_up_to(longest: int) -> list[int]:
    return [SHORTEST << i for i in range(int(math.log2(longest / SHORTEST)) + 1)]


@functools.lru_cache(maxsize=16)
def _case(
    device: str, dtype: str, heads: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of one prompt, the exact result in float64, and what naive attention makes of them. Kept for the next."""
    import torch

    from labkit.lab.ch03 import attention

    random = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(heads, length, HEAD_SIZE, generator=random).to(device, getattr(torch, dtype)) for _ in range(3)
    )
    return q, k, v, attention.exact(q, k, v), attention.naive(q, k, v)
