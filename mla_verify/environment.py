"""Where and with what a run was made. Whatever cannot be found out is None: describing a run must never fail it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import mla_verify
from mla_verify.kernels.contract import Kernel

_T = TypeVar("_T")
_PACKAGE = Path(mla_verify.__file__).parent
_MAPPED = ("reference", "evals")  # beside the package in a checkout, inside it once installed


def describe_environment(
    *,
    argv: Sequence[str],
    device: str,
    seed: int | None,
    timeout: float,
    kernels: Iterable[Kernel],
    unavailable: Mapping[str, str],
    started: datetime,
    seconds: float,
) -> dict[str, Any]:
    """The environment part of a report, of plain values only. `unavailable`: kernel -> why it cannot run here."""
    commit, dirty = _or_none(git_state) or (None, None)
    return {
        "argv": list(argv),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "device": device,
        "seed": seed,
        "timeout_seconds": timeout,  # of one kernel call
        "commit": commit,
        "dirty": dirty,
        "package_hash": _or_none(package_hash),
        "versions": _versions([kernel for kernel in kernels if kernel.name not in unavailable]),
        "unavailable_kernels": dict(unavailable),
        "platform": _or_none(platform.platform),
        "cpu": {"model": _or_none(_cpu_model), "cores": _or_none(_cores), "torch_threads": _or_none(_torch_threads)},
        "memory_bytes": _or_none(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "gpu": _or_none(_gpu) if device == "cuda" else None,
    }


def git_state() -> tuple[str, bool] | None:
    """Commit of the checkout this runs from and whether the source files differ from it; None without one."""
    root = _PACKAGE.parent
    try:
        # Site-packages of a virtual environment may lie inside some other project's checkout.
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        # Only what is imported: a report written into the checkout makes no difference to what ran.
        changes = _git(root, "--no-optional-locks", "status", "--porcelain", "--", _PACKAGE.name, *_MAPPED)
        return _git(root, "rev-parse", "HEAD"), bool(changes)
    except (OSError, subprocess.SubprocessError):  # no git here, no repository, or one without a commit
        return None


def package_hash(package: Path | None = None) -> str:
    """SHA-256 over the package's source files, names and contents: the same for a checkout and a wheel made of it.

    package: the folder mla_verify of another checkout; without it, of this one.
    """
    digest = hashlib.sha256()
    for name, path in sorted(_sources(package or _PACKAGE)):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _sources(package: Path) -> Iterator[tuple[str, Path]]:
    for path in package.rglob("*.py"):
        yield path.relative_to(package).as_posix(), path
    for name in _MAPPED:
        if not (package / name).exists():
            for path in (package.parent / name).rglob("*.py"):
                yield path.relative_to(package.parent).as_posix(), path


def _git(root: Path, *args: str) -> str:
    # Inside a git hook GIT_DIR names the repository of the hook.
    env = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    done = subprocess.run(
        ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20, check=True, env=env
    )
    return done.stdout.strip()


def _version(library: str) -> str:
    """As the library itself says, which for torch names the CUDA build; its package's metadata may leave that out."""
    return str(getattr(sys.modules.get(library), "__version__", None) or metadata.version(library))


def _versions(kernels: Iterable[Kernel]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"mla-verify": mla_verify.__version__, "python": platform.python_version()}
    for library in ("torch", "numpy"):
        versions[library] = _or_none(partial(_version, library))
    for kernel in kernels:
        versions[kernel.name] = _or_none(kernel.version)
    return versions


def _cpu_model() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None  # Arm's cpuinfo names no model


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _torch_threads() -> int | None:
    # A run that never got to torch must not pay for importing it now.
    return int(sys.modules["torch"].get_num_threads()) if "torch" in sys.modules else None


def gpu_name() -> str:
    """The name of the device that torch runs on."""
    import torch

    return str(torch.cuda.get_device_properties(0).name)


def _gpu() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": _or_none(_driver),
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.split()[0]


def _or_none(find_out: Callable[[], _T]) -> _T | None:
    try:
        return find_out()
    except Exception:  # a report without one fact is worth more than no report
        return None
