"""The exercises of chapter 10: cutting, kinds of pieces, the choice per batch, launches of a step.

Two have the signature of a hook point: `pieces` and `dispatch` run in the engine. Refuses to know the engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from labkit.lab.exercises import Case, Exercise, Wrong, case

# --- 10.1 ------------------------------------------------------------------------------------------------------------


def pieces(ops: Sequence[str], splitting_ops: Sequence[str]) -> list[list[str]]:
    """The operators in pieces, in order; every splitting operator is alone in its own."""
    out: list[list[str]] = [[]]
    for op in ops:
        if op in splitting_ops:
            out += [[op], []]
        else:
            out[-1].append(op)
    return [piece for piece in out if piece]


def _piece_cases(rng: random.Random) -> Iterator[Case]:
    between, ends = "attention between others", "attention at an end, or twice in a row"
    nothing, several = "nothing to cut", "several splitting operators"
    yield case(between, ["norm", "qkv", "attention", "output", "norm"], ["attention"])
    yield case(ends, ["attention", "output", "attention", "attention"], ["attention"])
    yield case(nothing, ["norm", "qkv", "attention", "output"], [])
    yield case(several, ["norm", "attention", "mlp", "moe", "norm"], ["attention", "moe"])
    for _ in range(3):
        plain = [rng.choice(["norm", "qkv", "rotate", "output", "mlp"]) for _ in range(8)]
        yield case(between, [*plain[:3], "attention", *plain[3:5], "attention", *plain[5:]], ["attention"])
        yield case(ends, ["attention", "attention", *plain[:2], "attention"], ["attention"])
        yield case(nothing, plain, [])
        yield case(several, [*plain[:2], "moe", *plain[2:4], "attention", *plain[4:]], ["moe", "attention"])


def _ends_the_piece(ops: Sequence[str], splitting_ops: Sequence[str]) -> list[list[str]]:
    out: list[list[str]] = [[]]
    for op in ops:
        out[-1].append(op)
        if op in splitting_ops:
            out.append([])
    return [piece for piece in out if piece]


def _dropped(ops: Sequence[str], splitting_ops: Sequence[str]) -> list[list[str]]:
    return [piece for piece in pieces(ops, splitting_ops) if piece[0] not in splitting_ops]


def _empty_ones(ops: Sequence[str], splitting_ops: Sequence[str]) -> list[list[str]]:
    out: list[list[str]] = [[]]
    for op in ops:
        if op in splitting_ops:
            out += [[op], []]
        else:
            out[-1].append(op)
    return out


def _only_the_first_name(ops: Sequence[str], splitting_ops: Sequence[str]) -> list[list[str]]:
    return pieces(ops, splitting_ops[:1])


def _nothing_then(ops: Sequence[str], splitting_ops: Sequence[str]) -> list[list[str]]:
    return pieces(ops, splitting_ops) if splitting_ops else []


PIECES = Exercise(
    id="10.1",
    title="Cut at the opaque operator",
    minutes=7,
    items=("A6",),
    ask="Write <code>pieces(ops, splitting_ops)</code>. <code>ops</code> is a forward pass as a list of operator "
    "names; cut it at every operator whose name is in <code>splitting_ops</code>. Return a list of lists in the same "
    "order: each splitting operator alone in a list, and the operators between two of them together. No list is empty.",
    solution=pieces,
    cases=_piece_cases,
    wrong=(
        Wrong("ends the piece", _ends_the_piece, "Your splitting operator stays in the piece before it. Then that "
              "piece has attention inside, and is exactly what was to be avoided."),
        Wrong("dropped", _dropped, "You leave the splitting operators out. They are not compiled, but they have to "
              "run."),
        Wrong("empty ones", _empty_ones, "You keep empty pieces: before an attention that comes first, or between two "
              "in a row, there is nothing to compile."),
        Wrong("first name", _only_the_first_name, "You look at the first name of <code>splitting_ops</code> only."),
        Wrong("nothing then", _nothing_then, "With no splitting operator you return nothing. The pass is one piece "
              "then, attention inside."),
    ),
    hints=(
        "Keep a list of lists whose last one is being filled.",
        "At a splitting operator two lists begin: one for it alone, and a new one for what follows.",
        "<code>out += [[op], []]</code> at a cut, <code>out[-1].append(op)</code> elsewhere; drop empty lists at the "
        "end.",
    ),
    explanation="N attention calls leave N + 1 parts around them. The engine gives operators numbers instead of making "
    "lists, and lets torch.fx take the graph apart by these numbers; the cut is the same.",
    redundant={"attention between others": "The plain case comes first; what fails there fails in the other groups."},
)  # fmt: skip

# --- 10.2 ------------------------------------------------------------------------------------------------------------


def kinds(found: Sequence[Sequence[str]]) -> list[int]:
    """The kind of every piece; equal pieces are of one kind, and kinds are numbered as they first appear."""
    known: list[list[str]] = []
    out = []
    for piece in found:
        if list(piece) not in known:
            known.append(list(piece))
        out.append(known.index(list(piece)))
    return out


def _kind_cases(rng: random.Random) -> Iterator[Case]:
    first, last = ["embedding", "norm", "qkv"], ["output", "mlp", "norm"]
    dense, sparse = ["output", "norm", "mlp", "norm", "qkv"], ["output", "norm", "experts", "norm", "qkv"]
    yield case("passes", [first, dense, dense, dense, last])
    yield case("passes", [first, dense, sparse, dense, sparse, last])
    yield case("passes", [first, last])
    yield case("passes", [dense, dense, dense])
    for _ in range(8):
        middle = [list(rng.choice([dense, sparse])) for _ in range(rng.randint(2, 7))]
        yield case("passes", [first, *middle, last])


def _by_place(found: Sequence[Sequence[str]]) -> list[int]:
    return [0 if i == 0 else 2 if i == len(found) - 1 else 1 for i in range(len(found))]


def _by_length(found: Sequence[Sequence[str]]) -> list[int]:
    lengths = list(dict.fromkeys(len(piece) for piece in found))
    return [lengths.index(len(piece)) for piece in found]


def _neighbours(found: Sequence[Sequence[str]]) -> list[int]:
    out = [0]
    for before, piece in zip(found, found[1:], strict=False):
        out.append(out[-1] + (list(before) != list(piece)))
    return out[: len(found)]


def _each_its_own(found: Sequence[Sequence[str]]) -> list[int]:
    return list(range(len(found)))


KINDS = Exercise(
    id="10.2",
    title="Compile each kind once",
    minutes=6,
    items=("A7",),
    ask="Write <code>kinds(found)</code>. <code>found</code> is a list of pieces, each a list of operator names. Two "
    "pieces are of one kind when their lists are equal. Return a number for each piece: kinds are numbered from 0, in "
    "the order in which they first appear.",
    solution=kinds,
    cases=_kind_cases,
    wrong=(
        Wrong("by place", _by_place, "You go by the place: first, middle, last. That holds while all layers are "
              "alike; a model with experts in every second layer has two kinds in the middle."),
        Wrong("by length", _by_length, "You compare lengths. A layer with experts may have as many operators as one "
              "without."),
        Wrong("neighbours", _neighbours, "You compare with the piece before only, so that a kind that comes back "
              "counts as new, and is compiled again."),
        Wrong("each its own", _each_its_own, "You give every piece a number of its own: then a model of 80 layers is "
              "compiled 81 times."),
    ),
    hints=(
        "Keep the kinds that were seen, in order. What is a piece's number among them?",
        "If the piece is not among the known ones, put it at the end. Then its number is its place there.",
        "<code>if piece not in known: known.append(piece)</code>, then <code>known.index(piece)</code>.",
    ),
    explanation="“Three kinds” is no law. It follows from layers that are all alike: before the first attention, "
    "between two, after the last. labkit compares operators, constants, wiring, shapes and dtypes, as a hash; the "
    "weights do not count, since they come in as arguments.",
)  # fmt: skip

# --- 10.3 ------------------------------------------------------------------------------------------------------------

Graphs = dict[int, str]


def dispatch(
    num_tokens: int, is_uniform_decode: bool, decode_graphs: Graphs, mixed_graphs: Graphs
) -> tuple[str, int]:  # fmt: skip
    """The graph that serves a batch, as (mode, size), or ("NONE", num_tokens)."""
    offered = [decode_graphs, mixed_graphs] if is_uniform_decode else [mixed_graphs]
    for graphs in offered:
        fitting = [size for size in graphs if size >= num_tokens]
        if fitting:
            return graphs[min(fitting)], min(fitting)
    return "NONE", num_tokens


def _dispatch_cases(rng: random.Random) -> Iterator[Case]:
    decodes, mixed, above = "decodes", "a prompt among them", "above the largest size"
    fallback, order = "decodes without graphs of their own", "sizes in any order"
    sizes = [1, 2, 4, 8, 16, 32]
    full, parts = dict.fromkeys(sizes, "FULL"), dict.fromkeys(sizes, "PIECEWISE")
    yield case(decodes, 3, True, full, parts)
    yield case(mixed, 3, False, full, parts)
    yield case(above, 33, False, full, parts)
    yield case(fallback, 3, True, {}, parts)
    yield case(order, 3, False, {}, {16: "FULL", 4: "FULL", 8: "FULL"})
    yield case(mixed, 16, False, full, parts)
    for _ in range(3):
        n = rng.randint(1, 32)
        yield case(decodes, n, True, full, parts)
        yield case(mixed, n, False, full, parts if n % 2 else {})
        yield case(above, n + 32, False, full, parts)
        yield case(fallback, n, True, {}, dict.fromkeys(sizes, "FULL"))
    yield case(fallback, 12, True, {1: "FULL", 8: "FULL"}, parts)
    yield case(order, 5, False, {}, {32: "PIECEWISE", 16: "PIECEWISE", 8: "PIECEWISE", 1: "PIECEWISE"})


def _full_for_all(
    num_tokens: int, is_uniform_decode: bool, decode_graphs: Graphs, mixed_graphs: Graphs
) -> tuple[str, int]:  # fmt: skip
    return dispatch(num_tokens, True, decode_graphs, mixed_graphs)


def _mixed_for_all(
    num_tokens: int, is_uniform_decode: bool, decode_graphs: Graphs, mixed_graphs: Graphs
) -> tuple[str, int]:  # fmt: skip
    return dispatch(num_tokens, is_uniform_decode, {} if mixed_graphs else decode_graphs, mixed_graphs)


def _no_fallback(
    num_tokens: int, is_uniform_decode: bool, decode_graphs: Graphs, mixed_graphs: Graphs
) -> tuple[str, int]:  # fmt: skip
    graphs = decode_graphs if is_uniform_decode else mixed_graphs
    return dispatch(num_tokens, False, {}, graphs)


def _first_that_fits(
    num_tokens: int, is_uniform_decode: bool, decode_graphs: Graphs, mixed_graphs: Graphs
) -> tuple[str, int]:  # fmt: skip
    for graphs in ([decode_graphs] if is_uniform_decode else []) + [mixed_graphs]:
        for size, mode in graphs.items():
            if size >= num_tokens:
                return mode, size
    return "NONE", num_tokens


def _largest_instead(
    num_tokens: int, is_uniform_decode: bool, decode_graphs: Graphs, mixed_graphs: Graphs
) -> tuple[str, int]:  # fmt: skip
    found = dispatch(num_tokens, is_uniform_decode, decode_graphs, mixed_graphs)
    if found[0] == "NONE" and mixed_graphs and num_tokens > max(mixed_graphs):
        return mixed_graphs[max(mixed_graphs)], max(mixed_graphs)
    return found


def exact_only(
    num_tokens: int, is_uniform_decode: bool, decode_graphs: Graphs, mixed_graphs: Graphs
) -> tuple[str, int]:  # fmt: skip
    """A wrong `dispatch` to plug in: only a batch that fits a size exactly gets its graph."""
    for graphs in ([decode_graphs] if is_uniform_decode else []) + [mixed_graphs]:
        if num_tokens in graphs:
            return graphs[num_tokens], num_tokens
    return "NONE", num_tokens


DISPATCH = Exercise(
    id="10.3",
    title="Pick a graph for the batch",
    minutes=10,
    items=("A6",),
    ask="Write <code>dispatch(num_tokens, is_uniform_decode, decode_graphs, mixed_graphs)</code>. The last two map a "
    "captured size to the mode of its graph, such as <code>{8: 'FULL', 16: 'FULL'}</code>; either may be empty. A "
    "batch in which every request decodes (<code>is_uniform_decode</code>) tries the decode graphs first, then the "
    "mixed ones. Any other batch may use mixed graphs only. Of the graphs that hold <code>num_tokens</code> the "
    "smallest runs. Return <code>(mode, size)</code>, or <code>('NONE', num_tokens)</code> where no graph fits.",
    solution=dispatch,
    cases=_dispatch_cases,
    wrong=(
        Wrong("FULL for all", _full_for_all, "You give a batch with a prompt a graph of decodes. It was recorded for "
              "one token per request, and would compute something else."),
        Wrong("mixed for all", _mixed_for_all, "You never use the decode graphs while there are mixed ones, and "
              "launch every attention by itself where one replay would do."),
        Wrong("no fallback", _no_fallback, "Decodes without a decode graph run eagerly with you. A graph for mixed "
              "batches can serve them."),
        Wrong("first that fits", _first_that_fits, "You take the first size that fits. Sizes come in any order, and "
              "the smallest that fits wastes least."),
        Wrong("largest instead", _largest_instead, "Above the largest size you take the largest graph: it has no room "
              "for all the tokens."),
        Wrong("exact only", exact_only, "You use a graph only where the number fits exactly. Padding is there so that "
              "13 tokens run as 16."),
    ),
    hints=(
        "Which dictionaries may this batch use, in which order?",
        "In each of them: the sizes that are at least <code>num_tokens</code>, and of these the smallest. None? The "
        "next.",
        "<code>fitting = [s for s in graphs if s &gt;= num_tokens]</code>, then <code>graphs[min(fitting)], "
        "min(fitting)</code>.",
    ),
    explanation="That is the whole of FULL_AND_PIECEWISE: FULL graphs are the decode graphs, PIECEWISE graphs the "
    "mixed ones. In the other modes one of the two dictionaries is empty, or the mixed ones are FULL.",
    redundant={"decodes": "The plain case; a wrong answer that fails only there would be one for mixed batches, too."},
)  # fmt: skip

# --- 10.4 ------------------------------------------------------------------------------------------------------------


def launches_per_step(way: str, layers: int, piece_kernels: int, attention_kernels: int) -> int:
    """What the host starts in a step that runs eagerly ("NONE"), in PIECEWISE graphs or in a FULL one."""
    if way == "FULL":
        return 1
    if way == "PIECEWISE":
        return (layers + 1) + layers * attention_kernels
    return (layers + 1) * piece_kernels + layers * attention_kernels


def _count_cases(rng: random.Random) -> Iterator[Case]:
    for way in ("NONE", "PIECEWISE", "FULL"):
        yield case(way, way, 32, 8, 2)
        for _ in range(3):
            yield case(way, way, rng.randint(2, 80), rng.randint(3, 40), rng.randint(1, 18))


def _as_many_as_layers(way: str, layers: int, piece_kernels: int, attention_kernels: int) -> int:
    return launches_per_step(way, layers, piece_kernels, attention_kernels) if way == "FULL" else (
        layers * ((1 if way == "PIECEWISE" else piece_kernels) + attention_kernels)
    )  # fmt: skip


def _without_attention(way: str, layers: int, piece_kernels: int, attention_kernels: int) -> int:
    return layers + 1 if way == "PIECEWISE" else launches_per_step(way, layers, piece_kernels, attention_kernels)


def _pieces_in_full(way: str, layers: int, piece_kernels: int, attention_kernels: int) -> int:
    return layers + 1 if way == "FULL" else launches_per_step(way, layers, piece_kernels, attention_kernels)


def _eager_without_attention(way: str, layers: int, piece_kernels: int, attention_kernels: int) -> int:
    if way == "NONE":
        return (layers + 1) * piece_kernels
    return launches_per_step(way, layers, piece_kernels, attention_kernels)


LAUNCHES = Exercise(
    id="10.4",
    title="Launches of a step, by mode",
    minutes=5,
    items=("A6", "A7"),
    ask="Every piece of a pass has <code>piece_kernels</code> kernels, every attention "
    "<code>attention_kernels</code>; there are <code>layers</code> attentions. Write <code>launches_per_step(way, "
    "layers, piece_kernels, attention_kernels)</code>: what the host starts in a step that runs as "
    "<code>'NONE'</code> (eagerly), <code>'PIECEWISE'</code> (a graph for each piece) or <code>'FULL'</code>. A "
    "kernel that is launched by itself counts one, a graph counts one.",
    solution=launches_per_step,
    cases=_count_cases,
    wrong=(
        Wrong("as many as layers", _as_many_as_layers, "You count as many pieces as layers. N cuts leave N + 1 parts."),
        Wrong("without attention", _without_attention, "Attention is outside of the pieces, so that each of its "
              "kernels is launched by itself, in every layer."),
        Wrong("pieces in FULL", _pieces_in_full, "A FULL graph is one graph: attention and all pieces are in it."),
        Wrong("eager", _eager_without_attention, "Running eagerly, attention has to be launched, too."),
    ),
    hints=(
        "How many pieces are there? How many attentions?",
        "Eagerly everything counts its kernels. In PIECEWISE a piece counts one; attention still counts its kernels.",
        "<code>(layers + 1) + layers * attention_kernels</code> for PIECEWISE.",
    ),
    explanation="With 32 layers, 8 kernels a piece and 2 for attention: 328, 97 and 1. So PIECEWISE takes most "
    "launches away where attention is one or two kernels, and few where it is twenty. That alone makes one percentage "
    "for all models and backends impossible.",
)  # fmt: skip

EXERCISES = (PIECES, KINDS, DISPATCH, LAUNCHES)
