"""nbval's comparison, cut down to what never varies (`-p labkit.dev.nbval_plugin`). Refuses to run cells itself.

Compared is plain text, and only in a notebook as it ships: a solved run (LABKIT_SOLUTIONS=1) and a learner's own copy
(LABKIT_COMPARE=0) print other lines, and have to run without an error.
"""

from __future__ import annotations

import os
from typing import Any

#: HTML follows the style sheet, and warnings carry paths.
NEVER = ("text/html", "stderr", "application/vnd.jupyter.widget-view+json")
ELSE = ("text/plain", "stdout")


def pytest_collectstart(collector: Any) -> None:
    """nbval's documented way to leave kinds of output out."""
    if not hasattr(collector, "skip_compare"):
        return
    collector.skip_compare = (*collector.skip_compare, *NEVER)
    if os.environ.get("LABKIT_SOLUTIONS") == "1" or os.environ.get("LABKIT_COMPARE") == "0":
        collector.skip_compare = (*collector.skip_compare, *ELSE)
