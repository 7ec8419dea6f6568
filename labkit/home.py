"""Where a user's own things live: progress, answers, recordings. Refuses to create anything before it is written to."""

from __future__ import annotations

import os
from pathlib import Path

#: Names another folder for all of it.
VARIABLE = "LABKIT_HOME"


def home() -> Path:
    """LABKIT_HOME, else `labkit` in the folder for a user's data: XDG_DATA_HOME, or ~/.local/share."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "labkit"


def recordings_dir() -> Path:
    """Recordings that the user made or was given; panels list them beside those that ship."""
    return home() / "recordings"
