"""All checks of this repository, in one command: `python tools/check.py`. No step stops the next; any failure fails it.

Needs the `test` extra and no network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TYPECHECK = Path("build/typecheck")


def python(*args: str) -> bool:
    """Run `python -m args` in the repository root, its output shown as it comes."""
    return subprocess.run([sys.executable, "-m", *args], cwd=ROOT).returncode == 0


def mypy() -> bool:
    """mypy sees reference/ and evals/ as parts of mla_verify in an installed copy only, so it checks one."""
    # Modules that are gone from the source survive in build/ and would be installed again.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    install = ("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(TYPECHECK), ".")
    if not python(*install):
        return False
    command = [sys.executable, "-m", "mypy", "--strict", str(TYPECHECK / "mla_verify"), "cli.py", "tools", "examples"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    output = (done.stdout + done.stderr).replace(f"{TYPECHECK}/", "")
    for package in ("reference", "evals"):
        output = output.replace(f"mla_verify/{package}/", f"{package}/")
    print(output, end="")
    return done.returncode == 0


STEPS: dict[str, Callable[[], bool]] = {
    "ruff check": lambda: python("ruff", "check", "."),
    "ruff format": lambda: python("ruff", "format", "--check", "."),
    "mypy --strict": mypy,
    # The other checks of the house (options, packages, imports, docs tables) are tests: tests/test_house.py.
    "pytest": lambda: python("pytest", *sys.argv[1:]),
}


def main() -> int:
    lines, failed = [], False
    for name, step in STEPS.items():
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        passed = step()
        failed |= not passed
        lines.append(f"{name:<14} {'ok' if passed else 'FAILED':<6} {time.perf_counter() - start:6.1f} s")
    print("== summary", *lines, "all checks passed" if not failed else "checks FAILED", sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
