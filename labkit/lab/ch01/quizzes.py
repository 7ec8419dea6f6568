"""The questions of chapter 01. Refuses to ask for a number that no cell shows."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="01.recap",
    question="Before we begin: the panel of chapter 00 has a run marked LIVE and one marked RECORDED. What may you do "
    "with their times?",
    options=(
        ("Divide one by the other: that is the speed-up.", False,
         "The two ran on different machines at different times, so that the ratio would compare everything at once."),
        ("Look at both; take ratios only between runs of one kind.", True,
         "A ratio says most where one thing changed. Between LIVE and RECORDED all did, and the panel takes none."),
        ("Throw the RECORDED one away, for it is old.", False,
         "It is as true as on its day, and its badge names the machine. It just is no run of this computer."),
    ),
)  # fmt: skip

TRANSFER = Quiz(
    id="01.transfer",
    kind="transfer",
    items=("A1", "B1"),
    question="A decode step of a small model runs eagerly. You double the batch from 1 to 2, and the step takes as "
    "long as before. You buy a GPU with twice the memory bandwidth, and the step still takes as long. What does it "
    "wait for?",
    options=(
        ("For data: the weights are the same at both batches.", False,
         "Weights are read once whatever the batch, that much is right. But then twice the bandwidth would have "
         "helped."),
        ("For arithmetic: matrix products are the heaviest part.", False,
         "Twice the batch is twice the arithmetic, and the step did not notice."),
        ("For instructions: the number of launches is the same in all three.", True,
         "Neither the batch nor the memory changes how many kernels the host starts. A faster host would help, or "
         "fewer launches."),
    ),
)  # fmt: skip

SELF_CHECK = Quiz(
    id="01.selfcheck",
    kind="self-check",
    items=("A1", "B1"),
    question="A step has 300 kernels of 20 µs each, and one launch costs the host 8 µs (made-up numbers). About what "
    "does one graph save?",
    options=(
        ("2,400 µs: all 300 launches.", False, "They overlap with 6,000 µs of kernels, so nobody waited for most of "
                                               "them."),
        ("Almost nothing: the launches are hidden behind the kernels.", True,
         "Every launch but the first is over before the kernel before it ends. The step takes 6,008 µs, and only "
         "those 8 can go."),
        ("3,600 µs: the kernels get shorter.", False, "A graph runs the same kernels. It changes who starts them."),
    ),
)  # fmt: skip

QUIZZES = (RECAP, TRANSFER, SELF_CHECK)
