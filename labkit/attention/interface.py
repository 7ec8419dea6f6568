"""What an attention backend is: capabilities as data, and three moments. Refuses to know any kernel.

`prepare` runs outside any graph and may touch the host. `forward` is what may be captured: it reads device tensors
only, writes into `out`, allocates nothing that outlives it and never synchronizes. `describe` says what will run.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata


class AttentionCGSupport(enum.IntEnum):
    """How far a backend's kernels may be captured (vLLM's tiers). The engine takes the minimum over layers."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclasses.dataclass(frozen=True)
class Platform:
    """The machine a selection is asked for. `capability` is CUDA's (major, minor), None without an NVIDIA GPU.

    A ROCm build of torch calls its devices "cuda" too and gives them numbers that look like sm_9x; here they are "rocm"
    and have none, so that no rule for Hopper matches them.
    """

    device_type: str  # "cuda", "rocm" or "cpu"
    capability: tuple[int, int] | None = None
    name: str = ""

    @property
    def sm(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else self.device_type


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is asked of a backend: the model's attention shape, the cache it reads and its options. Hashable.

    Fields that EngineConfig has too carry its names, so that a `Reason` can name one.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str  # "float32", "float16" or "bfloat16"
    block_size: int
    kv_cache_dtype: str = "auto"
    kv_cache_layout: str = "NHD"
    family: str = "MHA"  # or "MLA": absorbed, one KV head of latents, whose first `head_size_v` numbers are the values
    head_size_v: int = 0  # 0: as wide as the keys
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    sdpa_kernel: str = "auto"
    num_splits: int = 0
    flash_attn_version: int | None = None
    split_mixed_batches: bool = False
    batch_invariant: bool = False


@dataclasses.dataclass(frozen=True)
class Reason:
    """One failed condition and what would make it pass.

    Where one setting would do, `field` names it as EngineConfig does and `value` is what to set: then exactly this
    reason disappears.
    """

    condition: str
    remedy: str = ""
    field: str | None = None
    value: Any = None

    def __str__(self) -> str:
        return f"{self.condition}; {self.remedy}" if self.remedy else self.condition


@dataclasses.dataclass(frozen=True)
class Provider:
    """One library that can serve a version of a backend's kernels, as found in this process.

    version: of the algorithm, FLASH_ATTN's 2, 3 or 4. provider: module and package version. reason: the real exception,
    or what the probe saw, when it is not usable.
    """

    version: int
    provider: str
    usable: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Availability:
    """Whether the provider loads here; `reason` holds the real exception's type and text when it does not.

    `providers` lists the libraries looked at, for a backend that several can serve; it is usable when one of them is.
    """

    usable: bool
    reason: str = ""
    version: str | None = None
    providers: tuple[Provider, ...] = ()


@dataclasses.dataclass(frozen=True)
class VersionAnswer:
    """One version of a backend's answer to a request; usable exactly when `reasons` is empty."""

    version: int
    provider: str
    usable: bool
    reasons: tuple[Reason, ...] = ()


@dataclasses.dataclass(frozen=True)
class BackendCapabilities:
    """What a backend is for, as data: the selector and the tables of the course read it, no GPU needed.

    `head_sizes` and `block_sizes` are (lowest, highest, multiple of). `min_capability` is inclusive.
    `preferred_block_size` is the page size when the user sets none. `num_splits`, `split_mixed_batches` and
    `batch_invariant` say which of these options it has.
    """

    name: str
    dtypes: tuple[str, ...]
    head_sizes: tuple[int, int, int]
    block_sizes: tuple[int, int, int]
    device_types: tuple[str, ...] = ("cuda",)
    min_capability: tuple[int, int] | None = None
    family: str = "MHA"
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    kv_layouts: tuple[str, ...] = ("NHD",)
    sliding_window: bool = False
    logits_soft_cap: bool = False
    sinks: bool = False
    num_splits: bool = False
    split_mixed_batches: bool = False
    batch_invariant: bool = False
    preferred_block_size: int = 16
    explicit_only: bool = False


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """One kernel that `forward` will launch, once per layer: its name, grid, splits and tile (query rows, keys)."""

    kernel: str
    grid: tuple[int, ...] | None = None
    num_splits: int = 1
    tile: tuple[int, int] | None = None
    note: str = ""


class AttentionBackend:
    """Base of all backends. One instance serves all layers of one engine."""

    capabilities: ClassVar[BackendCapabilities]

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device

    @classmethod
    def availability(cls) -> Availability:
        """Whether the package loads in this process; never raises."""
        raise NotImplementedError

    @classmethod
    def why_not(cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None) -> list[Reason]:
        """Every failed condition, most general first; empty when the backend can serve. Pure: no torch, no GPU.

        `available` is what loads here; None assumes that every provider is installed and passed its probe.
        """
        size = cls.preferred_block_size(spec, platform, available)
        return check_capabilities(cls.capabilities, spec, platform, size) + cls.extra_reasons(spec, platform, available)

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        """Conditions that do not fit the capability table. What `available.reason` says is not among them."""
        return []

    @classmethod
    def versions(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[VersionAnswer, ...]:
        """One answer per version of the kernels, for a backend that has several. Pure."""
        return ()

    @classmethod
    def preferred_block_size(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> int:
        """The page size to take when the user set none; `spec.block_size` is then not asked for. Pure."""
        return cls.capabilities.preferred_block_size

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        """The tier for this configuration and one sentence on why. Pure."""
        return AttentionCGSupport.NEVER, "the backend does not declare a tier"

    def warm_up(self, progress: Callable[[str, int, int, str], None] | None) -> None:
        """Build or compile what the first call would otherwise, so that no step waits for it.

        Called once after construction, outside any graph. `progress` is called as (stage, done, total, detail) before
        each slow part; None keeps quiet. May be called again; what is built is not built twice.
        """

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Build what `forward` needs from one step's metadata. Runs outside the graph, before every replay too.

        Device results go to `metadata.scratch` or to persistent buffers owned by the backend; under a graph
        (`metadata.for_graph`) only values in persistent buffers may change between replays.
        """

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
        """Causal, bottom-right aligned attention of a mixed batch over the paged cache, into `output`.

        A backend of the MLA family computes the absorbed form: `key_cache` is the cache of latents and rotated keys,
        `value_cache` its first `head_size_v` columns, and `output` is that narrow, too.

        Args:
            query: `[num_tokens, num_heads, head_size]`, rows in the order of `query_start_loc`.
            key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_size]`; K/V of this step are in it.
            output: like `query`; every row below `query_start_loc[-1]` is written; a row with nothing to see is 0.
            metadata: this step's; see `AttentionMetadata`.
            scale: multiplies q·k; scores are accumulated in fp32.
            sliding_window: keep this many keys, the token itself included.
            lse: optional fp32 `[num_tokens, num_heads]`, natural log; −inf where a row sees nothing.
        """
        raise NotImplementedError

    def bare_call(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Callable[[], Any] | None:
        """The library's own call for this batch, planned once and without labkit's adapter around it.

        A benchmark puts its time beside that of `forward`. Arguments and shapes are those of `forward`. The callable
        attends into `output`, or returns its result where the library has no argument for one. None where there is no
        library under the backend, or no such call.
        """
        return None

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        """What `forward` launches per layer for this batch."""
        return ()


#: The backend of each family that runs everywhere.
FALLBACK = {"MHA": "TORCH_SDPA", "MLA": "TORCH_SDPA_MLA"}
_DEVICES = {"cuda": "an NVIDIA GPU (CUDA)", "rocm": "an AMD GPU (ROCm)", "cpu": "a CPU"}


def check_capabilities(
    cap: BackendCapabilities, spec: AttentionSpec, platform: Platform, preferred_block_size: int | None = None
) -> list[Reason]:
    """Compare a capability table with a request, one Reason per failed condition.

    Args:
        preferred_block_size: the page size to advise; None takes the table's own.
    """
    out: list[Reason] = []
    if platform.device_type not in cap.device_types:
        needed = " or ".join(_DEVICES[kind] for kind in cap.device_types)
        here = "only a CPU" if platform.device_type == "cpu" else _DEVICES[platform.device_type]
        out.append(Reason(f"needs {needed}, this machine has {here}", f"run it on {needed}"))
    elif cap.min_capability and platform.capability and platform.capability < cap.min_capability:
        need = f"sm_{cap.min_capability[0]}{cap.min_capability[1]}"
        out.append(
            Reason(
                f"needs compute capability {need} or newer, this GPU is {platform.sm}",
                f"take a newer GPU or {FALLBACK[cap.family]}",
            )
        )
    if spec.family != cap.family:
        out.append(
            Reason(
                f"is for {cap.family} attention, the model has {spec.family}",
                f"pick a backend of the {spec.family} family",
            )
        )
    if spec.dtype not in cap.dtypes:
        old = platform.capability is not None and platform.capability < (8, 0)
        fits = [dtype for dtype in reversed(cap.dtypes) if not (old and dtype == "bfloat16")] or list(cap.dtypes)
        out.append(Reason(f"has no kernel for {spec.dtype}", f"set dtype to {' or '.join(fits)}", "dtype", fits[0]))
    if spec.kv_cache_dtype not in cap.kv_cache_dtypes:
        value = cap.kv_cache_dtypes[0]
        out.append(
            Reason(
                f"cannot read a {spec.kv_cache_dtype} KV cache",
                f"set kv_cache_dtype to {value}",
                "kv_cache_dtype",
                value,
            )
        )
    low, high, multiple = cap.head_sizes
    if not low <= spec.head_size <= high or spec.head_size % multiple:
        out.append(
            Reason(
                f"head size {spec.head_size} is not supported", f"it takes multiples of {multiple} from {low} to {high}"
            )
        )
    if spec.num_heads % spec.num_kv_heads:
        out.append(
            Reason(
                f"{spec.num_heads} query heads are no multiple of {spec.num_kv_heads} KV heads",
                "every KV head must serve the same number of query heads",
            )
        )
    low, high, multiple = cap.block_sizes
    if not low <= spec.block_size <= high or spec.block_size % multiple:
        size = preferred_block_size or cap.preferred_block_size
        out.append(
            Reason(
                f"pages of {spec.block_size} tokens are not supported",
                f"set block_size to {size} (it takes multiples of {multiple} from {low} to {high})",
                "block_size",
                size,
            )
        )
    if spec.kv_cache_layout not in cap.kv_layouts:
        value = cap.kv_layouts[0]
        out.append(
            Reason(
                f"KV layout {spec.kv_cache_layout} is not supported",
                f"set kv_cache_layout to {value}",
                "kv_cache_layout",
                value,
            )
        )
    for asked, has, what in (
        (spec.sliding_window is not None, cap.sliding_window, "a sliding window"),
        (spec.logits_soft_cap is not None, cap.logits_soft_cap, "logits soft-capping"),
        (spec.has_sinks, cap.sinks, "attention sinks"),
    ):
        if asked and not has:
            out.append(Reason(f"does not implement {what}, which the model needs", "pick a backend that does"))
    for field, asked, has, off, what in (
        ("num_splits", spec.num_splits > 0, cap.num_splits, 0, "a number of splits"),
        ("split_mixed_batches", spec.split_mixed_batches, cap.split_mixed_batches, False, "split mixed batches"),
        ("batch_invariant", spec.batch_invariant, cap.batch_invariant, False, "batch-invariant kernels"),
    ):
        if asked and not has:
            out.append(Reason(f"does not have {what}", f"set {field} to {off}", field, off))
    return out
