"""The GPU suite: runs on whatever torch ≥ 2.11 is installed; without a GPU it fails instead of passing empty.

Files run in the order of what they take, so that a run that is cut off has said most. A failure is told in short when
it happens, with what the GPU was left in, and in full at the end, where it also lists what each attention backend
refused, and which of its combinations were not compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.parity import Contender, Outcome, Record, summary

#: Cheapest first; a file that is not named here runs before those that compile.
CHEAP = ("models", "sdpa", "measure", "triton", "timeline", "generate", "engine", "capture")
COMPILES = ("piecewise", "flash_attn", "flex", "parity", "flashinfer", "mla")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if items and not torch.cuda.is_available():
        pytest.exit("tests/gpu needs a CUDA GPU, and torch sees none here.", returncode=1)
    places = {f"test_{name}": i for i, name in enumerate((*CHEAP, "", *COMPILES))}
    items.sort(key=lambda item: places.get(item.path.stem, len(CHEAP)))


class InShort:
    """Tells a failure when it happens. Under pytest-xdist only the process that prints has the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if not report.failed or terminal is None:
            return
        terminal.ensure_newline()
        terminal.write_line(f"FAILED {report.nodeid} ({report.when})")
        crash = getattr(report.longrepr, "reprcrash", None)
        where = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
        states = [text for name, text in report.sections if name == "GPU"]
        terminal.write_line("\n".join([where[:2000], *states, report.capstdout[-1000:]]))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(InShort(config))


def state() -> str:
    """What the GPU and torch are in: memory, the stream, and whether random numbers can be drawn."""
    lines = [f"torch {torch.__version__}, {torch.cuda.get_device_name()}"]
    free, total = torch.cuda.mem_get_info()
    lines.append(
        f"MiB: {torch.cuda.memory_allocated() >> 20} allocated, {torch.cuda.memory_reserved() >> 20} reserved, "
        f"{(total - free) >> 20} of {total >> 20} in use"
    )
    lines.append(f"stream {torch.cuda.current_stream()}, capturing: {torch.cuda.is_current_stream_capturing()}")
    try:
        torch.rand(1, device="cuda").item()
    except RuntimeError as error:
        lines.append(f"torch.rand: {error}")
    return "\n".join(lines)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = (yield).get_result()  # type: ignore[misc]
    if report.failed:
        with contextlib.suppress(RuntimeError):  # of a GPU that answers nothing any more
            report.sections.append(("GPU", state()))


@pytest.fixture(autouse=True)
def _give_memory_back() -> object:
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def tell(record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """Keeps the outcomes of parity cases for the list at the end. Skips a backend that cannot run here at all."""

    def keep(contender: Contender, *outcomes: Outcome) -> None:
        for outcome in outcomes:
            record_property("parity", [contender.label, outcome.kind, list(outcome.reasons)])
        if outcomes and outcomes[-1].kind == "absent":
            pytest.skip(f"{contender.label}: {outcomes[-1].reasons[0]}")

    return keep


def pytest_terminal_summary(terminalreporter: Any) -> None:
    # Properties travel with the reports, so this is right with test processes, too.
    records: list[Record] = []
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        if getattr(report, "when", "") == "call":
            for name, value in report.user_properties:
                if name == "parity":
                    label, kind, reasons = value
                    records.append((label, kind, tuple(reasons)))
    lines = summary(records)
    if lines:
        terminalreporter.write_sep("=", "attention backends")
        for line in lines:
            terminalreporter.write_line(line)
