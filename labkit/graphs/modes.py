"""From the mode that was asked for to the mode that can run, with every decision in words. Pure; refuses to know torch.

The rules are vLLM 0.33's (`VllmConfig.__post_init__`, then `resolve_cudagraph_mode_and_sizes`).
"""

from __future__ import annotations

import dataclasses
import enum

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.config import CUDAGraphMode as Mode
from labkit.errors import ConfigError

#: vLLM's -O levels: O0 no graphs, O1 piecewise, O2 (the default) and O3 both kinds.
OPTIMIZATION_LEVELS = {0: Mode.NONE, 1: Mode.PIECEWISE, 2: Mode.FULL_AND_PIECEWISE, 3: Mode.FULL_AND_PIECEWISE}
DEFAULT_MODE = Mode.FULL_AND_PIECEWISE


def requested_compilation(mode: str | None, *, enforce_eager: bool, optimization_level: int | None) -> tuple[str, str]:
    """The compilation mode that the configuration asks for, and why.

    vLLM compiles by default; here only where it is asked for or the level is 1 or above, since the first compile of a
    model takes many seconds and the lab is about seeing the difference.
    """
    if enforce_eager:
        asked = f" (over {mode})" if mode not in (None, "NONE") else ""
        return "NONE", f"enforce_eager is set: no compilation{asked}"
    if mode is not None:
        return mode, f"compilation_mode asks for {mode}"
    if optimization_level:
        return "VLLM_COMPILE", f"optimization level O{optimization_level} asks for VLLM_COMPILE"
    return "NONE", "compilation was not asked for"


def requested_mode(mode: Mode | None, *, enforce_eager: bool, optimization_level: int | None) -> tuple[Mode, list[str]]:
    """What the configuration asks for before any backend is known.

    `enforce_eager` beats everything, an explicit mode beats the level, the level beats the default.
    """
    if enforce_eager:
        asked = f" (over {mode.name})" if mode not in (None, Mode.NONE) else ""
        return Mode.NONE, [f"enforce_eager is set: NONE{asked}"]
    if mode is not None:
        return mode, [f"cudagraph_mode asks for {mode.name}"]
    if optimization_level is not None:
        if optimization_level not in OPTIMIZATION_LEVELS:
            raise ConfigError(
                f"optimization_level={optimization_level!r}", "there is no such level", "Take 0, 1, 2 or 3."
            )
        chosen = OPTIMIZATION_LEVELS[optimization_level]
        return chosen, [f"optimization level O{optimization_level} asks for {chosen.name}"]
    return DEFAULT_MODE, [f"nothing was asked for: the default is {DEFAULT_MODE.name}"]


class Rule(enum.Enum):
    """Why a mode was lowered; `graphs.avoid` has the remedy for each."""

    POOLING = enum.auto()
    ONE_PIECE = enum.auto()
    NO_CUT = enum.auto()
    MIXED_BATCHES = enum.auto()
    NEVER_CAPTURED = enum.auto()
    QUERY_LEN = enum.auto()


@dataclasses.dataclass(frozen=True)
class Downgrade:
    """One decision of the trail: the mode before and after it, the rule, and the rule in words."""

    before: Mode
    after: Mode
    rule: Rule
    why: str

    def __str__(self) -> str:
        return f"{self.before.name} → {self.after.name}: {self.why}"


def resolve(
    requested: Mode,
    tier: Tier,
    compiled: bool,
    query_len: int = 1,
    *,
    backend: str = "the backend",
    pooling: bool = False,
    split: bool = True,
    breakable: bool = False,
) -> tuple[Mode, list[str]]:
    """The mode that will run and the trail that led to it.

    Args:
        requested: what was asked for.
        tier: the minimum graph support over all attention layers.
        compiled: whether the model is split into compiled pieces, one way to have PIECEWISE graphs.
        split: whether a compiled model is cut at attention; without cuts (an empty `splitting_ops`) it is one piece.
        breakable: whether a capture is broken at attention instead, the other way, which compiles nothing.
        query_len: tokens per request in a decode step (1 + speculative tokens).
        pooling: whether the model pools instead of generating; no step of it is a uniform decode.

    Raises:
        ConfigError: FULL was asked for and the backend can never be captured.
    """
    made = downgrades(
        requested, tier, compiled, query_len, backend=backend, pooling=pooling, split=split, breakable=breakable
    )
    mode = made[-1].after if made else requested
    return mode, [f"requested: {requested.name}", *map(str, made), f"resolved: {mode.name}"]


def downgrades(
    requested: Mode,
    tier: Tier,
    compiled: bool,
    query_len: int = 1,
    *,
    backend: str = "the backend",
    pooling: bool = False,
    split: bool = True,
    breakable: bool = False,
) -> list[Downgrade]:
    """The decisions of `resolve`, for the same arguments, in the order in which they are taken.

    Raises:
        ConfigError: FULL was asked for and the backend can never be captured.
    """
    mode, made = requested, []

    def become(new: Mode, rule: Rule, why: str) -> None:
        nonlocal mode
        if new is not mode:
            made.append(Downgrade(mode, new, rule, why))
            mode = new

    if pooling and mode.has_full():
        become(Mode.PIECEWISE, Rule.POOLING, "a pooling model has no uniform decode step")
    if compiled and not split:
        whole = {Mode.PIECEWISE: Mode.NONE, Mode.FULL_AND_PIECEWISE: Mode.FULL}
        why = "splitting_ops is empty, so the compiled model is one piece, attention inside"
        become(whole.get(mode, mode), Rule.ONE_PIECE, why)
        compiled = False
    elif not compiled and not breakable:
        become(
            mode.without_piecewise(),
            Rule.NO_CUT,
            "PIECEWISE needs a model compiled in pieces or a capture broken at attention, and it has neither",
        )

    if mode is Mode.FULL and tier is Tier.NEVER:
        raise ConfigError(
            "cudagraph_mode='FULL'",
            f"{backend} cannot be captured in a graph (tier NEVER)",
            "Take another attention_backend, or PIECEWISE, whose attention stays outside the graph, or NONE.",
        )
    if mode is Mode.FULL and tier is not Tier.ALWAYS:
        lower = Mode.FULL_AND_PIECEWISE if compiled else Mode.FULL_DECODE_ONLY
        become(lower, Rule.MIXED_BATCHES, f"{backend} (tier {tier.name}) cannot capture mixed batches")
    lower = Mode.PIECEWISE if compiled else Mode.NONE
    if mode.has_full() and tier is Tier.NEVER:
        become(lower, Rule.NEVER_CAPTURED, f"{backend} (tier NEVER) cannot be captured")
    lower = Mode.PIECEWISE if compiled or breakable else Mode.NONE
    if mode.has_full() and query_len > 1 and tier < Tier.UNIFORM_BATCH:
        why = f"a decode step has {query_len} tokens per request, {backend} (tier {tier.name}) captures one"
        become(lower, Rule.QUERY_LEN, why)
    return made
