"""Exercise 11.2: the arguments of vLLM for a need, read by the names and values of a real vLLM.

`read` takes a shell command apart as the shell and vLLM would, and says what is wrong with it. The names come from
`labkit.vllm_options`. Refuses to start vLLM.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from labkit.lab.exercises import Case, Exercise, Wrong, case
from labkit.vllm_options import table

#: Options that take JSON or a field of it → (short name, class of their fields).
_GROUPS = {"compilation_config": ("cc", "CompilationConfig"), "attention_config": ("ac", "AttentionConfig")}
#: The same setting under another name.
_SAME = {
    "attention_backend": "ac.backend", "cudagraph_capture_sizes": "cc.cudagraph_capture_sizes",
    "max_cudagraph_capture_size": "cc.max_cudagraph_capture_size",
}  # fmt: skip
_ENUMS = {"cc.mode": "CompilationMode", "cc.cudagraph_mode": "CUDAGraphMode", "ac.backend": "AttentionBackendEnum"}
_DEFAULTS = {"enforce_eager": False, "tensor_parallel_size": 1}


def read(command: str) -> dict[str, Any]:
    """What a shell command asks vLLM for, one name per setting whatever spelling it has; defaults are left out.

    Raises:
        ValueError: a sentence on the first thing that the shell or vLLM would not take as it is meant.
    """
    words = _words(command)
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        name = words.pop(0).split("=")[0]
        if name not in table()["environment"]:
            raise ValueError(f"vLLM {table()['version']} reads no variable {name}")
    if words[:2] != ["vllm", "serve"]:
        raise ValueError("the command begins with `vllm serve`")
    asked: dict[str, Any] = {}
    rest = words[2:]
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if "model" in asked:
                raise ValueError(f"{word!r} belongs to no option")
            asked["model"] = word
        else:
            for name, value in _option(word, rest):
                asked[name] = value
    return {name: value for name, value in asked.items() if _DEFAULTS.get(name, ...) != value}


def _words(command: str) -> list[str]:
    text = command.strip().replace("\\\n", " ")
    if "\n" in text:
        raise ValueError("the command ends in its first line: a backslash must be the very last character of a line")
    return shlex.split(text, comments=True)


def _option(word: str, rest: list[str]) -> Iterator[tuple[str, Any]]:
    """(setting, value) pairs of one option; takes what belongs to it from `rest`."""
    level = re.fullmatch(r"-O(\d?)", word)
    if level or word.startswith("--optimization-level"):
        value = (level[1] if level else word.partition("=")[2]) or _next(word, rest)
        if f"O{value}" not in table()["enums"]["OptimizationLevel"]:
            raise ValueError(f"there is no level {value}")
        yield "optimization_level", int(value)
        return
    name, equals, value = word.partition("=")
    flag, dot, key = name.partition(".")
    off = flag.startswith("--no-")
    found = _flag(f"--{flag[5:]}" if off else flag)
    setting, kind = _setting(found[0]), found[1]["kind"]
    if setting in _GROUPS:
        short, group = _GROUPS[setting]
        text = value if equals else _next(name, rest)
        fields = {key: _plain(text)} if dot else json.loads(text)
        for field, one in fields.items():
            if field not in table()["classes"][group]:
                raise ValueError(f"vLLM's {group} has no {field}")
            yield f"{short}.{field}", _known(f"{short}.{field}", one)
    elif kind == "switch":
        if equals or dot:
            raise ValueError(f"{flag} takes no value; --no-{flag[2:]} turns it off")
        yield setting, not off
    elif setting == "cudagraph_capture_sizes" and not equals:
        sizes = [int(rest.pop(0)) for _ in list(_digits(rest))]
        yield _SAME[setting], sizes
    else:
        text = value if equals else _next(name, rest)
        yield _SAME.get(setting, setting), _known(_SAME.get(setting, setting), _plain(text))


def _digits(rest: list[str]) -> Iterator[str]:
    for word in rest:
        if not word.isdigit():
            return
        yield word


def _flag(flag: str) -> tuple[str, dict[str, Any]]:
    for name, found in table()["flags"].items():
        if flag in found["names"]:
            return name, found
    raise ValueError(f"vLLM {table()['version']} has no option {flag}")


def _setting(flag: str) -> str:
    return flag[2:].replace("-", "_")


def _next(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ValueError(f"{name} needs a value")
    return rest.pop(0)


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _known(setting: str, value: Any) -> Any:
    """The value under its name where it is one of an enum."""
    enum = table()["enums"].get(_ENUMS.get(setting, ""))
    if enum is None:
        return value
    if value in enum.values() and not isinstance(value, str):
        return next(name for name, number in enum.items() if number == value)
    if value not in enum:
        raise ValueError(f"{setting.partition('.')[2]} has no value {value!r}")
    return value


def means_the_same(expected: Any, got: Any) -> bool:
    """Whether two commands ask vLLM for the same; False for one that vLLM or the shell does not take."""
    try:
        return isinstance(got, str) and read(expected) == read(got)
    except (ValueError, KeyError, TypeError):
        return False


# --- the exercise ----------------------------------------------------------------------------------------------------


def serve_command(need: Mapping[str, Any]) -> str:
    """The command that starts vLLM with what is needed, one option a line."""
    lines = [f"vllm serve {need['model']}"]
    if "gpus" in need:
        lines.append(f"--tensor-parallel-size {need['gpus']}")
    if "backend" in need:
        lines.append(f"--attention-backend {need['backend']}")
    if need.get("debug"):
        lines.append("--enforce-eager")
    else:
        if "level" in need:
            lines.append(f"-O{need['level']}")
        if "mode" in need:
            lines.append(f"-cc.cudagraph_mode={need['mode']}")
        if "sizes" in need:
            sizes = ",".join(str(size) for size in need["sizes"])
            lines.append(f"-cc.cudagraph_capture_sizes=[{sizes}]")
    return " \\\n  ".join(lines)


_MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct")


def _cases(rng: random.Random) -> Iterator[Case]:
    def need(**more: Any) -> dict[str, Any]:
        return {"model": rng.choice(_MODELS), **more}

    yield case("a backend", need(backend="FLASH_ATTN"))
    for name in ("TRITON_ATTN", "FLASHINFER"):
        yield case("a backend", need(backend=name))
    for gpus in (2, 8):
        yield case("several GPUs", need(gpus=gpus))
    for more in ({"debug": True}, {"debug": True, "level": 3}, {"debug": True, "mode": "FULL", "sizes": [1, 2]}):
        yield case("debugging", need(**more))
    yield case("no debugging", need(debug=False))
    yield case("no debugging", need(debug=False))
    for level in (0, 1, 3):
        yield case("a level", need(level=level))
    for mode in ("FULL_DECODE_ONLY", "PIECEWISE"):
        yield case("a graph mode", need(mode=mode))
    for sizes in ([1, 2, 4, 8], [rng.randrange(1, 30), 32, 64]):
        yield case("capture sizes", need(sizes=sizes))


def _comment(need: Mapping[str, Any]) -> str:
    return serve_command(need).replace(" \\\n", " \\  # next\n")


def _eager_false(need: Mapping[str, Any]) -> str:
    return serve_command(need) + (" --enforce-eager=false" if need.get("debug") is False else "")


def _level_in_config(need: Mapping[str, Any]) -> str:
    if "level" not in need or need.get("debug"):
        return serve_command(need)
    rest = {name: value for name, value in need.items() if name != "level"}
    return serve_command(rest) + f" --compilation-config '{{\"level\": {need['level']}}}'"


def _variable(need: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in need.items() if name != "backend"}
    prefix = f"VLLM_ATTENTION_BACKEND={need['backend']} " if "backend" in need else ""
    return prefix + serve_command(rest)


def _no_graphs(need: Mapping[str, Any]) -> str:
    if not need.get("debug"):
        return serve_command(need)
    return serve_command({**need, "debug": False, "mode": "NONE"})


def _labkits_flag(need: Mapping[str, Any]) -> str:
    return serve_command(need).replace("-cc.cudagraph_mode=", "--cudagraph-mode ")


def _bare_list(need: Mapping[str, Any]) -> str:
    if "sizes" not in need:
        return serve_command(need)
    rest = {name: value for name, value in need.items() if name != "sizes"}
    return serve_command(rest) + ("" if need.get("debug") else f" -cc.cudagraph_capture_sizes={need['sizes']}")


def _gpus(need: Mapping[str, Any]) -> str:
    return serve_command(need).replace("--tensor-parallel-size", "--num-gpus")


SERVE_COMMAND = Exercise(
    id="11.2",
    title="What vLLM is to be told",
    minutes=10,
    items=("B5",),
    ask="Write <code>serve_command(need)</code>: the shell command that starts vLLM, as text. It begins with "
    "<code>vllm serve MODEL</code>. <code>need</code> is a dictionary with <code>model</code>, and perhaps: "
    "<code>gpus</code> (that share each layer: <code>--tensor-parallel-size</code>); <code>backend</code> "
    "(<code>--attention-backend</code>); <code>debug</code> (where it is true, <code>--enforce-eager</code> and "
    "nothing else about graphs and compilation); <code>level</code> (<code>-O0</code> to <code>-O3</code>); "
    "<code>mode</code> (the field <code>cudagraph_mode</code>) and <code>sizes</code> (the field "
    "<code>cudagraph_capture_sizes</code>) of <code>-cc</code>, the compilation config: <code>-cc.FIELD=VALUE</code>. "
    "What is not in <code>need</code> is left to vLLM. Any spelling that vLLM 0.33 takes counts; each name and "
    "value is looked up in its sources.",
    solution=serve_command,
    cases=_cases,
    same=means_the_same,
    wrong=(
        Wrong("comment", _comment, "There is something after a backslash. It joins two lines only where it is the last "
              "character; otherwise the command ends there, and the rest is lost."),
        Wrong("=false", _eager_false, "<code>--enforce-eager</code> is a switch and takes no value. Graphs are on "
              "unless it is there."),
        Wrong("level in the config", _level_in_config, "<code>level</code> was a field of the compilation config in "
              "older versions. The levels are <code>-O0</code> to <code>-O3</code> now."),
        Wrong("variable", _variable, "<code>VLLM_ATTENTION_BACKEND</code> is gone: nobody reads it any more, and "
              "nobody complains. It is <code>--attention-backend</code>."),
        Wrong("graphs alone", _no_graphs, "You turn off graphs alone. The compiler still fuses, so that its kernels "
              "stay suspects. <code>--enforce-eager</code> turns off both."),
        Wrong("labkit's flag", _labkits_flag, "<code>--cudagraph-mode</code> is an option of labkit. In vLLM the mode "
              "is a field of the compilation config: <code>-cc.cudagraph_mode=…</code>"),
        Wrong("bare list", _bare_list, "The shell cuts your list at its spaces. Write it without any, or in quotes."),
        Wrong("gpus", _gpus, "There is no such option. GPUs that share every layer are "
              "<code>--tensor-parallel-size</code>."),
    ),
    hints=(
        "Collect the options in a list of lines; which of them are there depends on the keys of <code>need</code>.",
        "<code>debug</code> is asked first: where it is true, nothing about graphs and compilation follows. At the end "
        "join the lines by a space, a backslash and a new line, or by a space alone.",
        '<code>lines = [f"vllm serve {need[\'model\']}"]</code>, then <code>if "backend" in need: '
        "lines.append(f\"--attention-backend {need['backend']}\")</code> and so on; sizes: "
        '<code>"-cc.cudagraph_capture_sizes=[" + ",".join(map(str, need["sizes"])) + "]"</code>.',
    ),
    explanation="Names change between versions, and a wrong one is found at start-up at best. That is why labkit reads "
    "them out of vLLM's own sources: <code>labkit export vllm</code> writes this command for any configuration of the "
    "lab, and says what has no counterpart.",
)  # fmt: skip
