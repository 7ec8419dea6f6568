"""`labkit course`: how far a learner has come, chapter by chapter and item by item. Refuses to know what is taught.

Reads the learner's own notes; `--reset` forgets them. Works without torch.
"""

from __future__ import annotations

import argparse
from typing import Any

from labkit.cli.answer import Answer, Console
from labkit.cli.options import Parser
from labkit.lab import progress
from labkit.lab.chapter import Chapter, chapters
from labkit.lab.exercises import Exercise
from labkit.lab.items import ITEMS, exercises_for

#: A status and its sign.
SIGNS = {"passed": "✓", "tried": "~", "open": "·", "no exercise yet": " "}


def course_options(parser: Parser) -> None:
    parser.add_argument("--reset", action="store_true", default=False, help="forget all progress; cannot be undone")


def course(args: argparse.Namespace, console: Console) -> Answer:
    """The status page, or with --reset none any more."""
    if args.reset:
        progress.reset()
        return Answer({"reset": True}, "All progress is forgotten.")
    data = status()
    return Answer(data, "\n".join(_lines(data)))


def status() -> dict[str, Any]:
    """Chapters with their exercises, the thirteen items, and what to do next, as plain values."""
    notes = progress.load()
    found = chapters()
    every = [exercise for chapter in found for exercise in chapter.exercises]
    return {
        "chapters": [_chapter(chapter, notes) for chapter in found],
        "items": [_item(item.key, item.text, exercises_for(item.key, every), notes) for item in ITEMS],
        "predictions": len(notes.predictions),
        "next": _next(found, notes),
        "file": progress.NAME if progress.path().exists() else None,
        "notices": list(progress.notices()),
    }


def _chapter(chapter: Chapter, notes: progress.Progress) -> dict[str, Any]:
    return {
        "number": chapter.number,
        "title": chapter.title,
        "notebook": chapter.notebook,
        "minutes": chapter.minutes,
        "opened": chapter.key in notes.chapters,
        "exercises": [_exercise(exercise, notes) for exercise in chapter.exercises],
        "questions": len(chapter.quizzes),
        "questions_right": sum(bool(notes.quizzes.get(q.id, {}).get("right")) for q in chapter.quizzes),
        "predictions": sum(key.startswith(f"{chapter.key}.") for key in notes.predictions),
    }


def _exercise(exercise: Exercise, notes: progress.Progress) -> dict[str, Any]:
    state = notes.exercise(exercise.id)
    return {
        "id": exercise.id, "title": exercise.title, "status": state.word, "hints": state.hints,
        "solution_seen": state.solution_seen,
    }  # fmt: skip


def _item(key: str, text: str, mine: list[Exercise], notes: progress.Progress) -> dict[str, Any]:
    words = [notes.exercise(exercise.id).word for exercise in mine]
    if not words:
        word = "no exercise yet"
    elif all(w == "passed" for w in words):
        word = "passed"
    else:
        word = "tried" if any(w != "open" for w in words) else "open"
    return {"key": key, "text": text, "status": word, "exercises": [exercise.id for exercise in mine]}


def _next(found: tuple[Chapter, ...], notes: progress.Progress) -> str:
    """The first exercise that did not pass, in the order of the course, as a sentence."""
    for chapter in found:
        if chapter.key not in notes.chapters and not any(e.id in notes.exercises for e in chapter.exercises):
            return f"Open {chapter.notebook} (about {chapter.minutes} minutes)."
        for exercise in chapter.exercises:
            if not notes.exercise(exercise.id).passed:
                return f"Exercise {exercise.id}, {exercise.title}, in {chapter.notebook}."
    return "Every exercise has passed." if found else "There is no chapter here."


def _lines(data: dict[str, Any]) -> list[str]:
    lines = ["Chapters"]
    for chapter in data["chapters"]:
        marks = " ".join(f"{SIGNS[e['status']]} {e['id']}" for e in chapter["exercises"])
        aside = []
        if chapter["questions"]:
            aside.append(f"questions {chapter['questions_right']} of {chapter['questions']}")
        if chapter["predictions"]:
            aside.append(f"predictions {chapter['predictions']}")
        hints = sum(e["hints"] for e in chapter["exercises"])
        if hints:
            aside.append(f"hints {hints}")
        opened = "" if chapter["opened"] else "not opened yet"
        head = f"{chapter['number']:02d} {chapter['title']}"
        lines.append(f"  {head:44}  {marks or opened}".rstrip())
        if marks and (aside or opened):
            lines.append(f"  {'':44}  {', '.join(filter(None, [opened, *aside]))}")
    lines += ["", "Self-check: I can …"]
    for item in data["items"]:
        where = f" ({', '.join(item['exercises'])})" if item["exercises"] else f" ({item['status']})"
        lines.append(f"  {SIGNS[item['status']]} {item['key']} {item['text']}{where}")
    lines += ["", f"Next: {data['next']}", "Signs: ✓ passed, ~ tried, · open."]
    return [*lines, *(f"Note: {sentence}" for sentence in data["notices"])]
