"""The parity suite: every backend, in every version, against dense float64 attention; what it refuses; what it replays.

The cases, the judgement and the proof of a declared tier. It knows no test runner and no particular machine: on a GPU
tests/gpu/test_parity.py runs all of it, on a CPU tests/attention/test_parity_cpu.py runs a small part of it.

A backend may answer a case in two ways: right, or by reasons at selection. What only fails when it is called, or leaves
a feature out in silence, is a bug. Backends that compile for long at each new combination run a fixed list of cases;
the others of their cases are named as not compiled, which is no claim about them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from labkit.attention import registry
from labkit.attention.flash_attn import fa4_key_tile
from labkit.attention.interface import AttentionBackend, AttentionCGSupport, AttentionSpec, Availability, Platform
from labkit.attention.metadata import AttentionMetadata
from labkit.attention.selector import select
from labkit.attention.split_mixed import make_backend
from labkit.errors import BackendError
from tests.reference import PagedBatch, assert_attention_close, dense_attention

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 192, 256)
RATIOS = (1, 2, 3, 5, 7, 8, 16, 71)
Tier = AttentionCGSupport


@dataclasses.dataclass(frozen=True)
class Case:
    """What is fixed when kernels are compiled: shape, types, features and how the memory lies.

    heads: (query heads, KV heads, head size). page: None takes what the backend prefers. interleaved: K and V of a
    page lie side by side in one tensor. fused: the query is a view of a projection of query, key and value.
    """

    heads: tuple[int, int, int] = (9, 3, 64)
    dtype: str = "bfloat16"
    page: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    layout: str = "NHD"
    interleaved: bool = False
    fused: bool = False
    num_splits: int = 0
    scale: float | None = None
    lse: bool = True

    def __str__(self) -> str:
        words = ["x".join(map(str, self.heads)), self.dtype]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={value}")
        return "-".join(words)

    @property
    def features(self) -> dict[str, Any]:
        """As `dense_attention` takes them, without the sinks' values."""
        named = {"window": self.window, "soft_cap": self.soft_cap, "sinks": self.sinks or None}
        return {name: value for name, value in named.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Extent:
    """How large batches are: requests of one batch, tokens of a chunk, earlier tokens, and the longest context."""

    requests: int
    chunk: int
    past: int
    longest: int


LARGE = Extent(requests=12, chunk=300, past=1500, longest=4096)
SMALL = Extent(requests=3, chunk=20, past=40, longest=96)


# --- the cases -------------------------------------------------------------------------------------------------------


def on_grid(head_size: int, ratio: int) -> Case:
    """Data types, and whether an LSE is asked for, take turns over the grid."""
    kv_heads = 1 if ratio >= 16 else 2
    turn = HEAD_SIZES.index(head_size) + RATIOS.index(ratio)
    dtype = "float16" if ratio % 2 == 0 else "bfloat16"
    return Case((ratio * kv_heads, kv_heads, head_size), dtype, lse=turn % 2 == 0)


GRID = tuple(on_grid(*pair) for pair in itertools.product(HEAD_SIZES, RATIOS))
BASE = Case()
EIGHT = (8, 2, 64)
WIDE = (32, 8, 128)
PAGES = tuple(Case(EIGHT, page=page) for page in (1, 8, 16, 24, 32, 48, 64, 128, 256, 512, 768))
VIEWS = (
    Case(WIDE, interleaved=True, fused=True),
    Case(EIGHT, layout="HND", fused=True),
    Case(WIDE, layout="HND", interleaved=True, fused=True),
)
FEATURES = (
    BASE,
    dataclasses.replace(BASE, lse=False),
    *(Case(EIGHT, window=window) for window in (1, 5, 16, 300)),
    Case(WIDE, window=100, lse=False),
    Case((8, 8, 128), window=100, layout="HND"),
    Case(EIGHT, soft_cap=30.0),
    Case((28, 4, 128), soft_cap=30.0, layout="HND"),
    Case(EIGHT, window=100, soft_cap=30.0, lse=False),
    Case(WIDE, window=50, soft_cap=30.0, layout="HND"),
    Case(EIGHT, sinks=True),
    Case(WIDE, sinks=True, window=40),
    Case(EIGHT, sinks=True, soft_cap=30.0),
    Case((6, 2, 64), scale=0.07),
    Case((24, 4, 128), "float16"),
    Case(WIDE, "float16", page=256),
    Case(BASE.heads, "float32"),
    Case((40, 8, 80), "float32", window=20),
    Case((16, 8, 256), layout="HND"),
    *(Case(EIGHT, num_splits=splits) for splits in (1, 3, 16)),
)
CASES = tuple(dict.fromkeys((*GRID, *FEATURES, *VIEWS, *PAGES)))

#: FLASHINFER's modules: head size, dtype, window?, soft-cap? About 40 s of nvcc each, kept between runs.
FLASHINFER_MODULES = (
    (64, "bfloat16", False, False), (64, "bfloat16", True, False), (64, "bfloat16", False, True),
    (64, "bfloat16", True, True), (128, "bfloat16", False, False), (128, "bfloat16", True, False),
    (128, "bfloat16", False, True), (128, "bfloat16", True, True), (128, "float16", False, False),
    (256, "bfloat16", False, False),
)  # fmt: skip
#: FA4 compiles 2 to 3 s for each kernel of a case.
FA4_CASES = (
    *(on_grid(*pair) for pair in (
        (32, 2), (64, 3), (64, 8), (80, 5), (96, 1), (112, 2), (128, 7), (128, 16), (192, 8), (256, 71),
    )),
    BASE, Case(EIGHT, window=16), Case(WIDE, window=100, lse=False), Case(EIGHT, soft_cap=30.0),
    Case(EIGHT, sinks=True), Case(EIGHT, num_splits=1), *VIEWS,
    *(case for case in PAGES if case.page in (16, 48, 64, 128, 256)),
)  # fmt: skip
#: FLEX_ATTENTION compiles two forms of a case, one for decodes and one for longer queries.
FLEX_BASE = Case(page=64, fused=True, lse=False)
FLEX_CASES = (
    FLEX_BASE,
    Case(WIDE, page=16, window=50, fused=True),
    Case((28, 4, 128), "float16", 48, sinks=True, layout="HND", fused=True),
    Case((8, 1, 256), page=64, soft_cap=30.0, fused=True, lse=False),
    Case((6, 2, 80), "float32", 32, interleaved=True, fused=True),
    Case((71, 1, 64), "float16", 16, window=20, soft_cap=30.0, sinks=True, fused=True, lse=False),
)
#: TRITON_ATTN in its batch-invariant form: one tile and one loop, of which the plain cases show most.
INVARIANT_CASES = (
    *(on_grid(*pair) for pair in ((32, 7), (64, 71), (80, 3), (96, 8), (112, 5), (128, 1), (192, 16), (256, 2))),
    BASE, Case(EIGHT, window=16), Case(EIGHT, sinks=True, soft_cap=30.0), Case(EIGHT, num_splits=3),
    Case(BASE.heads, "float32"), VIEWS[2],
)  # fmt: skip
#: What graphs are captured of.
PROOFS = (
    BASE,
    Case(WIDE, window=100, lse=False),
    Case(EIGHT, layout="HND", interleaved=True, fused=True),
    Case(EIGHT, soft_cap=30.0, lse=False),
    Case(EIGHT, sinks=True),
    Case(EIGHT, num_splits=3),
)


def flashinfer_module(case: Case) -> tuple[int, str, bool, bool]:
    return case.heads[2], case.dtype, case.window is not None, case.soft_cap is not None


# --- who takes part --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contender:
    """A backend in one of its forms: `options` are the fields of AttentionSpec that make it so.

    cases, proofs: what it runs and captures; what it leaves out of CASES is called not compiled.
    """

    label: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()
    cases: tuple[Case, ...] = CASES
    proofs: tuple[Case, ...] = PROOFS
    backend: type[AttentionBackend] | None = None  # in place of the registry's

    def __str__(self) -> str:
        return self.label.replace(" ", "-")

    @property
    def cls(self) -> type[AttentionBackend]:
        return self.backend or registry.load(self.name)


def _in_modules(cases: Iterable[Case]) -> tuple[Case, ...]:
    """What FLASHINFER's compiled modules serve, and what it refuses, for which there is nothing to compile."""
    sizes = {module[0] for module in FLASHINFER_MODULES}
    return tuple(
        c for c in cases
        if flashinfer_module(c) in FLASHINFER_MODULES or c.heads[2] not in sizes or c.sinks or c.dtype == "float32"
    )  # fmt: skip


CONTENDERS = (
    Contender("TRITON_ATTN", "TRITON_ATTN"),
    Contender(
        "TRITON_ATTN batch_invariant", "TRITON_ATTN", (("batch_invariant", True),), INVARIANT_CASES,
        (BASE, Case(WIDE, window=100, lse=False), Case(EIGHT, num_splits=3)),
    ),
    Contender("FLASH_ATTN FA3", "FLASH_ATTN", (("flash_attn_version", 3),)),
    Contender("FLASH_ATTN FA4", "FLASH_ATTN", (("flash_attn_version", 4),), FA4_CASES, PROOFS[:2]),
    Contender("FLASH_ATTN FA2", "FLASH_ATTN", (("flash_attn_version", 2),)),
    Contender("FLASHINFER", "FLASHINFER", (), _in_modules(CASES), _in_modules(PROOFS)),
    Contender("FLEX_ATTENTION", "FLEX_ATTENTION", (), FLEX_CASES, FLEX_CASES[:2]),
    Contender("XFORMERS", "XFORMERS"),
    Contender("TORCH_SDPA", "TORCH_SDPA"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a case ended when it was not wrong: "ran", "refused", "not compiled" or "absent", and why."""

    kind: str
    reasons: tuple[str, ...] = ()


@functools.cache
def platform_of(device_type: str) -> Platform:
    if device_type == "cpu":
        return Platform("cpu")
    return Platform("cuda", torch.cuda.get_device_capability(), torch.cuda.get_device_name())


@functools.cache
def availability(cls: type[AttentionBackend]) -> Availability:
    return cls.availability()


def absent(contender: Contender) -> str:
    """Why nothing of it can run in this process; empty when it can."""
    available = availability(contender.cls)
    version = dict(contender.options).get("flash_attn_version")
    mine = [p for p in available.providers if p.version == version]
    if mine and not any(p.usable for p in mine):
        return "; ".join(f"{p.provider}: {p.reason}" for p in mine)
    return "" if available.usable else available.reason


def spec_of(contender: Contender, case: Case, device: torch.device, extent: Extent) -> AttentionSpec:
    heads, kv_heads, head_size = case.heads
    spec = AttentionSpec(
        heads, kv_heads, head_size, case.dtype, case.page or 16, kv_cache_layout=case.layout,
        sliding_window=case.window, logits_soft_cap=case.soft_cap, has_sinks=case.sinks, num_splits=case.num_splits,
        max_model_len=extent.longest, max_num_seqs=64, max_num_batched_tokens=8192, **dict(contender.options),
    )  # fmt: skip
    if case.page is None:
        cls, platform = contender.cls, platform_of(device.type)
        spec = dataclasses.replace(spec, block_size=cls.preferred_block_size(spec, platform, availability(cls)))
    return spec


def refusal(contender: Contender, spec: AttentionSpec, device: torch.device) -> tuple[str, ...]:
    """The conditions that fail at selection. Then naming the backend raises, with the same words."""
    platform, available = platform_of(device.type), availability(contender.cls)
    reasons = contender.cls.why_not(spec, platform, available)
    if reasons and contender.backend is None:
        try:
            select(spec, platform, contender.name, {contender.name: available})
        except BackendError as error:
            assert reasons[0].condition in error.why, error
        else:
            raise AssertionError(f"{contender.label} refuses {spec} and can still be chosen by name")
    return tuple(reason.condition for reason in reasons)


def ask(contender: Contender, case: Case, device: torch.device, extent: Extent) -> tuple[AttentionSpec, Outcome | None]:
    """The case's spec, and the outcome where nothing is to be run."""
    why = absent(contender)
    if why:
        return AttentionSpec(1, 1, 64, case.dtype, 16), Outcome("absent", (why,))
    spec = spec_of(contender, case, device, extent)
    conditions = refusal(contender, spec, device)
    return spec, Outcome("refused", conditions) if conditions else None


def left_out(contender: Contender, device: torch.device, extent: Extent) -> list[Outcome]:
    """What of CASES a contender with a list of its own does not run: each refused, or not compiled."""
    out = []
    for case in CASES:
        if case not in contender.cases:
            out.append(ask(contender, case, device, extent)[1] or Outcome("not compiled", (str(case),)))
    return out


# --- batches ---------------------------------------------------------------------------------------------------------


def needs_finite_tails(contender: Contender, spec: AttentionSpec, device: torch.device) -> bool:
    """Whether values that no request may read are multiplied by 0 all the same, so that they must not be NaN.

    So it is where whole pages are loaded by TMA (FA3: pages that its key tile divides, never 16 or 32; FA4: pages of
    just its key tile) and in FLEX_ATTENTION. The engine's caches are finite. Such a batch has large values there.
    """
    if contender.name == "FLASH_ATTN":
        version = dict(contender.options).get("flash_attn_version")
        tile = fa4_key_tile(platform_of(device.type), spec.head_size, spec.sliding_window is not None)
        return {3: spec.block_size >= 64, 4: spec.block_size == tile}.get(version or 0, False)
    return contender.name in ("FLEX_ATTENTION", "XFORMERS")


def lengths(extent: Extent, page: int, rng: random.Random) -> Iterator[tuple[str, list[int], list[int]]]:
    """Batches as (what, query lengths, KV lengths): what an engine makes, and what it never should."""
    chunk, longest = extent.chunk, extent.longest
    kinds = [1, 1, 0, rng.randint(2, max(3, chunk // 4)), rng.randint(chunk // 3, chunk)]
    query = [rng.choice(kinds) for _ in range(extent.requests)]
    query[0], query[-1] = 1, chunk
    rng.shuffle(query)
    yield "mixed", query, [q + rng.choice([0, 1, rng.randint(0, extent.past)]) for q in query]
    decodes = [1, longest, *(rng.randint(1, longest) for _ in range(extent.requests))]
    yield "decodes", [1] * len(decodes), decodes
    # Alone: beside short contexts, whose errors are larger, a range of keys left out of a long one would go unnoticed.
    yield "long decodes", [1] * 4, [longest, longest - 1, longest // 2 + 1, longest * 3 // 4]
    around = [n for n in (page - 1, page, page + 1, 2 * page) if 0 < n <= longest]
    yield "ends of pages", [1] * len(around) + [min(n, 2 * chunk) for n in around], around * 2
    yield "rows that see nothing", [5, 2, 0, 1, 0, 3, chunk], [2, 5, 0, 3, 7, 0, min(20, chunk // 2)]
    yield "one token", [1], [1]
    yield "one chunk over a past", [4], [12]


def storage(
    case: Case, spec: AttentionSpec, num_pages: int, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V caches with logical axes `[num_pages, page, kv_heads, head_size]`, in memory as the case says."""
    page, kv_heads, head_size = spec.block_size, spec.num_kv_heads, spec.head_size
    inner = (page, kv_heads) if case.layout == "NHD" else (kv_heads, page)
    shape = (num_pages, 2, *inner, head_size) if case.interleaved else (2, num_pages, *inner, head_size)
    rng = torch.Generator(device).manual_seed(seed)
    both = torch.randn(shape, generator=rng, device=device).to(getattr(torch, case.dtype))
    key, value = both.unbind(1 if case.interleaved else 0)
    return (key, value) if case.layout == "NHD" else (key.transpose(1, 2), value.transpose(1, 2))


def queries(case: Case, tokens: int, device: torch.device, seed: int) -> torch.Tensor:
    """`[tokens, heads, head_size]`; scores reach the cap where there is one."""
    rng = torch.Generator(device).manual_seed(seed)
    out = torch.randn((tokens, case.heads[0], case.heads[2]), generator=rng, device=device)
    return laid_out(case, (out * (12 if case.soft_cap is not None else 1)).to(getattr(torch, case.dtype)))


def laid_out(case: Case, query: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """The same rows where the case wants them, inside a wider projection or not, and `padding` rows of NaN behind."""
    heads, kv_heads, head_size = case.heads
    width = heads + 2 * kv_heads if case.fused else heads
    out = query.new_full((query.shape[0] + padding, width, head_size), math.nan)[:, :heads]
    out[: query.shape[0]] = query
    return out


def draw(
    case: Case, spec: AttentionSpec, query_lens: list[int], kv_lens: list[int], device: torch.device, seed: int,
    finite: bool,
) -> PagedBatch:  # fmt: skip
    """A batch over scattered pages, of which two requests may share their first. What nobody may read is poison."""
    rng, page = random.Random(seed), spec.block_size
    needed = [-(-n // page) for n in kv_lens]
    order = rng.sample(range(1, sum(needed) + 4), sum(needed))
    tables, at = [], 0
    for n in needed:
        tables.append(order[at : at + n])
        at += n
    shared = [row for row, n in enumerate(kv_lens) if n > page]
    if len(shared) > 1 and rng.random() < 0.5:
        tables[shared[1]][0] = tables[shared[0]][0]
    filled = np.zeros(sum(needed) + 4, dtype=np.int64)
    for table, n in zip(tables, kv_lens, strict=True):
        for i, block in enumerate(table):
            filled[block] = max(filled[block], min(page, n - i * page))
    unread = torch.arange(page) >= torch.from_numpy(filled)[:, None]
    caches = storage(case, spec, len(filled), device, seed)
    for cache, garbage in zip(caches, (3.0, 100.0), strict=True):
        cache[unread.to(device)] = garbage if finite else math.nan
    query = queries(case, sum(query_lens), device, seed + 1)
    return PagedBatch(query, *caches, list(query_lens), list(kv_lens), tables, case.scale or spec.head_size**-0.5)


def in_order(batch: PagedBatch, order: Sequence[int]) -> PagedBatch:
    """The same requests in another order."""
    rows = batch.query.split(batch.query_lens)
    pick: Callable[[list], list] = lambda values: [values[i] for i in order]  # noqa: E731
    return dataclasses.replace(
        batch, query=torch.cat(pick(list(rows))), query_lens=pick(batch.query_lens), kv_lens=pick(batch.kv_lens),
        tables=pick(batch.tables),
    )  # fmt: skip


def sink_values(case: Case, device: torch.device) -> torch.Tensor | None:
    """bfloat16 in every case: FA3's builds take sinks of no other type."""
    return torch.linspace(-2, 6, case.heads[0], device=device).bfloat16() if case.sinks else None


# --- judgement -------------------------------------------------------------------------------------------------------


def call_options(case: Case, device: torch.device) -> dict[str, Any]:
    return {"sliding_window": case.window, "logits_soft_cap": case.soft_cap, "sinks": sink_values(case, device)}


@torch.inference_mode()  # as in the engine
def attend(backend: AttentionBackend, case: Case, batch: PagedBatch, padding: int = 0) -> tuple[torch.Tensor, Any]:
    """Output and LSE of the real tokens, every row of both NaN before; `padding` rows and requests behind the batch."""
    device, tokens = batch.query.device, batch.num_tokens
    metadata, query = batch.metadata(pad_reqs=padding, pad_tokens=padding), laid_out(case, batch.query, padding)
    output = torch.full(query.shape, math.nan, dtype=query.dtype, device=device)
    lse = torch.full(query.shape[:2], math.nan, device=device) if case.lse else None
    backend.prepare(metadata)
    backend.forward(
        query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, lse=lse,
        **call_options(case, device),
    )  # fmt: skip
    if tokens:
        assert all(plan.kernel for plan in backend.describe(metadata)), "it does not say what it launched"
    return output[:tokens], None if lse is None else lse[:tokens]


def judge(case: Case, batch: PagedBatch, output: torch.Tensor, lse: torch.Tensor | None, what: str) -> None:
    """Error by the project's rule; rows that see nothing are exactly 0 and −inf, sinks or not; natural LSE."""
    features = {**case.features, **({"sinks": sink_values(case, output.device)} if case.sinks else {})}
    what = f"{what}: q={batch.query_lens} kv={batch.kv_lens}"
    exact = assert_attention_close(batch, output, what=what, **features)
    sees = rows_that_see(batch)
    assert (output[~sees] == 0).all(), f"{what}: a row that sees nothing is not 0"
    if lse is None:
        return
    assert torch.isneginf(lse[~sees]).all(), f"{what}: the LSE of a row that sees nothing is not −inf"
    # Under a cap of 30 libraries take the hardware's approximation of tanh.
    tolerance = 5e-2 if case.soft_cap else 5e-3
    torch.testing.assert_close(
        lse.double()[sees], exact[sees], atol=tolerance, rtol=1e-3, msg=lambda text: f"{what}: LSE: {text}"
    )


def rows_that_see(batch: PagedBatch) -> torch.Tensor:
    """Of each token whether it sees a key: all but the first ones of a request with more tokens than keys."""
    sees = [i >= n - length for n, length in zip(batch.query_lens, batch.kv_lens, strict=True) for i in range(n)]
    return torch.tensor(sees, dtype=torch.bool, device=batch.query.device)


def tells_apart(case: Case, batch: PagedBatch) -> set[str]:
    """The features without which the answer to this batch would be another one, beyond any rounding."""
    features = {**case.features, **({"sinks": sink_values(case, batch.query.device)} if case.sinks else {})}
    exact = dense_attention(batch, **features)[0]
    found = set()
    for name in features:
        other = dense_attention(batch, **{key: value for key, value in features.items() if key != name})[0]
        if exact.numel() and (other - exact).abs().max() > 0.05:
            found.add(name)
    return found


def check_case(
    contender: Contender, case: Case, device: torch.device, extent: Extent, kinds: Sequence[str] = ()
) -> Outcome:
    """Every batch of `lengths` (those of `kinds`, if named), once as drawn and the mixed one in another order, too.

    Raises:
        AssertionError: an answer is wrong, or no batch would have shown that a feature is ignored.
    """
    spec, outcome = ask(contender, case, device, extent)
    if outcome is not None:
        return outcome
    backend = make_backend(contender.cls, spec, device)
    finite = needs_finite_tails(contender, spec, device)
    rng, shown = random.Random(repr(case)), set()
    for turn, (kind, query_lens, kv_lens) in enumerate(lengths(extent, spec.block_size, rng)):
        if kinds and kind not in kinds:
            continue
        batch = draw(case, spec, query_lens, kv_lens, device, turn, finite)
        what = f"{contender.label}, {case}, {kind}"
        judge(case, batch, *attend(backend, case, batch, padding=3 * (turn % 2)), what)
        if len(shown) < len(case.features):
            shown |= tells_apart(case, batch)
        if kind == "mixed":
            other = in_order(batch, rng.sample(range(len(query_lens)), len(query_lens)))
            judge(case, other, *attend(backend, case, other), f"{what}, in another order")
    assert shown == set(case.features), f"{case}: no batch shows {set(case.features) - shown}"
    return Outcome("ran")


def check_orders(contender: Contender, case: Case, device: torch.device, extent: Extent) -> Outcome:
    """C18: a prefill, two decodes and the last token of a chunked prompt, in all 24 orders."""
    spec, outcome = ask(contender, case, device, extent)
    if outcome is not None:
        return outcome
    backend = make_backend(contender.cls, spec, device)
    batch = draw(case, spec, [5, 1, 1, 1], [5, 30, 9, 17], device, 1, needs_finite_tails(contender, spec, device))
    for order in itertools.permutations(range(4)):
        other = in_order(batch, order)
        judge(case, other, *attend(backend, case, other), f"{contender.label}, order {order}")
    return Outcome("ran")


def check_large_scores(contender: Contender, case: Case, device: torch.device, extent: Extent) -> Outcome:
    """C15: products that float16 does not hold, before the scale and after it, must be summed in float32."""
    case = dataclasses.replace(case, dtype="float16")
    spec, outcome = ask(contender, case, device, extent)
    if outcome is not None:
        return outcome
    backend = make_backend(contender.cls, spec, device)
    for size in (64.0, 256.0):
        batch = draw(case, spec, [1, 5], [20, 9], device, 3, finite=True)
        batch.query.fill_(size)
        batch.key_cache.fill_(size)
        output, lse = attend(backend, case, batch)
        exact, exact_lse = dense_attention(batch)
        torch.testing.assert_close(output.double(), exact, atol=4e-3, rtol=4e-3)
        if lse is not None:
            torch.testing.assert_close(lse.double(), exact_lse, atol=1e-2, rtol=1e-5)
    return Outcome("ran")


def check_bare_call(contender: Contender, case: Case, device: torch.device, extent: Extent) -> Outcome:
    """The library's own call, where a backend offers one, answers the same."""
    spec, outcome = ask(contender, case, device, extent)
    if outcome is not None:
        return outcome
    backend = make_backend(contender.cls, spec, device)
    finite = needs_finite_tails(contender, spec, device)
    for query_lens, kv_lens in (([1] * 4, [300, 17, 2, 90]), ([1, 40, 20], [50, 60, 20])):
        kv_lens = [min(n, extent.longest) for n in kv_lens]
        batch = draw(case, spec, query_lens, kv_lens, device, 1, finite)
        output, metadata = torch.empty_like(batch.query), batch.metadata()
        call = backend.bare_call(batch.query, batch.key_cache, batch.value_cache, output, metadata, batch.scale)
        if call is None:
            return Outcome("ran")
        result = call()
        result = result[0] if isinstance(result, tuple) else result
        judge(case, batch, output if result is None else result, None, f"{contender.label}, bare call")
    return Outcome("ran")


# --- graphs ----------------------------------------------------------------------------------------------------------


class Captured:
    """One call, recorded at a padded shape and replayed over the same buffers, filled as the engine fills them.

    On a GPU a CUDA graph. On a CPU an emulated one, as the engine has it: the same call on the same buffers with what
    the host knew at capture, so that a length read on the host, or a tensor that was rebound, is as stale as there.
    """

    def __init__(
        self, backend: AttentionBackend, case: Case, caches: tuple[torch.Tensor, torch.Tensor], reqs: int, tokens: int,
        query_len: int, extent: Extent,
    ) -> None:  # fmt: skip
        self.backend, self.case, self.caches = backend, case, caches
        device, page, longest = caches[0].device, caches[0].shape[1], extent.longest
        self.device, self.scale = device, case.scale or case.heads[2] ** -0.5
        self.query = queries(case, tokens, device, 0)
        self.output = torch.empty(self.query.shape, dtype=self.query.dtype, device=device)
        self.lse = torch.empty(self.query.shape[:2], device=device) if case.lse else None
        self.options = call_options(case, device)
        self.metadata = AttentionMetadata(
            reqs, tokens, reqs, tokens, query_len, longest,
            torch.zeros(reqs + 1, dtype=torch.int32, device=device),
            torch.zeros(reqs, dtype=torch.int32, device=device),
            torch.zeros((reqs, -(-longest // page)), dtype=torch.int32, device=device),
            torch.full((tokens,), -1, dtype=torch.int64, device=device),
            np.zeros(reqs + 1, dtype=np.int32), np.zeros(reqs, dtype=np.int32),
            for_graph=True, is_uniform_decode=query_len == 1,
        )  # fmt: skip
        # The dummy batch that a capture sees: short, over the null block, and like nothing that comes later.
        spread = [query_len] * reqs if query_len * reqs == tokens else [*[1] * (reqs - 1), tokens - reqs + 1]
        self.fill(spread, spread, [[0] * -(-n // page) for n in spread])
        with torch.inference_mode():
            backend.prepare(self.metadata)
            self.baked = dataclasses.replace(
                self.metadata, query_start_loc_cpu=self.metadata.query_start_loc_cpu.copy(),
                seq_lens_cpu=self.metadata.seq_lens_cpu.copy(),
            )  # fmt: skip
            self.graph = self._capture()

    def _capture(self) -> Any:
        if self.device.type == "cpu":
            self.forward()
            return None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.forward()
        return graph

    def forward(self) -> None:
        self.backend.forward(
            self.query, *self.caches, self.output, self.baked, scale=self.scale, lse=self.lse, **self.options
        )

    def fill(self, query_lens: list[int], kv_lens: list[int], tables: list[list[int]]) -> None:
        meta, total = self.metadata, sum(query_lens)
        starts = list(itertools.accumulate(query_lens, initial=0))
        meta.query_start_loc_cpu[:] = starts + [total] * (meta.num_reqs + 1 - len(starts))
        meta.seq_lens_cpu[:] = kv_lens + [0] * (meta.num_reqs - len(kv_lens))
        rows = torch.zeros(meta.block_table.shape, dtype=torch.int32)
        for row, taken in enumerate(tables):
            rows[row, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
        meta.query_start_loc.copy_(torch.from_numpy(meta.query_start_loc_cpu))
        meta.seq_lens.copy_(torch.from_numpy(meta.seq_lens_cpu))
        meta.block_table.copy_(rows)
        meta.num_actual_reqs, meta.num_actual_tokens = len(query_lens), total

    def replay(self, query_lens: list[int], kv_lens: list[int], seed: int, what: str) -> None:
        """One step: new values in the same memory, `prepare`, replay, judged. Within inference mode and outside it."""
        rng, total, page = random.Random(seed), sum(query_lens), self.caches[0].shape[1]
        pages = range(1, self.caches[0].shape[0])
        # Requests may share pages; no request has one twice.
        tables = [rng.sample(pages, -(-n // page)) for n in kv_lens]
        self.fill(query_lens, kv_lens, tables)
        self.query[:total] = queries(self.case, total, self.device, seed)
        self.query[total:] = math.nan
        self.output.fill_(math.nan)
        if self.lse is not None:
            self.lse.fill_(math.nan)
        with torch.inference_mode() if seed % 2 else contextlib.nullcontext():
            self.backend.prepare(dataclasses.replace(self.metadata, scratch={}))
            if self.graph is None:
                self.forward()
            else:
                self.graph.replay()
                torch.cuda.synchronize()
        batch = PagedBatch(self.query[:total], *self.caches, query_lens, kv_lens, tables, self.scale)
        judge(self.case, batch, self.output[:total], None if self.lse is None else self.lse[:total], what)


def uniform_compositions(reqs: int, query_len: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """Full and part batches of equal queries: shortest, longest, and both in one."""
    rng, q = random.Random(3), query_len
    some = [rng.randint(q, longest) for _ in range(reqs)]
    found = [
        ([q] * reqs, [longest] * reqs), ([q] * reqs, [q] * reqs), ([q] * reqs, some), ([q], [longest]), ([q], [q]),
        ([q] * (reqs - 1), some[1:]), ([q] * reqs, [longest] + [q] * (reqs - 1)),
        ([q] * reqs, [q] * (reqs - 1) + [longest]),
    ]  # fmt: skip
    return [composition for composition in found if composition[0]]


def mixed_compositions(reqs: int, tokens: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """Any split of the tokens among the requests, all of them or fewer."""
    rng, found = random.Random(5), []
    for _ in range(4):
        n = rng.randint(1, reqs)
        query = [1] * n
        for _ in range(rng.randint(0, tokens - n)):
            query[rng.randrange(n)] += 1
        found.append((query, [rng.randint(q, longest) for q in query]))
    found += [([tokens], [tokens]), ([tokens], [longest]), ([1], [1])]
    if reqs > 1:
        found += [
            ([1] * reqs, [longest] * reqs),
            ([tokens - 1, 1], [tokens - 1, longest]),
            ([1, 0, 1], [9, 0, longest]),
        ]
    return [(q, kv) for q, kv in found if len(q) <= reqs and sum(q) <= tokens]


def prove_tier(contender: Contender, case: Case, device: torch.device, extent: Extent) -> Outcome:
    """Capture at one composition, replay at others, as far up as the backend's tier claims, and eager steps between.

    Graphs of all shapes live in one instance and take turns, a uniform and a mixed one of the same size among them.

    Raises:
        AssertionError: it claims more than what replays correctly.
    """
    spec, outcome = ask(contender, case, device, extent)
    if outcome is not None:
        return outcome
    cls, platform = contender.cls, platform_of(device.type)
    tier, why = cls.graph_support(spec, platform, availability(cls))
    most = 8 if extent.requests > 4 else 3
    wanted = [
        (Tier.UNIFORM_SINGLE_TOKEN_DECODE, most, most, 1), (Tier.UNIFORM_SINGLE_TOKEN_DECODE, 1, 1, 1),
        (Tier.UNIFORM_BATCH, 2, 6, 3), (Tier.ALWAYS, most, most, most),
        (Tier.ALWAYS, most, 8 * most if most > 4 else 2 * most, 0),
    ]  # fmt: skip
    wanted = [entry for entry in wanted if entry[0] <= tier]
    if not wanted:
        return Outcome("ran")
    backend = make_backend(cls, spec, device)
    pages = 2 * -(-extent.longest // spec.block_size) + 8
    caches = storage(case, spec, pages, device, 0)
    for cache in caches:
        cache[0] = 0  # the null block, as the engine has it
    turns, claim = [], f"{contender.label} claims {tier.name} ({why})"
    for level, reqs, tokens, query_len in wanted:
        shape = f"{reqs} requests and {tokens} tokens, at most {query_len or tokens} each"
        try:
            graph = Captured(backend, case, caches, reqs, tokens, query_len or tokens, extent)
        except Exception as error:
            raise AssertionError(f"{claim} and cannot be captured at {shape}: {error}") from error
        if level is Tier.ALWAYS:
            compositions = mixed_compositions(reqs, tokens, extent.longest)
        else:
            compositions = uniform_compositions(reqs, query_len, extent.longest)
        turns += [(graph, shape, *composition) for composition in compositions]
    rng = random.Random(11)
    rng.shuffle(turns)
    finite = needs_finite_tails(contender, spec, device)
    for turn, (graph, shape, query_lens, kv_lens) in enumerate(turns):
        try:
            graph.replay(query_lens, kv_lens, turn, f"captured at {shape}")
        except AssertionError as error:
            raise AssertionError(f"{claim} and replays wrongly. {error}") from error
        if turn % 5 == 0:
            eager = draw(case, spec, [1, 7, 1], [30, 20, 2], device, turn, finite)
            judge(case, eager, *attend(backend, case, eager), f"{contender.label}, eager between replays")
    return Outcome("ran")


# --- what is listed at the end ---------------------------------------------------------------------------------------

Record = tuple[str, str, tuple[str, ...]]  # label, kind, reasons


def summary(records: Iterable[Record]) -> list[str]:
    """Lines of text: who could not be run at all, then by backend what it refused, how often, and what was left out."""
    kinds: dict[str, dict[str, collections.Counter[str]]] = {}
    for label, kind, reasons in records:
        found = kinds.setdefault(kind, {}).setdefault(label, collections.Counter())
        found.update(reasons)
    lines = []
    for kind, title in (("absent", "not here"), ("refused", "refused at selection")):
        if kind in kinds:
            lines.append(title)
        for label, reasons in sorted(kinds.get(kind, {}).items()):
            lines.append(f"  {label}")
            counts = [f"{count} × " if kind == "refused" else "" for count in reasons.values()]
            lines += [f"    {count}{reason}" for count, reason in zip(counts, reasons, strict=True)]
    if "not compiled" in kinds:
        lines.append("not compiled, each being a compilation of its own")
    for label, cases in sorted(kinds.get("not compiled", {}).items()):
        lines.append(f"  {label}: {len(cases)} of {len(CASES)} cases: {', '.join(cases)}")
    return lines
