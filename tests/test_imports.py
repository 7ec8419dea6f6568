"""Every module loads on a machine with little: no GPU, no triton, and no torch where the design says so.

Each test asks a fresh process, since this one has torch and the Triton interpreter.
"""

from __future__ import annotations

import json
import os
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import labkit

ROOT = pathlib.Path(__file__).resolve().parents[1]

# The rooms and files that a reader without torch can still use.
WITHOUT_TORCH = (
    "labkit.attention.interface",
    "labkit.attention.registry",
    "labkit.attention.selector",
    "labkit.bench",
    "labkit.cli",
    "labkit.config",
    "labkit.dev",
    "labkit.engine.report",
    "labkit.errors",
    "labkit.figures",
    "labkit.graphs.advisor",
    "labkit.graphs.avoid",
    "labkit.graphs.dispatcher",
    "labkit.graphs.modes",
    "labkit.graphs.padding",
    "labkit.graphs.sizes",
    "labkit.lab",
    "labkit.measure",
    "labkit.models.shapes",
    "labkit.paging.block_hash",
    "labkit.paging.block_pool",
    "labkit.paging.slot_mapping",
    "labkit.scheduling",
    "labkit.simulate",
)

PROBE = """
import importlib, json, os, sys

class Without:
    "A finder that does not find what is blocked, so that both `import` and `find_spec` see nothing there."
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in blocked else self.finder.find_spec(name, path, target)

blocked, first, modules = json.loads(sys.argv[1])
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
for name in first:
    importlib.import_module(name)
before, failures = dict(os.environ), {}
for name in modules:
    try:
        importlib.import_module(name)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
torch = sys.modules.get("torch")
print(json.dumps({
    "failures": failures,
    "loaded": sorted({name.split(".")[0] for name in sys.modules}),
    "environment": sorted(set(before.items()) ^ set(os.environ.items())),
    "cuda": bool(torch and torch.cuda.is_initialized()),
}))
"""


def all_modules() -> list[str]:
    return ["labkit", *(m.name for m in pkgutil.walk_packages(labkit.__path__, "labkit.") if "__main__" not in m.name)]


def without_torch() -> list[str]:
    found = [m for m in all_modules() if any(m == name or m.startswith(f"{name}.") for name in WITHOUT_TORCH)]
    assert {m for m in found} >= set(WITHOUT_TORCH), "a module on the list is gone"
    return ["labkit", *found]


def load(env: dict[str, str], modules: list[str], blocked: tuple[str, ...] = (), first: tuple[str, ...] = ()) -> dict:
    """What happened when a fresh process imported `modules` after `first`, with `blocked` packages missing."""
    command = [sys.executable, "-c", PROBE, json.dumps([blocked, first, modules])]
    answer = subprocess.run(command, env=env, cwd=os.path.dirname(ROOT), capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def test_import_labkit_touches_nothing_heavy(user_env: dict[str, str]) -> None:
    """`import labkit` is quick because it loads none of these; `labkit bench import` prints the time."""
    got = load(user_env, ["labkit"])
    assert got["failures"] == {}
    heavy = {"torch", "triton", "numpy", "plotly", "ipywidgets", "IPython", "transformers", "tokenizers", "gguf"}
    assert heavy & set(got["loaded"]) == set()


@pytest.fixture(scope="module")
def everything(user_env: dict[str, str]) -> dict:
    """All of labkit on top of the packages that it uses, so that a change it makes is not mistaken for theirs."""
    pytest.importorskip("torch")
    return load(user_env, all_modules(), first=("torch", "IPython", "plotly", "ipywidgets"))


def test_c25_every_module_imports_without_a_gpu(everything: dict) -> None:
    """Importing touches no driver."""
    assert everything["failures"] == {}
    assert not everything["cuda"]


def test_c25_every_module_imports_without_triton(user_env: dict[str, str]) -> None:
    """A computer that has no triton (macOS, say) still has all of labkit."""
    pytest.importorskip("torch")
    assert load(user_env, all_modules(), ("triton",))["failures"] == {}


def test_importing_leaves_the_process_alone(everything: dict) -> None:
    """No environment variable changes (TRITON_INTERPRET above all) beyond what the packages themselves do."""
    assert everything["environment"] == []


def test_c25_rules_figures_and_panels_import_without_torch(user_env: dict[str, str]) -> None:
    """The rules, recorded panels and figures load where torch, triton and the model libraries are missing."""
    got = load(user_env, without_torch(), ("torch", "triton", "transformers", "tokenizers", "safetensors", "gguf"))
    assert got["failures"] == {}


def test_c25_rules_load_no_torch_where_it_is_installed(user_env: dict[str, str]) -> None:
    """They do not load it when they could: a static page or the command line stays quick."""
    got = load(user_env, without_torch())
    assert got["failures"] == {}
    assert {"torch", "triton", "transformers"} & set(got["loaded"]) == set()
