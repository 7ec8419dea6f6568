"""The GPU suite: runs on whatever torch ≥ 2.11 is installed; without a GPU it fails instead of passing empty.

At the end it lists what each attention backend refused, and which of its combinations were not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.parity import Contender, Outcome, Record, summary


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if items and not torch.cuda.is_available():
        pytest.exit("tests/gpu needs a CUDA GPU, and torch sees none here.", returncode=1)


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
