"""The questions of chapter 09. Refuses to count: they are there to be thought about."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    "09.recap",
    "Chapter 08: graphs were captured for the sizes 1, 2, 4, 8 and 16. A step has 13 tokens. What runs?",
    [
        ("the graph of 16, with three rows of padding", True, "The smallest captured size that holds them. The three "
         "rows are computed and dropped."),
        ("the graphs of 8, 4 and 1, one after another", False, "A step is one forward pass: attention and the tokens "
         "of one request cannot be spread over graphs of other batches."),
        ("nothing is captured for 13, so it runs eagerly", False, "Only a step above the largest size runs eagerly. "
         "Below it there is always a larger graph."),
        ("the graph of 16 is captured anew for 13 tokens", False, "Nothing is captured after start-up. A fixed shape "
         "is exactly what padding is for."),
    ],
    ("A7",),
)  # fmt: skip

TRANSFER = Quiz(
    "09.transfer",
    "A team serves a model of 70 billion parameters with batches of about 200. They turn on graphs and measure no "
    "difference. Then they turn on the compiler and gain a little. What is the most likely reason?",
    [
        ("its kernels are longer than their launches, so that the host was never the slower side; fusion still moves "
         "fewer bytes", True, "A graph saves waiting for launches, and there was none. What fusion saves is on the "
         "device: values that need not go to memory and back."),
        ("graphs do not work with large batches", False, "They work up to the largest captured size. They save what "
         "waiting there is, and here is none."),
        ("the compiler makes the matrix products faster", False, "Those come from a library before and after; nothing "
         "was fused into them."),
        ("they measured with too few steps", False, "Possible, and worth a check. But the result is what you would "
         "expect from the kernels' lengths."),
    ],
    ("A8",),
    "transfer",
)  # fmt: skip

SELF_CHECK = Quiz(
    "09.self",
    "A8, first part: what does a team pay for compiling, and what does it get?",
    [
        ("seconds to minutes at start-up, once per configuration if the cache is kept; fewer kernels in every step, "
         "and code that is harder to debug", True, "The cache makes the second start short, the first one never. In "
         "exchange every step has fewer launches and moves fewer bytes."),
        ("memory for each captured size; no launches any more", False, "That is the price and the gain of graphs. A "
         "compiler captures nothing."),
        ("seconds in the middle of requests whenever a new batch size comes", False, "That would be recompiling. With "
         "a dynamic number of tokens one piece of code serves all sizes, and it is made before serving."),
        ("nothing: the code is made while requests run, in the background", False, "It is made before serving begins, "
         "so that no request waits for it. The start is longer for it."),
    ],
    ("A8",),
    "self-check",
)  # fmt: skip

QUIZZES = (RECAP, TRANSFER, SELF_CHECK)
