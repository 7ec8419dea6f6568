"""Origins: what is in them, what must not be, and what cannot be read."""

from __future__ import annotations

import datetime
import json
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.errors import ConfigError
from labkit.measure import provenance
from labkit.measure.provenance import Kind, Provenance, ProvenanceError, collect, command_line, source_commit

ROOT = Path(provenance.__file__).resolve().parents[2]


def test_an_origin_names_the_machine_the_versions_and_the_time() -> None:
    found = collect("LIVE", "labkit bench", order="NONE FULL FULL NONE", n=60, primed=True, device="cpu")
    assert (found.kind, found.gpu, found.driver, found.device) == (Kind.LIVE, None, None, "cpu")
    assert found.cpu
    assert found.packages["python"] == platform.python_version()
    assert re.match(r"\d+\.\d+", found.packages["numpy"])
    assert (found.command, found.order, found.n, found.primed) == ("labkit bench", "NONE FULL FULL NONE", 60, True)
    taken = datetime.datetime.strptime(found.date, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.timezone.utc)
    assert abs((datetime.datetime.now(datetime.timezone.utc) - taken).total_seconds()) < 3600
    assert found.label.startswith("LIVE · ") and found.label.endswith(found.date[:10])


def test_an_origin_holds_no_path_and_no_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "/srv/models/private"
    monkeypatch.setattr(sys, "argv", [f"{ROOT}/.venv/bin/labkit", "bench", "--model", folder, f"--out={folder}/x.gz"])
    text = json.dumps(collect("LIVE").as_dict())
    assert "labkit bench --model private --out=x.gz" in text
    assert str(ROOT) not in text and folder not in text
    host = socket.gethostname()
    assert len(host) < 4 or host not in text


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["/usr/bin/labkit", "bench", "--batch", "1,8"], "labkit bench --batch 1,8"),
        (["labkit", "generate", "--prompt", "either/or is fine"], "labkit generate --prompt 'either/or is fine'"),
        (["labkit", "record", "--out", "C:\\runs\\a.json.gz"], "labkit record --out a.json.gz"),
        (["labkit", "bench", "--model=models/mine/"], "labkit bench --model=mine"),
    ],
)
def test_a_command_is_kept_without_its_folders(argv: list[str], text: str) -> None:
    assert command_line(argv) == text


def test_an_origin_survives_json() -> None:
    found = collect(Kind.SIMULATED, "x", order="one", n=3, device="cpu")
    assert Provenance.from_dict(json.loads(json.dumps(found.as_dict()))) == found


GOOD = collect("RECORDED", "labkit record", order="one", n=50, device="cpu").as_dict()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "MEASURED"}, "kind='MEASURED' is none of LIVE, RECORDED, SIMULATED"),
        ({"kind": None}, "kind=None has the wrong type"),
        ({"cpu": None}, "cpu=None has the wrong type"),
        ({"n": "50"}, "n='50' has the wrong type"),
        ({"n": True}, "n=True has the wrong type"),
        ({"host": "box"}, "unknown fields: host"),
        ({"commit": ...}, "has no 'commit'"),
    ],
)
def test_a_broken_origin_is_refused_with_a_sentence(change: dict, says: str) -> None:
    data = {k: v for k, v in {**GOOD, **change}.items() if v is not ...}
    with pytest.raises(ProvenanceError, match=re.escape(says)):
        Provenance.from_dict(data)
    with pytest.raises(ProvenanceError, match="not an object"):
        Provenance.from_dict([])


def test_rows_share_a_file_only_when_everything_but_the_moment_is_equal() -> None:
    a = Provenance.from_dict(GOOD)
    later = a.replace(date="2027-01-01T00:00:00Z", command="other", order="two", n=99)
    assert a.same_machine(later) == []
    assert a.same_machine(a.replace(gpu="NVIDIA H200", commit="f" * 40)) == [
        "gpu None ≠ NVIDIA H200",
        f"commit {a.commit} ≠ {'f' * 40}",
    ]


def git(folder: Path, *args: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, "-C", str(folder), *args], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "labkit" / "data").mkdir(parents=True)
    (tmp_path / "labkit" / "a.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_commit_and_dirty_flag_come_from_the_checkout(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD").strip()
    elsewhere = {"LABKIT_COMMIT": "a" * 40, "LABKIT_DIRTY": "1"}
    assert source_commit(checkout, elsewhere) == (head, False)
    (checkout / "labkit" / "data" / "new.json.gz").write_bytes(b"")
    (checkout / "notes.txt").write_text("not the product")
    assert source_commit(checkout, {}) == (head, False)
    (checkout / "labkit" / "new.py").write_text("y = 2\n")
    assert source_commit(checkout, {}) == (head, True)


def test_a_copy_without_history_is_told_its_commit(tmp_path: Path) -> None:
    assert source_commit(tmp_path, {}) == (None, None)
    assert source_commit(tmp_path, {"LABKIT_COMMIT": "0123abc"}) == ("0123abc", None)
    assert source_commit(tmp_path, {"LABKIT_COMMIT": "0123abc", "LABKIT_DIRTY": "0"}) == ("0123abc", False)
    assert source_commit(tmp_path, {"LABKIT_COMMIT": "0123abc", "LABKIT_DIRTY": "true"}) == ("0123abc", True)
    with pytest.raises(ConfigError, match="LABKIT_COMMIT='main': is not a commit hash"):
        source_commit(tmp_path, {"LABKIT_COMMIT": "main"})
    with pytest.raises(ConfigError, match="LABKIT_DIRTY"):
        source_commit(tmp_path, {"LABKIT_COMMIT": "0123abc", "LABKIT_DIRTY": "maybe"})


def test_the_package_inside_someone_elses_repository_has_no_commit(checkout: Path) -> None:
    site = checkout / "env" / "site-packages"
    (site / "labkit").mkdir(parents=True)
    assert source_commit(site, {}) == (None, None)


@pytest.mark.parametrize(
    ("smi", "driver"),
    [("printf '580.159.03\\n580.159.03\\n'", "580.159.03"), ("exit 9", None)],
)
def test_the_driver_is_asked_of_its_own_tool(tmp_path, monkeypatch, smi: str, driver: str | None) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{smi}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if driver is None and Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine's kernel module answers instead")
    assert provenance.gpu_driver() == driver
