from __future__ import annotations

import json
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mla_verify import environment
from mla_verify.environment import describe_environment, git_state, package_hash
from tests.fakes import Absorbed, Gone

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def describe(**fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"argv": ["mla-verify", "kernels"], "device": "cpu", "seed": 3, "kernels": [Absorbed()]}
    known |= {"timeout": 120.0, "unavailable": {}, "started": STARTED, "seconds": 1.25}
    return describe_environment(**known | fields)


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "all")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout that the environment is asked about, not yet a git repository and in none."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "checkout"
    for name, text in (("mla_verify/cli.py", "1"), ("reference/rope.py", "2"), ("evals/tasks.py", "3")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(environment, "_PACKAGE", folder / "mla_verify")
    return folder


def test_environment_is_plain_json_and_says_where_and_with_what_the_run_was_made() -> None:
    found = describe()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["argv"] == ["mla-verify", "kernels"]
    assert (found["started"], found["seconds"]) == ("2026-01-02T03:04:05+00:00", 1.25)
    assert (found["device"], found["seed"], found["gpu"]) == ("cpu", 3, None)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["numpy"] == numpy.__version__
    assert found["versions"]["absorbed"] == "fake 1.0"
    assert found["cpu"]["cores"] >= 1
    assert found["cpu"]["torch_threads"] == torch.get_num_threads()
    assert found["memory_bytes"] > 2**28
    assert found["package_hash"] == package_hash()


def test_environment_names_unavailable_kernels_and_does_not_ask_them_for_a_version() -> None:
    found = describe(kernels=[Absorbed(), Gone()], unavailable={"gone": "not installed"})
    assert found["unavailable_kernels"] == {"gone": "not installed"}
    assert "gone" not in found["versions"]


def test_describing_a_run_never_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise RuntimeError("broken")

    for target in (
        "subprocess.run",
        "platform.platform",
        "os.sysconf",
        "pathlib.Path.read_bytes",
        "os.sched_getaffinity",
    ):
        monkeypatch.setattr(target, fail)
    monkeypatch.setattr("pathlib.Path.read_text", fail)
    monkeypatch.setattr("torch.get_num_threads", fail)
    monkeypatch.setattr("torch.cuda.get_device_properties", fail)
    monkeypatch.setattr("importlib.metadata.version", fail)
    found = describe(kernels=[Gone()], device="cuda")
    unknown = {name for name, value in found.items() if value is None}
    assert unknown == {"commit", "dirty", "package_hash", "platform", "memory_bytes", "gpu"}
    assert found["cpu"] == {"model": None, "cores": None, "torch_threads": None}
    assert found["versions"]["gone"] is None


def test_a_gpu_is_described_with_driver_and_cuda_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, total_memory = "H200", 9, 0, 2**37

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Properties)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("mla_verify.environment._driver", lambda: "580.1")
    assert describe(device="cuda")["gpu"] == {
        "name": "H200",
        "capability": "9.0",
        "memory_bytes": 2**37,
        "count": 2,
        "cuda": "13.0",
        "driver": "580.1",
    }


def test_commit_of_a_checkout_and_whether_its_sources_differ_from_it(checkout: Path) -> None:
    head = commit(checkout)
    assert git_state() == (head, False)
    (checkout / "report.json").write_text("a report says nothing about what ran")
    assert git_state() == (head, False)
    (checkout / "evals" / "new.py").touch()
    assert git_state() == (head, True)
    (checkout / "evals" / "new.py").unlink()
    (checkout / "reference" / "rope.py").write_text("changed")
    assert git_state() == (head, True)


def test_sources_in_no_repository_have_no_commit(checkout: Path) -> None:
    assert git_state() is None


def test_an_installed_copy_has_no_commit_even_inside_another_projects_checkout(checkout: Path) -> None:
    (checkout.parent / "other.txt").touch()
    commit(checkout.parent)
    assert git_state() is None
    assert (describe()["commit"], describe()["dirty"]) == (None, None)


def test_a_git_hooks_own_repository_is_not_taken_for_the_checkout(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = commit(checkout)
    (tmp_path / "hooked").mkdir()
    (tmp_path / "hooked" / "file").touch()
    commit(tmp_path / "hooked")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "hooked" / ".git"))
    assert git_state() == (head, False)


def test_package_hash_changes_with_any_source_file_or_its_name(checkout: Path) -> None:
    hashes = [package_hash()]
    for name in ("mla_verify/cli.py", "reference/rope.py", "evals/tasks.py"):
        with (checkout / name).open("a") as file:
            file.write("x")
        hashes.append(package_hash())
    (checkout / "evals/tasks.py").rename(checkout / "evals/other.py")
    hashes.append(package_hash())
    assert len(set(hashes)) == len(hashes)
    (checkout / "mla_verify" / "notes.txt").touch()
    assert package_hash() == hashes[-1]


def test_package_hash_of_an_installed_copy_is_that_of_its_checkout(checkout: Path) -> None:
    before = package_hash()
    for name in ("reference", "evals"):
        shutil.move(checkout / name, checkout / "mla_verify" / name)
    assert package_hash() == before
