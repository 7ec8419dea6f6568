"""`labkit export vllm`: the engine settings as another engine takes them. Runs nothing, and imports no torch."""

from __future__ import annotations

import argparse

from labkit.cli.answer import Answer, Console
from labkit.cli.options import Parser, add_engine_options, engine_config, whole
from labkit.vllm_options import Note, to_vllm

#: Fields of EngineConfig that mean more here than in labkit's engine, so that they are read as options of their own.
_OWN = ("tensor_parallel_size",)


def export_vllm_options(parser: Parser) -> None:
    parser.add_argument("--keep-defaults", action="store_true", default=False,
                        help="also write labkit's defaults where vLLM's differ, for a comparison")  # fmt: skip
    for name, what in (
        ("tensor", "GPUs that share every layer"), ("pipeline", "GPUs that each hold some of the layers"),
        ("data", "copies of the whole, each with its own requests"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}-parallel-size", type=whole(1), default=1, metavar="N",
                            help=f"{what} (default 1)")  # fmt: skip
    add_engine_options(parser, leave_out=_OWN)


def export_vllm(args: argparse.Namespace, console: Console) -> Answer:
    """The settings as a vLLM command line and as Python, and what they cannot say."""
    sizes = {f"{name}_parallel_size": getattr(args, f"{name}_parallel_size") for name in ("tensor", "pipeline", "data")}
    for name in _OWN:
        delattr(args, name)
    found = to_vllm(engine_config(args), keep_defaults=args.keep_defaults, **sizes)
    parts = [f"For vLLM {found.version}:", found.command, "The same in Python:", found.python]
    parts += [_listed("Has no counterpart:", found.missing), _listed("Is otherwise in vLLM:", found.different)]
    return Answer({"engine": "vllm", **found.as_dict()}, "\n\n".join(part for part in parts if part))


def _listed(head: str, notes: tuple[Note, ...]) -> str:
    return "\n".join([head, *(f"  {note}" for note in notes)]) if notes else ""
