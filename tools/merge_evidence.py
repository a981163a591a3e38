"""Summaries of several runs (`mla-verify kernels --summary`) -> one file for docs/evidence/.

    python tools/merge_evidence.py --commit COMMIT --out docs/evidence/h200-standard.json run1.json run2.json

A GPU host may have the source without its history; COMMIT names it, and must have the package hash that ran.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the checkout's mla_verify, not an installed one

from mla_verify.environment import package_hash  # noqa: E402
from mla_verify.errors import UsageError  # noqa: E402
from mla_verify.report.files import write_whole  # noqa: E402
from mla_verify.report.summary import render  # noqa: E402
from mla_verify.report.summary_merge import merge_summaries  # noqa: E402
from mla_verify.report.summary_read import read_summary  # noqa: E402

MAX_BYTES = 1_000_000


def hash_of_commit(root: Path, commit: str) -> str:
    """environment.package_hash of the source as a commit has it. Raises CalledProcessError when git cannot show it."""
    folders = ["mla_verify", "reference", "evals"]
    command = ["git", "-C", str(root), "archive", "--format=tar", commit, *folders]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return package_hash(Path(folder) / "mla_verify")


def full_commit(root: Path, commit: str) -> str:
    """The whole name of a commit. Raises CalledProcessError when there is none."""
    command = ["git", "-C", str(root), "rev-parse", "--verify", f"{commit}^{{commit}}"]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout.strip()


def _without_folders(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Where on its machine a run wrote to tells nobody anything."""
    return {**environment, "argv": [Path(a).name if a.startswith("/") else a for a in environment["argv"]]}


def merge(files: Sequence[Path], out: Path, commit: str | None, root: Path = ROOT) -> str:
    """Write the merged summary to `out` and say in a line what it holds. Raises UsageError where files do not fit."""
    name = None if commit is None else full_commit(root, commit)
    summary = merge_summaries([read_summary(file) for file in files], name)
    summary = replace(summary, environments=tuple(_without_folders(one) for one in summary.environments))
    if summary.commit is not None and (found := hash_of_commit(root, summary.commit)) != summary.package_hash:
        raise UsageError(
            f"commit {summary.commit[:12]} has package hash {found[:12]}, the runs {str(summary.package_hash)[:12]}",
            "name the commit whose source ran",
        )
    text = render(summary)
    if len(text) > MAX_BYTES:
        raise UsageError(f"the merged summary has {len(text)} bytes, more than {MAX_BYTES}", "merge fewer runs")
    write_whole(out, text)
    read_summary(out)
    elements, decision = summary.elements_by_case().total(), summary.decide()
    return f"{out}: {len(summary.pairs)} pairs, {elements} elements, {decision.decision} (exit {decision.exit_code})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit")
    args = parser.parse_args()
    try:
        print(merge(args.files, args.out, args.commit))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr)
        print(f"error: git: {words.strip()}", file=sys.stderr)
        return 2
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
