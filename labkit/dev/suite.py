"""`make test`: every check that needs no GPU, one after another, with the slowest of them named at the end.

A part that fails does not stop the others; the exit status says whether any did. Refuses to know what a test tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
CACHE = ROOT / ".cache"
NUM_SLOWEST = 20


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that passed or failed: a test, or a whole tool."""

    name: str
    outcome: str  # "passed" | "failed" | "skipped"
    seconds: float


@dataclasses.dataclass(frozen=True)
class Part:
    """A command of the suite. `report` is where pytest writes its results; a tool without one is a single check."""

    name: str
    command: Sequence[str]
    report: pathlib.Path | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


def pytest_part(name: str, workers: int, *args: str) -> Part:
    report = CACHE / f"report-{name}.xml"
    # A file stays on one worker: a notebook's cells need their order, and fixtures of a module are made once.
    spread = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
    return Part(name, ["pytest", "-q", *spread, f"--junitxml={report}", *args], report)


def parts(jobs: int) -> list[Part]:
    notebooks = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "notebooks").glob("*.ipynb"))
    nbval = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout", "120", "-p", "labkit.dev.nbval_plugin"]
    solved = pytest_part("notebooks-solved", min(jobs, len(notebooks)), *nbval, *notebooks)
    return [
        Part("lint", ["ruff", "check", "."]),
        Part("format", ["ruff", "format", "--check", "."]),
        Part("types", ["mypy"]),
        # Its cache forgets that a module which a file imports was not there before; without one it takes a second.
        Part("imports", ["lint-imports", "--no-logo", "--no-cache"]),
        pytest_part("notebooks", min(jobs, len(notebooks)), *nbval, *notebooks),
        # The same with every exercise answered: a check that does not say PASS raises.
        dataclasses.replace(solved, env={"LABKIT_SOLUTIONS": "1"}),
        pytest_part("tests", jobs, "tests", "--ignore=tests/gpu"),
    ]


def environment() -> dict[str, str]:
    """No GPU, no downloads, no more threads than processes; the rest is the user's."""
    ours = {
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "LABKIT_STRICT": "1",
        # What a notebook notes as a learner's progress is not the user's own.
        "LABKIT_HOME": str(CACHE / "home"),
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(CACHE / "triton"),
    }
    return {**os.environ, **ours}


def read_report(part: Part, path: pathlib.Path) -> list[Check]:
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return []
    checks = []
    for case in cases:
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        name = f"{part.name}: {case.get('classname', '')}::{case.get('name', '')}"
        checks.append(Check(name, outcome, float(case.get("time", 0))))
    return checks


def run_part(part: Part) -> list[Check]:
    """What the command checked. Failing without a failed check, or ending without results, is a failed check itself."""
    if part.report:
        part.report.unlink(missing_ok=True)
    begin = time.monotonic()
    command = [str(BIN / part.command[0]), *part.command[1:]]
    code = subprocess.run(command, cwd=ROOT, env={**environment(), **part.env}, stdin=subprocess.DEVNULL).returncode
    seconds = time.monotonic() - begin
    if part.report is None:
        return [Check(part.name, "failed" if code else "passed", seconds)]
    checks = read_report(part, part.report)
    if not checks or (code and not any(check.outcome == "failed" for check in checks)):
        checks.append(Check(part.name, "failed", seconds))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description="Run every check that needs no GPU.")
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    parser.add_argument("--only", action="append", metavar="PART", help="run this part only; may be given again")
    args = parser.parse_args()
    chosen = [part for part in parts(args.jobs) if not args.only or part.name in args.only]
    if not chosen:
        parser.error(f"no such part; there are: {', '.join(part.name for part in parts(1))}")
    CACHE.mkdir(exist_ok=True)
    checks: list[Check] = []
    summary: list[str] = []
    for part in chosen:
        print(f"\n=== {part.name}: {' '.join(part.command)}", flush=True)
        begin = time.monotonic()
        found = run_part(part)
        failed = sum(check.outcome == "failed" for check in found)
        took = time.monotonic() - begin
        summary.append(
            f"  {part.name:16} {took:7.1f} s  {len(found):5} checks" + (f", {failed} FAILED" if failed else "")
        )
        checks += found
    print(f"\n=== the {NUM_SLOWEST} slowest")
    for check in sorted(checks, key=lambda check: -check.seconds)[:NUM_SLOWEST]:
        print(f"  {check.seconds:7.1f} s  {check.name}")
    print("\n=== parts", *summary, sep="\n")
    count = {outcome: sum(c.outcome == outcome for c in checks) for outcome in ("passed", "failed", "skipped")}
    for check in checks:
        if check.outcome == "failed":
            print(f"FAILED {check.name}")
    print(f"\n{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped", flush=True)
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
