"""The course's words, each in one or two sentences, with the chapter that brings it in. Refuses to teach.

A notebook prints a word in bold where it brings it in; a test looks for every bold word here.
"""

from __future__ import annotations

import dataclasses

from labkit.errors import ConfigError, did_you_mean
from labkit.lab.cards import Card, paragraph


@dataclasses.dataclass(frozen=True)
class Term:
    """word: as it is looked up. meaning: HTML, one or two sentences. chapter: the first that uses it."""

    word: str
    meaning: str
    chapter: int


_WORDS: tuple[tuple[int, str, str], ...] = (
    (0, "step", "One pass of the engine for all running requests, from the call to the new tokens on the host."),
    (0, "decode step", "A step in which every request is past its prompt and gets one new token."),
    (0, "token", "The unit of text that a model reads and writes: a number that stands for a few characters."),
    (0, "launch", "One kernel or one graph that the host starts. Starting takes the host time, whatever is started."),
    (0, "kernel", "One program on the GPU, such as a matrix product. A step of a small model runs hundreds of them."),
    (0, "host", "The CPU, and the Python program on it that tells the GPU what to do."),
    (0, "device", "What computes: the GPU, or the CPU where there is none."),
    (0, "attention backend", "The code that computes attention. Backends compute the same thing with other kernels."),
    (0, "CUDA graph", "A recording of kernel launches that the host starts again with one launch."),
    (0, "eager", "Mode NONE: the host starts every kernel by itself."),
    (0, "capture", "Record all launches of a step, once."),
    (0, "replay", "Start a captured graph: one launch, the same kernels, the same addresses."),
    (0, "padding", "Rows that belong to no request and fill a batch up to a captured size. Their results are dropped."),
    (0, "size", "The number of tokens that a graph was captured for; a smaller batch is padded up to it."),
    (0, "context", "Tokens of a request that are in the KV cache already when the step begins."),
    (0, "primed", "The KV cache was filled with seeded values in place of a real prompt, to reach a context at once."),
    (0, "LIVE", "Measured here, just now."),
    (0, "RECORDED", "Measured earlier on the machine that is named, and looked up; nothing is made up in between."),
    (0, "SIMULATED", "Computed by a model whose parameters are shown."),
    (0, "provenance", "Where a number comes from: LIVE, RECORDED or SIMULATED, with machine, versions and date."),
    (0, "prediction gate", "A question before a panel: the guess is kept, and drawn beside the result."),
    (1, "launch-bound", "The device waits for launches: the host needs longer to start the kernels than they run."),
    (1, "memory-bound", "The time is that of reading bytes; arithmetic would be ready earlier."),
    (1, "compute-bound", "The time is that of arithmetic; the bytes would be there earlier."),
    (1, "idle", "A time in which the device has nothing to run, because nothing was started yet."),
    (2, "synchronize", "Let the host wait until the device has finished what was started."),
    (2, "warm-up", "Runs before the measured ones, so that compiling, loading and caches are not measured."),
    (2, "median", "The middle one of the sorted samples. A single slow run does not move it."),
    (2, "noise", "A difference that another run of the same thing also shows."),
    (3, "online softmax", "Softmax over parts of a row, one after another, with a running maximum and a running sum."),
    (3, "log-sum-exp", "The logarithm of the sum of exponentials of a row of scores: what merging parts needs."),
    (3, "tolerance", "The difference up to which two results count as the same; it depends on the number format."),
    (3, "query", "The vector of one token that asks: it is compared with the keys of the tokens it may see."),
    (3, "key", "The vector of one token that a query is compared with."),
    (3, "value", "The vector of one token that is added up, times its weight."),
    (3, "score", "The product of a query and a key, scaled: how much of this token's value comes into the result."),
    (3, "head", "One of several attentions that a layer does side by side, with queries, keys and values of its own."),
    (3, "naive attention", "Attention that stores the whole matrix of scores."),
    (3, "tiled attention", "Attention that computes a tile of scores at a time and stores none of them."),
    (4, "prefill", "Computing the tokens of a prompt: many query rows for one request."),
    (4, "decode", "Computing one new token: one query row that reads all of a request's KV."),
    (4, "split-KV", "Several programs share one request's keys and values; their partial results are merged."),
    (4, "program", "One of the copies of a kernel that a launch starts; each works on its own part of the task."),
    (4, "grid", "How many programs a kernel launch starts, and how they are numbered."),
    (4, "SM", "Streaming multiprocessor: one of a GPU's independent processors. A program runs on one of them."),
    (5, "capability", "What a backend declares: data types, head sizes, page sizes, GPUs, features."),
    (5, "tier", "Which batches of a backend may be captured: ALWAYS, UNIFORM_BATCH, one-token decodes only, or NEVER."),
    (5, "reason", "One condition that a backend fails, with what would make it pass."),
    (6, "mixed batch", "A step with prompts' chunks and decodes in it."),
    (6, "chunk", "A part of a prompt that is computed in one step."),
    (6, "token budget", "How many tokens one step may compute, whoever they belong to."),
    (6, "block", "A page of the KV cache: room for a fixed number of one request's tokens."),
    (6, "block table", "For each request the blocks that hold its tokens, in order."),
    (6, "slot", "One token's place in the cache: block number times block size, plus its place in the block."),
    (6, "slot mapping", "The slots of all tokens of a step, in order: where their keys and values are written."),
    (6, "block hash", "A name for a full block that stands for its tokens and all tokens before them."),
    (6, "prefix caching", "Requests that begin alike share the blocks of their common beginning."),
    (6, "query_start_loc", "Where each request's tokens begin in the packed batch: a running sum that begins with 0."),
    (7, "static buffer", "A tensor that keeps its address: a graph reads it, so new values are copied into it."),
    (7, "stale input", "What a replay computes from when the new values were put into another tensor."),
    (7, "break-even", "The number of steps after which what was saved exceeds what it took to prepare."),
    (8, "capture size", "A number of tokens for which a graph is captured."),
    (8, "pool", "Memory that all graphs share for what lives only during a replay."),
    (8, "miss", "A step that runs eagerly although its mode has graphs."),
    (9, "fusion", "Several operations in one kernel: fewer launches, and values that stay on the chip between them."),
    (9, "compile", "Let torch.compile write fewer, larger kernels for a model or its pieces."),
    (9, "recompile", "The compiler meets something that its code was not made for, and starts again."),
    (10, "piece", "One part of a forward pass between two cuts at attention."),
    (10, "splitting op", "An operator at which the forward pass is cut; here attention."),
    (10, "opaque operator", "An operator that the compiler does not look into."),
    (10, "dispatch", "Choose for one batch the graph that runs, or none."),
    (10, "uniform decode", "A batch in which every request decodes, with the same number of tokens each."),
    (10, "FULL", "One graph of the whole step, attention included."),
    (10, "PIECEWISE", "Graphs of the pieces; attention between them is started by the host."),
    (11, "start-up time", "From the call that makes an engine to the first step that may run."),
    (11, "amortise", "Pay a cost once and divide it by the number of times that it helped."),
    (11, "SLO", "Service-level objective: a promise such as “99 of 100 tokens within 20 ms”."),
    (11, "bisect", "Find which of several changes is at fault by testing half of them at a time."),
)  # fmt: skip

TERMS: dict[str, Term] = {word.casefold(): Term(word, meaning, chapter) for chapter, word, meaning in _WORDS}


def find(word: str) -> Term | None:
    """A term by its word, whatever its case, and in the plural too; None where there is none."""
    folded = " ".join(word.casefold().split())
    candidates = [folded, folded.removesuffix("s"), folded.removesuffix("es")]
    if folded.endswith("ies"):
        candidates.append(folded[:-3] + "y")
    return next((TERMS[c] for c in candidates if c in TERMS), None)


def term(word: str) -> Card:
    """What a word means, as a card.

    Raises:
        ConfigError: the glossary does not have it; names the nearest.
    """
    found = find(word)
    if found is None:
        raise ConfigError(f"term({word!r})", "the glossary does not have it", did_you_mean(word, _names()))
    line = f"{found.word}: see chapter {found.chapter:02d}"
    return Card(line, paragraph(f"<b>{found.word}</b> (chapter {found.chapter:02d}): {found.meaning}", html=True))


def glossary(chapter: int | None = None) -> Card:
    """All terms, or those up to a chapter, in alphabetical order."""
    chosen = [t for _, t in sorted(TERMS.items()) if chapter is None or t.chapter <= chapter]
    body = "".join(paragraph(f"<b>{t.word}</b> ({t.chapter:02d}): {t.meaning}", html=True) for t in chosen)
    return Card(f"glossary: {len(chosen)} terms", body)


def _names() -> list[str]:
    return [t.word for t in TERMS.values()]
