"""From words on a command line to settings, with a sentence for each that makes no sense. Refuses to run anything.

Engine options are EngineConfig's fields with dashes, made from the dataclass itself, so that a new field is an option
at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from labkit.config import (
    ATTENTION_BACKENDS,
    COMPILATION_MODES,
    DTYPES,
    MLA_ATTENTION_BACKENDS,
    SDPA_KERNELS,
    CUDAGraphMode,
    EngineConfig,
)
from labkit.errors import LabkitError, did_you_mean


class UsageError(LabkitError):
    """Words on the command line that make no sense; exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, and with errors that are raised as sentences instead of printed."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [options]",
            description=description,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )
        shared = self.add_argument_group("for every command")
        shared.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
        shared.add_argument("-h", "--help", action="store_true", help="show this text")

    def error(self, message: str) -> NoReturn:
        found = re.match(r"argument ([^:]+): (.*)", message, re.DOTALL)
        what, why = (f"{self.prog} {found[1]}", found[2]) if found else (self.prog, message)
        raise UsageError(what, why.replace("expected one argument", "needs a value"), f"See `{self.prog} --help`.")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse every word or raise UsageError for the first that has no meaning."""
        found, rest = self.parse_known_args(list(words))
        if rest:
            word = rest[0]
            if word.startswith("-"):
                names = sorted(n for action in self._actions for n in action.option_strings if n.startswith("--"))
                flag = word.split("=")[0]
                raise UsageError(f"{self.prog} {flag}", "there is no such option", _closest(flag, names, self.prog))
            raise UsageError(
                f"{self.prog} {word!r}", "stands alone, every value follows an option", f"See `{self.prog} --help`."
            )
        return found


def _closest(word: str, names: Sequence[str], prog: str) -> str:
    hint = did_you_mean(word, names)
    return hint.split(" Options:")[0] if hint.startswith("Did you mean") else f"See `{prog} --help`."


# --- values --------------------------------------------------------------------------------------------------------


def whole(low: int | None = None) -> Callable[[str], int]:
    """Reads a whole number of at least `low`."""

    def read(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is not a whole number") from None
        if low is not None and value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return read


def real(word: str) -> float:
    """Reads a number."""
    try:
        return float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number") from None


def whole_list(low: int | None = None) -> Callable[[str], list[int]]:
    """Reads whole numbers separated by commas, each once: `1,8,32` or `[1, 8, 32]`."""

    def read(word: str) -> list[int]:
        inner = word.strip().removeprefix("[").removesuffix("]")
        return list(dict.fromkeys(whole(low)(part.strip()) for part in inner.split(","))) if inner.strip() else []

    return read


def words(word: str) -> list[str]:
    """Reads words separated by commas."""
    return [part.strip() for part in word.split(",") if part.strip()]


def one_of(options: Sequence[str], upper: bool = False) -> Callable[[str], str]:
    """Reads one of some names; case is ignored."""
    folded = {o.casefold(): o for o in options}

    def read(word: str) -> str:
        if word.casefold() not in folded:
            raise argparse.ArgumentTypeError(f"{word!r} is not known. {did_you_mean(word, options)}".rstrip("."))
        return folded[word.casefold()]

    return read


# --- engine options ------------------------------------------------------------------------------------------------

_HELP = {
    "model": "smollm2-135m-instruct, a named shape (random weights), or a local Hugging Face folder",
    "dtype": f"one of {', '.join(DTYPES)}",
    "device": "auto, cpu or cuda",
    "seed": "of random weights and of sampling without a seed of its own",
    "attention_backend": f"one of {', '.join(ATTENTION_BACKENDS)}, of models with latent "
    f"attention {', '.join(MLA_ATTENTION_BACKENDS)}, or auto; without this option the environment "
    "variable LABKIT_ATTENTION_BACKEND decides, and without either the automatic order",
    "flash_attn_version": "2, 3 or 4, or auto: the first usable one in the order that suits the GPU",
    "sdpa_kernel": f"torch's inner kernel, one of {', '.join(SDPA_KERNELS)}",
    "block_size": "tokens per KV page; without this option the backend decides",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "max_model_len": "longest context in tokens",
    "max_num_seqs": "requests per step at most",
    "max_num_batched_tokens": "tokens per step at most",
    "cudagraph_mode": f"one of {', '.join(CUDAGraphMode.__members__)}",
    "cudagraph_capture_sizes": "sizes to capture, in tokens, like 1,2,4,8",
    "enforce_eager": "no graphs and no compilation",
    "compilation_mode": f"one of {', '.join(COMPILATION_MODES)}",
    "compile_sizes": "numbers of tokens to compile for exactly, with autotuning, like 1,8",
    "splitting_ops": "operators that a compiled model is cut at; an empty list for one piece",
    "prefill_first": "the older scheduling: a step runs prompts or decodes, and prompts go first",
    "piecewise_method": "compile, or break: how a PIECEWISE step is cut at attention",
}


#: Fields where "NONE" is a value of its own, not the absence of one.
_NONE_IS_A_MODE = ("cudagraph_mode", "compilation_mode")


def add_engine_options(parser: Parser, leave_out: Sequence[str] = (), **defaults: Any) -> None:
    """One option per field of EngineConfig, with a command's own defaults; only those given are in the namespace."""
    group = parser.add_argument_group("engine settings (fields of EngineConfig)")
    for field in dataclasses.fields(EngineConfig):
        if field.name in leave_out:
            continue
        flag = "--" + field.name.replace("_", "-")
        usual = defaults.get(field.name, field.default)
        default = "" if usual is None else f" (default {usual})"
        text = (_HELP.get(field.name, "") + default).strip().replace("%", "%%")
        annotation = str(field.type)
        if annotation == "bool":
            group.add_argument(flag, dest=field.name, action=argparse.BooleanOptionalAction, help=text)
        else:
            meta = field.name.rsplit("_", 1)[-1].upper()
            reader = _reader(annotation.removesuffix(" | None") if field.name in _NONE_IS_A_MODE else annotation)
            group.add_argument(flag, dest=field.name, type=reader, metavar=meta, help=text)


def _reader(annotation: str) -> Callable[[str], Any]:
    optional = "None" in annotation
    if annotation.startswith("Sequence[int]"):
        return whole_list()
    if annotation.startswith("Sequence"):
        return words
    kinds = annotation.split(" | ")
    read: Callable[[str], Any] = {"int": whole(), "float": real}.get(kinds[0], str)
    if "int" in kinds and "str" in kinds:
        read = _whole_or_word

    def maybe(word: str) -> Any:
        return None if optional and word.casefold() == "none" else read(word)

    return maybe


def _whole_or_word(word: str) -> int | str:
    return int(word) if word.isdecimal() else word


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The EngineConfig that the options ask for, over a command's own defaults.

    Raises:
        ConfigError: a value that cannot work.
    """
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    return EngineConfig(**{**defaults, **given})
