"""The map of the course: every chapter that is there, how long it takes, where it runs, how far the learner is.

Refuses to have a list of its own: all of it comes from the chapters.
"""

from __future__ import annotations

from labkit.lab import progress, ui
from labkit.lab.cards import Card, escape, paragraph
from labkit.lab.chapter import MODES, Chapter, chapters


def course_map() -> Card:
    """One line per chapter, with a link to its notebook; ✓ where it shows something in a mode."""
    found, notes = chapters(), progress.load()
    lines = [
        {
            "key": chapter.key,
            "title": f'<a href="{escape(chapter.notebook)}">{escape(chapter.title)}</a>',
            "minutes": str(chapter.minutes), "builds": ", ".join(f"{n:02d}" for n in chapter.needs) or "–",
            "done": _done(chapter, notes),
            **{mode: "✓" if mode in chapter.modes else "–" for mode in MODES},
        } for chapter in found
    ]  # fmt: skip
    head = [("key", "#"), ("title", "chapter"), ("minutes", "minutes#"), ("builds", "builds on"),
            *((mode, mode) for mode in MODES), ("done", "your exercises")]  # fmt: skip
    hours = sum(chapter.minutes for chapter in found) / 60
    said = f"{len(found)} chapters, about {hours:.0f} hours in all. They build on each other; each is one notebook."
    where = " ".join(f"{mode}: {what}." for mode, what in MODES.items())
    body = paragraph(said) + ui.table("The course", head, lines) + paragraph(where, quiet=True)
    return Card(f"course: {len(found)} chapters", body)


def _done(chapter: Chapter, notes: progress.Progress) -> str:
    """`2 of 4 passed`; "not opened yet" where nothing was done."""
    passed = sum(notes.exercise(exercise.id).passed for exercise in chapter.exercises)
    if not passed and chapter.key not in notes.chapters:
        return "not opened yet"
    return f"{passed} of {len(chapter.exercises)} passed"
