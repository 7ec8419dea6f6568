"""A question to the selector, and its answer as rows of conditions. Asks labkit's own rules; refuses to have any."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.attention import registry
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Availability, Platform, Reason
from labkit.attention.selector import Candidate, candidates
from labkit.config import CUDAGraphMode
from labkit.errors import ConfigError
from labkit.figures.selection import FAILS, NOT_ASKED, PASSES, SIGNS, row_labels
from labkit.graphs.modes import resolve

#: The conditions in the order in which a reader asks them.
CONDITIONS = ("GPU", "family", "dtype", "head size", "KV dtype", "page size", "window", "soft cap", "sinks", "option",
              "loads")  # fmt: skip
_BY_FIELD = {
    "dtype": "dtype", "kv_cache_dtype": "KV dtype", "block_size": "page size", "num_splits": "option",
    "split_mixed_batches": "option", "batch_invariant": "option", "flash_attn_version": "option",
}  # fmt: skip
#: Words of a condition → its column, for reasons that no one setting mends. The first that occurs decides.
_BY_WORDS = (
    ("has paged kernels for", "GPU"), ("kernels for sm_", "GPU"), ("kernels are for sm_", "GPU"),
    ("a sliding window", "window"), ("soft-capping", "soft cap"),
    ("attention sinks", "sinks"), ("head size", "head size"), ("query heads", "head size"), ("is for ", "family"),
    ("needs ", "GPU"),
)  # fmt: skip
#: Option of the panel → what it sets.
OPTIONS: dict[str, Mapping[str, Any]] = {
    "none": {}, "4 splits": {"num_splits": 4}, "two calls": {"split_mixed_batches": True},
    "batch-invariant": {"batch_invariant": True}, "FA2": {"flash_attn_version": 2}, "FA3": {"flash_attn_version": 3},
    "FA4": {"flash_attn_version": 4},
}  # fmt: skip
#: Requests at once, tokens of each: the two limits that a tier may depend on.
LIMITS = {"large": (256, 8192), "small": (4, 256)}
NUM_HEADS, NUM_KV_HEADS = 32, 8
#: No page size and no backend by name.
OWN_PAGE, AUTO = 0, "automatic"


def spec_of(values: Mapping[str, Any]) -> AttentionSpec:
    """What is asked of a backend, from the panel's controls."""
    seqs, length = LIMITS[values["limits"]]
    return AttentionSpec(
        NUM_HEADS, NUM_KV_HEADS, values["head"], values["dtype"], values["page"] or 16, kv_cache_dtype=values["kv"],
        family=values["family"], sliding_window=1024 if values["window"] else None,
        logits_soft_cap=30.0 if values["cap"] else None, has_sinks=values["sinks"], max_model_len=length,
        max_num_seqs=seqs, **OPTIONS[values["option"]],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the selector says: every backend's answer in order, the one that is taken, and the mode that will run.

    taken: None where nobody can serve, or the one asked for by name refuses. mode: "" where none runs.
    """

    found: tuple[Candidate, ...]
    taken: Candidate | None
    requested: str | None
    mode: str
    trail: tuple[str, ...]

    @property
    def refused(self) -> list[Candidate]:
        """Those that were tried before the one taken and refused; all that refused where none is."""
        if self.taken is None or self.taken.order is None:
            return [c for c in self.found if not c.usable and c.order is not None]
        return [c for c in self.found if not c.usable and c.order is not None and c.order < self.taken.order]


def ask(values: Mapping[str, Any], platform: Platform, available: Mapping[str, Availability] | None = None) -> Answer:
    """Every backend's answer to the panel's controls on a machine; `available` as in `selector.candidates`."""
    requested = None if values["requested"] == AUTO else values["requested"]
    set_ = values["page"] != OWN_PAGE
    found = candidates(spec_of(values), platform, available, block_size_is_set=set_, also=requested)
    if requested is not None:
        taken = next((c for c in found if c.name == requested and c.usable), None)
    else:
        taken = next((c for c in found if c.usable and c.order is not None), None)
    if taken is None:
        return Answer(found, None, requested, "", ())
    try:
        mode, trail = resolve(
            CUDAGraphMode[values["mode"]], taken.tier, values["compiled"], breakable=not values["compiled"],
            backend=taken.name,
        )  # fmt: skip
    except ConfigError as error:
        return Answer(found, taken, requested, "refused", (str(error),))
    return Answer(found, taken, requested, mode.name, tuple(line for line in trail if "→" in line))


def column_of(reason: Reason, status: Availability | None = None) -> str:
    """The condition that a reason belongs to, one of CONDITIONS."""
    if status is not None and not status.usable and reason.condition == status.reason:
        return "loads"
    if reason.field in _BY_FIELD:
        return _BY_FIELD[reason.field]
    if "provider" in reason.condition:
        return "loads"
    return next((column for words, column in _BY_WORDS if words in reason.condition), "loads")


def matrix(
    values: Mapping[str, Any], answer: Answer, available: Mapping[str, Availability] | None = None
) -> dict[str, Any]:
    """The answer as plain rows for the figure: see `labkit.figures.selection.Matrix`."""
    asked = {"window": values["window"], "soft cap": values["cap"], "sinks": values["sinks"],
             "option": values["option"] != "none"}  # fmt: skip
    rows, cells, texts, hovers = [], [], [], []
    for candidate in answer.found:
        status = available.get(candidate.name) if available is not None else None
        why: dict[str, list[Reason]] = {}
        for reason in candidate.reasons:
            why.setdefault(column_of(reason, status), []).append(reason)
        line = [FAILS if c in why else PASSES if asked.get(c, True) else NOT_ASKED for c in CONDITIONS]
        rows.append(candidate.name)
        cells.append(line)
        texts.append([str(candidate.block_size) if c == "page size" and v == PASSES else SIGNS[v]
                      for c, v in zip(CONDITIONS, line, strict=True)])  # fmt: skip
        hovers.append([_hover(candidate, c, why.get(c, ())) for c in CONDITIONS])
    taken = answer.found.index(answer.taken) if answer.taken is not None else None
    return {
        "rows": rows, "columns": list(CONDITIONS), "cells": cells, "texts": texts, "hovers": hovers, "taken": taken,
        "labels": row_labels(rows, taken), "tiers": [int(c.tier) for c in answer.found],
        "usable": [c.usable for c in answer.found],
        "reasons": {c.name: [_said(reason) for reason in c.reasons] for c in answer.found},
    }  # fmt: skip


def lines(answer: Answer) -> list[str]:
    """One sentence for each backend, in the order in which they are tried: its reasons, each with what would mend "
    "it."""
    out = []
    for candidate in answer.found:
        place = f"{candidate.order}." if candidate.order is not None else "By name only:"
        if candidate is answer.taken:
            said = f"▶ taken. Tier {candidate.tier.name}: {candidate.tier_reason}."
        elif candidate.usable:
            said = f"✓ could serve too. Tier {candidate.tier.name}: {candidate.tier_reason}."
        else:
            said = f"✗ {'; and '.join(map(_said, candidate.reasons))}."
        out.append(f"{place} {candidate.name} {said}")
    return out


def _said(reason: Reason) -> str:
    """A reason with its remedy, and the one setting that removes exactly this reason, where there is one."""
    setting = f" (one setting does it: {reason.field}={reason.value!r})" if reason.field else ""
    return f"{reason.condition} → {reason.remedy or 'nothing would change that here'}{setting}"


def _hover(candidate: Candidate, column: str, reasons: Sequence[Reason]) -> str:
    if reasons:
        return f"<b>{candidate.name}</b>, {column}:<br>" + "<br>".join(map(_said, reasons))
    own = f": pages of {candidate.block_size} tokens" if column == "page size" else " passes, or was not asked"
    return f"<b>{candidate.name}</b>, {column}{own}"


def machine_name(platform: Platform) -> str:
    """ "T4 (sm_75)", "MI300X (rocm)", "CPU"."""
    if platform.device_type == "cpu":
        return "CPU"
    return f"{platform.name or 'GPU'} ({platform.sm})"


def platform_of(gpu: str) -> Platform:
    """The machine that a name of the panel stands for."""
    return registry.platform_for_gpu(gpu)


def tier_names(tiers: Sequence[int]) -> list[str]:
    return [AttentionCGSupport(tier).name for tier in tiers]
