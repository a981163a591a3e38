"""Runs the command line in this process, and remembers which options some test has passed."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from mla_verify.cli import cli, main

# As "kernels --json": the words of the command, then the option. tests/test_house.py compares them with the click tree.
PASSED_OPTIONS: set[str] = set()


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str


def invoke(*args: str | Path) -> Result:
    """`mla-verify ARGS`: its exit code and what it wrote. A bug's traceback is on stderr, as for a user."""
    words = [str(arg) for arg in args]
    _remember(words)
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as done:
        main(words)
    assert isinstance(done.value.code, int)
    return Result(done.value.code, stdout.getvalue(), stderr.getvalue())


def _remember(words: list[str]) -> None:
    command: click.Command = cli
    path = ""
    for word in words:
        if isinstance(command, click.Group) and word in command.commands:
            command, path = command.commands[word], f"{path}{word} "
        elif word.startswith("-"):
            PASSED_OPTIONS.add(path + word.partition("=")[0])
