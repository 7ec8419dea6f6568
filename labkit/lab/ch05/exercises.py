"""The exercises of chapter 05: reasons, the first that has none, what a tier leaves of a mode. Refuses to run "
"anything."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.attention.interface import AttentionSpec, BackendCapabilities, Platform
from labkit.lab.exercises import Case, Exercise, Wrong, case

# --- 05.1 ------------------------------------------------------------------------------------------------------------


def why_not(capabilities: BackendCapabilities, spec: AttentionSpec, platform: Platform) -> list[str]:
    """The name of every condition that fails; an empty list where the backend can serve."""
    cap, failed = capabilities, []
    if platform.device_type not in cap.device_types:
        failed.append("device")
    elif cap.min_capability and platform.capability and platform.capability < cap.min_capability:
        failed.append("capability")
    if spec.dtype not in cap.dtypes:
        failed.append("dtype")
    for name, value, (low, high, multiple) in (
        ("head_size", spec.head_size, cap.head_sizes),
        ("block_size", spec.block_size, cap.block_sizes),
    ):
        if not low <= value <= high or value % multiple:
            failed.append(name)
    if spec.sliding_window is not None and not cap.sliding_window:
        failed.append("window")
    return failed


_NAMES = ("device", "capability", "dtype", "head_size", "block_size", "window")
_CAP = BackendCapabilities(
    "SOME_ATTN", ("float16", "bfloat16"), (64, 256, 64), (16, 512, 16), min_capability=(8, 0), sliding_window=False
)
_SPEC = AttentionSpec(8, 8, 128, "float16", 16)
_GPU, _OLD = Platform("cuda", (9, 0), "H200"), Platform("cuda", (7, 5), "T4")


def _with(cap: Mapping[str, Any] | None = None, gpu: Platform = _GPU, **spec: Any) -> tuple[Any, ...]:
    return dataclasses.replace(_CAP, **(cap or {})), dataclasses.replace(_SPEC, **spec), gpu


def _why_cases(rng: random.Random) -> Iterator[Case]:
    yield case("a request that fits", *_with())
    for capability in ((8, 0), (8, 0), (9, 0)):
        cap = {"min_capability": capability, "name": f"SM{capability[0]}{capability[1]}_ATTN"}
        yield case("a GPU that is just new enough", *_with(cap, Platform("cuda", capability, "just")))
    yield case("an older GPU", *_with(None, _OLD))
    for capability in ((10, 0), (12, 0), (10, 3)):
        yield case("a GPU with a number of two digits", *_with(None, Platform("cuda", capability, "new")))
    for machine in (Platform("cpu"), Platform("rocm", None, "MI300X")):
        yield case("a machine without CUDA", *_with(None, machine))
        yield case("a machine without CUDA", *_with({"device_types": ("cuda", "cpu", "rocm")}, machine))
    for dtype in ("float32", "float64"):
        yield case("another data type", *_with(dtype=dtype))
    for head in (96, 72, 200):
        yield case("a head size between two multiples", *_with(head_size=head))
    for head, high in ((256, 256), (192, 192)):
        yield case("the largest head size", *_with({"head_sizes": (64, high, 64)}, head_size=head))
    for head in (32, 320):
        yield case("a head size outside", *_with({"head_sizes": (64, 256, 32)}, head_size=head))
    for page in (8, 24, 1024):
        yield case("a page that does not fit", *_with(block_size=page))
    yield case("a window", *_with(sliding_window=rng.randint(64, 4096)))
    yield case("a window", *_with({"sliding_window": True}, sliding_window=1024))
    for window in (128, 512):
        yield case("several at once", *_with({"device_types": ("cpu",)}, sliding_window=window))
    for device_types in (("cpu",), ("rocm", "cpu")):
        yield case("an old GPU, and no CUDA kernels at all", *_with({"device_types": device_types}, _OLD))


def _only_the_first(cap: Any, spec: Any, platform: Any) -> list[str]:
    return why_not(cap, spec, platform)[:1]


def _changed(name: str, wrong: Any) -> Any:
    """`why_not` with one condition decided by `wrong(cap, spec, platform)`."""

    def answer(cap: Any, spec: Any, platform: Any) -> list[str]:
        failed = set(why_not(cap, spec, platform)) - {name}
        if wrong(cap, spec, platform):
            failed.add(name)
        return [known for known in _NAMES if known in failed]

    return answer


def _newer_only(cap: Any, spec: Any, platform: Any) -> bool:
    fits = platform.device_type in cap.device_types and platform.capability
    return bool(fits and cap.min_capability and platform.capability <= cap.min_capability)


def _as_text(cap: Any, spec: Any, platform: Any) -> bool:
    here, need = platform.capability, cap.min_capability
    fits = platform.device_type in cap.device_types
    return bool(fits and here and need and f"{here[0]}.{here[1]}" < f"{need[0]}.{need[1]}")


def _no_device(cap: Any, spec: Any, platform: Any) -> list[str]:
    too_old = platform.capability < cap.min_capability  # TypeError without an NVIDIA GPU
    return [n for n in why_not(cap, spec, platform) if n != "capability" or too_old]


def _both(cap: Any, spec: Any, platform: Any) -> bool:
    return bool(platform.capability and cap.min_capability and platform.capability < cap.min_capability)


def _same_names(expected: Any, got: Any) -> bool:
    return isinstance(got, list | tuple) and sorted(expected) == sorted(got)


def _show_why(args: tuple[Any, ...]) -> str:
    cap, spec, platform = args
    needs = (
        f"device_types={cap.device_types}, min_capability={cap.min_capability}, dtypes={cap.dtypes}, "
        f"head_sizes={cap.head_sizes}, block_sizes={cap.block_sizes}, sliding_window={cap.sliding_window}"
    )
    asked = (
        f"dtype={spec.dtype!r}, head_size={spec.head_size}, block_size={spec.block_size}, "
        f"sliding_window={spec.sliding_window}"
    )
    return (
        f"capabilities: {needs}\nspec:         {asked}\n"
        f"platform:     device_type={platform.device_type!r}, capability={platform.capability}"
    )


WHY_NOT = Exercise(
    id="05.1",
    title="Every reason, not only the first",
    minutes=10,
    items=("A2",),
    ask="Write <code>why_not(capabilities, spec, platform)</code>: a list with the name of every condition that fails, "
    "empty where the backend can serve.<br>"
    "<code>'device'</code>: <code>platform.device_type</code> is not among <code>capabilities.device_types</code>. "
    "<code>'capability'</code>, only where the device fits: <code>platform.capability</code>, a pair such as (7, 5) or "
    "None, is below <code>min_capability</code>, a pair or None; equal is enough. <code>'dtype'</code>: not among "
    "<code>dtypes</code>. <code>'head_size'</code> and <code>'block_size'</code>: outside of <code>head_sizes</code> "
    "and <code>block_sizes</code>, each (lowest, highest, multiple of), both ends allowed. <code>'window'</code>: "
    "<code>spec.sliding_window</code> is not None and <code>capabilities.sliding_window</code> is False. Any order.",
    solution=why_not,
    cases=_why_cases,
    same=_same_names,
    show=_show_why,
    wrong=(
        Wrong("first", _only_the_first, "You stop at the first condition that fails. Somebody who mends that one meets "
              "the next; a list of all saves the round trips."),
        Wrong("newer only", _changed("capability", _newer_only), "You ask for a GPU that is newer than the oldest one "
              "that is allowed; the oldest one is allowed."),
        Wrong("as text", _changed("capability", _as_text), "You compare versions as text or as one decimal number: "
                                                           "then 12.0 is below 8.0. Pairs of whole numbers compare "
                                                           "the right way."),
        Wrong("no device", _no_device, "You compare the capability of a machine that has none: None is not less than a "
              "pair. Look at the device first."),
        Wrong("both", _changed("capability", _both), "You blame the GPU's age as well where the backend is not "
                                                     "written for CUDA at all. A newer GPU would not help: ask for "
                                                     "the capability only where the device fits."),
        Wrong("any head in range", _changed("head_size", lambda c, s, p: not
              c.head_sizes[0] <= s.head_size <= c.head_sizes[1]), "You look at the range of head sizes and not at the "
              "multiple: 96 lies between 64 and 256, and is no multiple of 64."),
        Wrong("open end", _changed("head_size", lambda c, s, p: not c.head_sizes[0] <= s.head_size < c.head_sizes[1]
              or s.head_size % c.head_sizes[2]), "You leave out the largest head size. Both ends are allowed."),
        Wrong("multiple only", _changed("head_size", lambda c, s, p: s.head_size % c.head_sizes[2]), "You look at the "
              "multiple of a head size and not at the range."),
        Wrong("no pages", _changed("block_size", lambda c, s, p: False), "You forget the page size: a backend that "
              "reads pages of 16 may have no kernel for pages of 24."),
        Wrong("any window", _changed("window", lambda c, s, p: s.sliding_window is not None), "You refuse windows, "
              "also where the backend has one."),
        Wrong("no dtype", _changed("dtype", lambda c, s, p: False), "You forget the data type."),
        Wrong("old GPUs welcome", _changed("capability", lambda c, s, p: False), "You forget how old the GPU may be."),
    ),
    hints=(
        "Begin with an empty list and append a name for each condition that fails. Never return early.",
        "Pairs compare as you want them: (7, 5) &lt; (8, 0) is True. A CPU and an AMD GPU have no capability, so ask "
        "for the device first and for the capability in an <code>elif</code>.",
        "<code>low, high, multiple = capabilities.head_sizes</code>, then <code>if not low &lt;= spec.head_size &lt;= "
        "high or spec.head_size % multiple: failed.append('head_size')</code>. The page size goes the same way.",
    ),
    explanation="A table of what a backend can do and a request are compared, condition by condition. Nothing is "
    "imported and no GPU is asked, so the same function answers for a machine that is not here. The engine's own, "
    "<code>check_capabilities</code>, has eight conditions more and puts what would mend it beside each.",
    redundant={"a request that fits": "the simplest case comes first; the wrong answers go wrong at something"},
)  # fmt: skip

# --- 05.2 ------------------------------------------------------------------------------------------------------------


def pick(order: Sequence[str], reasons: Mapping[str, Sequence[str]], requested: str | None) -> str:
    """The backend that is taken; ValueError where none can serve, or the one asked for by name cannot."""
    if requested is not None:
        if reasons[requested]:
            raise ValueError(requested)
        return requested
    for name in order:
        if not reasons[name]:
            return name
    raise ValueError("no backend can serve")


_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TORCH_SDPA")


def _pick_cases(rng: random.Random) -> Iterator[Case]:
    def reasons(*usable: str) -> dict[str, list[str]]:
        names = [*_BACKENDS, "XFORMERS"]
        rng.shuffle(names)
        return {name: [] if name in usable else ["capability"] for name in names}

    order = list(_BACKENDS)
    yield case("automatic", order, reasons("FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA"), None)
    yield case("automatic", order, reasons("TRITON_ATTN", "TORCH_SDPA"), None)
    for _ in range(4):
        turned = ["TRITON_ATTN", "TORCH_SDPA", "FLASHINFER", "FLASH_ATTN"]
        yield case("another machine's order", turned, reasons(*rng.sample(_BACKENDS, 3)), None)
    for _ in range(2):
        yield case("a backend that is in no order", order, reasons("XFORMERS", "TORCH_SDPA"), None)
    yield case("a backend that is in no order", order, reasons("XFORMERS", "TORCH_SDPA"), "XFORMERS")
    for name in ("TORCH_SDPA", "TRITON_ATTN"):
        yield case("by name, and it can serve", order, reasons(*_BACKENDS), name)
    for name in ("FLASHINFER", "XFORMERS"):
        yield case("by name, and it cannot", order, reasons("FLASH_ATTN", "TORCH_SDPA"), name)
    yield case("nobody can serve", order, reasons(), None)
    yield case("nobody can serve", order, reasons("XFORMERS"), None)


def _replaces(order: Any, reasons: Any, requested: Any) -> Any:
    return requested if requested is not None and not reasons[requested] else pick(order, reasons, None)


def _ignores_request(order: Any, reasons: Any, requested: Any) -> Any:
    return pick(order, reasons, requested if requested not in order or reasons[requested] else None)


def _trusts_request(order: Any, reasons: Any, requested: Any) -> Any:
    return requested if requested is not None else pick(order, reasons, None)


def _any_that_serves(order: Any, reasons: Any, requested: Any) -> Any:
    return pick([*order, *reasons], reasons, requested)


def _own_order(order: Any, reasons: Any, requested: Any) -> Any:
    return pick([n for n in _BACKENDS if n in order], reasons, requested)


def _last_resort(order: Any, reasons: Any, requested: Any) -> Any:
    try:
        return pick(order, reasons, requested)
    except ValueError:
        if requested is not None:
            raise
        return order[-1]


def _by_order_only(order: Any, reasons: Any, requested: Any) -> Any:
    if requested is not None and requested not in order:
        raise ValueError(requested)
    return pick(order, reasons, requested)


PICK = Exercise(
    id="05.2",
    title="The first without a reason",
    minutes=7,
    items=("B5",),
    ask="Write <code>pick(order, reasons, requested)</code>. <code>order</code> is a list of names, the best first. "
    "<code>reasons</code> has the reasons of every backend by name, an empty list where it can serve; it may know "
    "backends that are in no order. <code>requested</code> is a name or None. Return the name that is taken: with "
    "None the first in order that can serve; otherwise the one requested. Where that one cannot serve, or with None "
    "nobody can, raise <code>ValueError</code>: a choice by name is never replaced.",
    solution=pick,
    cases=_pick_cases,
    wrong=(
        Wrong("replaces", _replaces, "You quietly take another backend where the one that was asked for refuses. Then "
              "somebody measures FLASHINFER and reads numbers of FLASH_ATTN."),
        Wrong("trusts", _trusts_request, "You take the backend that was asked for without looking at its reasons: it "
              "fails later, in the middle of a step, or computes something else."),
        Wrong("ignores", _ignores_request, "You go by the order also where somebody asked for a backend by name."),
        Wrong("any", _any_that_serves, "You fall back to backends that are in no order. Those are for an explicit "
                                       "choice only."),
        Wrong("own order", _own_order, "You use one order for all machines. It is an input: a B200 has another one "
                                       "than an H200."),
        Wrong("last resort", _last_resort, "You take the last of the order where nobody can serve. Then it fails where "
              "nobody can say why."),
        Wrong("in order only", _by_order_only, "You refuse a name because it is in no order. An explicit choice needs "
                                               "no place in it."),
    ),
    hints=(
        "Two questions, one after the other: was a backend asked for by name? And if not, who is first?",
        "By name: look at its own reasons only, and raise where there are some. Automatic: go through "
        "<code>order</code>, not through <code>reasons</code>.",
        "<code>for name in order:</code> <code>if not reasons[name]: return name</code>, and after the loop "
        "<code>raise ValueError('nobody can serve')</code>.",
    ),
    explanation="Automatic selection is a list of names and the first empty list of reasons. A choice by name skips "
                "the list and keeps the reasons: it works, or it raises before anything runs.",
    redundant={"automatic": "the simplest cases come first; who goes by the order gets them right"},
)  # fmt: skip

# --- 05.3 ------------------------------------------------------------------------------------------------------------


def mode_for(requested: str, tiers: Sequence[str], compiled: bool) -> str:
    """The graph mode that runs; ValueError where FULL was asked for and a layer can never be captured."""
    ladder = ["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
    tier = min(tiers, key=ladder.index)
    if requested == "FULL" and tier == "NEVER":
        raise ValueError("this backend cannot be captured")
    if requested == "FULL" and tier != "ALWAYS":
        return "FULL_AND_PIECEWISE" if compiled else "FULL_DECODE_ONLY"
    if requested in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE") and tier == "NEVER":
        return "PIECEWISE" if compiled else "NONE"
    return requested


_TIERS = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")


def _mode_cases(rng: random.Random) -> Iterator[Case]:
    yield case("one tier in all layers", "FULL_AND_PIECEWISE", ["ALWAYS"] * 4, True)
    yield case("one tier in all layers", "FULL", ["ALWAYS"] * 4, False)
    for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"):
        for compiled in (True, False):
            tiers = ["ALWAYS", "NEVER", "UNIFORM_BATCH"]
            rng.shuffle(tiers)
            yield case("one layer can never be captured", mode, tiers, compiled)
            yield case("one layer can never be captured", mode, [_TIERS[2], "NEVER"], compiled)
    for compiled in (True, False):
        yield case("FULL, and one layer never", "FULL", ["ALWAYS", "ALWAYS", "NEVER"], compiled)
        for tier in _TIERS[1:3]:
            yield case("FULL, and one layer for uniform batches", "FULL", ["ALWAYS", tier, "ALWAYS"], compiled)
        yield case(
            "decodes only, and one layer for uniform batches", "FULL_DECODE_ONLY", ["ALWAYS", _TIERS[1]], compiled
        )
        for mode in ("NONE", "PIECEWISE"):
            yield case("attention is in no graph", mode, ["ALWAYS", rng.choice(_TIERS[:2])], compiled)
            yield case("attention is in no graph", mode, ["NEVER"] * 2, compiled)


def _highest(requested: Any, tiers: Any, compiled: Any) -> Any:
    return mode_for(requested, [max(tiers, key=_TIERS.index)], compiled)


def _alphabet(requested: Any, tiers: Any, compiled: Any) -> Any:
    return mode_for(requested, [min(tiers)], compiled)


def _never_lowers_everything(requested: Any, tiers: Any, compiled: Any) -> Any:
    if "NEVER" in tiers and requested == "PIECEWISE":
        return "NONE"
    return mode_for(requested, tiers, compiled)


def _lowers_quietly(requested: Any, tiers: Any, compiled: Any) -> Any:
    if requested == "FULL" and "NEVER" in tiers:
        return "PIECEWISE" if compiled else "NONE"
    return mode_for(requested, tiers, compiled)


def _always_compiled(requested: Any, tiers: Any, compiled: Any) -> Any:
    return mode_for(requested, tiers, True)


def _full_is_full(requested: Any, tiers: Any, compiled: Any) -> Any:
    if requested == "FULL" and "NEVER" not in tiers:
        return "FULL"
    return mode_for(requested, tiers, compiled)


def _decode_needs_always(requested: Any, tiers: Any, compiled: Any) -> Any:
    if requested == "FULL_DECODE_ONLY" and "NEVER" not in tiers and set(tiers) != {"ALWAYS"}:
        return "NONE"
    return mode_for(requested, tiers, compiled)


def _still_decodes(requested: Any, tiers: Any, compiled: Any) -> Any:
    if "NEVER" in tiers and requested in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        return requested
    return mode_for(requested, tiers, compiled)


MODE_FOR = Exercise(
    id="05.3",
    title="The weakest layer decides",
    minutes=8,
    items=("B5",),
    ask="Write <code>mode_for(requested, tiers, compiled)</code>. <code>tiers</code> has the tier of every attention "
    "layer by name; the lowest counts for all. Return the graph mode that runs:<br>"
    "<code>'FULL'</code> needs ALWAYS. With NEVER raise <code>ValueError</code>; with a tier in between return "
    "<code>'FULL_AND_PIECEWISE'</code> where the model is <code>compiled</code> in pieces, else "
    "<code>'FULL_DECODE_ONLY'</code>. <code>'FULL_DECODE_ONLY'</code> and <code>'FULL_AND_PIECEWISE'</code> stay, but "
    "with NEVER they become <code>'PIECEWISE'</code> where compiled, else <code>'NONE'</code>. "
    "<code>'PIECEWISE'</code> and <code>'NONE'</code> have no attention in a graph, so they stay. (A decode step has "
    "one token per request here.)",
    solution=mode_for,
    cases=_mode_cases,
    wrong=(
        Wrong("highest", _highest, "You take the highest tier. One graph holds all layers, so the weakest decides."),
        Wrong("alphabet", _alphabet, "You take the minimum of names, which goes by the alphabet: ALWAYS comes first "
              "there, and NEVER is not the lowest."),
        Wrong("quietly", _lowers_quietly, "You lower FULL quietly where nothing can be captured. That is the one case "
              "that is refused, since nothing of what was asked for would be left."),
        Wrong("piecewise too", _never_lowers_everything, "You lower PIECEWISE because of the tier. Its attention runs "
              "outside of the graphs, so the tier says nothing about it."),
        Wrong("full is full", _full_is_full, "You keep FULL for a backend that cannot capture mixed batches."),
        Wrong("decodes need ALWAYS", _decode_needs_always, "You ask for ALWAYS where only decodes are captured. A "
                                                           "lower tier is enough for them."),
        Wrong("still decodes", _still_decodes, "You keep a FULL graph for decodes with a backend that can never be "
              "captured."),
        Wrong("compiled", _always_compiled, "You return modes with PIECEWISE in them where the model was not compiled "
              "in pieces."),
    ),
    hints=(
        "First the tier of the whole model: the lowest of its layers, on this ladder: NEVER, "
        "UNIFORM_SINGLE_TOKEN_DECODE, UNIFORM_BATCH, ALWAYS.",
        "<code>min(tiers, key=ladder.index)</code> with the ladder as a list. Then FULL, then the two modes that have "
        "a FULL graph for decodes, then the rest.",
        "<code>if requested == 'FULL' and tier == 'NEVER': raise ValueError</code>; <code>if requested == 'FULL' and "
        "tier != 'ALWAYS': return 'FULL_AND_PIECEWISE' if compiled else 'FULL_DECODE_ONLY'</code>; …",
    ),
    explanation="A FULL graph holds the attention of every layer, so that the weakest layer decides. What a tier "
                "cannot carry is taken away, and the rest stays. <code>labkit.graphs.modes.resolve</code> has the "
                "same rules with the reason for each, and a few more: steps with several tokens per request, pooling "
                "models, a model that is not cut.",
    redundant={"one tier in all layers": "the simplest cases come first"},
)  # fmt: skip

EXERCISES = (WHY_NOT, PICK, MODE_FOR)
