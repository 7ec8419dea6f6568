"""The questions of chapter 02. Refuses to ask for a number that no cell shows."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="02.recap",
    items=("A1",),
    question="From chapter 01: in an eager step every kernel is longer than a launch. What does the host do most of "
    "the time?",
    options=(
        ("It waits after each launch until that kernel has ended.", False,
         "It never waits between launches. That is what makes launching and running overlap."),
        ("It runs ahead, and waits at the end of the step for the GPU.", True,
         "It is done with launching long before the GPU is done with running. Remember that when you read a clock on "
         "the host."),
        ("It launches more slowly, so that both end together.", False,
         "The host does not know how long a kernel takes."),
    ),
)  # fmt: skip

TRANSFER = Quiz(
    id="02.transfer",
    kind="transfer",
    question="A colleague reports: “My new attention kernel takes 9 µs, whether the context is 1,000 or 100,000 "
    "tokens. The old one was 40 times slower.” What do you ask first?",
    options=(
        ("How many samples were taken.", False,
         "More samples of the wrong thing are as wrong. A time that does not depend on the work is the clue."),
        ("Whether the clock waited for the GPU.", True,
         "Nine microseconds for any amount of work is the price of a launch. Perhaps the old one was timed with a "
         "synchronize, and this one was not."),
        ("Which GPU it was.", False, "No GPU reads a hundred times as much data in the same time."),
    ),
)  # fmt: skip

SELF_CHECK = Quiz(
    id="02.selfcheck",
    kind="self-check",
    question="A step went from 1.5 ms to 1.0 ms (made-up numbers). Which sentence is right?",
    options=(
        ("It is 33 % faster.", False, "It takes 33 % less time. Faster is about speed, and speed is 1 over time."),
        ("It takes a third less time, which is 1.5 times the speed.", True,
         "0.5 of 1.5 ms is a third; 1.5 / 1.0 is 1.5. Say which of the two you mean, or give both times."),
        ("It is 50 % shorter.", False, "Half of 1.5 ms would be 0.75 ms. It is the speed that grew by 50 %."),
    ),
)  # fmt: skip

QUIZZES = (RECAP, TRANSFER, SELF_CHECK)
