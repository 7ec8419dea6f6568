"""The cards of chapter 05: choices by name, a plugged run, the myth check, the row of the scoreboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.attention import registry
from labkit.attention.interface import AttentionSpec
from labkit.attention.selector import candidates, select
from labkit.errors import BackendError
from labkit.lab import scoreboard, ui
from labkit.lab.cards import Card, paragraph
from labkit.lab.ch05.exercises import why_not
from labkit.lab.myths import COMPUTED, DOCUMENTED, Myth, myth_card, recorded_myths
from labkit.lab.plugged_run import PluggedRun, run_plugged
from labkit.measure.library import library

SCORE = "decode step, eager, TRITON_ATTN"
OTHER_SCORE = "decode step, eager, TORCH_SDPA"
WORKS, RAISES = "works", "raises"
#: (machine, dtype, head size, more of the request, backend by name), in the order of the notebook's list.
OVERRIDES: tuple[tuple[str, str, int, dict[str, Any], str], ...] = (
    ("L4", "bfloat16", 128, {}, "FLASHINFER"),
    ("T4", "float16", 128, {}, "FLASH_ATTN"),
    ("T4", "float16", 128, {}, "TRITON_ATTN"),
    ("RTX 5090", "bfloat16", 128, {"flash_attn_version": 3}, "FLASH_ATTN"),
    ("A100", "bfloat16", 128, {}, "XFORMERS"),
    ("H200", "bfloat16", 80, {}, "FLASHINFER"),
)


def override(number: int) -> tuple[str, str]:
    """What becomes of one of OVERRIDES: ("works" or "raises", why)."""
    gpu, dtype, head, more, name = OVERRIDES[number]
    spec = AttentionSpec(32, 8, head, dtype, 16, **more)
    try:
        mine = select(spec, registry.platform_for_gpu(gpu), name, None, block_size_is_set=False).mine
    except BackendError as error:
        return RAISES, error.why
    return WORKS, f"tier {mine.tier.name}, pages of {mine.block_size} tokens"


def overrides(guesses: Sequence[str]) -> Card:
    """Six guesses beside what the selector says; nothing is told before all six are made."""
    made = list(guesses)
    if len(made) != len(OVERRIDES) or any(guess not in (WORKS, RAISES) for guess in made):
        said = f"Write `{WORKS}` or `{RAISES}` in each of the {len(OVERRIDES)} places, and run the cell again."
        return Card("overrides: NOT ATTEMPTED", paragraph(said))
    rows, right = [], 0
    for i, (guess, (gpu, dtype, head, more, name)) in enumerate(zip(made, OVERRIDES, strict=True)):
        answer, why = override(i)
        right += guess == answer
        extra = "".join(f", {key} = {value}" for key, value in more.items())
        sign = "✓" if guess == answer else "✗"
        rows.append({
            "n": str(i + 1), "asked": ui.escape(f"{name} on {gpu}: {dtype}, head size {head}{extra}"),
            "yours": f"{sign} {ui.escape(guess)}", "answer": f"<b>{answer}</b>",
            "why": f'<div style="white-space:normal;min-width:260px">{ui.escape(why)}</div>',
        })  # fmt: skip
    head_row = [("n", "#"), ("asked", "asked for by name"), ("yours", "you"), ("answer", "selector"), ("why", "why")]
    return Card(f"overrides: {right} of {len(OVERRIDES)}", ui.table("By name", head_row, rows))


# --- plugged in ------------------------------------------------------------------------------------------------------


def refuses_small_heads(capabilities: Any, spec: Any, platform: Any) -> list[str]:
    """A known wrong `why_not`: it takes what kernels are tuned for as what they can do."""
    return [*why_not(capabilities, spec, platform), *(["head_size"] if spec.head_size < 128 else [])]


def plug_in(answer: Any) -> PluggedRun:
    """The engine makes its choice with a learner's `why_not`, and writes some text with what was chosen."""
    return run_plugged(prompts=("The capital of France is",), max_tokens=4, why_not=answer)


def plug_in_wrong() -> PluggedRun:
    """The same with one that refuses heads below 128, and is believed."""
    return run_plugged(prompts=("The capital of France is",), max_tokens=4, trust=True, why_not=refuses_small_heads)


# --- claims ----------------------------------------------------------------------------------------------------------


def taken(gpu: str, dtype: str = "bfloat16") -> str:
    """The backend that a machine of the table gets, FLASH_ATTN with the version of its kernels."""
    spec = AttentionSpec(32, 8, 128, dtype, 16)
    mine = select(spec, registry.platform_for_gpu(gpu), None, None, block_size_is_set=False).mine
    version = next((v.version for v in mine.versions if v.usable), None)
    return f"{mine.name} (FA{version})" if version else mine.name


def serves(name: str) -> list[str]:
    """The machines of the table on which a backend can serve bfloat16 with head size 128, or float16 where not that."""
    out = []
    for gpu in (*registry.GPUS, "cpu"):
        for dtype in ("bfloat16", "float16"):
            spec = AttentionSpec(32, 8, 128, dtype, 16)
            found = candidates(spec, registry.platform_for_gpu(gpu), None, block_size_is_set=False)
            if next(c for c in found if c.name == name).usable:
                out.append(gpu)
                break
    return out


def tier(name: str, gpu: str) -> str:
    """A backend's tier on a machine, in the configuration that the panel opens with."""
    spec = AttentionSpec(32, 8, 128, "bfloat16", 16)
    found = candidates(spec, registry.platform_for_gpu(gpu), None, block_size_is_set=False)
    return next(c for c in found if c.name == name).tier.name


def myths() -> Card:
    """The claims of the source texts that this chapter touches, beside what the rules say now."""
    machines = len(registry.GPUS) + 1
    default = "; ".join(f"{gpu}: {taken(gpu)}" for gpu in ("A100", "H200", "B200", "RTX 5090"))
    return myth_card([
        Myth("Ampere and Hopper get FLASH_ATTN by default, Blackwell FLASHINFER.",
             f"Rules of labkit, which here are vLLM 0.33's: {default}. There are two kinds of Blackwell: data-centre "
             "ones (sm_10x) get FLASHINFER, an RTX 5090 (sm_12x) does not.",
             "holds in part", COMPUTED, "the panel, Machine"),
        Myth("FlashAttention is version 2 on Ampere, 3 on Hopper, 4 on Blackwell.",
             f"By name: A100 {_version('A100')}, H200 {_version('H200')}, B200 {_version('B200')}, RTX 5090 "
             f"{_version('RTX 5090')}. FA4 has no paged kernels for sm_12x, so that an RTX 5090 gets the oldest.",
             "holds in part", COMPUTED, "the panel, Machine RTX 5090"),
        Myth("FlashInfer can be captured for pure decodes with one token per request only.",
             "vLLM 0.33 computes the tier at start: from the GPU, from which of NVIDIA's kernels can be had, from the "
             "number of heads. It is UNIFORM_BATCH on an A100, and that single tier on an H200 without those kernels. "
             f"labkit captures FlashInfer's prefill kernel for every batch, so that here it is "
             f"{tier('FLASHINFER', 'H200')}.",
             "holds in part", DOCUMENTED, "the panel, ladder"),
        Myth("FA3 and Triton can be captured for any batch, FA2 for uniform batches only.",
             f"FLASH_ATTN: {tier('FLASH_ATTN', 'H200')} on an H200 (FA3), {tier('FLASH_ATTN', 'A100')} on an A100 "
             f"(FA2). TRITON_ATTN: {tier('TRITON_ATTN', 'H200')}.", "holds", COMPUTED, "the panel, ladder"),
        Myth("xFormers is general purpose, with wide hardware support.",
             f"With pages it serves on {len(serves('XFORMERS'))} of {machines} machines of the table, and TORCH_SDPA "
             f"on {len(serves('TORCH_SDPA'))}. It has no float32, no window, no sinks, and can never be captured. "
             "Neither engine takes it by itself.", "does not hold", COMPUTED, "the panel, Backend XFORMERS"),
        *recorded_myths({"backend-throughput": "the latency panel of chapter 00, source RECORDED"}),
    ])  # fmt: skip


def _version(gpu: str) -> str:
    spec = AttentionSpec(32, 8, 128, "bfloat16", 16)
    found = candidates(spec, registry.platform_for_gpu(gpu), None, block_size_is_set=False)
    mine = next(c for c in found if c.name == "FLASH_ATTN")
    return next((f"FA{v.version}" for v in mine.versions if v.usable), "none")


def note_score() -> Card:
    """Put the recorded eager step of two backends on the board, of one model and batch, and show it."""
    for entry in library().of("steps"):
        recording = entry.recording
        for name, backend in ((OTHER_SCORE, "TORCH_SDPA"), (SCORE, "TRITON_ATTN")):
            rows = [r for r in recording.rows if r.backend == backend and r.mode == "NONE" and r.compile == "NONE"
                    and not r.chunk and r.query_len == 1]  # fmt: skip
            if rows:
                row = min(rows, key=lambda r: (r.model != "smollm2-135m", r.batch, r.context))
                made = recording.provenance
                scoreboard.note(scoreboard.Score(name, str(made.kind), made.device, launches=row.launches,
                                                 step_ms=row.p50_ms))  # fmt: skip
        break
    return scoreboard.scoreboard(SCORE)
