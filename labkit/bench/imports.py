"""How long `import labkit` takes in a fresh process, and what it drags in. Refuses to import anything itself."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

from labkit.errors import LabkitError
from labkit.measure.stats import summary

#: What must not be loaded by an import: each of them takes longer than labkit itself.
HEAVY = ("torch", "triton", "transformers", "plotly", "ipywidgets", "numpy")

_PROGRAM = """
import json, sys, time
before = set(sys.modules)
begin = time.perf_counter()
import {module}
seconds = time.perf_counter() - begin
json.dump({{"ms": seconds * 1e3, "loaded": sorted(set(sys.modules) - before)}}, sys.stdout)
"""


@dataclasses.dataclass(frozen=True)
class ImportRow:
    """Wall time of one import statement in `n` fresh processes, and the heavy packages that it loaded."""

    kind: str
    module: str
    p10_ms: float
    p50_ms: float
    p90_ms: float
    n: int
    samples_ms: tuple[float, ...]
    heavy: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def bench_import(module: str = "labkit", samples: int = 10) -> ImportRow:
    """Import `module` in fresh processes of this interpreter; the first, which may write byte code, is not counted.

    Raises:
        LabkitError: the import failed, with what Python said.
    """
    times, loaded = [], set()
    for _ in range(samples + 1):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(module=module)], capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise LabkitError(f"import {module}", said[-1] if said else "it failed", "See what `labkit doctor` says.")
        found = json.loads(done.stdout)
        times.append(round(found["ms"], 4))
        loaded |= {name.partition(".")[0] for name in found["loaded"]}
    kept = times[1:]
    s = summary(kept)
    heavy = tuple(name for name in HEAVY if name in loaded)
    return ImportRow("import", module, round(s.p10, 5), round(s.p50, 5), round(s.p90, 5), s.n, tuple(kept), heavy)
