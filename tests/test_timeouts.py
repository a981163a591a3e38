"""A kernel that hangs, compiles, takes all memory or is killed: the verdict of its case, and of the next one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_verify import memory, watch
from mla_verify.compilers import _processes
from mla_verify.report.progress import progress_bar
from mla_verify.results import Verdict
from mla_verify.watch import compilations
from mla_verify.workers import WorkerTimeoutError, ask, close_workers
from tests.cli_helper import invoke
from tests.kernels_helper import SINGLE, Run, cases, verify

KERNELS = Path(__file__).with_name("isolation_kernels.py")
BAD, GOOD = SINGLE.replace("bf16", "fp16"), SINGLE
PASS, CRASH, TIMEOUT, NOT_RUN = Verdict.PASS, Verdict.CRASH, Verdict.TIMEOUT, Verdict.NOT_RUN


@pytest.fixture(autouse=True)
def fresh_workers() -> Iterator[None]:
    close_workers()
    yield
    close_workers()


def run(folder: Path, kernel: str, *args: str) -> Run:
    """One case in which the kernel misbehaves, between two in which it does not."""
    return verify(folder, "--kernel", f"{KERNELS}:{kernel}", *cases(GOOD, BAD, GOOD.replace("-s7", "-s8")), *args)


# Time


def test_a_kernel_that_never_ends_is_a_timeout_and_the_next_case_is_decided(tmp_path: Path) -> None:
    done = run(tmp_path, "spins", "--timeout", "0.5")
    assert (done.exit_code, done.verdicts) == (3, [PASS, TIMEOUT, PASS])
    hung = done.report.results[1]
    assert hung.reason == "no result after 0.5 s (--timeout); its process was killed"
    # Where it hangs, innermost call first, in the file of its author.
    first, second = hung.traceback.strip().splitlines()[:2]
    assert first.startswith("Stack (most recent call first)")
    assert re.search(r'isolation_kernels\.py", line \d+ in (_is_bad|spins)', second)
    assert f"TIMEOUT  {hung.kernel}  {BAD}\n" in done.done.stdout
    assert second.strip() in done.done.stdout
    assert "3 planned cases decided, 0 wrong (exit 3)" in done.done.stdout
    # The command that repeats it has the limit under which it is one.
    assert hung.repeat.endswith("--timeout 0.5")
    assert done.report.environment["timeout_seconds"] == 0.5


def test_a_slow_kernel_passes_within_the_limit_and_not_beyond_it(tmp_path: Path) -> None:
    arguments = ("--kernel", f"{KERNELS}:sleeps_half_a_second", *cases(GOOD))
    assert verify(tmp_path, *arguments, "--timeout", "20").verdicts == [PASS]
    assert verify(tmp_path, *arguments, "--timeout", "0.2").verdicts == [TIMEOUT]


def test_starting_a_process_is_no_time_of_the_kernels(tmp_path: Path) -> None:
    # The last case is that of a new worker, which takes longer than this to import torch.
    assert run(tmp_path, "is_killed", "--timeout", "0.3").verdicts == [PASS, CRASH, PASS]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_timeout_that_is_no_time_is_a_usage_error(seconds: str) -> None:
    done = invoke("kernels", "--timeout", seconds)
    assert done.exit_code == 2
    assert done.stderr == f"error: --timeout is {seconds}\nhint: give seconds, more than 0; inf for no limit\n"


def test_list_refuses_a_timeout_since_it_runs_nothing() -> None:
    done = invoke("kernels", "--list", "--timeout", "3")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--timeout has no effect" in done.stderr


def doze(seconds: float) -> None:
    time.sleep(seconds)


def test_a_question_besides_kernel_calls_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ask({}, doze, 0.0)  # what it needs is imported then
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.3)
    with pytest.raises(WorkerTimeoutError, match=r"no answer after 0\.3 s, besides the kernel call") as caught:
        ask({}, doze, 60.0)
    assert "in doze" in caught.value.log
    assert ask({}, os.getpid) != os.getpid()


# Compilation


def test_compiling_counts_apart_and_is_told_in_the_log_and_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mla_verify.report.progress.LOGGED_SECONDS", 0.5)
    seen: list[tuple[str | None, float]] = []
    with compilations(lambda kernel, compiler, seconds: seen.append((compiler, seconds))):
        done = run(tmp_path, "compiles", "--timeout", "0.7")
    assert (done.exit_code, done.verdicts) == (0, [PASS] * 3)
    seconds = done.report.results[1].seconds
    assert 1.0 < seconds["compile"] < 2.5
    assert seconds["kernel"] < 0.7
    assert "compile" not in done.report.results[0].seconds
    assert {compiler for compiler, _ in seen} == {"nvcc", None}
    notes = [line for line in done.done.stderr.splitlines() if "compil" in line]
    name = re.escape(done.report.results[1].kernel)
    assert re.fullmatch(rf"note: {name} is compiling \(nvcc\), as at its first call", notes[0])
    assert re.fullmatch(rf"note: {name} has compiled for [12] s", notes[1])


def test_compiling_has_a_limit_too_which_names_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watch, "COMPILING_SECONDS", 0.6)
    done = run(tmp_path, "compiles")
    assert (done.exit_code, done.verdicts) == (3, [PASS, TIMEOUT, PASS])
    assert done.report.results[1].reason == "still compiling (nvcc) after 0.6 s; its process was killed"
    # What it had started is ended as well, and not only when it is done.
    assert not [name for name, _, state in _processes().values() if name == "nvcc" and state not in "ZX"]


def test_the_bar_of_a_terminal_shows_who_compiles_and_for_how_long() -> None:
    from io import StringIO

    from rich.console import Console

    console = Console(file=StringIO(), force_terminal=True, width=100)
    with progress_bar(3, console):
        for listener in tuple(watch._listeners):
            listener("flashinfer-mla-fa2", "nvcc", 12.3)
        time.sleep(0.2)  # the bar is drawn ten times a second
    assert "flashinfer-mla-fa2 compiling (nvcc) 12 s" in console.file.getvalue()  # type: ignore[attr-defined]
    assert not watch._listeners


# Memory


def test_a_kernel_that_takes_all_memory_is_ended_before_the_machine_suffers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As on a machine with nothing left; a worker may still have the first GiB.
    monkeypatch.setattr(memory, "available", lambda: 1 << 28)
    done = run(tmp_path, "allocates")
    assert (done.exit_code, done.verdicts) == (3, [PASS, NOT_RUN, PASS])
    reason = (
        r"out of memory: the process grew to (\d\.\d) GiB and the machine has 0\.2 GiB left; its process was killed"
    )
    match = re.fullmatch(reason, done.report.results[1].reason)
    assert match and 1.0 <= float(match[1]) < 4.0
    assert not done.report.results[1].tool_error


def test_what_is_available_is_what_the_machine_or_its_container_has_left() -> None:
    assert 0 < memory.available() <= memory.total()
    held = bytearray(b"1") * (1 << 27)
    assert memory.resident(os.getpid()) > len(held)


def test_a_process_that_something_else_kills_is_a_crash_that_names_memory_as_a_cause(tmp_path: Path) -> None:
    done = run(tmp_path, "is_killed")
    assert (done.exit_code, done.verdicts) == (1, [PASS, CRASH, PASS])
    reason = done.report.results[1].reason
    assert reason.startswith("the kernel's process ended: killed by SIGKILL, not by mla-verify;")
    assert "memory" in reason


# Its end


def test_a_process_that_dies_is_seen_to_although_its_child_holds_the_connection(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run(tmp_path, "leaves_a_child")
    assert (done.exit_code, done.verdicts) == (1, [PASS, CRASH, PASS])
    assert "exit code 5" in done.report.results[1].reason
    assert time.monotonic() - began < 40  # and not the minute for which the child sleeps


def test_a_kernel_file_that_takes_long_to_load_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SLOW_SECONDS", 0.2)
    text = "import time\ntime.sleep(1)\nfrom mla_verify.kernels import Contract, mla_kernel\n"
    text += "@mla_kernel(Contract())\ndef slow(inputs, out):\n    return out\n"
    (tmp_path / "slow.py").write_text(text)
    done = invoke("kernels", "--list", "--kernel", f"{tmp_path / 'slow.py'}:slow", "--device", "cpu")
    assert done.exit_code == 0
    assert f"note: waiting for {tmp_path / 'slow.py'}:slow to load, for 600 s at most\n" in done.stderr
