"""Errors as sentences: what was asked, what failed, what would work. Refuses to know where they are shown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabkitError(Exception):
    """Base of every error that is meant for a learner.

    Args:
        what: what was asked for ("attention_backend='FLASH_ATN'").
        why: what failed ("there is no backend of that name").
        try_: what would work, as an imperative ("Did you mean FLASH_ATTN?").
    """

    def __init__(self, what: str, why: str, try_: str = "") -> None:
        self.what, self.why, self.try_ = what, why, try_
        super().__init__(f"{what}: {why}." + (f" {try_}" if try_ else ""))

    def as_dict(self) -> dict[str, str]:
        """The shape every `labkit … --json` failure prints under the key "error"."""
        return {"what": self.what, "why": self.why, "try": self.try_}


class ConfigError(LabkitError, ValueError):
    """A configuration that cannot work; raised at construction, never later."""


class RequestError(LabkitError, ValueError):
    """One request that cannot be served; the others go on."""


class BackendError(LabkitError, ValueError):
    """An explicitly chosen attention backend cannot serve this model on this machine."""


class CaptureError(LabkitError, RuntimeError):
    """A graph could not be captured, or what it reads is no longer where it was; the engine stays usable without it.

    Args:
        mode: the kind of graph, FULL or PIECEWISE; "" where it is not about one.
        out_of_memory: whether memory was what was missing.
    """

    def __init__(self, what: str, why: str, try_: str = "", mode: str = "", out_of_memory: bool = False) -> None:
        self.mode, self.out_of_memory = mode, out_of_memory
        super().__init__(what, why, try_)


class CompileError(LabkitError, RuntimeError):
    """The model could not be compiled; the engine stays usable without."""


class LoadError(LabkitError, ValueError):
    """Weights or a tokenizer could not be loaded."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """'Did you mean X? Options: …' for an unknown name; case is ignored."""
    options = list(options)
    folded = {o.casefold(): o for o in options}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    hint = f"Did you mean {folded[close[0]]!r}? " if close else ""
    return hint + "Options: " + ", ".join(options) + "."
