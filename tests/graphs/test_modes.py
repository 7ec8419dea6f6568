"""Mode resolution against vLLM 0.33's table, cell by cell."""

from __future__ import annotations

import itertools

import pytest

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.config import CUDAGraphMode as Mode
from labkit.errors import ConfigError
from labkit.graphs.modes import requested_mode, resolve

ALWAYS, BATCH, SINGLE, NEVER = Tier.ALWAYS, Tier.UNIFORM_BATCH, Tier.UNIFORM_SINGLE_TOKEN_DECODE, Tier.NEVER
TIERS = (ALWAYS, BATCH, SINGLE, NEVER)
ERROR = "ValueError"

# (requested, cut) → result per tier, for one token per request. cut: "compiled" in pieces, a capture "broken" at
# attention, or None.
TABLE = {
    ("NONE", "compiled"): ("NONE",) * 4,
    ("NONE", None): ("NONE",) * 4,
    ("PIECEWISE", "compiled"): ("PIECEWISE",) * 4,
    ("PIECEWISE", None): ("NONE",) * 4,
    ("FULL", "compiled"): ("FULL", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", ERROR),
    ("FULL", None): ("FULL", "FULL_DECODE_ONLY", "FULL_DECODE_ONLY", ERROR),
    ("FULL_DECODE_ONLY", "compiled"): ("FULL_DECODE_ONLY",) * 3 + ("PIECEWISE",),
    ("FULL_DECODE_ONLY", None): ("FULL_DECODE_ONLY",) * 3 + ("NONE",),
    ("FULL_AND_PIECEWISE", "compiled"): ("FULL_AND_PIECEWISE",) * 3 + ("PIECEWISE",),
    ("FULL_AND_PIECEWISE", None): ("FULL_DECODE_ONLY",) * 3 + ("NONE",),
    ("NONE", "broken"): ("NONE",) * 4,
    ("PIECEWISE", "broken"): ("PIECEWISE",) * 4,
    ("FULL", "broken"): ("FULL", "FULL_DECODE_ONLY", "FULL_DECODE_ONLY", ERROR),
    ("FULL_DECODE_ONLY", "broken"): ("FULL_DECODE_ONLY",) * 3 + ("NONE",),
    ("FULL_AND_PIECEWISE", "broken"): ("FULL_AND_PIECEWISE",) * 3 + ("NONE",),
}
CUTS = {"compiled": {"compiled": True}, "broken": {"compiled": False, "breakable": True}, None: {"compiled": False}}


@pytest.mark.parametrize(("requested", "cut"), TABLE)
@pytest.mark.parametrize("tier", TIERS, ids=lambda t: t.name)
def test_resolution_follows_the_table(requested: str, cut: str | None, tier: Tier) -> None:
    expected = TABLE[requested, cut][TIERS.index(tier)]
    if expected == ERROR:
        with pytest.raises(ConfigError, match="cannot be captured"):
            resolve(Mode[requested], tier, **CUTS[cut])
        return
    mode, trail = resolve(Mode[requested], tier, **CUTS[cut])
    assert mode is Mode[expected]
    assert trail[0] == f"requested: {requested}" and trail[-1] == f"resolved: {expected}"
    assert (len(trail) > 2) == (expected != requested), "every change has a sentence, and nothing else does"


@pytest.mark.parametrize(("cut", "lower"), [("compiled", "PIECEWISE"), ("broken", "PIECEWISE"), (None, "NONE")])
@pytest.mark.parametrize("requested", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_several_tokens_per_request_need_a_uniform_batch(requested: str, cut: str | None, lower: str) -> None:
    assert resolve(Mode[requested], SINGLE, **CUTS[cut], query_len=3)[0] is Mode[lower]
    assert resolve(Mode[requested], BATCH, **CUTS[cut], query_len=3)[0].has_full()
    assert resolve(Mode[requested], SINGLE, **CUTS[cut], query_len=1)[0].has_full()


@pytest.mark.parametrize("requested", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_a_pooling_model_gets_no_full_graph(requested: str) -> None:
    for tier, compiled in itertools.product((ALWAYS, NEVER), (True, False)):
        mode, trail = resolve(Mode[requested], tier, compiled, pooling=True)
        assert mode is (Mode.PIECEWISE if compiled else Mode.NONE)
        assert "pooling" in " ".join(trail)


@pytest.mark.parametrize(
    ("mode", "eager", "level", "expected"),
    [
        (None, False, None, "FULL_AND_PIECEWISE"),
        (None, False, 0, "NONE"),
        (None, False, 1, "PIECEWISE"),
        (None, False, 3, "FULL_AND_PIECEWISE"),
        (Mode.FULL, False, 0, "FULL"),
        (Mode.FULL, True, 3, "NONE"),
    ],
)
def test_what_is_asked_for(mode: Mode | None, eager: bool, level: int | None, expected: str) -> None:
    assert requested_mode(mode, enforce_eager=eager, optimization_level=level)[0] is Mode[expected]


def test_an_unknown_level_or_name_is_answered() -> None:
    with pytest.raises(ConfigError, match="0, 1, 2 or 3"):
        requested_mode(None, enforce_eager=False, optimization_level=4)
    with pytest.raises(ConfigError, match="Did you mean 'FULL_DECODE_ONLY'"):
        Mode.parse("full_decode")
