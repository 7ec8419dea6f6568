"""What every test starts from: an environment in which nothing is downloaded and kernels run without a GPU.

Refuses to import torch, and to need a plugin: `make test-gpu` uses this file with whatever packages are there.
"""

from __future__ import annotations

import os
import pathlib
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def _has_gpu() -> bool:
    """Whether a CUDA device can be there: asked of the driver's files, since asking torch takes seconds."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"))


# Triton binds its own helpers to the interpreter or the compiler when it is first imported, so this comes first.
# Without a device the compiler cannot launch anything. A test of the compiler itself starts a process with `user_env`.
INTERPRETING = not _has_gpu()
if INTERPRETING:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A choice that the user made for other work decides nothing here.
os.environ.pop("LABKIT_ATTENTION_BACKEND", None)
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Errors inside a panel fail the test instead of showing a card.
os.environ.setdefault("LABKIT_STRICT", "1")
# What a test writes as a learner (progress, recordings) never meets the user's own.
os.environ["LABKIT_HOME"] = tempfile.mkdtemp(prefix="labkit-home-")

try:
    import hypothesis
except ImportError:  # the GPU suite runs without it
    pass
else:
    hypothesis.settings.register_profile(
        "labkit",
        deadline=None,  # a deadline is a timed assertion, and fails on a busy machine
        derandomize=bool(os.environ.get("CI")),
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("labkit")


@pytest.fixture(scope="session")
def user_env() -> dict[str, str]:
    """The environment of a process as a user starts it: no Triton interpreter, no strict panels, no GPU."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "LABKIT_STRICT", "OMP_NUM_THREADS")}
    return {**env, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
