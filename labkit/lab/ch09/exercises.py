"""The exercises of chapter 09: counting launches, two factors, a specialised size, recompiling. Refuses to compile."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from labkit.lab.exercises import Case, Exercise, Wrong, case

# --- 09.1 ------------------------------------------------------------------------------------------------------------


def count_launches(ops: Sequence[str]) -> tuple[int, int]:
    """Kernels that a list of operators launches one by one, and after fusion."""
    before = sum(op != "view" for op in ops)
    after, open_, reduced = 0, False, False
    for op in ops:
        if op == "view":
            continue
        if op == "matmul":
            after += 1
            open_ = False
            continue
        if not open_ or (op == "reduction" and reduced):
            after += 1
            open_, reduced = True, False
        reduced = reduced or op == "reduction"
    return before, after


def _launch_cases(rng: random.Random) -> Iterator[Case]:
    views, products, reductions = "views", "matrix products", "reductions"
    yield case(reductions, ["pointwise", "reduction", "pointwise", "pointwise"])
    yield case(views, ["view", "pointwise", "view", "pointwise"])
    yield case(products, ["matmul", "pointwise", "matmul", "matmul"])
    yield case(reductions, ["pointwise", "reduction", "pointwise", "reduction", "pointwise"])
    norm, act = ["pointwise", "reduction", "pointwise", "pointwise", "pointwise"], ["view", "pointwise", "pointwise"]
    yield case(products, [*norm, "view", "matmul", *act, "matmul", "pointwise"])
    for _ in range(4):
        n = rng.randint(2, 5)
        yield case(views, ["pointwise", *rng.choices(["view", "pointwise"], k=n), "view", "pointwise"])
        yield case(products, ["pointwise", "matmul", *rng.choices(["matmul", "pointwise"], k=n), "matmul", "pointwise"])
        yield case(reductions, ["reduction", "pointwise", *rng.choices(["pointwise", "reduction"], k=n), "reduction"])
    yield case(products, [])


def _views_launch(ops: Sequence[str]) -> tuple[int, int]:
    return len(ops), count_launches(ops)[1]


def _views_cut(ops: Sequence[str]) -> tuple[int, int]:
    before, after, open_ = count_launches(ops)[0], 0, False
    reduced = False
    for op in ops:
        if op in ("view", "matmul"):
            after += op == "matmul"
            open_ = False
        else:
            if not open_ or (op == "reduction" and reduced):
                after, open_, reduced = after + 1, True, False
            reduced = reduced or op == "reduction"
    return before, after


def _products_fuse(ops: Sequence[str]) -> tuple[int, int]:
    before, after, open_, reduced = count_launches(ops)[0], 0, False, False
    for op in ops:
        if op == "view":
            continue
        if op == "matmul" or not open_ or (op == "reduction" and reduced):
            after, open_, reduced = after + 1, True, False
        reduced = reduced or op == "reduction"
    return before, after


def _all_in_one(ops: Sequence[str]) -> tuple[int, int]:
    rest = [op for op in ops if op != "view"]
    runs = sum(op != "matmul" and (i == 0 or rest[i - 1] == "matmul") for i, op in enumerate(rest))
    return len(rest), runs + rest.count("matmul")


def _reduction_ends(ops: Sequence[str]) -> tuple[int, int]:
    before, after, open_ = count_launches(ops)[0], 0, False
    for op in ops:
        if op == "view":
            continue
        if op == "matmul":
            after, open_ = after + 1, False
        else:
            after += not open_
            open_ = op != "reduction"
    return before, after


COUNT_LAUNCHES = Exercise(
    id="09.1",
    title="Launches before and after fusion",
    minutes=8,
    items=("A8",),
    ask="Write <code>count_launches(ops)</code> for a list of operators in order, each <code>'view'</code>, "
    "<code>'pointwise'</code>, <code>'reduction'</code> or <code>'matmul'</code>. Return two counts: kernels when "
    "every operator runs by itself, and kernels after fusion. Rules: a view starts no kernel and is in nobody's way. "
    "A matmul is always a kernel of its own. Between two matmuls all pointwise operators and reductions join into one "
    "kernel, but a kernel holds at most one reduction: the next reduction begins a new one.",
    solution=count_launches,
    cases=_launch_cases,
    wrong=(
        Wrong("views launch", _views_launch, "You count a launch for every view. A view is the same memory under "
              "another shape: nothing runs."),
        Wrong("views cut", _views_cut, "You begin a new kernel after a view. Nothing happens there, so fusion goes "
              "on."),
        Wrong("products fuse", _products_fuse, "You let operators join a matrix product. It comes from a library, "
              "ready as it is: what follows it begins a kernel."),
        Wrong("all in one", _all_in_one, "You put several reductions into one kernel. By these rules the second "
              "begins a new one: it may have to wait for the result of the first over the whole row."),
        Wrong("reduction ends", _reduction_ends, "You end the kernel with the reduction. Pointwise operators after it "
              "still join: that is how a norm becomes one kernel."),
    ),
    hints=(
        "Drop the views first. Then walk through the list and ask at each operator: is a kernel open that it may join?",
        "A matmul closes what is open and leaves nothing open. A reduction may join only if the open kernel has none "
        "yet.",
        "Keep two flags, <code>open_</code> and <code>reduced</code>. Count one more kernel when "
        "<code>not open_ or (op == 'reduction' and reduced)</code>.",
    ),
    explanation="What is left after fusion is about twice the number of matrix products: the products themselves and "
    "one kernel between two of them. A norm, an activation, a rotation: each was five to ten launches and is one.",
)  # fmt: skip

# --- 09.2 ------------------------------------------------------------------------------------------------------------


def attribute(eager: float, graph: float, compiled: float, both: float) -> tuple[float, float, float]:
    """What the graph saves alone, what compiling saves alone, and what they save together beyond the sum of the two."""
    graph_gain, compile_gain = eager - graph, eager - compiled
    return graph_gain, compile_gain, (eager - both) - (graph_gain + compile_gain)


def _attribute_cases(rng: random.Random) -> Iterator[Case]:
    yield case("four times", 5.5, 5.125, 5.25, 5.0)
    yield case("four times", 9.5, 4.25, 5.5, 1.75)
    yield case("four times", 8.0, 6.0, 5.0, 3.0)
    for _ in range(9):
        eager = rng.randint(32, 80) / 8
        graph, compiled = eager - rng.randint(1, 16) / 8, eager - rng.randint(1, 16) / 8
        yield case("four times", eager, graph, compiled, min(graph, compiled) - rng.randint(0, 6) / 8)


def _one_after_the_other(eager: float, graph: float, compiled: float, both: float) -> tuple[float, float, float]:
    return eager - graph, graph - both, 0.0


def _no_interaction(eager: float, graph: float, compiled: float, both: float) -> tuple[float, float, float]:
    return eager - graph, eager - compiled, 0.0


def _sign(eager: float, graph: float, compiled: float, both: float) -> tuple[float, float, float]:
    a, b, c = attribute(eager, graph, compiled, both)
    return a, b, -c


def _from_the_best(eager: float, graph: float, compiled: float, both: float) -> tuple[float, float, float]:
    return compiled - both, graph - both, eager - both - (compiled - both) - (graph - both)


ATTRIBUTE = Exercise(
    id="09.2",
    title="Two switches, one gain",
    minutes=6,
    items=("A8",),
    ask="A step was measured in four forms (milliseconds). Write <code>attribute(eager, graph, compiled, "
    "both)</code>: what the graph saves alone, what compiling saves alone, both against <code>eager</code>, and the "
    "interaction: how much more the two save together than the sum of these. It is negative where each takes away "
    "what the other would save.",
    solution=attribute,
    cases=_attribute_cases,
    wrong=(
        Wrong("in turn", _one_after_the_other, "You switch one on after the other. Then what the second saves depends "
              "on the order, and the interaction hides in it."),
        Wrong("none", _no_interaction, "You take for granted that savings add up. Whether they do is what the fourth "
              "number tells."),
        Wrong("sign", _sign, "Your interaction has the wrong sign: it is what both save, less the sum of what each "
              "saves."),
        Wrong("from the best", _from_the_best, "You measure against the best form: that is what switching one OFF "
              "costs. Asked is what switching one ON saves."),
    ),
    hints=(
        "Three differences to <code>eager</code>: with the graph, with the compiler, with both.",
        "If the two had nothing to do with each other, the third would be the sum of the first two.",
        "<code>(eager - both) - ((eager - graph) + (eager - compiled))</code> is the last of the three results.",
    ),
    explanation="Both remedies cut launches: the compiler some of them, the graph all. So the launches are saved once "
    "only, and the interaction is often negative. It is positive where a step waits so long for launches that the "
    "time of the kernels, which fusion shortens, does not show without a graph.",
)  # fmt: skip

# --- 09.3 ------------------------------------------------------------------------------------------------------------


def steps_to_pay(compile_s: float, any_ms: float, exact_ms: float, share: float) -> int | None:
    """Steps after which compiling for one exact size has paid for itself; None where it never does."""
    saved_ms = (any_ms - exact_ms) * share
    if saved_ms <= 0:
        return None
    return math.ceil(compile_s * 1000 / saved_ms)


def _pay_cases(rng: random.Random) -> Iterator[Case]:
    every, some, never = "every step has that size", "some steps have that size", "it never pays"
    yield case(every, 30.0, 5.5, 5.0, 1.0)
    yield case(some, 30.0, 5.5, 5.0, 0.25)
    yield case(never, 30.0, 5.0, 5.25, 0.5)
    yield case(never, 30.0, 5.0, 5.0, 0.5)
    yield case(never, 30.0, 5.5, 5.0, 0.0)
    for _ in range(4):
        slow = rng.randint(16, 60) / 8
        yield case(every, float(rng.randint(3, 90)), slow, slow - rng.choice([1, 3, 5, 7]) / 8, 1.0)
        yield case(some, float(rng.randint(3, 90)), slow, slow - rng.choice([1, 3, 5, 7]) / 8, rng.choice([0.5, 0.25]))
    yield case(every, 7.0, 5.375, 5.0, 1.0)


def _every_step(compile_s: float, any_ms: float, exact_ms: float, share: float) -> int | None:
    return steps_to_pay(compile_s, any_ms, exact_ms, 1.0 if share > 0 else 0.0)


def _no_never(compile_s: float, any_ms: float, exact_ms: float, share: float) -> int | None:
    saved_ms = (any_ms - exact_ms) * share
    return math.ceil(compile_s * 1000 / saved_ms) if saved_ms else 0


def _in_seconds(compile_s: float, any_ms: float, exact_ms: float, share: float) -> int | None:
    return steps_to_pay(compile_s / 1000, any_ms, exact_ms, share)


def _too_early(compile_s: float, any_ms: float, exact_ms: float, share: float) -> int | None:
    found = steps_to_pay(compile_s, any_ms, exact_ms, share)
    return None if found is None else math.floor(compile_s * 1000 / ((any_ms - exact_ms) * share))


STEPS_TO_PAY = Exercise(
    id="09.3",
    title="When a compiled size pays",
    minutes=5,
    items=("A8",),
    ask="<code>compile_sizes</code> lets the compiler tune code for one exact batch size: it takes "
    "<code>compile_s</code> seconds at start-up, and a step of that size then takes <code>exact_ms</code> instead of "
    "<code>any_ms</code>. Of all steps a <code>share</code> (0 to 1) has that size. Write "
    "<code>steps_to_pay(compile_s, any_ms, exact_ms, share)</code>: after how many steps of all sizes the seconds are "
    "earned back (a whole number, the first at which they are), or <code>None</code> if never.",
    solution=steps_to_pay,
    cases=_pay_cases,
    wrong=(
        Wrong("every step", _every_step, "You let every step save something. Only the share with exactly that size "
              "does."),
        Wrong("no never", _no_never, "You give a number even where nothing is saved: then it never pays, which is "
              "None."),
        Wrong("seconds", _in_seconds, "Seconds at start-up, milliseconds in a step: one second is 1000 ms."),
        Wrong("too early", _too_early, "You round down: after that many steps a part of the cost is still open."),
    ),
    hints=(
        "What does an average step save, if only a share of the steps saves anything?",
        "The cost in ms, divided by the saving of an average step. And if that saving is zero or less?",
        "<code>math.ceil(compile_s * 1000 / ((any_ms - exact_ms) * share))</code>, after the case that never pays.",
    ),
    explanation="The code for any size is nearly as good, so that the saving is small and the steps are many. That is "
    "why engines leave <code>compile_sizes</code> empty unless somebody knows which sizes will come, over and over.",
    redundant={"every step has that size": "The plain case comes first; what fails there fails with a share, too."},
)  # fmt: skip

# --- 09.4 ------------------------------------------------------------------------------------------------------------


def recompiles(shapes: Sequence[Sequence[int]], dynamic: Sequence[int]) -> list[int]:
    """Places of the calls in which the compiler has to work, the first call included."""
    known: list[list[object]] = []
    found = []
    for i, shape in enumerate(shapes):
        needs: list[object] = ["any" if d in dynamic and n > 1 else n for d, n in enumerate(shape)]
        if needs not in known:
            known.append(needs)
            found.append(i)
    return found


def _recompile_cases(rng: random.Random) -> Iterator[Case]:
    static, dynamic, one = "nothing is dynamic", "a dynamic dimension", "a size of one"
    yield case(static, [[8, 64], [8, 64], [16, 64], [8, 64]], [])
    yield case(dynamic, [[8, 64], [16, 64], [24, 64]], [0])
    yield case(one, [[8, 64], [8, 64], [1, 64], [1, 64]], [0])
    for _ in range(3):
        a, b, c = rng.sample(range(2, 9), 3)
        yield case(static, [[a, 64], [b, 64], [a, 64], [c, 64], [b, 64]], [])
        yield case(dynamic, [[a, 64], [b, 64], [c, 64], [c, 64], [c, 128]], [0])
        yield case(one, [[a, 32], [a, 32], [1, 32]] + [[1, 32]] * rng.randint(0, 2), [0])


def _last_only(shapes: Sequence[Sequence[int]], dynamic: Sequence[int]) -> list[int]:
    keys = [["any" if d in dynamic and n > 1 else n for d, n in enumerate(shape)] for shape in shapes]
    return [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]


def _nothing_dynamic(shapes: Sequence[Sequence[int]], dynamic: Sequence[int]) -> list[int]:
    return recompiles(shapes, [])


def _one_like_others(shapes: Sequence[Sequence[int]], dynamic: Sequence[int]) -> list[int]:
    return recompiles([[n + 1 if d in dynamic else n for d, n in enumerate(shape)] for shape in shapes], dynamic)


def _without_the_first(shapes: Sequence[Sequence[int]], dynamic: Sequence[int]) -> list[int]:
    return recompiles(shapes, dynamic)[1:]


RECOMPILES = Exercise(
    id="09.4",
    title="Spot a recompile",
    minutes=6,
    items=("A8",),
    ask="A compiled function is called with tensors of these <code>shapes</code>, one after another. Code is made for "
    "what a call brings and is kept. It fits a later call when all sizes are the same, except in the dimensions "
    "listed in <code>dynamic</code>: there code for one size of 2 or more fits every size of 2 or more. A size of 1 "
    "always needs code of its own. Write <code>recompiles(shapes, dynamic)</code>: the places (from 0) of the calls "
    "for which no code fits, the first included.",
    solution=recompiles,
    cases=_recompile_cases,
    wrong=(
        Wrong("last only", _last_only, "You compare with the call before only. All code that was ever made is kept."),
        Wrong("nothing dynamic", _nothing_dynamic, "You compile for every new size, even where the dimension is "
              "dynamic."),
        Wrong("one like others", _one_like_others, "You let a size of 1 use the code for many. The compiler takes 1 "
              "as a constant: a dimension of 1 broadcasts, which is other code."),
        Wrong("without the first", _without_the_first, "The first call compiles, too: there is nothing yet that fits."),
    ),
    hints=(
        "Write down for each call what its code is good for, such as <code>['any', 64]</code>.",
        "A call is served if what it needs is among what was written down before; otherwise the compiler works.",
        "<code>['any' if d in dynamic and n &gt; 1 else n for d, n in enumerate(shape)]</code> is what a call needs.",
    ),
    explanation="A recompile takes seconds in the middle of a request. An engine therefore traces once with a dynamic "
    "number of tokens, checks nothing afterwards, and does all compiling before it serves. labkit also traces with 34 "
    "tokens, so that nothing is taken for a constant.",
)  # fmt: skip

EXERCISES = (COUNT_LAUNCHES, ATTRIBUTE, STEPS_TO_PAY, RECOMPILES)
