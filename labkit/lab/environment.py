"""The environment card: what this machine is, which backends load, and the exact reason for each that does not.

`look()` gathers plain values, `environment_card()` shows them. Refuses to build an engine; answers without torch too.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from labkit.lab import ui
from labkit.lab.live import engine_missing
from labkit.measure.provenance import Provenance, collect

if TYPE_CHECKING:
    from labkit.attention.selector import Candidate
    from labkit.config import ModelConfig

LIVE_GPU = "LIVE GPU"
LIVE_CPU = "LIVE CPU"
RECORDED_ONLY = "RECORDED only"
_MODES = {
    LIVE_GPU: ("LIVE", "the engine runs on the GPU, with real CUDA graphs"),
    LIVE_CPU: ("LIVE", "the engine runs on the CPU; graphs are emulated: same discipline, nothing saved"),
    RECORDED_ONLY: ("RECORDED", "no engine here; panels show runs that were recorded on a GPU"),
}


@dataclasses.dataclass(frozen=True)
class Environment:
    """This machine as plain values.

    mode: LIVE_GPU, LIVE_CPU or RECORDED_ONLY. why: the reason when no engine runs. capability: (major, minor).
    free_bytes, total_bytes: of the memory that an engine would use, the GPU's or the machine's; None where unknown.
    backends: every attention backend's answer for `model`, in the order of automatic selection.
    selected: what automatic selection picks. recordings: machines whose recordings are shipped.
    """

    mode: str
    why: str
    made: Provenance
    capability: tuple[int, int] | None
    free_bytes: int | None
    total_bytes: int | None
    cores: int
    model: str
    backends: tuple[Candidate, ...]
    selected: str | None
    recordings: tuple[str, ...]


def look(model: str | None = None) -> Environment:
    """Gather everything; `model` is the shape that backends are asked about (None: the default model's)."""
    from labkit.measure.recordings import shipped

    why = engine_missing()
    made = collect("LIVE", "environment_card")
    mode = RECORDED_ONLY if why else LIVE_GPU if made.gpu else LIVE_CPU
    capability, free, total = None, *_cpu_memory()
    if mode == LIVE_GPU:
        import torch

        capability = torch.cuda.get_device_capability()
        free, total = torch.cuda.mem_get_info()
    shape = shape_of(model)
    backends = backend_answers(shape)
    usable = [c for c in backends if c.usable and c.order is not None]
    return Environment(
        mode, why, made, capability, free, total, os.cpu_count() or 1, shape.name, backends,
        usable[0].name if usable and not why else None, tuple(dict.fromkeys(r.provenance.device for r in shipped())),
    )  # fmt: skip


def environment_card(environment: Environment | None = None) -> widgets.Widget:
    """The card as a widget; None looks now."""
    return ui.root([ui.area(card_html(environment or look()))])


def card_html(env: Environment) -> str:
    """The card as HTML: one table of facts, one of backends."""
    kind, means = _MODES[env.mode]
    facts = [("Mode", f"{ui.badge(kind, env.mode.removeprefix(kind).strip())} {ui.escape(means)}.")]
    if env.why:
        facts.append(("Why", ui.escape(env.why)))
    if env.made.gpu:
        capability = f", compute capability {env.capability[0]}.{env.capability[1]}" if env.capability else ""
        facts.append(("GPU", ui.escape(f"{env.made.gpu}{capability}, driver {env.made.driver or 'unknown'}")))
    else:
        facts.append(("GPU", "none that torch can use" if not env.why else "not looked for"))
    facts.append(("CPU", ui.escape(f"{env.made.cpu}, {env.cores} cores")))
    if env.free_bytes is not None and env.total_bytes is not None:
        facts.append(
            ("Free memory", f"{_gib(env.free_bytes)} of {_gib(env.total_bytes)}{' on the GPU' if env.made.gpu else ''}")
        )
    facts.append(("Versions", ui.escape(" · ".join(f"{name} {version}" for name, version in versions(env)))))
    facts.append(("Recordings", ui.escape(", ".join(env.recordings)) or "none shipped with this copy"))
    lines = "".join(f'<tr><th scope="row">{name}</th><td class="lk-wrap">{value}</td></tr>' for name, value in facts)
    table = f"<table><caption>This machine</caption><tbody>{lines}</tbody></table>"
    columns = [
        ("order", "order#"),
        ("name", "backend"),
        ("state", "here"),
        ("tier", "graph tier"),
        ("reason", "why not and what would help, or why this tier"),
    ]
    caption = f"Attention backends for {env.model}, in the order in which automatic selection tries them"
    answers = ui.table(caption, columns, [_backend_cells(c, env.selected) for c in env.backends])
    answers = answers.replace("<td>@wrap", '<td class="lk-wrap">')
    head = '<div class="lk-head"><h3>Environment</h3></div>'
    return ui.block(f'{head}<div class="lk-scroll">{table}</div>{answers}')


def versions(env: Environment) -> list[tuple[str, str]]:
    """Names and versions of what a result depends on, "not installed" where absent."""
    found = dict(env.made.packages)
    for name in ("torch", "triton", "ipywidgets", "plotly"):
        if name not in found:
            found[name] = _version(name)
    return [(name, version) for name, version in found.items() if version]


def backend_answers(
    shape: ModelConfig, max_num_seqs: int = 256, max_model_len: int | None = None
) -> tuple[Candidate, ...]:
    """Every backend's answer for a model on this machine, with the real reason of what does not load.

    The two limits decide graph tiers; None is the engine's own default length.
    """
    from labkit.attention.interface import AttentionSpec, Platform
    from labkit.attention.selector import candidates
    from labkit.engine.plan import DEFAULT_MAX_MODEL_LEN, resolve_dtype
    from labkit.llm import find_backends, find_device

    platform = Platform("cpu") if engine_missing() else find_device()[1]
    spec = AttentionSpec(
        shape.num_heads, shape.num_kv_heads, shape.head_size, resolve_dtype("auto", platform)[0], 16,
        max_model_len=max_model_len or min(shape.max_position_embeddings, DEFAULT_MAX_MODEL_LEN[platform.device_type]),
        max_num_seqs=max_num_seqs,
    )  # fmt: skip
    found = candidates(spec, platform, find_backends(platform))
    return tuple(sorted(found, key=lambda c: (c.order is None, c.order or 0)))


def _backend_cells(candidate: Candidate, selected: str | None) -> dict[str, str]:
    if candidate.usable:
        state = f'<span class="lk-ok">✓ {"selected" if candidate.name == selected else "usable"}</span>'
        reason = "" if candidate.order is not None else "only when asked for by name on this machine; "
        reason += candidate.tier_reason
    else:
        state = '<span class="lk-no">✗ not here</span>'
        reason = "; ".join(map(str, candidate.reasons))
    return {
        "order": "–" if candidate.order is None else str(candidate.order),
        "name": ui.escape(candidate.name),
        "state": state,
        "tier": ui.escape(candidate.tier.name if candidate.tier is not None else "–"),
        "reason": "@wrap" + ui.escape(reason),
    }


@functools.cache
def _version(name: str) -> str:
    from labkit.measure.provenance import package_version

    return package_version(name) or "not installed"


def shape_of(model: str | None) -> ModelConfig:
    """The shape of a model by name; the default model's for a name that has none, such as a folder."""
    from labkit.models.shapes import DEFAULT_MODEL, SHAPES

    name = model or DEFAULT_MODEL
    return SHAPES.get(name) or SHAPES[DEFAULT_MODEL.removesuffix("-instruct")]


def _cpu_memory() -> tuple[int | None, int | None]:
    """Bytes available and in all, None where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024, int(lines["MemTotal"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None, None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def as_dict(env: Environment) -> dict[str, Any]:
    """Plain values, for tests and for copying into a report."""
    rows: Sequence[dict[str, Any]] = [
        {"name": c.name, "usable": c.usable, "reasons": [str(r) for r in c.reasons]} for c in env.backends
    ]
    return {"mode": env.mode, "made": env.made.as_dict(), "backends": list(rows), "selected": env.selected}
