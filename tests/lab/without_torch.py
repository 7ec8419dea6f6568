"""A pytest plugin (`-p tests.lab.without_torch`): this process cannot find torch, as on a machine without it."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

HIDDEN = ("torch", "triton")


class _Hidden(importlib.abc.MetaPathFinder):
    """Wraps a finder and does not find what is hidden, so that `import` and `find_spec` agree."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname.split(".")[0] in HIDDEN else self._finder.find_spec(fullname, path, target)


assert not set(HIDDEN) & set(sys.modules), "the plugin has to be loaded first"
sys.meta_path[:] = [_Hidden(finder) for finder in sys.meta_path]
