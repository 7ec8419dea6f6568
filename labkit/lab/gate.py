"""A prediction before a result: asked once, kept beside what came out. Refuses to know panels, and to grade anybody.

A gate holds back the Run button until something is predicted or the question is skipped. A cell that calls
`panel.run()` is never held back, so that a notebook runs from top to bottom without a learner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from labkit.errors import ConfigError, LabkitError
from labkit.lab import progress, ui
from labkit.lab.fields import Number


@dataclasses.dataclass(frozen=True)
class Gate:
    """A question that a panel asks before its first run.

    id: where the prediction is stored ("01.idle_share"). options: (label, value) to choose from; or number: what to
        type, with its range and unit. Exactly one of the two.
    answer: what is right: a value, or a function of the runs so far that returns it, or None while they do not tell: it
        may take two runs, or a run with the settings that the question names. The first that is not None counts.
    explain: why, as a sentence or a function of the runs.
    tolerance: how far a number may be off and count as right, as a share of the answer.
    axis: "x" or "y" where the chart should show a predicted number as a line, on that axis.
    """

    id: str
    question: str
    options: Sequence[tuple[str, Any]] = ()
    number: Number | None = None
    answer: Any = None
    explain: str | Callable[[Sequence[Any]], str] = ""
    tolerance: float = 0.2
    axis: str = ""

    def __post_init__(self) -> None:
        if bool(self.options) == (self.number is not None):
            raise ConfigError(
                f"gate {self.id!r}", "needs either options or a number", "Give one of the two, and not both."
            )
        if self.axis not in ("", "x", "y") or (self.axis and self.number is None):
            raise ConfigError(f"gate {self.id!r}", "axis is for a number, x or y", "Leave axis out.")

    def right_answer(self, runs: Sequence[Any]) -> Any:
        """What is right after these runs, None while that cannot be told."""
        return self.answer(runs) if callable(self.answer) else self.answer

    def is_right(self, guess: Any, answer: Any) -> bool:
        if self.number is None:
            return bool(guess == answer)
        return math.isclose(float(guess), float(answer), rel_tol=self.tolerance, abs_tol=1e-12)

    def name_of(self, value: Any) -> str:
        """A prediction or an answer in the words of the question."""
        for label, known in self.options:
            if known == value:
                return label
        unit = f" {self.number.unit}" if self.number is not None and self.number.unit else ""
        return f"{value:.3g}{unit}" if isinstance(value, float) else f"{value}{unit}"


class GateBox:
    """The question with what answers it. States: asking, predicted, skipped, opened (a cell ran the panel first).

    Args:
        changed: called after Commit or Skip.
    """

    def __init__(self, gate: Gate, changed: Callable[[], None]) -> None:
        self.gate, self._changed = gate, changed
        self.state = "asking"
        self.prediction: Any = None
        self._verdict = ""
        self.entry: Any
        if gate.options:
            self.entry = widgets.RadioButtons(
                options=list(gate.options), value=None, layout=widgets.Layout(width="auto", margin="0 0 0 4px")
            )
        else:
            number = gate.number
            assert number is not None
            box = widgets.IntText if number.whole else widgets.FloatText
            self.entry = box(
                value=number.value, description=number.label, style=dict(ui.LABEL), layout=widgets.Layout(width="200px")
            )
        ui.hint(self.entry, gate.question)
        self.commit_button = ui.button("Commit", "Keep this prediction; Run shows it beside the result", "primary")
        self.skip_button = ui.button("Skip", "Run without a prediction")
        self.asked, self.said = ui.area(), ui.area()
        self._answering = widgets.VBox(
            [self.entry, ui.row([self.commit_button, self.skip_button])], layout=widgets.Layout(width="auto")
        )
        self.widget = widgets.VBox([self.asked, self._answering, self.said], layout=widgets.Layout(width="auto"))
        self.widget.add_class("lk-gate")
        self.show(())

    @property
    def open(self) -> bool:
        """Whether Run may be pressed."""
        return self.state != "asking"

    def commit(self, value: Any = None) -> None:
        """Keep a prediction; None takes what the widget holds. A second one changes nothing.

        Raises:
            ConfigError: nothing is chosen, or the value is none of the options or outside the range.
        """
        if self.state in ("predicted", "skipped"):
            return
        value = self.entry.value if value is None else value
        what = f"prediction {value!r}"
        if self.gate.options:
            known = [v for _, v in self.gate.options] + [label for label, _ in self.gate.options]
            if value is None or value not in known:
                labels = ", ".join(repr(label) for label, _ in self.gate.options)
                raise ConfigError(what, "is none of the answers", f"Choose one of {labels}, or press Skip.")
            value = next(v for label, v in self.gate.options if value in (v, label))
            self.entry.value = value
        elif self.gate.number is not None:
            kept, note = self.gate.number.take(value)
            if note:
                unit = f" {self.gate.number.unit}" if self.gate.number.unit else ""
                ends = f"from {self.gate.number.low:g} to {self.gate.number.high:g}{unit}"
                raise ConfigError(what, "is outside of what can come out", f"Give a number {ends}, or press Skip.")
            value = self.entry.value = kept
        self.state, self.prediction = "predicted", value
        self.show(())
        self._changed()

    def skip(self) -> None:
        """Go on without one; that it was skipped is kept."""
        if self.state == "asking":
            self.state = "skipped"
            self._note(None, None)
            self.show(())
            self._changed()

    def recall(self) -> None:
        """Take a prediction that was stored by an earlier kernel as made."""
        stored = progress.load().predictions.get(self.gate.id) if self.state == "asking" else None
        if stored is not None and stored["value"] is not None:
            self.state, self.prediction = "predicted", stored["value"]

    def show(self, runs: Sequence[Any]) -> None:
        """The question, and once the runs tell it, the prediction beside the result."""
        if runs and self.state == "asking":
            self.state = "opened"
        self._answering.layout.display = None if self.state == "asking" else "none"
        self.asked.value = ui.block(f"<p><b>Predict first.</b> {ui.escape(self.gate.question)}</p>")
        self.said.value = ui.block(self._result(runs))

    def _result(self, runs: Sequence[Any]) -> str:
        """What was predicted, and once it can be told, what came out. What later runs say counts no more."""
        if self._verdict:
            return self._verdict
        mine = ui.escape(self.gate.name_of(self.prediction)) if self.state == "predicted" else ""
        answer = self.gate.right_answer(runs) if runs else None
        if answer is None:
            then = "Another run tells." if runs else "Now press Run."
            known = {"predicted": f"You predict: <b>{mine}</b>. {then}", "skipped": f"Skipped. {then}"}
            return f"<p>{known[self.state]}</p>" if self.state in known else ""
        why = self.gate.explain(runs) if callable(self.gate.explain) else self.gate.explain
        verdict = "<p>No prediction was made."
        if self.state == "predicted":
            right = self.gate.is_right(self.prediction, answer)
            self._note(self.prediction, right)
            sign, word = ("✓", "That is what came out") if right else ("✗", "It came out otherwise")
            verdict = f'<p><span class="lk-{"ok" if right else "no"}"><b>{sign} {word}.</b></span> You: <b>{mine}</b>.'
        result = ui.escape(self.gate.name_of(answer))
        self._verdict = f"{verdict} Result: <b>{result}</b>.</p><p>{ui.escape(why)}</p>"
        return self._verdict

    def _note(self, value: Any, right: bool | None) -> None:
        """Hand it to the learner's progress."""
        with contextlib.suppress(OSError, LabkitError):
            progress.note_prediction(self.gate.id, value, right)
