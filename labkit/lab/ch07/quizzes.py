"""The questions of chapter 07. Refuses to ask for a number that no cell shows."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="07.recap",
    question="Before we begin: a step holds 3 decodes and a chunk of 512 prompt tokens. In the next step the chunk is "
    "gone, and two more requests decode. What has changed for the kernels?",
    options=(
        ("Nothing: kernels do not know about requests.", False,
         "They do not, but they know shapes: 515 rows before, 5 rows now, with other offsets and lengths."),
        ("The shapes of nearly everything: rows, offsets, lengths.", True,
         "515 tokens before, 5 now. Kernels take any shape; a recording of launches, as in this chapter, does not."),
        ("Only the attention kernel has other work; the rest is the same.", False,
         "Every matrix product and every norm has one row per token, so all of them changed shape."),
    ),
)  # fmt: skip

TRANSFER = Quiz(
    id="07.transfer",
    kind="transfer",
    items=("A5", "B3"),
    question="A colleague adds LoRA to an engine, small extra weights (an adapter) that each request may name: before "
    "each step the code sets <code>layer.lora = adapters[name]</code>. Without graphs it works. With graphs every "
    "request gets the adapter "
    "that was active during the capture, and there is no error. What mends it?",
    options=(
        ("Capture again whenever the adapter changes.", False,
         "It would be right, and each change would cost a capture of every size: far more than a step."),
        ("Keep a buffer for the adapter at a fixed address, and copy the wanted one into it before the replay.", True,
         "The attribute is a name; the graph holds the address of the old tensor. Copying changes what lies there."),
        ("Synchronize before the replay, so that the new tensor has arrived.", False,
         "The new tensor has arrived. It is at an address that the graph does not read."),
        ("Move the assignment into the captured function.", False,
         "An assignment of names is Python. It runs once, at capture, and is not recorded."),
    ),
)  # fmt: skip

SELF_CHECK = Quiz(
    id="07.selfcheck",
    kind="self-check",
    items=("A5",),
    question="Why must shapes be fixed in a CUDA graph?",
    options=(
        ("Because the driver checks shapes at every replay, and refuses other ones.", False,
         "A replay takes no arguments, so there is nothing to check. It would run the old shape, and say nothing."),
        ("Because a launch is recorded with its grid, its addresses and its numbers: another shape is another list of "
         "launches.", True,
         "So an engine records one graph per size, pads a batch up to one of them, and runs what is larger without."),
        ("Because memory cannot be allocated during a capture.", False,
         "It can: torch takes it from a pool that belongs to the graphs. What it may not do is move afterwards."),
    ),
)  # fmt: skip

QUIZZES = (RECAP, TRANSFER, SELF_CHECK)
