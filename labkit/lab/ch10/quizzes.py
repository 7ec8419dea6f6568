"""The questions of chapter 10. Refuses to run anything: they are there to be thought about."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    "10.recap",
    "Chapter 09: a compiler fuses the small operators of a layer. What does it leave alone?",
    [
        ("matrix products, which come from a library, and attention, which it is not "
         "shown", True, "One kernel between two "
         "products is about what is left. Attention was cut out before."),
        ("norms and activations, because they reduce over a row", False, "Exactly these are fused: a whole norm is one "
         "kernel."),
        ("everything that has a dynamic number of tokens", False, "The number of tokens is dynamic in all of it; one "
         "piece of code serves every batch."),
        ("nothing: the whole step becomes one kernel", False, "A graph is one launch, and still hundreds of kernels. "
         "Fusion stops at library calls."),
    ],
    ("A8",),
)  # fmt: skip

TRANSFER = Quiz(
    "10.transfer",
    "A colleague changes the attention backend, and in the same engine prompts in a batch now cost many more "
    "launches. The mode asked for is FULL in both cases. What happened?",
    [
        ("the new backend's tier is lower, so that FULL became FULL_AND_PIECEWISE or FULL_DECODE_ONLY; the trail of "
         "the mode says so", True, "A FULL graph of a mixed batch needs tier ALWAYS. Below it mixed batches get "
         "graphs of pieces, or none, and attention is launched layer by layer."),
        ("the new backend is slower", False, "Perhaps, but a slower kernel is still one launch."),
        ("FULL graphs are captured for decodes only, whatever the backend", False, "With tier ALWAYS they are "
         "captured for mixed batches too: that was the case before."),
        ("its graphs were not captured yet", False, "All captures end before the first step."),
    ],
    ("A6",),
    "transfer",
)  # fmt: skip

SELF_CHECK = Quiz(
    "10.self",
    "A6 and A7: why is the pass cut at attention, and why is the number of kinds so small?",
    [
        ("attention's work depends on the lengths in the batch, so it stays outside of graphs and compiler; layers are "
         "alike, so that only the first, the middle and the last part differ", True, "Everything else sees a number of "
         "tokens and nothing more. That is what padding can fix, and lengths are not."),
        ("attention is too slow for a graph; three is the number of graphs that fit into "
         "memory", False, "Attention can be "
         "captured where the backend allows it: that is the FULL graph. And there are N + 1 graphs per size, of 3 "
         "kinds."),
        ("the compiler cannot differentiate attention; there are three kinds of "
         "layers", False, "Nothing is differentiated "
         "here. And the layers are of one kind: it is the parts between attentions that are three."),
        ("only decodes are captured, and they have no attention over prompts", False, "PIECEWISE captures everything "
         "but attention, for any batch. Decodes attend to all of their context."),
    ],
    ("A6", "A7"),
    "self-check",
)  # fmt: skip

QUIZZES = (RECAP, TRANSFER, SELF_CHECK)
