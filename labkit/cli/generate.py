"""`labkit generate`: prompts in, text out. Refuses to know how text is made."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from labkit.cli.answer import Answer, Console
from labkit.cli.options import Parser, UsageError, add_engine_options, engine_config, real, whole, whole_list
from labkit.config import CUDAGraphMode, SamplingParams

if TYPE_CHECKING:
    from labkit.engine.report import RequestOutput, StepReport
    from labkit.llm import LLM

_SAMPLING = (
    ("max-tokens", whole(), "N", "tokens to generate at most (default 16)"),
    ("temperature", real, "T", "0 is greedy (default 0)"),
    ("top-k", whole(), "K", "sample among the K likeliest tokens; 0 is off"),
    ("top-p", real, "P", "sample among the likeliest tokens that make up P"),
    ("min-tokens", whole(), "N", "tokens to generate before anything may end the text"),
    ("logprobs", whole(), "N", "return the N likeliest tokens at each place"),
    ("stop-token-ids", whole_list(), "IDS", "token ids that end the text"),
)  # fmt: skip


def generate_options(parser: Parser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="raw text; may be given several times")
    parser.add_argument("--chat", action="store_true", default=False, help="put each prompt into the chat template")
    parser.add_argument(
        "--reports", action="store_true", default=False, help="add a report of every step to the object"
    )
    group = parser.add_argument_group("sampling")
    for name, read, meta, text in _SAMPLING:
        group.add_argument(f"--{name}", type=read, metavar=meta, help=text)
    group.add_argument("--sampling-seed", type=whole(), metavar="SEED", help="seed of every request's own generator")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the output; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at an end-of-sequence token")
    add_engine_options(parser)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The SamplingParams that the options ask for."""
    names = [name.replace("-", "_") for name, *_ in _SAMPLING] + ["stop", "ignore_eos"]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return SamplingParams(seed=getattr(args, "sampling_seed", None), **given)


def generate(args: argparse.Namespace, console: Console) -> Answer:
    """Complete every prompt, batched together; a single prompt is written as it comes."""
    prompts: list[str] = getattr(args, "prompt", [])
    if not prompts:
        raise UsageError("labkit generate", "there is no prompt", "Give one: --prompt 'The capital of France is'")
    params, config = sampling_params(args), engine_config(args)
    from labkit.llm import LLM

    reports: list[StepReport] = []
    with LLM(config=config, progress=console.progress) as llm:
        console.clear()
        for note in llm.notes:
            console.note(note)
        begin = time.perf_counter()
        outputs = _complete(llm, prompts, params, args.chat, reports, console)
        seconds = time.perf_counter() - begin
        resolved = llm.config.as_dict()
        emulated = llm.emulated_graphs and llm.cudagraph_mode is not CUDAGraphMode.NONE
        ran = f"{llm.selection.selected}, {llm.cudagraph_mode.name}" + (" (emulated)" if emulated else "")
        ran += f", {llm.config.dtype}, {llm.weights} weights"
    data: dict[str, Any] = {"outputs": [output_object(o) for o in outputs], "config": resolved}
    if args.reports:
        data["reports"] = [{k: v for k, v in r.as_dict().items() if k != "outputs"} for r in reports]
    failed = [o for o in outputs if o.finish_reason == "error"]
    if not console.as_json:
        tokens = sum(o.usage.completion_tokens for o in outputs)
        ends = ", ".join(sorted({str(o.finish_reason) for o in outputs}))
        console.note(f"[{tokens} tokens in {seconds:.2f} s, finished by {ends}; {ran}]")
    return Answer(data, "" if len(prompts) == 1 else _text(prompts, outputs), ok=not failed)


def _complete(
    llm: LLM, prompts: list[str], params: SamplingParams, chat: bool, reports: list[StepReport], console: Console
) -> list[RequestOutput]:
    """Step until all prompts are complete; a prompt that cannot be served has its error in its place."""
    from labkit.engine.report import RequestOutput, Usage
    from labkit.errors import RequestError

    if params.max_tokens == 0:  # over before any step
        return llm.generate(prompts, params, chat=chat)
    done: dict[str, RequestOutput] = {}
    order: list[str] = []
    for i, prompt in enumerate(prompts):
        request_id = f"prompt-{i}"
        order.append(request_id)
        try:
            llm.add_request(prompt, params, request_id, chat=chat)
        except RequestError as error:
            if len(prompts) == 1:
                raise
            done[request_id] = RequestOutput(request_id, (), (), "", "", "error", Usage(0, 0), error=str(error))
    live = len(prompts) == 1
    while any(name not in done for name in order):
        report = llm.step()
        reports.append(report)
        for output in report.outputs:
            if live:
                console.write(output.delta)
            if output.finished:
                done[output.request_id] = output
    if live:
        console.write("\n")
    return [done[name] for name in order]


def output_object(output: RequestOutput) -> dict[str, Any]:
    """One element of `outputs`."""
    out: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "usage": dataclasses.asdict(output.usage),
    }
    if output.logprobs is not None:
        out["logprobs"] = [
            {"token_id": p.token_id, "logprob": p.logprob, "top": [list(pair) for pair in p.top]}
            for p in output.logprobs
        ]
    if output.error:
        out["error"] = output.error
    return out


def _text(prompts: list[str], outputs: list[RequestOutput]) -> str:
    lines = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        lines += [f"[{i}] {prompt!r}", output.error or output.text, ""]
    return "\n".join(lines)


__all__ = ["generate", "generate_options", "output_object", "sampling_params"]
