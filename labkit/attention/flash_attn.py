"""FLASH_ATTN: FlashAttention 2, 3 or 4, one call for a mixed batch. Chooses a version; refuses to know its library.

The rules of each version are here, pure. Which library serves it, and how it is called, is in
`labkit.attention.flash_attn_providers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.flash_attn_providers import (
    ASSUMED,
    FEATURES,
    MAX_SPLITS_UNDER_GRAPH,
    FlashAttnProvider,
    Plan,
    find_providers,
    open_provider,
    runs_on,
)
from labkit.attention.interface import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionSpec,
    Availability,
    BackendCapabilities,
    KernelPlan,
    Platform,
    Provider,
    Reason,
    VersionAnswer,
    check_capabilities,
)
from labkit.errors import BackendError

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata

VERSIONS = (2, 3, 4)
RUNS_ON = {2: "sm_80 and newer", 3: "sm_9x", 4: "sm_9x, sm_10x and sm_11x"}
INSTALL = {2: "install torch 2.13 or newer, or flash-attn", 3: "install tokenspeed-fa3", 4: "install flash-attn-4"}
MAX_SPLITS = {2: 128, 3: 256, 4: 256}


def order_of_versions(platform: Platform) -> tuple[int, ...]:
    """The versions that automatic choice tries, first to last. FA4 on sm_11x is by explicit choice only."""
    major = platform.capability[0] if platform.capability else 0
    return {9: (3, 4, 2), 10: (4, 2)}.get(major, (2,))


def fa4_key_tile(platform: Platform, head_size: int, windowed: bool) -> int:
    """Keys that one tile of FA4 holds; pages of just this size are loaded by TMA, others row by row (4.0.0b36)."""
    if platform.capability is None or platform.capability[0] != 9 or head_size <= 128:
        return 128
    if head_size <= 192:
        return 96 if windowed else 112
    return 64 if windowed else 80


def page_size_for(version: int, spec: AttentionSpec, platform: Platform) -> int:
    """The page size to take for a version: 16, where nothing is lost by it."""
    if version == 2:
        return 256
    if version == 4:
        tile = fa4_key_tile(platform, spec.head_size, spec.sliding_window is not None)
        if tile == 128 or spec.head_size % 16:
            return tile
    return 16


def rules(version: int, spec: AttentionSpec, platform: Platform) -> list[Reason]:
    """What a version's kernels refuse, whoever provides them, beyond the backend's table."""
    if platform.capability is None or not runs_on(version, platform.capability):
        return [Reason(f"FA{version} has paged kernels for {RUNS_ON[version]} only, not for {platform.sm}")]
    out: list[Reason] = []
    head, page, size = spec.head_size, spec.block_size, page_size_for(version, spec, platform)
    table = FlashAttentionBackend.capabilities
    if version == 4 and platform.capability[0] != 9 and 128 < head < 256:
        out.append(Reason(f"FA4 takes head sizes up to 128, and 256, on {platform.sm}, not {head}"))
    # A size that the table refuses already is not refused twice.
    if table.block_sizes[0] <= page <= table.block_sizes[1] and page % table.block_sizes[2] == 0:
        advice = f"set block_size to {size}"
        if version == 2 and page % 256:
            advice = f"{advice} (it takes multiples of 256)"
            out.append(Reason(f"pages of {page} tokens are not supported by FA2", advice, "block_size", size))
        if version == 4 and head % 16 and head % 8 == 0 and page != size:
            why = f"pages of {page} tokens are not supported by FA4 at head size {head}, which is no multiple of 16"
            out.append(Reason(why, advice, "block_size", size))
    splits, one_only = spec.num_splits, version == 4 and platform.capability[0] == 9
    if splits > (1 if one_only else MAX_SPLITS[version]):
        why = f"FA4 splits no keys on {platform.sm}" if one_only else f"FA{version} takes {MAX_SPLITS[version]} splits"
        out.append(Reason(f"{why}, not {splits}", "set num_splits to 0 (its own choice)", "num_splits", 0))
    return out


def wanted(spec: AttentionSpec) -> list[str]:
    """The optional features that a request needs, as keys of FEATURES."""
    asked = {
        "sliding_window": spec.sliding_window is not None,
        "logits_soft_cap": spec.logits_soft_cap is not None,
        "sinks": spec.has_sinks,
        "num_splits": spec.num_splits > 0,
    }
    return [feature for feature in FEATURES if asked[feature]]


def _lacking(version: int, provider: Provider, spec: AttentionSpec) -> list[Reason]:
    lacks = provider.lacks if isinstance(provider, FlashAttnProvider) else ()
    out = []
    for feature in wanted(spec):
        if feature == "num_splits" and feature in lacks:
            why = f"FA{version} of {provider.provider} takes no number of splits"
            out.append(Reason(why, "set num_splits to 0 (its own choice)", "num_splits", 0))
        elif feature in lacks:
            why = f"FA{version} of {provider.provider} does not implement {FEATURES[feature]}, which the model needs"
            out.append(Reason(why, "pick a backend that does"))
    return out


def provider_for(
    version: int, spec: AttentionSpec, providers: Sequence[Provider]
) -> tuple[Provider | None, list[Reason]]:
    """The provider of a version that serves most of what is asked, the first of equals, and what it does not serve."""
    mine = [p for p in providers if p.version == version]
    usable = [p for p in mine if p.usable]
    if not usable:
        found = "; ".join(f"{p.provider}: {p.reason or 'not usable'}" for p in mine) or "no library for it was found"
        return None, [Reason(f"FA{version} has no usable provider ({found})", INSTALL[version])]
    best = min(usable, key=lambda p: _weight(_lacking(version, p, spec)))
    return best, _lacking(version, best, spec)


def _weight(reasons: Sequence[Reason]) -> tuple[int, int]:
    """What no setting would mend weighs most."""
    return sum(r.field is None for r in reasons), len(reasons)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A version, who would provide it, why it was taken, and what speaks against it.

    `reasons` are in the backend's words; `trail` says of the versions before it why they were passed over.
    """

    version: int
    provider: Provider | None
    reasons: tuple[Reason, ...]
    trail: str


def weigh(version: int, spec: AttentionSpec, platform: Platform, providers: Sequence[Provider]) -> Choice:
    """One version's case."""
    refused = rules(version, spec, platform)
    provider, lacking = provider_for(version, spec, providers)
    if platform.capability is None or not runs_on(version, platform.capability):
        lacking = []  # who would provide what cannot run here is beside the point
    said = {reason.field for reason in refused if reason.field}
    lacking = [reason for reason in lacking if reason.field not in said]
    return Choice(version, provider, (*refused, *lacking), "")


def choose(spec: AttentionSpec, platform: Platform, providers: Sequence[Provider]) -> Choice:
    """The version to take: the one asked for, or the first usable in the GPU's order, or the one with least against it.

    Where a version was asked for that no other setting can save, the automatic choice follows behind that reason.
    """
    asked = spec.flash_attn_version
    if asked is not None:
        case = weigh(asked, spec, platform, providers)
        fatal = [r.condition for r in case.reasons if r.field is None]
        if not fatal:
            return dataclasses.replace(case, trail=f"FA{asked}, as flash_attn_version asks")
        other = choose(dataclasses.replace(spec, flash_attn_version=None), platform, providers)
        remedy = "set flash_attn_version to None (automatic)"
        first = Reason("; ".join(fatal), remedy, "flash_attn_version", None)
        return dataclasses.replace(other, reasons=(first, *other.reasons))
    order = order_of_versions(platform)
    cases = [weigh(version, spec, platform, providers) for version in order]
    best = min(cases, key=lambda case: _weight(case.reasons))
    passed = [f"not FA{c.version}: {c.reasons[0].condition}" for c in cases[: cases.index(best)] if c.reasons]
    place = "which comes closest" if best.reasons else "first usable"
    trail = f"FA{best.version}, {place} of {', '.join(map(str, order))} on {platform.sm}"
    return dataclasses.replace(best, trail="; ".join([trail, *passed]))


class FlashAttentionBackend(AttentionBackend):
    """Paged FlashAttention for MHA, GQA and MQA; `flash_attn_version` picks among three generations of it."""

    capabilities = BackendCapabilities(
        name="FLASH_ATTN",
        dtypes=("float16", "bfloat16"),
        head_sizes=(8, 256, 8),
        block_sizes=(16, 4096, 16),
        min_capability=(8, 0),
        kv_layouts=("NHD", "HND"),  # every version goes by strides
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        num_splits=True,
        split_mixed_batches=True,
    )

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        platform = _platform(device)
        available = self.availability()
        reasons = self.why_not(spec, platform, available)
        if not available.usable:
            reasons.insert(0, Reason(available.reason))
        if reasons:
            raise BackendError("attention_backend='FLASH_ATTN'", "; ".join(map(str, reasons)))
        choice = choose(spec, platform, available.providers)
        assert isinstance(choice.provider, FlashAttnProvider)  # availability() lists nothing else
        self.version, self.provider = choice.version, choice.provider
        self.kernels = open_provider(choice.provider)

    @classmethod
    def availability(cls) -> Availability:
        """Every provider, imported and probed once per process; `version` names the one that would be tried first."""
        import importlib.util

        if importlib.util.find_spec("torch") is None:
            return Availability(False, "ModuleNotFoundError: No module named 'torch'")
        try:
            providers = find_providers()
            order = order_of_versions(_platform())
        except Exception as error:  # a broken torch is the answer to the question
            return Availability(False, f"{type(error).__name__}: {error}")
        usable = [p for p in providers if p.usable]
        if not usable:
            why = "; ".join(f"{p.reason} (FA{p.version}, {p.provider})" for p in providers)
            return Availability(False, why, None, providers)
        first = min(usable, key=lambda p: order.index(p.version) if p.version in order else len(order))
        return Availability(True, "", f"FA{first.version}: {first.provider}", providers)

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        if not _has_a_version(platform):
            return []
        return list(choose(spec, platform, _providers(available)).reasons)

    @classmethod
    def versions(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[VersionAnswer, ...]:
        """All three, those of the automatic order first. One that was not asked for is told so."""
        order = order_of_versions(platform)
        found = available.providers if available is not None and available.providers else None
        answers = []
        for version in (*order, *(v for v in VERSIONS if v not in order)):
            case = weigh(version, spec, platform, found if found is not None else ASSUMED)
            size = page_size_for(version, spec, platform)
            reasons = [*check_capabilities(cls.capabilities, spec, platform, size), *case.reasons]
            if available is not None and not available.usable and found is None:
                reasons.append(Reason(available.reason, INSTALL[version]))
            advice = (f"set flash_attn_version to {version}", "flash_attn_version", version)
            if spec.flash_attn_version not in (None, version):
                reasons.append(Reason(f"flash_attn_version asks for FA{spec.flash_attn_version}", *advice))
            elif spec.flash_attn_version is None and version not in order and _runs_on(version, platform):
                reasons.append(Reason(f"automatic choice does not try FA{version} on {platform.sm}", *advice))
            mine = [p for p in found if p.version == version] if found is not None else []
            name = case.provider or (mine[0] if mine else next(p for p in ASSUMED if p.version == version))
            answers.append(VersionAnswer(version, name.provider, not reasons, tuple(reasons)))
        return tuple(answers)

    @classmethod
    def preferred_block_size(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> int:
        """FA2: 256, its only one. FA3: 16. FA4: its key tile where that is 128, so that TMA loads whole pages."""
        if not _has_a_version(platform):
            return cls.capabilities.preferred_block_size
        # Any size that the table refuses makes the versions' own rules about pages silent.
        asked = dataclasses.replace(spec, block_size=0)
        return page_size_for(choose(asked, platform, _providers(available)).version, spec, platform)

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        if not _has_a_version(platform):
            return AttentionCGSupport.NEVER, f"no version of FlashAttention has kernels for {platform.sm}"
        choice = choose(spec, platform, _providers(available))
        if choice.version == 2:
            return AttentionCGSupport.UNIFORM_BATCH, (
                f"{choice.trail}; a graph captured at one token per request holds FA2's packed heads, "
                "which cannot serve a mixed batch"
            )
        why = (
            f"its schedule is refreshed before each replay and its splits are bounded by {MAX_SPLITS_UNDER_GRAPH}"
            if choice.version == 3
            else "it reads every length from device tensors and bounds from the worst case"
        )
        return AttentionCGSupport.ALWAYS, f"{choice.trail}; {why}"

    def warm_up(self, progress: Callable[[str, int, int, str], None] | None) -> None:
        """FA4 compiles one kernel for decodes and one for longer queries; the others come compiled."""
        if self.version != 4:
            return
        import numpy as np
        import torch

        from labkit.attention.metadata import AttentionMetadata

        spec, dtype = self.spec, getattr(torch, self.spec.dtype)
        for done, tokens in enumerate((1, min(512, spec.max_num_batched_tokens))):
            if progress:
                progress("compiling", done, 2, f"FA4 for {tokens} tokens")
            pages = -(-tokens // spec.block_size)
            starts, lengths = np.array([0, tokens], dtype=np.int32), np.array([tokens], dtype=np.int32)
            inner = (spec.block_size, spec.num_kv_heads)
            shape = (2, pages + 1, *(inner if spec.kv_cache_layout == "NHD" else inner[::-1]), spec.head_size)
            cache = torch.zeros(shape, dtype=dtype, device=self.device)
            keys, values = cache if spec.kv_cache_layout == "NHD" else cache.transpose(2, 3)
            query = torch.zeros((tokens, spec.num_heads, spec.head_size), dtype=dtype, device=self.device)
            table = torch.arange(1, pages + 1, dtype=torch.int32, device=self.device)[None]
            metadata = AttentionMetadata(
                1, tokens, 1, tokens, tokens, tokens, torch.from_numpy(starts).to(self.device),
                torch.from_numpy(lengths).to(self.device), table,
                torch.full((tokens,), -1, dtype=torch.int64, device=self.device), starts, lengths,
            )  # fmt: skip
            sinks = torch.zeros(spec.num_heads, dtype=dtype, device=self.device) if spec.has_sinks else None
            with torch.inference_mode():
                self.forward(
                    query, keys, values, torch.empty_like(query), metadata, scale=1.0,
                    sliding_window=spec.sliding_window, logits_soft_cap=spec.logits_soft_cap, sinks=sinks,
                )  # fmt: skip
        if progress:
            progress("compiling", 2, 2, "done")

    def prepare(self, metadata: AttentionMetadata) -> None:
        metadata.scratch["flash_attn"] = self._plan(metadata)

    def _plan(self, metadata: AttentionMetadata) -> Plan:
        import torch

        # Buffers that outlive a step may be written inside inference mode and outside it only if they are made outside.
        with torch.inference_mode(False), torch.no_grad():
            plan = self.kernels.prepare(self.spec, metadata)
            if not metadata.for_graph:
                plan.hidden = self._hidden_rows(metadata)
        return plan

    def _hidden_rows(self, metadata: AttentionMetadata) -> torch.Tensor | None:
        """Rows of requests that bring more tokens than they have keys; no engine makes such a step."""
        import numpy as np

        starts, reqs = metadata.query_start_loc_cpu, metadata.num_reqs
        beyond = starts[1 : reqs + 1] - starts[:reqs] - metadata.seq_lens_cpu[:reqs]
        if reqs == 0 or beyond.max() <= 0:
            return None
        import torch

        rows = [np.arange(start, start + n) for start, n in zip(starts[:reqs], beyond, strict=True) if n > 0]
        return torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(self.device)

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        if metadata.num_tokens == 0:
            return
        plan = metadata.scratch.get("flash_attn") or self._plan(metadata)
        found = self.kernels.attend(
            plan, metadata, query, key_cache, value_cache, output, scale, sliding_window, logits_soft_cap, sinks,
            lse is not None,
        )  # fmt: skip
        nothing = float("-inf")
        if lse is not None and found is not None:
            lse.copy_(found.t())
            lse.masked_fill_(lse == float("inf"), nothing)  # FA2's answer for a row that sees nothing
        if plan.hidden is not None:
            # FA4 attends to keys before the first one in tiles of which no row sees any.
            output.index_fill_(0, plan.hidden, 0)
            if lse is not None:
                lse.index_fill_(0, plan.hidden, nothing)  # sinks or not: a sink makes no row see something

    def bare_call(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Callable[[], Any] | None:
        return self.kernels.bare(self.spec, metadata, query, key_cache, value_cache, output, scale)

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        attention, merge = self.kernels.kernels
        plan = metadata.scratch.get("flash_attn") or self._plan(metadata)
        splits, note = plan.num_splits, f"FA{self.version} of {self.provider.provider}"
        if splits == 0:
            return (KernelPlan(attention, note=f"{note}; the library chooses the splits"),)
        if splits == 1:
            return (KernelPlan(attention, note=note),)
        bound = "at most this many splits" if self.version == 3 else "splits"
        return (
            KernelPlan(attention, num_splits=splits, note=f"{note}; {bound}"),
            KernelPlan(merge, num_splits=splits, note="merges the splits by their log-sum-exp"),
        )


def _has_a_version(platform: Platform) -> bool:
    """Whether any version runs there at all; where none does, the table has said so."""
    return platform.device_type == "cuda" and platform.capability is not None and runs_on(2, platform.capability)


def _runs_on(version: int, platform: Platform) -> bool:
    return _has_a_version(platform) and platform.capability is not None and runs_on(version, platform.capability)


def _providers(available: Availability | None) -> Sequence[Provider]:
    """What was found. Where nothing is usable, which is said elsewhere, the rules are asked as if all were there."""
    return available.providers if available is not None and available.usable and available.providers else ASSUMED


def _platform(device: torch.device | None = None) -> Platform:
    """The platform of a device, the current one for None."""
    import torch

    if (device is not None and device.type != "cuda") or not torch.cuda.is_available():
        return Platform("cpu")
    if torch.version.hip is not None:
        return Platform("rocm")
    return Platform("cuda", torch.cuda.get_device_capability(device))
