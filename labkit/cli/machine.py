"""`labkit doctor` and `labkit backends`: what is here, what would run, and the exact reason for what would not."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import platform as system
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.attention.interface import Platform
from labkit.cli.answer import Answer, Console, table
from labkit.cli.options import Parser, add_engine_options, engine_config
from labkit.config import EngineConfig, ModelConfig
from labkit.errors import BackendError, ConfigError, LabkitError, did_you_mean
from labkit.measure.provenance import cpu_model, gpu_driver, package_version

if TYPE_CHECKING:
    from labkit.attention.selector import Candidate

WIDTH = 100
#: Shown by `doctor` when installed.
PACKAGES = (
    "labkit", "torch", "triton", "flash-attn", "flash-attn-4", "flashinfer-python", "xformers", "numpy", "safetensors",
    "tokenizers", "transformers", "gguf", "plotly", "ipywidgets", "jupyterlab", "anywidget",
)  # fmt: skip


def backends_options(parser: Parser) -> None:
    from labkit.attention.registry import GPUS

    parser.add_argument("--gpu", metavar="NAME", help="answer for another machine, every provider assumed installed "
                        f"there: {', '.join(name.replace(' ', '') for name in GPUS)} or cpu")  # fmt: skip
    parser.add_argument("--installed", action="store_true", default=False,
                        help="with --gpu: count only what loads in this environment")  # fmt: skip
    add_engine_options(parser)


def backends(args: argparse.Namespace, console: Console) -> Answer:
    """Every backend's answer to a model on a machine, and the one that would be picked."""
    data = backend_report(engine_config(args), getattr(args, "gpu", None), args.installed)
    assumed = ", everything assumed installed" if data["assumes_installed"] else ""
    head = f"{data['model']}, {data['dtype']}, on {data['gpu']}{assumed}"
    return Answer(data, "\n\n".join([head, _backend_table(data), _selected_line(data)]))


def backend_report(config: EngineConfig, gpu: str | None = None, installed: bool = False) -> dict[str, Any]:
    """The object of `labkit backends`. The environment's backend counts for this machine, not for a named one.

    Raises:
        ConfigError: no such GPU, model or backend. LoadError: a model folder that cannot be read.
    """
    from labkit.attention import registry
    from labkit.attention.selector import candidates, select
    from labkit.engine.plan import attention_spec, page_size_notes
    from labkit.llm import BACKEND_VARIABLE, environment_backend, find_backends

    where = registry.platform_for_gpu(gpu) if gpu else this_platform(config.device)
    asked, by = config.attention_backend, "--attention-backend"
    if asked is None and not gpu:
        asked, by = environment_backend(), BACKEND_VARIABLE
    requested = None if asked == "auto" else asked
    available = find_backends(where, requested) if installed or not gpu else None
    spec = attention_spec(config, model_shape(config.model), where)
    is_set = config.block_size is not None
    notes = registry.platform_notes(where)
    try:
        selection = select(spec, where, requested, available, is_set)
        found, selected = selection.candidates, selection.selected
        notes += page_size_notes(spec, where, selection, available, is_set)
    except BackendError:
        found, selected = candidates(spec, where, available, is_set), None
    return {
        "selected": selected,
        "requested": requested,
        "requested_by": by if requested else None,
        "backends": [_backend_row(c) for c in found],
        "model": Path(config.model).name,
        "dtype": spec.dtype,
        "block_size": next((c.block_size for c in found if c.name == selected), spec.block_size),
        "gpu": where.name or where.device_type,
        "assumes_installed": available is None,
        "notes": notes,
    }


def _backend_row(c: Candidate) -> dict[str, Any]:
    """`reasons` are sentences; `conditions` are the same in parts, for programs that act on them."""
    row: dict[str, Any] = {
        "name": c.name, "usable": c.usable, "reasons": [str(r) for r in c.reasons],
        "tier": c.tier.name, "order": c.order, "block_size": c.block_size,
        "tier_reason": c.tier_reason, "conditions": [dataclasses.asdict(r) for r in c.reasons],
    }  # fmt: skip
    if c.versions:
        row["versions"] = [
            {
                "version": v.version, "provider": v.provider, "usable": v.usable,
                "reasons": [str(r) for r in v.reasons], "conditions": [dataclasses.asdict(r) for r in v.reasons],
            }
            for v in c.versions
        ]  # fmt: skip
    return row


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


def _backend_table(data: dict[str, Any]) -> str:
    """One line per backend in the order in which they are tried, and under it what it fails or what it can."""
    rows = data["backends"]
    lines = [("", "backend", "usable", "pages", "captured")]
    for row in rows:
        order = str(row["order"]) if row["order"] is not None else "-"
        tier = row["tier"] if row["usable"] else ""
        lines.append((order, row["name"], "yes" if row["usable"] else "no", str(row["block_size"]), tier))
    head, *texts = table(lines, left=(1, 2, 4), indent=" ").split("\n")
    out = [head]
    for text, row in zip(texts, rows, strict=True):
        out.append(text + ("   ← selected" if row["name"] == data["selected"] else ""))
        if row["usable"]:
            out += _wrapped(row["tier_reason"], "      ")
        for condition in row["conditions"]:
            out += _condition(condition, "      ")
        for version in row.get("versions", ()):
            label = f"{'FA' if row['name'] == 'FLASH_ATTN' else 'version '}{version['version']}"
            word = "yes" if version["usable"] else "no"
            out += _wrapped(f"{label}  {word:3}  {version['provider']}".rstrip(), "      ", "               ")
            for condition in version["conditions"]:
                if condition not in row["conditions"]:  # what holds for all of them is said once
                    out += _condition(condition, "           ")
    if any(row["order"] is None for row in rows):
        out += ["", *_wrapped("-: never picked by itself, only by an explicit choice", " ")]
    return "\n".join(out)


def _condition(condition: dict[str, Any], indent: str) -> list[str]:
    out = _wrapped(condition["condition"], f"{indent}x ", f"{indent}  ")
    return out + (_wrapped(condition["remedy"], f"{indent}  → ", f"{indent}    ") if condition["remedy"] else [])


def _wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=first if rest is None else rest)


def _selected_line(data: dict[str, Any], whom: str = "") -> str:
    """What would be picked and who said so, and what a reader must know about the answer."""
    asked, by = data["requested"], data["requested_by"]
    if data["selected"] is None:
        usable = [row["name"] for row in data["backends"] if row["usable"] and row["order"] is not None]
        why = f"{by} asks for {asked}, which cannot serve" if asked else "no backend can serve"
        text = f"selected{whom}: none; {why}" + (f" (usable: {', '.join(usable)})" if asked and usable else "")
    else:
        why = f"{by} asks for it" if asked else "the first usable one in this order"
        text = f"selected{whom}: {data['selected']} ({why}), pages of {data['block_size']} tokens"
    return "\n".join([text, *(line for note in data["notes"] for line in _wrapped(note, "note: ", "      "))])


# --- doctor --------------------------------------------------------------------------------------------------------

#: Linux driver branch → newest CUDA whose programs it runs whole; Windows' drivers, which WSL uses, share the numbers.
#: From the table "CUDA Toolkit and Corresponding Driver Versions" in NVIDIA's CUDA Toolkit release notes
#: (https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/). A branch runs programs for later CUDAs of the same major
#: version too, unless they bring PTX (https://docs.nvidia.com/deploy/cuda-compatibility/).
DRIVER_CUDA: tuple[tuple[int, tuple[int, int]], ...] = (
    (450, (11, 0)), (455, (11, 1)), (460, (11, 2)), (465, (11, 3)), (470, (11, 4)), (495, (11, 5)), (510, (11, 6)),
    (515, (11, 7)), (520, (11, 8)), (525, (12, 0)), (530, (12, 1)), (535, (12, 2)), (545, (12, 3)), (550, (12, 4)),
    (555, (12, 5)), (560, (12, 6)), (570, (12, 8)), (575, (12, 9)), (580, (13, 0)), (590, (13, 1)),
)  # fmt: skip


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
    parts = [table([(name, str(value)) for name, value in lines], left=(0, 1))]
    if data["backends"]:
        parts += [_backend_table(data), _selected_line(data, f" for {data['model']}")]
    if data["advice"]:
        parts.append("\n".join(line for advice in data["advice"] for line in _wrapped(advice, "- ", "  ")))
    return Answer(data, "\n\n".join(parts))


def _gpu_line(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, sm_{gpu['capability'].replace('.', '')}, {gpu['memory_mib'] / 1024:.0f} GiB"


def doctor_report(config: EngineConfig) -> dict[str, Any]:
    """The object of `labkit doctor`; answers whatever is missing, torch included."""
    gpus, torch_error, torch_cuda = find_gpus()
    packages = {name: version for name in PACKAGES if (version := package_version(name))}
    if provider := provider_of("flash_attn_interface"):
        packages["flash_attn_interface"] = provider
    driver, kind = gpu_driver(), system.system()
    advice = system_advice(kind, system.release())
    too_old = driver_advice(driver, torch_cuda)
    if torch_error:
        advice.append(f"No engine runs here: {torch_error}. Install it with: pip install 'labkit[engine]'")
    elif too_old:
        advice.append(too_old)
    elif not gpus and driver:
        advice.append(
            f"There is an NVIDIA driver ({driver}) but torch {packages.get('torch')} sees no GPU: "
            + (
                "install a CUDA build of torch (pytorch.org/get-started)."
                if not torch_cuda
                else "check CUDA_VISIBLE_DEVICES."
            )
        )
    elif not gpus and kind != "Darwin":
        advice.append("There is no CUDA GPU: steps run on the CPU, and graphs are emulated, which saves nothing.")
    if any(float(g["capability"]) < 8.0 for g in gpus):
        advice.append("A GPU older than sm_80 has no bfloat16 arithmetic: dtype auto means float16 there.")
    if not torch_error and "triton" not in packages and kind == "Linux":
        advice.append(
            "Triton is not installed, so TRITON_ATTN cannot run: it comes with torch on Linux (pip install triton)."
        )
    report: dict[str, Any] = {}
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
        "platform": f"{kind} {system.release()} {system.machine()}",
        "cpu": cpu_model(),
        "gpus": gpus,
        "driver": driver,
        "packages": packages,
        "backends": [],
        "selected": None,
        **{k: v for k, v in report.items() if k in _FROM_BACKENDS},
        "model": config.model,
        "advice": advice,
    }


_FROM_BACKENDS = ("backends", "selected", "requested", "requested_by", "block_size", "notes")


def system_advice(kind: str, release: str) -> list[str]:
    """What users of a system other than plain Linux get, from the system's name and kernel release."""
    if kind == "Darwin":
        return [
            "macOS has neither CUDA nor Triton: steps run on the CPU with TORCH_SDPA, graphs are emulated, and the "
            "RECORDED runs show what a GPU does. Untried so far."
        ]
    if kind == "Windows":
        return [
            "labkit is tested on Linux only. On Windows take WSL 2, where make, CUDA and Triton are what they are on "
            "Linux. Outside it there is no make and no Triton package: TORCH_SDPA is left. Untried so far."
        ]
    if kind == "Linux" and "microsoft" in release.casefold():
        return [
            "This is WSL: the GPU comes through the driver of Windows, so update that one and install none in here. "
            "The rest is as on Linux. Untried so far."
        ]
    return []


def driver_advice(driver: str | None, torch_cuda: str | None) -> str:
    """A sentence where the driver is too old for the CUDA that torch was built for; empty where it is not, or unknown.

    Args:
        driver: like "580.159.03". torch_cuda: `torch.version.cuda`, like "13.0".
    """
    try:
        branch = int((driver or "").split(".")[0])
        major, minor = map(int, (torch_cuda or "").split(".")[:2])
    except ValueError:
        return ""
    runs = max((cuda for first, cuda in DRIVER_CUDA if first <= branch), default=(0, 0))
    need = next((first for first, cuda in DRIVER_CUDA if cuda >= (major, minor)), None)
    enough = next((first for first, cuda in DRIVER_CUDA if cuda[0] == major), None)
    if enough is None or runs >= (major, minor) or branch >= DRIVER_CUDA[-1][0]:
        return ""
    newest = f"{runs[0]}.{runs[1]}" if runs[0] else "before 11.0"
    if branch < enough:
        return (
            f"The driver ({driver}) came with CUDA {newest}, and this torch is built for CUDA {torch_cuda}: it sees no "
            f"GPU. Update the driver to {enough} or newer, or install a build of torch for an older CUDA "
            "(pytorch.org/get-started)."
        )
    return (
        f"The driver ({driver}) came with CUDA {newest}, and this torch is built for CUDA {torch_cuda}. It runs, but a "
        "kernel that is compiled here may be refused (unsupported PTX): then update the driver to "
        f"{need or DRIVER_CUDA[-1][0]} or newer."
    )


def provider_of(module: str) -> str | None:
    """The installed distribution that brings a top-level module, with its version; None without one."""
    names = importlib.metadata.packages_distributions().get(module)
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else None


def find_gpus() -> tuple[list[dict[str, Any]], str, str | None]:
    """The GPUs that torch sees, why torch does not load (empty when it does), and the CUDA it was built for, if any."""
    try:
        import torch
    except Exception as error:
        return [], f"torch does not load ({type(error).__name__}: {error})", None
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
    return gpus, "", torch.version.cuda


def _default_model_is_here() -> bool:
    try:
        from labkit.models.fetch import default_model_dir

        return default_model_dir() is not None
    except Exception:  # doctor answers, whatever is broken
        return False
