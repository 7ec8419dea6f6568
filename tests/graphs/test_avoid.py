"""What would have avoided a downgrade: the change is tried, the cost is recomputed from the rows."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

import pytest

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.config import CUDAGraphMode as Mode
from labkit.errors import ConfigError
from labkit.graphs.avoid import NOT_MEASURED, Avoidance, avoid
from labkit.graphs.modes import Rule, downgrades, resolve
from labkit.measure.provenance import Kind, collect
from labkit.measure.recordings import Recording, Row, shipped
from labkit.measure.stats import summary

QUESTIONS = [
    {"requested": mode, "tier": tier, "compiled": compiled, "query_len": query_len, "pooling": pooling,
     "split": split, "breakable": breakable}
    for mode, tier, compiled, query_len, pooling, split, breakable in itertools.product(
        Mode, Tier, (False, True), (1, 3), (False, True), (False, True), (False, True)
    )
]  # fmt: skip
OTHERS = {"TRITON_ATTN": Tier.ALWAYS, "FLASH_ATTN": Tier.UNIFORM_BATCH, "XFORMERS": Tier.NEVER}


def answered() -> list[tuple[dict[str, Any], list[Any]]]:
    """Every question that `resolve` answers, with its downgrades."""
    out = []
    for question in QUESTIONS:
        try:
            out.append((question, downgrades(**question)))
        except ConfigError:
            assert question["tier"] is Tier.NEVER
    return out


def test_every_downgrade_of_every_trail_has_its_answer() -> None:
    rules = set()
    for question, made in answered():
        found = avoid(**question)
        assert [a.downgrade for a in found] == made
        assert [str(d) for d in made] == resolve(**question)[1][1:-1]
        assert all(a.change and a.cost == NOT_MEASURED and a.costs is not None for a in found)
        rules |= {d.rule for d in made}
    assert rules == set(Rule)


@pytest.mark.parametrize("others", [None, OTHERS, {}], ids=["unknown machine", "others", "none other"])
def test_with_the_change_the_downgrade_does_not_happen(others: dict[str, Tier] | None) -> None:
    without = 0
    for question, made in answered():
        for one, found in zip(made, avoid(**question, others=others), strict=True):
            if not found.instead:
                assert others == {} and "No other backend" in found.change
                without += 1
                continue
            assert one.rule not in {d.rule for d in downgrades(**{**question, **found.instead})}, (question, found)
    assert bool(without) == (others == {})


def test_following_every_change_keeps_the_mode_asked_for() -> None:
    for question, made in answered():
        if question["pooling"]:
            continue
        now = dict(question)
        for _ in range(4):
            for found in avoid(**now)[:1]:
                now |= found.instead
        assert not made or now != question
        assert resolve(**now)[0] is question["requested"]


def test_the_remedy_names_what_is_here() -> None:
    def change(**question: Any) -> str:
        return avoid(**{"compiled": False, "breakable": True, **question})[0].change

    full = {"requested": Mode.FULL, "tier": Tier.UNIFORM_BATCH}
    assert change(**full) == "Take an attention_backend of tier ALWAYS or above, such as TRITON_ATTN."
    assert change(**full, others=OTHERS) == "Take attention_backend TRITON_ATTN."
    assert change(**full, others={}) == "No other backend here reaches tier ALWAYS."
    never = {"requested": Mode.FULL_AND_PIECEWISE, "tier": Tier.NEVER}
    assert change(**never, others=OTHERS) == (
        "Take attention_backend TRITON_ATTN or FLASH_ATTN, or ask for PIECEWISE, whose attention runs outside the "
        "graph."
    )
    single = {"requested": Mode.FULL_DECODE_ONLY, "tier": Tier.UNIFORM_SINGLE_TOKEN_DECODE, "query_len": 3}
    assert "TRITON_ATTN or FLASH_ATTN, or decode one token" in change(**single, others=OTHERS)
    assert "piecewise_method to break" in change(requested=Mode.PIECEWISE, tier=Tier.ALWAYS, breakable=False)


def test_a_backend_that_is_named_as_always_captured_is() -> None:
    from labkit.attention import registry
    from labkit.attention.interface import AttentionSpec, Platform

    spec = AttentionSpec(9, 3, 64, "bfloat16", 16)
    assert registry.load("TRITON_ATTN").graph_support(spec, Platform("cuda", (9, 0)))[0] is Tier.ALWAYS


# --- costs ---------------------------------------------------------------------------------------------------------


def row(mode: str, batch: int, ms: float, **changes: Any) -> Row:
    samples = tuple(round(ms * (1 + i / 1000), 4) for i in range(50))
    found = summary(samples)
    values: dict[str, Any] = dict(
        model="m", dtype="bfloat16", backend="TRITON_ATTN", backend_version="1", requested_mode=mode, mode=mode,
        size=batch, batch=batch, context=512, query_len=1, compile="NONE", primed=True, p10_ms=found.p10,
        p50_ms=found.p50, p90_ms=found.p90, n=50, samples_ms=samples, host_us=1.0, device_us=1.0, launches=1,
        graph_launches=1, launch_cost_us={}, gb_s=1.0, floor_ms=0.1, tok_s=1.0, peak_mib=1.0,
    )  # fmt: skip
    return Row(**{**values, **changes})


def recording(*rows: Row) -> Recording:
    origin = collect(Kind.RECORDED, "labkit record", n=50, device="cpu").replace(gpu="NVIDIA H200")
    return Recording(origin, rows)


def never(*rows: Row, **more: Any) -> Avoidance:
    """FULL decode steps become eager ones."""
    (found,) = avoid(Mode.FULL_DECODE_ONLY, Tier.NEVER, False, recordings=[recording(*rows)], **more)
    return found


def test_the_cost_is_the_ratio_of_medians_at_the_nearest_batch() -> None:
    rows = [row(mode, batch, ms * batch) for mode, ms in (("FULL", 1.0), ("NONE", 4.0)) for batch in (1, 8, 64)]
    rows += [row("FULL", 16, 1.0), row("NONE", 32, 1.0), row("FULL", 24, 1.0, size=32), row("NONE", 24, 9.0)]
    for batch, nearest in ((1, 1), (5, 8), (24, 8), (36, 8), (37, 64), (1000, 64)):
        found = never(*rows, batch=batch).costs[0].measured
        assert found is not None and (found.before.batch, found.after.batch) == (nearest, nearest)
        assert found.ratio.value == pytest.approx(4.0, rel=1e-3)
    text = never(*rows).cost
    assert (
        text.startswith("decode steps take 4.00× (") and "as long in NONE as in FULL (m, TRITON_ATTN, batch 1" in text
    )
    assert "RECORDED · NVIDIA H200" in text
    data = never(*rows).as_dict()
    assert set(data) == {"downgrade", "change", "cost", "costs"} and data["costs"][0]["kind"] == "RECORDED"


@pytest.mark.parametrize(
    "differs",
    [
        {"model": "other"}, {"context": 1024}, {"compile": "VLLM_COMPILE"}, {"dtype": "float16"}, {"emulated": True},
        {"backend": "FLASH_ATTN"}, {"weights": "real"}, {"query_len": 2, "size": 2}, {"batch": 2, "size": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_rows_that_differ_in_more_than_the_mode_are_no_pair(differs: dict[str, Any]) -> None:
    assert never(row("FULL", 1, 1.0), row("NONE", 1, 4.0)).costs[0].measured is not None
    found = never(row("FULL", 1, 1.0), dataclasses.replace(row("NONE", 1, 4.0), **differs))
    assert found.cost == NOT_MEASURED and found.as_dict()["costs"][0]["ratio"] is None


def test_the_lost_mode_is_looked_up_where_it_can_run() -> None:
    rows = [
        row(mode, 1, ms, backend=name)
        for name, full in (("TORCH_SDPA", 1.0), ("TRITON_ATTN", 2.0), ("FLASH_ATTN", 3.0))
        for mode, ms in (("NONE", 12.0), ("FULL", full))
    ]
    found = never(*rows, backend="XFORMERS", others={"FLASH_ATTN": Tier.ALWAYS, "TRITON_ATTN": Tier.ALWAYS}).costs[0]
    assert found.measured and found.measured.before.backend == "FLASH_ATTN", "the order is the caller's"
    assert never(*rows, backend="XFORMERS", others={"FLEX_ATTENTION": Tier.ALWAYS}).cost == NOT_MEASURED
    mine = [row("PIECEWISE", 1, 3.0), *rows]
    question = (Mode.PIECEWISE, Tier.ALWAYS, False)
    (cut,) = avoid(*question, recordings=[recording(*mine)], backend="TRITON_ATTN")
    assert "mixed steps take 4.00×" in cut.cost and "measured on decode steps" in cut.cost
    (cut,) = avoid(*question, recordings=[recording(*mine)], backend="FLASH_ATTN")
    assert cut.cost == NOT_MEASURED


def test_mixed_steps_of_a_full_graph_are_not_answered_by_decode_steps() -> None:
    rows = [row("FULL", 1, 1.0), row("NONE", 1, 4.0), row("PIECEWISE", 1, 2.0)]
    (found,) = avoid(Mode.FULL, Tier.UNIFORM_BATCH, False, recordings=[recording(*rows)])
    assert found.cost == NOT_MEASURED and [c.steps for c in found.costs] == ["mixed"]
    (both,) = avoid(
        Mode.FULL_AND_PIECEWISE, Tier.NEVER, False, breakable=True, recordings=[recording(*rows)]
    )  # fmt: skip
    assert "decode steps take 4.00×" in both.cost and "mixed steps take 2.00×" in both.cost


def test_what_ships_answers_for_a_backend_that_cannot_be_captured() -> None:
    (found,) = avoid(
        Mode.FULL_DECODE_ONLY, Tier.NEVER, False, recordings=shipped(), model="qwen3-0.6b", batch=9,
        others={"TRITON_ATTN": Tier.ALWAYS},
    )  # fmt: skip
    measured = found.costs[0].measured
    assert measured is not None and measured.before.batch == 8 and measured.provenance.kind is Kind.RECORDED
    medians = [statistics.median(r.samples_ms) for r in (measured.after, measured.before)]
    assert measured.ratio.value == pytest.approx(medians[0] / medians[1])
    before, after = (dataclasses.asdict(r) for r in (measured.before, measured.after))
    same = ("model", "backend", "batch", "context", "compile", "dtype", "weights")
    assert [before[name] for name in same] == [after[name] for name in same]
