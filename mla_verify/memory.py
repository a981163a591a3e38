"""Memory of this machine, of a process and of a GPU, in bytes."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

GIB = 1 << 30
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Of a GPU, what a process may keep for its next kernel: fetching it anew each time would cost milliseconds.
_KEPT = GIB
# Versions 2 and 1 of cgroups: where they are, the controller's name, and the files with limit and usage; then the line
# of memory.stat with the cached files in it, which count as used and would be given up.
_CGROUPS = (
    ("/sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file "),
    ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
)


def resident(pid: int) -> int:
    """What a process holds of the machine's memory; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def available() -> int:
    """What processes can still get, within the container's limit."""
    group = _limiting_group()
    if group is None:
        return _meminfo("MemAvailable")
    folder, limit, usage, cached = group
    lines = (folder / "memory.stat").read_text().splitlines()
    given_up = next((int(line.split()[1]) for line in lines if line.startswith(cached)), 0)
    return max(0, min(_meminfo("MemAvailable"), limit - int((folder / usage).read_text()) + given_up))


def total() -> int:
    """What all processes together can get."""
    group = _limiting_group()
    return _meminfo("MemTotal") if group is None else group[1]


def give_back_gpu_memory(keep: int = _KEPT) -> None:
    """Let other processes have what torch keeps of the GPU without using it, where that is more than `keep`."""
    import torch

    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > keep:
        torch.cuda.empty_cache()


def _meminfo(field: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


@lru_cache
def _limiting_group() -> tuple[Path, int, str, str] | None:
    """Of the innermost group with a limit of its own: folder, limit, usage's file, line of the cached files."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for mount, controller, limit, usage, cached in _CGROUPS:
        path = next((path for _, names, path in groups if controller in names.split(",")), "/")
        # Inside a container its own group may lie at the mount itself, whatever the path says.
        inside = Path(mount + path)
        for folder in (inside, *inside.parents):
            text = (folder / limit).read_text().strip() if (folder / limit).is_file() else "max"
            if text != "max" and int(text) < _meminfo("MemTotal"):
                return folder, int(text), usage, cached
    return None
