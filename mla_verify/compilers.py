"""Compilers at work for a process, found in /proc: FlashInfer and Triton compile kernels when they are first called."""

from __future__ import annotations

import os
from pathlib import Path

# What FlashInfer (ninja, nvcc and what that starts), Triton (ptxas) and torch's extensions (ninja, c++) call. The one
# that stands first is named of those at work: the rest are its helpers, or wait for it.
COMPILERS = (
    *("nvcc", "cicc", "ptxas", "nvlink", "fatbinary", "cudafe++"),
    *("c++", "g++", "clang++", "cc", "gcc", "clang", "cc1plus", "cc1", "collect2", "ld", "ninja"),
)


def compiler_below(pid: int) -> str | None:
    """The compiler that a process has started, itself or through others, and that still runs; or None.

    FlashInfer lets one process compile a kernel and has others wait for its lock, which shows nowhere: any FlashInfer
    build on this machine counts as one that is waited for.
    """
    processes = _processes()
    children: dict[int, list[int]] = {}
    for child, (_, parent, _) in processes.items():
        children.setdefault(parent, []).append(child)
    below: set[str] = set()
    left = [pid]
    while left:
        for child in children.get(left.pop(), ()):
            name, _, state = processes[child]
            if state != "Z":
                below.add(name)
                left.append(child)
    found = next((name for name in COMPILERS if name in below), None)
    if found is None and any(name == "ninja" and _is_flashinfer(other) for other, (name, *_) in processes.items()):
        return "ninja of another process"
    return found


def _processes() -> dict[int, tuple[str, int, str]]:
    """By process id: name (of its program, at most 15 characters), parent and state ("Z": ended)."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:  # it has ended meanwhile
                continue
            # A name may hold spaces and parentheses.
            name, _, rest = stat.partition(" (")[2].rpartition(") ")
            state, parent = rest.split()[:2]
            found[int(entry)] = (name, int(parent), state)
    return found


def _is_flashinfer(pid: int) -> bool:
    try:
        return b"flashinfer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
