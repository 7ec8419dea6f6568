"""The exercises of chapter 07: a correct replay, lines that no capture takes, a verifier, the steps that pay for it.

Refuses to record anything: graphs are `StaticGraph`s over small arrays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from labkit.lab.ch07.lines import ILLEGAL, LINES, illegal_lines
from labkit.lab.exercises import Case, Exercise, Wrong, case
from labkit.lab.static_graph import StaticGraph, replay


def twice_plus_one(reads: Any, writes: Any) -> None:
    """What the chapter's small graphs compute."""
    writes[:] = 2 * reads + 1


def _graph(size: int, left: Sequence[int]) -> StaticGraph:
    """A graph of `size` whose buffer still holds `left`."""
    buffer = np.zeros(size, dtype=np.int64)
    buffer[: len(left)] = left
    return StaticGraph(buffer, np.zeros(size, dtype=np.int64), twice_plus_one, f"a graph of {size}")


# --- 07.1 ------------------------------------------------------------------------------------------------------------


def _replay_cases(rng: random.Random) -> Iterator[Case]:
    full, short, several = "one input that fills it", "an input shorter than the graph", "several inputs"
    yield case(full, _graph(3, [1, 1, 1]), [np.array([4, 5, 6])])
    yield case(short, _graph(4, [0, 0, 0, 0]), [np.array([7, 8])])
    yield case(several, _graph(2, [1, 1]), [np.array([2, 3]), np.array([4, 5])])
    for _ in range(4):
        size = rng.randint(3, 8)
        some = lambda n: np.array([rng.randint(2, 60) for _ in range(n)])  # noqa: E731
        left = [rng.randint(61, 99) for _ in range(size)]
        yield case(full, _graph(size, left), [some(size)])
        yield case(short, _graph(size, []), [some(rng.randint(1, size - 1))])
        yield case("something left behind the input", _graph(size, left), [some(size - 1)])
        yield case(several, _graph(size, left), [some(size) for _ in range(rng.randint(2, 4))])


def rebind(graph: StaticGraph, inputs: list[Any]) -> list[Any]:
    """Gives the name `graph.input` a new array; what was recorded reads the old one."""
    found = []
    for values in inputs:
        n = len(values)
        graph.input = np.concatenate([values, np.zeros(len(graph.output) - n, dtype=values.dtype)])
        graph.launch()
        found.append(graph.output[:n].copy())
    return found


def _keep_views(graph: StaticGraph, inputs: list[Any]) -> list[Any]:
    found = []
    for values in inputs:
        n = len(values)
        graph.input[:n], graph.input[n:] = values, 0
        graph.launch()
        found.append(graph.output[:n])
    return found


def _whole_output(graph: StaticGraph, inputs: list[Any]) -> list[Any]:
    found = []
    for values in inputs:
        n = len(values)
        graph.input[:n], graph.input[n:] = values, 0
        graph.launch()
        found.append(graph.output.copy())
    return found


def _leave_the_rest(graph: StaticGraph, inputs: list[Any]) -> list[Any]:
    found = []
    for values in inputs:
        n = len(values)
        graph.input[:n] = values
        graph.launch()
        found.append(graph.output[:n].copy())
    return found


def _launch_first(graph: StaticGraph, inputs: list[Any]) -> list[Any]:
    found = []
    for values in inputs:
        n = len(values)
        graph.launch()
        graph.input[:n], graph.input[n:] = values, 0
        found.append(graph.output[:n].copy())
    return found


REPLAY = Exercise(
    id="07.1",
    title="Press play",
    minutes=10,
    items=("A5", "B3"),
    ask="Write <code>replay(graph, inputs)</code>. <code>graph.input</code> and <code>graph.output</code> are arrays "
    "of the size that the graph was captured for; <code>graph.launch()</code> takes nothing, reads the one and writes "
    "the other. For each array of <code>inputs</code>, in order: bring its n values into the graph's input, write 0 "
    "into the places behind them, launch once, and keep the first n results. Return the list of results. They must "
    "stay what they are when the graph is launched again.",
    solution=replay,
    cases=_replay_cases,
    mutates=True,
    wrong=(
        Wrong("rebind", rebind, "You give the name `graph.input` another array. The graph was recorded with the "
              "address of the old one, and goes on reading it."),
        Wrong("views", _keep_views, "You keep a view of the output buffer. The next launch overwrites it, so that all "
              "your results become the last one: copy it."),
        Wrong("whole output", _whole_output, "You return the rows of the padding as well."),
        Wrong("leave the rest", _leave_the_rest, "Behind your values the buffer still holds those of an earlier input. "
              "Write 0 there."),
        Wrong("launch first", _launch_first, "You launch before the new values are in the buffer, so that each result "
              "belongs to the input before."),
    ),
    redundant={
        "one input that fills it": "the simplest case; it shows a rebound or late input without anything else",
        "an input shorter than the graph": "shows rows of padding that are returned, without old values behind them",
    },
    hints=(
        "The graph knows two addresses and nothing else. What has to change, the name or what lies at the address?",
        "<code>graph.input[:n] = values</code> writes into the array that is there; <code>graph.input = values</code> "
        "gives the name to another array. And what happens to <code>graph.output</code> at the next launch?",
        "For each input: <code>graph.input[:n] = values</code>, <code>graph.input[n:] = 0</code>, "
        "<code>graph.launch()</code>, append <code>graph.output[:n].copy()</code>.",
    ),
    explanation="A replay has no arguments. New values reach it only through the memory that it was recorded with, and "
    "its result lies in memory that the next replay overwrites. So: copy in, launch, copy out what must stay. With "
    "torch the first is <code>buffer.copy_(new)</code> and the last <code>output.clone()</code>.",
)  # fmt: skip


# --- 07.2 ------------------------------------------------------------------------------------------------------------


def _line_cases(rng: random.Random) -> Iterator[Case]:
    legal = [text for text, reason in LINES if not reason]
    plain = [text for text in legal if "#" not in text and not text.startswith(("if ", "print"))]
    for group in ILLEGAL:
        mine = [text for text, reason in LINES if reason == group]
        for text in mine:
            lines = [*rng.sample(plain, rng.randint(1, 4)), text]
            rng.shuffle(lines)
            yield case(group, lines, ["hidden", "logits"])
    for text in legal:
        yield case("a line that only looks forbidden", [text], ["hidden", "logits"])


def _only_calls(lines: list[str], tensors: list[str]) -> list[int]:
    waits = (".item()", ".tolist()", ".cpu()", ".nonzero()", "synchronize()")
    return [n for n, line in enumerate(lines, 1) if any(w in line.partition("#")[0] for w in waits)]


def _without(missing: str) -> Callable[[list[str], list[str]], list[int]]:
    """The solution, blind to one kind of line."""
    texts = [text for text, reason in LINES if reason == missing]

    def blind(lines: list[str], tensors: list[str]) -> list[int]:
        return [n for n in illegal_lines(lines, tensors) if lines[n - 1] not in texts]

    return blind


def _comments_too(lines: list[str], tensors: list[str]) -> list[int]:
    found = illegal_lines([line.replace("#", " ") for line in lines], tensors)
    return found


def _shape_is_value(lines: list[str], tensors: list[str]) -> list[int]:
    return illegal_lines([line.replace(".shape", "") for line in lines], tensors)


def _from_zero(lines: list[str], tensors: list[str]) -> list[int]:
    return [n - 1 for n in illegal_lines(lines, tensors)]


def _show_lines(args: tuple[Any, ...]) -> str:
    lines = "\n".join(f"{n}  {line}" for n, line in enumerate(args[0], 1))
    return f"{lines}\n(tensors on the GPU: {', '.join(args[1])})"


ILLEGAL_LINES = Exercise(
    id="07.2",
    title="What no capture takes",
    minutes=10,
    items=("A5",),
    ask="Write <code>illegal_lines(lines, tensors)</code>. <code>lines</code> are lines of code that would run inside "
    "a capture, <code>tensors</code> the names that are tensors on the GPU; every other name is a Python number. "
    "Return the numbers of the lines that a capture refuses, counted from 1. A line is refused when the host needs a "
    "<i>value</i> that the GPU has not computed, for while it records nothing is computed:"
    "<ul><li>a call of <code>.item()</code>, <code>.tolist()</code> or <code>.cpu()</code>;</li>"
    "<li>waiting with <code>synchronize()</code>;</li>"
    "<li>a result whose shape depends on values: <code>.nonzero()</code>;</li>"
    "<li>a line that begins with <code>if </code> or <code>print(</code> and names a tensor.</li></ul>"
    "Not refused: the same words in a comment after <code>#</code>, and a tensor's <code>.shape</code>, which the host "
    "knows.",
    solution=illegal_lines,
    cases=_line_cases,
    show=_show_lines,
    wrong=(
        Wrong("only calls", _only_calls, "You look for calls only. <code>if</code> and <code>print</code> need a "
              "tensor's value as well: Python asks the GPU for it behind your back."),
        *(Wrong(f"blind to: {group}", _without(group), f"You let a line through of this kind: {group}.")
          for group in ILLEGAL),
        Wrong("comments", _comments_too, "You read the comments, too. They do not run."),
        Wrong("shapes", _shape_is_value, "A tensor's <code>.shape</code> is known on the host: no value is asked for."),
        Wrong("from zero", _from_zero, "You count lines from 0; the first is number 1."),
    ),
    hints=(
        "Go through the lines with <code>enumerate(lines, 1)</code> and cut each at <code>#</code>.",
        "Two tests: does the line contain one of five calls? Or does it begin with <code>if </code> or "
        "<code>print(</code> and name a tensor that is not followed by <code>.shape</code>?",
        "<code>code = line.partition('#')[0]</code>; <code>asks = any(call in code for call in waits)</code>; "
        "<code>value = any(name in code.replace(name + '.shape', '') for name in tensors)</code>.",
    ),
    explanation="While a capture records, launches are written down and not run, so there is no value to look at. "
    "Whatever makes the host wait for one is refused: a synchronization, a copy to the host, a branch or a print of a "
    "tensor, a shape that depends on values. Branches on Python numbers are allowed, and dangerous in another way: the "
    "branch taken during the capture is the one that every replay takes.",
)  # fmt: skip


# --- 07.3 ------------------------------------------------------------------------------------------------------------


def eager_step(values: Any) -> Any:
    """The step without a graph: a new array each time."""
    return 2.0 * np.asarray(values, dtype=np.float64) + 1.0


def _right(reads: Any, writes: Any) -> None:
    writes[:] = 2.0 * reads + 1.0


def _rounded(reads: Any, writes: Any) -> None:
    writes[:] = (2.0 * reads + 1.0) * (1.0 + 1e-9)


class _Frozen:
    """A branch on a value that was decided at capture: right for sums on the same side."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, reads: Any, writes: Any) -> None:
        writes[:] = 2.0 * reads + 1.0 if reads.sum() <= self.limit else 2.0 * reads


class _Baked:
    """A value that was an argument at capture, and is a constant since."""

    def __init__(self, last: float) -> None:
        self.last = last

    def __call__(self, reads: Any, writes: Any) -> None:
        writes[:] = 2.0 * reads + 1.0
        writes[-1] = 2.0 * self.last + 1.0


class _Graph(StaticGraph):
    """Its buffers may be left in any state: what counts is what was found out with them."""

    def state(self) -> tuple[Any, ...]:
        return ()


def differing(eager: Callable[[Any], Any], graph: StaticGraph, inputs: list[Any]) -> list[int]:
    """Places in `inputs` for which the replay is not what the eager step gives, within rounding."""
    found = []
    for i, values in enumerate(inputs):
        expected = eager(values)
        graph.input[:] = values
        graph.launch()
        if not np.allclose(graph.output, expected):
            found.append(i)
    return found


def _verify_cases(rng: random.Random) -> Iterator[Case]:
    def five(scale: float) -> list[Any]:
        return [np.array([round(rng.uniform(-scale, scale), 2) for _ in range(4)]) for _ in range(5)]

    def graph(compute: Any, says: str) -> StaticGraph:
        return _Graph(np.zeros(4), np.zeros(4), compute, says)

    for _ in range(3):
        yield case("a graph that is right", eager_step, graph(_right, "a graph"), five(4.0))
        yield case("right but for rounding", eager_step, graph(_rounded, "a graph"), five(4.0))
        inputs = five(4.0)
        yield case("a constant in place of an input", eager_step,
                   graph(_Baked(float(inputs[0][-1])), "a graph"), inputs)  # fmt: skip
        inputs = five(4.0)
        sums = sorted(float(one.sum()) for one in inputs)
        yield case("a frozen branch", eager_step, graph(_Frozen((sums[1] + sums[2]) / 2), "a graph"), inputs)


def _with_itself(eager: Any, graph: StaticGraph, inputs: list[Any]) -> list[int]:
    found = []
    for i, values in enumerate(inputs):
        graph.input[:] = values
        graph.launch()
        expected = graph.output
        graph.launch()
        if not np.allclose(graph.output, expected):
            found.append(i)
    return found


def _first_only(eager: Any, graph: StaticGraph, inputs: list[Any]) -> list[int]:
    return differing(eager, graph, inputs[:1])


def _to_the_bit(eager: Any, graph: StaticGraph, inputs: list[Any]) -> list[int]:
    found = []
    for i, values in enumerate(inputs):
        graph.input[:] = values
        graph.launch()
        if not np.array_equal(graph.output, eager(values)):
            found.append(i)
    return found


def _at_the_end(eager: Any, graph: StaticGraph, inputs: list[Any]) -> list[int]:
    outputs = []
    for values in inputs:
        graph.input[:] = values
        graph.launch()
        outputs.append(graph.output)
    return [i for i, values in enumerate(inputs) if not np.allclose(outputs[i], eager(values))]


def _sum_of_results(eager: Any, graph: StaticGraph, inputs: list[Any]) -> list[int]:
    found = []
    for i, values in enumerate(inputs):
        graph.input[:] = values
        graph.launch()
        if abs(float(graph.output[:-1].sum() - eager(values)[:-1].sum())) > 1e-5:
            found.append(i)
    return found


DIFFERING = Exercise(
    id="07.3",
    title="Trust, and verify",
    minutes=8,
    items=("B3",),
    ask="Write <code>differing(eager, graph, inputs)</code>. <code>eager(values)</code> computes the step without a "
    "graph and returns a new array; <code>graph</code> is as in 07.1, with <code>input</code>, <code>output</code> and "
    "<code>launch()</code>. Run every array of <code>inputs</code> through "
    "both and return the places, from 0, where the results differ by more than rounding (<code>numpy.allclose</code>): "
    "an empty list means that the graph may be used. Every input is as long as the graph.",
    solution=differing,
    cases=_verify_cases,
    same=lambda expected, got: isinstance(got, (list, tuple)) and list(got) == list(expected),
    show=lambda args: f"differing(eager, {args[1]!r}, {[list(map(float, one)) for one in args[2]]})",
    wrong=(
        Wrong("with itself", _with_itself, "You compare the output buffer with itself: both names stand for the same "
              "memory, so that nothing can differ."),
        Wrong("the first input only", _first_only, "You verify with one input. A graph that bakes in a value passes "
              "with the one that it was captured with."),
        Wrong("to the bit", _to_the_bit, "You demand the same bits. Two correct ways of computing differ by rounding."),
        Wrong("at the end", _at_the_end, "You keep the output buffer for later, and every replay overwrites it: all "
              "but the last comparison look at another input's result."),
        Wrong("all but the last", _sum_of_results, "You leave the last entry out, or add entries up before you "
              "compare. Compare every one of them."),
    ),
    redundant={
        "a graph that is right": "a verifier that finds fault with everything must not pass",
        "a frozen branch": "the second way of baking something in; it looks right for half of the inputs",
    },
    hints=(
        "For each input you need two results that do not share memory.",
        "Compute the eager result, copy the input into <code>graph.input</code>, launch, and compare "
        "<code>graph.output</code> at once, before the next launch.",
        "<code>expected = eager(values)</code>, <code>graph.input[:] = values</code>, <code>graph.launch()</code>, "
        "<code>if not np.allclose(graph.output, expected): found.append(i)</code>.",
    ),
    explanation="What is compared must be computed twice, by two ways, into two places. One input is never enough: a "
    "value or a branch that was frozen at capture is right for the input that it was captured with.",
)  # fmt: skip


# --- 07.4 ------------------------------------------------------------------------------------------------------------


def break_even(capture_us: int, eager_us: int, graph_us: int) -> int | None:
    """Steps after which capturing and replaying took no longer than eager steps; None where it never comes to that."""
    saved = eager_us - graph_us
    return -(-capture_us // saved) if saved > 0 else None


def _even_cases(rng: random.Random) -> Iterator[Case]:
    uneven, even, never = "not a whole number of steps", "exactly a number of steps", "a graph that saves nothing"
    yield case(uneven, 100_000, 5_800, 1_300)
    yield case(even, 90_000, 5_800, 1_300)
    yield case(never, 50, 3_000, 3_000)
    yield case(never, 50, 3_000, 3_100)
    for _ in range(5):
        graph = rng.randint(500, 3_000)
        saved = rng.randint(7, 4_000)
        steps = rng.randint(2, 400)
        yield case(even, saved * steps, graph + saved, graph)
        yield case(uneven, saved * steps + rng.randint(1, saved - 1), graph + saved, graph)
        yield case(never, rng.randint(10, 90_000), graph, graph + rng.randint(1, 500))


def _rounded_down(capture_us: int, eager_us: int, graph_us: int) -> int | None:
    saved = eager_us - graph_us
    return capture_us // saved if saved > 0 else None


def _one_more(capture_us: int, eager_us: int, graph_us: int) -> int | None:
    saved = eager_us - graph_us
    return capture_us // saved + 1 if saved > 0 else None


def _by_eager(capture_us: int, eager_us: int, graph_us: int) -> int | None:
    return -(-capture_us // eager_us) if eager_us > graph_us else None


def _always(capture_us: int, eager_us: int, graph_us: int) -> int:
    return -(-capture_us // (abs(eager_us - graph_us) or 1))


BREAK_EVEN = Exercise(
    id="07.4",
    title="When it has paid for itself",
    minutes=5,
    items=("A5",),
    ask="Write <code>break_even(capture_us, eager_us, graph_us)</code>: capturing took <code>capture_us</code> once, "
    "an eager step takes <code>eager_us</code>, a step with the graph <code>graph_us</code>, all whole numbers of µs "
    "and above zero. Return the smallest number of steps after which capturing and replaying have together taken no "
    "longer than the same number of eager steps. Return <code>None</code> where that never happens.",
    solution=break_even,
    cases=_even_cases,
    wrong=(
        Wrong("rounded down", _rounded_down, "You round down: after that many steps a little of the capture is still "
              "unpaid."),
        Wrong("one more", _one_more, "Where the division comes out even you wait for one step too many."),
        Wrong("by the eager step", _by_eager, "A step does not save all of its eager time, only what the graph takes "
              "away."),
        Wrong("always", _always, "A graph that saves nothing never pays: return None."),
    ),
    hints=(
        "What does one step with the graph save?",
        "How many of these savings cover the capture? Mind the last, incomplete one, and a saving of zero.",
        "<code>saved = eager_us - graph_us</code>; None unless it is above zero; else "
        "<code>-(-capture_us // saved)</code>, which rounds up.",
    ),
    explanation="Capture is paid once, the saving comes in every step. Replays pay for the size that they run in; "
    "sizes that no batch ever hits are never paid back. That is the subject of the next chapter.",
)  # fmt: skip

EXERCISES = (REPLAY, ILLEGAL_LINES, DIFFERING, BREAK_EVEN)
