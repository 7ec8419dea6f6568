"""A box and an upload button that bring a recording into a panel. Refuses to know what a panel does with it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from labkit.errors import LabkitError
from labkit.lab import ui
from labkit.measure.library import Entry, add

Guard = Callable[[str], contextlib.AbstractContextManager[None]]


class Loader:
    """ "Load recording…": a path, or a file from the reader's computer.

    Args:
        loaded: takes the entry that was added and returns a sentence.
        guarded: `with guarded("doing"):` turns an error into a card.
    """

    def __init__(self, loaded: Callable[[Entry], str], guarded: Guard) -> None:
        self._loaded, self._guarded = loaded, guarded
        self.path = ui.text("File", placeholder="path of a recording (.json.gz or .json)")
        self.upload = widgets.FileUpload(
            accept=".json,.gz", multiple=False, description="From this computer", layout=widgets.Layout(width="auto")
        )
        self.said = ui.area()
        button = ui.button("Load", "Check the file and offer it as a source", width="72px")
        button.on_click(lambda _: self._from_path())
        self.path.observe(lambda change: self._from_path(), names="value")
        self.upload.observe(lambda change: self._from_upload(), names="value")
        box = ui.stack([self.path, ui.row([button, self.upload]), self.said], width="auto")
        self.widget = widgets.Accordion(children=[box], selected_index=None)
        self.widget.set_title(0, "Load recording…")

    def load(self, path: Path) -> None:
        """Check the file, keep it with the user's own, hand it on.

        Raises:
            LabkitError: it cannot be read, or is of no use here.
        """
        self.said.value = ""
        self.said.value = ui.block(f"<p>{ui.escape(self._loaded(add(path)))}</p>", "lk-small")

    def _from_path(self) -> None:
        typed = self.path.value.strip()
        if typed:
            with self._guarded("Load recording"):
                self.load(Path(typed).expanduser())

    def _from_upload(self) -> None:
        with self._guarded("Load recording"):
            for name, content in uploaded(self.upload.value):
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / name
                    path.write_bytes(content)
                    self.load(path)


def uploaded(value: Any) -> list[tuple[str, bytes]]:
    """Name and content of each file of a FileUpload: ipywidgets 7 has a dictionary by name, 8 a tuple.

    Raises:
        LabkitError: a name that is none.
    """
    if isinstance(value, Mapping):
        found = [(str(name), bytes(one["content"])) for name, one in value.items()]
    else:
        found = [(str(one["name"]), bytes(one["content"])) for one in value]
    for name, _ in found:
        if Path(name).name != name or name.startswith("."):
            raise LabkitError(f"upload {name!r}", "is no name for a recording", "Rename the file.")
    return found
