"""Output that a reader can rely on: files that appear whole or not at all, and a stdout that may be closed early."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content`, text as UTF-8, so that a reader finds the old file or the new one, and never half of one.

    Raises OSError; then the old file is as it was and nothing new lies beside it.
    """
    target = path.resolve()  # os.replace would put a file in the place of a symbolic link
    temporary = _temporary(target)
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def why_unwritable(path: Path) -> str | None:
    """Why `write_whole(path, ...)` cannot work, or None. Tries it: permission bits do not tell of a read-only disk."""
    target = path.resolve()
    if target.is_dir():
        return "it is a folder"
    if target.exists() and not target.is_file():
        return "it is no regular file"
    if not target.parent.is_dir():
        return f"the folder {target.parent} does not exist"
    temporary = _temporary(target)
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        return f"no file can be made in {target.parent} ({error.strerror})"
    finally:
        temporary.unlink(missing_ok=True)
    return None


def discard_stdout() -> None:
    """After a closed pipe: Python flushes stdout once more at exit, and would complain and change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _temporary(target: Path) -> Path:
    # In the same folder, since a rename is whole only within one file system; by process, so that two runs keep apart.
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")
