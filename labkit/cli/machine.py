"""`labkit doctor` and `labkit backends`: what is here, what would run, and the exact reason for what would not."""

from __future__ import annotations

import argparse
import dataclasses
import platform as system
import textwrap
from pathlib import Path
from typing import Any

from labkit.attention.interface import Platform
from labkit.cli.answer import Answer, Console, table
from labkit.cli.options import Parser, add_engine_options, engine_config
from labkit.config import EngineConfig, ModelConfig
from labkit.errors import BackendError, ConfigError, LabkitError, did_you_mean
from labkit.measure.provenance import cpu_model, gpu_driver, package_version

#: Shown by `doctor` when installed.
PACKAGES = (
    "labkit", "torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "gguf", "plotly", "ipywidgets",
    "jupyterlab", "anywidget",
)  # fmt: skip


def backends_options(parser: Parser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help="answer for another GPU, every provider assumed installed there")
    parser.add_argument("--installed", action="store_true", default=False,
                        help="with --gpu: count only what loads in this environment")  # fmt: skip
    add_engine_options(parser)


def backends(args: argparse.Namespace, console: Console) -> Answer:
    """Every backend's answer to a model on a machine, and the one that would be picked."""
    config = engine_config(args)
    data = backend_report(config, getattr(args, "gpu", None), args.installed)
    head = f"{data['model']}, {data['dtype']}, pages of {data['block_size']} tokens, on {data['gpu']}"
    picked = f"selected: {data['selected'] or 'none'}"
    return Answer(data, f"{head}\n\n{_backend_table(data['backends'])}\n\n{picked}")


def backend_report(config: EngineConfig, gpu: str | None = None, installed: bool = False) -> dict[str, Any]:
    """The object of `labkit backends`.

    Raises:
        ConfigError: no such GPU or model. LoadError: a model folder that cannot be read.
    """
    from labkit.attention import registry
    from labkit.attention.selector import candidates, select
    from labkit.engine.plan import make_plan, resolve_dtype
    from labkit.llm import find_backends

    where = registry.platform_for_gpu(gpu) if gpu else this_platform(config.device)
    model = model_shape(config.model)
    dtype, _ = resolve_dtype(config.dtype, where)
    available = find_backends(where, config.attention_backend) if installed or not gpu else None
    # The plan's own specification, asked for without insisting on a backend or a graph mode.
    options = {"sdpa_kernel": "auto", "num_splits": 0, "split_mixed_batches": False, "batch_invariant": False}
    relaxed = config.replace(attention_backend=None, cudagraph_mode="NONE", dtype=dtype, **options)
    spec = dataclasses.replace(
        make_plan(relaxed.replace(attention_backend="TORCH_SDPA"), model, where, None).spec,
        **{name: getattr(config, name) for name in options},
    )
    is_set = config.block_size is not None
    try:
        selection = select(spec, where, None, available, is_set)
        found, selected = selection.candidates, selection.selected
    except BackendError:
        found, selected = candidates(spec, where, available, is_set), None
    if config.attention_backend is not None:
        asked = next(c for c in found if c.name == config.attention_backend)
        selected = asked.name if asked.usable else None
    rows = []
    for c in found:
        row: dict[str, Any] = {
            "name": c.name, "usable": c.usable, "reasons": [str(r) for r in c.reasons],
            "tier": c.tier.name if c.tier is not None else None, "order": c.order, "block_size": c.block_size,
        }  # fmt: skip
        if c.tier_reason:
            row["tier_reason"] = c.tier_reason
        rows.append(row)
    return {
        "selected": selected,
        "backends": rows,
        "model": Path(config.model).name,
        "dtype": dtype,
        "block_size": next((c.block_size for c in found if c.name == selected), config.block_size or 16),
        "gpu": where.name or where.device_type,
        "assumes_installed": available is None,
    }


def this_platform(device: str = "auto") -> Platform:
    """The platform of this machine; a CPU where torch is missing."""
    from labkit.llm import find_device

    try:
        return find_device(device)[1]
    except ImportError:
        return Platform("cpu")


def model_shape(name: str) -> ModelConfig:
    """The shape behind a model's name or folder, without its weights."""
    from labkit.models.shapes import DEFAULT_MODEL, SHAPES, model_names

    known = {option.casefold(): option for option in model_names()}
    name = known.get(name.casefold(), name)
    if name == DEFAULT_MODEL:
        return SHAPES["smollm2-135m"]
    if name in SHAPES:
        return SHAPES[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        from labkit.models.loader import load_config

        return load_config(folder)
    raise ConfigError(f"model={name!r}", "there is no model or folder of that name", did_you_mean(name, model_names()))


def _backend_table(rows: list[dict[str, Any]]) -> str:
    lines = [("order", "backend", "usable", "captured", "")]
    for row in rows:
        why = "; ".join(row["reasons"]) or row.get("tier_reason", "")
        order = str(row["order"]) if row["order"] is not None else "-"
        lines.append((order, row["name"], "yes" if row["usable"] else "no", row["tier"] or "-", why))
    narrow = table([line[:4] for line in lines], left=(1, 2, 3)).split("\n")
    width = max(map(len, narrow)) + 2
    out = []
    for text, line in zip(narrow, lines, strict=True):
        parts = textwrap.wrap(line[4], max(40, 118 - width)) or [""]
        out += [text.ljust(width) + parts[0], *(" " * width + part for part in parts[1:])]
    return "\n".join(line.rstrip() for line in out)


# --- doctor --------------------------------------------------------------------------------------------------------


def doctor_options(parser: Parser) -> None:
    add_engine_options(parser)


def doctor(args: argparse.Namespace, console: Console) -> Answer:
    """The machine, the packages, the backends, and what to do about whatever is missing."""
    data = doctor_report(engine_config(args))
    lines = [
        ("python", data["python"]), ("platform", data["platform"]), ("cpu", data["cpu"]),
        *(("gpu", _gpu_line(gpu)) for gpu in data["gpus"]),
        ("driver", data["driver"] or "none"), *data["packages"].items(),
    ]  # fmt: skip
    text = table([(name, str(value)) for name, value in lines], left=(0, 1))
    text += "\n\n" + (_backend_table(data["backends"]) if data["backends"] else "no backend could be asked")
    text += f"\n\nselected for {data['model']}: {data['selected'] or 'none'}"
    for advice in data["advice"]:
        text += "\n" + textwrap.fill(f"- {advice}", 118, subsequent_indent="  ")
    return Answer(data, text)


def _gpu_line(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, sm_{gpu['capability'].replace('.', '')}, {gpu['memory_mib'] / 1024:.0f} GiB"


def doctor_report(config: EngineConfig) -> dict[str, Any]:
    """The object of `labkit doctor`; answers whatever is missing, torch included."""
    gpus, torch_error, torch_cuda = find_gpus()
    packages = {name: version for name in PACKAGES if (version := package_version(name))}
    driver, advice = gpu_driver(), []
    if torch_error:
        advice.append(f"No engine runs here: {torch_error}. Install it with: pip install 'labkit[engine]'")
    elif not gpus and driver:
        advice.append(
            f"There is an NVIDIA driver ({driver}) but torch {packages.get('torch')} sees no GPU: "
            + (
                "install a CUDA build of torch (pytorch.org/get-started)."
                if not torch_cuda
                else "check CUDA_VISIBLE_DEVICES."
            )
        )
    elif not gpus:
        advice.append("There is no CUDA GPU: steps run on the CPU, and graphs are emulated, which saves nothing.")
    if any(float(g["capability"]) < 8.0 for g in gpus):
        advice.append("A GPU older than sm_80 has no bfloat16 arithmetic: dtype auto means float16 there.")
    if not torch_error and "triton" not in packages:
        advice.append(
            "Triton is not installed, so TRITON_ATTN cannot run: it comes with torch on Linux (pip install triton)."
        )
    report: dict[str, Any] = {"selected": None, "backends": []}
    try:
        report = backend_report(config)
    except LabkitError as error:
        advice.append(f"No backend could be asked: {error}")
    except Exception as error:  # whatever is broken here, the rest of the report must still come
        advice.append(f"No backend could be asked ({type(error).__name__}: {error}).")
    if not torch_error and not _default_model_is_here():
        advice.append("The default model is not in the cache yet: `python -m labkit.models.fetch` puts it there.")
    return {
        "python": system.python_version(),
        "platform": f"{system.system()} {system.release()} {system.machine()}",
        "cpu": cpu_model(),
        "gpus": gpus,
        "driver": driver,
        "packages": packages,
        "backends": report["backends"],
        "selected": report["selected"],
        "model": config.model,
        "advice": advice,
    }


def find_gpus() -> tuple[list[dict[str, Any]], str, bool]:
    """The GPUs that torch sees, why torch does not load (empty when it does), and whether it was built for CUDA."""
    try:
        import torch
    except Exception as error:
        return [], f"torch does not load ({type(error).__name__}: {error})", False
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": found.name,
                "capability": f"{found.major}.{found.minor}",
                "memory_mib": found.total_memory // 2**20,
                "multiprocessors": found.multi_processor_count,
            }
        )
    return gpus, "", torch.version.cuda is not None


def _default_model_is_here() -> bool:
    try:
        from labkit.models.fetch import default_model_dir

        return default_model_dir() is not None
    except Exception:  # doctor answers, whatever is broken
        return False
