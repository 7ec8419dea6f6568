"""Which attention backend serves a model on a machine, and why not the others. Pure; refuses to touch a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from labkit.attention import registry
from labkit.attention.interface import (
    AttentionCGSupport,
    AttentionSpec,
    Availability,
    Platform,
    Reason,
    VersionAnswer,
)
from labkit.attention.split_mixed import lowered_tier
from labkit.errors import BackendError, ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One backend's answer. `usable` exactly when `reasons` is empty. `order` is its place in the automatic order.

    `block_size` is the page size it was asked for: the user's, or its own where the user set none.
    """

    name: str
    usable: bool
    reasons: tuple[Reason, ...]
    tier: AttentionCGSupport
    tier_reason: str
    order: int | None
    block_size: int = 16
    versions: tuple[VersionAnswer, ...] = ()


@dataclasses.dataclass(frozen=True)
class Selection:
    """The backend picked and every candidate, in automatic order, explicit-only ones last."""

    selected: str
    requested: str | None
    candidates: tuple[Candidate, ...]

    def candidate(self, name: str) -> Candidate:
        return next(c for c in self.candidates if c.name == name)


def candidates(
    spec: AttentionSpec,
    platform: Platform,
    available: Mapping[str, Availability] | None = None,
    block_size_is_set: bool = True,
) -> tuple[Candidate, ...]:
    """Every backend's answer to `spec` on `platform`.

    Args:
        available: maps names to what loads; None assumes that everything is installed ("what would a T4 pick?").
        block_size_is_set: false asks each backend for the page size that it prefers, in place of `spec.block_size`.
    """
    order = registry.priority(platform)
    out = []
    for name in [*order, *(n for n in registry.BACKENDS if n not in order)]:
        place = order.index(name) + 1 if name in order else None
        cls = registry.load(name)
        status = available.get(name) if available is not None else None
        asked = spec
        if not block_size_is_set:
            asked = dataclasses.replace(spec, block_size=cls.preferred_block_size(spec, platform, status))
        reasons = cls.why_not(asked, platform, status)
        if status is not None and not status.usable:
            missing = status.reason.startswith("ModuleNotFoundError")
            mend = "install it" if missing else "mend its installation"
            reasons = [Reason(status.reason, f"{mend}, or pick another backend"), *reasons]
        tier, why = cls.graph_support(asked, platform, status)
        if asked.split_mixed_batches:
            tier, why = lowered_tier(tier, why)
        versions = cls.versions(asked, platform, status)
        out.append(Candidate(name, not reasons, tuple(reasons), tier, why, place, asked.block_size, versions))
    return tuple(out)


def select(
    spec: AttentionSpec,
    platform: Platform,
    requested: str | None = None,
    available: Mapping[str, Availability] | None = None,
    block_size_is_set: bool = True,
) -> Selection:
    """Pick a backend. An explicit choice is never replaced: it works or raises with its reasons.

    `requested` is what the caller made of four places, the first that says something wins: the keyword
    `LLM(attention_backend=…)` (on the command line `--attention-backend`), the field of `EngineConfig`, the environment
    variable LABKIT_ATTENTION_BACKEND, the automatic order. "auto" is something said: the automatic order, whatever the
    places after it say. `labkit.llm` reads the variable, once per LLM; here nothing is read, and None is the automatic
    order.

    Raises:
        BackendError: the requested backend cannot serve, or none can.
        ConfigError: there is no backend of that name.
    """
    found = candidates(spec, platform, available, block_size_is_set)
    if requested is not None:
        name = requested.upper()
        if name not in registry.BACKENDS:
            raise ConfigError(
                f"attention_backend={requested!r}",
                "there is no backend of that name",
                did_you_mean(name, registry.BACKENDS),
            )
        mine = next(c for c in found if c.name == name)
        if not mine.usable:
            others = [c.name for c in found if c.usable and c.order is not None]
            hint = f"Usable here: {', '.join(others)}." if others else "No backend can serve this configuration."
            raise BackendError(f"attention_backend={name!r}", "; ".join(map(str, mine.reasons)), hint)
        return Selection(name, name, found)
    usable = [c for c in found if c.usable and c.order is not None]
    if not usable:
        why = " | ".join(f"{c.name}: {'; '.join(map(str, c.reasons))}" for c in found)
        raise BackendError(
            f"attention for {spec.dtype}, head size {spec.head_size} on {platform.sm}",
            why,
            "Change dtype or block_size.",
        )
    return Selection(min(usable, key=lambda c: c.order or 0).name, None, found)
