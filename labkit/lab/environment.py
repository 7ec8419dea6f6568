"""The environment card: what this machine is, which backends load, and the exact reason for each that does not.

`look()` gathers plain values, `environment_card()` shows them. Refuses to build an engine; answers without torch too.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING

import ipywidgets as widgets

from labkit.lab import ui
from labkit.lab.machine import backend_answers, cpu_memory, engine_missing, shape_of
from labkit.measure.provenance import Provenance, collect

if TYPE_CHECKING:
    from labkit.attention.selector import Candidate

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
    capability, free, total = None, *cpu_memory()
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


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
