"""Finds the command, prints its answer, turns errors into sentences and exit codes. Refuses to know what commands do.

Exit codes: 0 done, 1 failed, 2 bad arguments. With `--json` stdout carries one object and nothing else, whatever
happens.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from labkit.cli.answer import Answer, Console
from labkit.cli.options import Parser, UsageError
from labkit.errors import ConfigError, LabkitError, RequestError, did_you_mean

#: command → (module, what it does). A command of two words is listed under both.
COMMANDS = {
    "generate": ("labkit.cli.generate", "complete prompts"),
    "doctor": ("labkit.cli.machine", "what is here, what loads, and what to do about the rest"),
    "backends": (
        "labkit.cli.machine",
        "which attention backend serves a model, here or on a named GPU, and why not the others",
    ),
    "modes": ("labkit.cli.rules", "which graph mode a request for one ends up as"),
    "sizes": ("labkit.cli.rules", "which sizes are captured, and what is padded to what"),
    "split": ("labkit.cli.split", "a compiled model's pieces, which are the same code, and what fusion saves"),
    "bench": ("labkit.cli.measure", "time decode steps, eager and under graphs"),
    "bench attention": ("labkit.cli.measure", "time one backend's attention kernels"),
    "bench moe": ("labkit.cli.experts", "time a layer of experts, and how fast it reads their weights"),
    "bench requests": ("labkit.cli.requests", "time requests when long prompts arrive, for each way of scheduling"),
    "bench import": ("labkit.cli.measure", "time `import labkit`, and say what it loads"),
    "record": ("labkit.cli.record", "measure a suite into a file; goes on where it stopped"),
    "recordings": ("labkit.cli.recordings", "list the recordings that panels show: those that ship, and yours"),
    "recordings add": ("labkit.cli.recordings", "check a recording and put it among yours"),
    "recordings diff": ("labkit.cli.recordings", "two machines side by side, where both have the same configuration"),
    "timeline": ("labkit.cli.timeline", "one step on two lanes: what the host launches and what the device runs"),
    "compare transformers": ("labkit.cli.compare", "the same decode steps in transformers, in the same process"),
    "export vllm": ("labkit.cli.export", "the settings as vLLM takes them, and what has no counterpart"),
    "simulate": ("labkit.cli.simulate", "what a decode step would cost, computed from a model's shape"),
    "claims": ("labkit.cli.claims", "the source texts' numbers beside ours, each with a verdict"),
    "course": ("labkit.cli.course", "how far you have come: chapters, exercises, self-check items, what is next"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` is what follows `labkit`; None takes the process's own."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    console = Console(as_json)
    with _stdout_kept_clean(as_json) as out:
        answer, code = _answer(words, console)
        console.clear()
        with contextlib.suppress(BrokenPipeError):
            if as_json:
                out.write(json.dumps(answer.data, ensure_ascii=False, default=str) + "\n")
            elif answer.text:
                (out if code == 0 or answer.ok else sys.stderr).write(answer.text.rstrip("\n") + "\n")
            out.flush()
    return code


def _answer(words: list[str], console: Console) -> tuple[Answer, int]:
    try:
        answer = _run(words, console)
        return answer, 0 if answer.ok else 1
    except (UsageError, ConfigError, RequestError) as error:
        return _failed(error), 2
    except LabkitError as error:
        return _failed(error), 1
    except KeyboardInterrupt:
        return _failed(LabkitError(_name(words), "it was interrupted", "")), 1
    except ModuleNotFoundError as error:
        why = f"{type(error).__name__}: {error}"
        return _failed(
            LabkitError(_name(words), why, "`pip install -e '.[engine]'` installs what the engine needs.")
        ), 1
    except Exception as error:
        if os.environ.get("LABKIT_DEBUG"):
            traceback.print_exc()
        why = f"{type(error).__name__}: {error}".rstrip(".: ")
        return _failed(LabkitError(_name(words), why, "Set LABKIT_DEBUG=1 to see where it happened.")), 1


def _failed(error: LabkitError) -> Answer:
    what = error.what if error.what.startswith("labkit") else f"labkit: {error.what}"
    lines = [f"{what}: {error.why}."] + ([f"  {error.try_}"] if error.try_ else [])
    return Answer({"error": error.as_dict()}, "\n".join(lines), ok=False)


def _name(words: Sequence[str]) -> str:
    return " ".join(["labkit", *words[:1]])


def _run(words: list[str], console: Console) -> Answer:
    words = [word for word in words if word != "--json"]
    if not words or words[0] in ("-h", "--help", "help"):
        text = _overview()
        return Answer({"help": text}, text, ok=True) if words else _no_command(text)
    if words[0] == "--version":
        from labkit import __version__

        return Answer({"version": __version__}, f"labkit {__version__}")
    name = words[0]
    if name not in _first_words():
        raise UsageError(f"labkit {name}", "there is no such command", did_you_mean(name, _first_words()))
    rest = words[1:]
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        whole = [c for c in COMMANDS if c.startswith(f"{name} ")]
        raise UsageError(f"labkit {name}", "needs a second word", " or ".join(f"`labkit {c}`" for c in whole) + ".")
    module_name, description = COMMANDS[name]
    module = importlib.import_module(module_name)
    command = name.replace(" ", "_")
    parser = Parser(f"labkit {name}", description[0].upper() + description[1:] + ".")
    getattr(module, f"{command}_options")(parser)
    if "-h" in rest or "--help" in rest:
        text = parser.format_help()
        return Answer({"help": text}, text)
    run: Any = getattr(module, command)
    return run(parser.read(rest), console)


def _no_command(text: str) -> Answer:
    raise UsageError("labkit", "no command was given", "Commands: " + ", ".join(_first_words()) + ".")


def _first_words() -> list[str]:
    return list(dict.fromkeys(command.split()[0] for command in COMMANDS))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: labkit COMMAND [options]", ""]
    lines += [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        "Every command takes --json (one object on stdout) and --help.",
        "Exit codes: 0 done, 1 failed, 2 bad arguments.",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _stdout_kept_clean(as_json: bool) -> Iterator[Any]:
    """Yields the real stdout. With `as_json`, whatever else writes to stdout meanwhile lands on stderr.

    That includes libraries and child processes that write to the file descriptor past Python.
    """
    out = sys.stdout
    if not as_json:
        yield out
        return
    saved = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no descriptor behind it, as in a notebook
        if out.fileno() == 1:
            out.flush()
            saved = os.dup(1)
            os.dup2(2, 1)
    target = os.fdopen(saved, "w", encoding="utf-8") if saved is not None else out
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield target
    finally:
        if saved is not None:
            with contextlib.suppress(BrokenPipeError):
                target.flush()
            os.dup2(saved, 1)
            with contextlib.suppress(BrokenPipeError):
                target.close()
