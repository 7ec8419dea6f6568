"""Which attention backend serves a model on a machine, and why not the others. Pure; refuses to touch a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

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
    """The backend picked and, asked for only when somebody wants to see them, all candidates.

    A library that nobody chose is not imported, and no kernel of it compiled for a probe, to start an engine with
    another.
    """

    mine: Candidate
    requested: str | None
    ask: Callable[[], tuple[Candidate, ...]] = dataclasses.field(repr=False, compare=False)

    @property
    def selected(self) -> str:
        return self.mine.name

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every backend's answer, in automatic order, explicit-only ones last."""
        return self.ask()

    def candidate(self, name: str) -> Candidate:
        return self.mine if name == self.mine.name else next(c for c in self.candidates if c.name == name)


def candidates(
    spec: AttentionSpec,
    platform: Platform,
    available: Mapping[str, Availability] | None = None,
    block_size_is_set: bool = True,
    also: str | None = None,
) -> tuple[Candidate, ...]:
    """The answer to `spec` on `platform` of every backend of its family; those of the other can only refuse.

    Args:
        available: maps names to what loads; None assumes that everything is installed ("what would a T4 pick?").
        block_size_is_set: false asks each backend for the page size that it prefers, in place of `spec.block_size`.
        also: a backend to ask whatever its family is, such as one that was asked for by name.
    """
    order = registry.priority(platform, spec.family)
    wanted = [*registry.names(spec.family), *([also] if also else [])]
    names = [*order, *dict.fromkeys(n for n in wanted if n not in order)]
    return tuple(_candidate(name, order, spec, platform, available, block_size_is_set) for name in names)


def _candidate(
    name: str,
    order: Sequence[str],
    spec: AttentionSpec,
    platform: Platform,
    available: Mapping[str, Availability] | None,
    block_size_is_set: bool,
) -> Candidate:
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
    return Candidate(name, not reasons, tuple(reasons), tier, why, place, asked.block_size, versions)


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

    def ask() -> tuple[Candidate, ...]:
        return candidates(spec, platform, available, block_size_is_set)

    order = registry.priority(platform, spec.family)
    if requested is not None:
        name = requested.upper()
        if not registry.known(name):
            raise ConfigError(
                f"attention_backend={requested!r}",
                "there is no backend of that name",
                did_you_mean(name, registry.names(spec.family)),
            )
        mine = _candidate(name, order, spec, platform, available, block_size_is_set)
        if not mine.usable:
            others = [c.name for c in ask() if c.usable and c.order is not None]
            hint = f"Usable here: {', '.join(others)}." if others else "No backend can serve this configuration."
            raise BackendError(f"attention_backend={name!r}", "; ".join(map(str, mine.reasons)), hint)
        return Selection(mine, name, ask)
    for name in order:
        mine = _candidate(name, order, spec, platform, available, block_size_is_set)
        if mine.usable:
            return Selection(mine, None, ask)
    why = " | ".join(f"{c.name}: {'; '.join(map(str, c.reasons))}" for c in ask())
    raise BackendError(
        f"attention for {spec.dtype}, head size {spec.head_size} on {platform.sm}",
        why,
        "Change dtype or block_size.",
    )
