"""Processes for kernels: questions find their answers, and a worker that dies costs its own question and no other.

Workers import this file, so that it stays without torch: its workers start in an instant.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path
from typing import NoReturn

import pytest

from mla_verify.workers import WorkerDiedError, ask, close_workers, retire

WORKER = {"MLA_TEST_WORKER": "yes"}
PATIENCE = 30  # seconds, for what takes a tenth of one


@pytest.fixture(autouse=True)
def fresh_workers() -> Iterator[None]:
    close_workers()
    yield
    close_workers()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, be it one that ended and was never waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(path: Path) -> str:
    """What another process writes to this file, in one go."""
    for _ in range(100 * PATIENCE):
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.01)
    raise TimeoutError(f"{path} was not written")


# What workers are asked: found there by its name, hence at the top level.


def square(number: int) -> tuple[int, int]:
    return number, number * number


def meet(folder: Path, mine: str, other: str) -> int:
    """Returns once the other has come as well."""
    (folder / mine).write_text("here")
    wait_for(folder / other)
    return os.getpid()


def say(text: str, stream: str = "stdout") -> int:
    print(text, file=getattr(sys, stream))
    return os.getpid()


def raise_value_error() -> NoReturn:
    raise ValueError("kv_lens is negative", 7)


class HintedError(Exception):
    """Pickles, and does not load: it takes two arguments and passes one on."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def raise_hinted() -> NoReturn:
    raise HintedError("no page 0", "start at 1")


class FunctionError(Exception):
    def __init__(self) -> None:
        super().__init__("an exception that no pickle holds")
        self.function = lambda: None


def raise_unpicklable() -> NoReturn:
    raise FunctionError


def return_unpicklable() -> Callable[[], None]:
    return lambda: None


def die(how: str) -> NoReturn:
    print(f"last words before {how}")
    sys.stdout.flush()
    if how == "segfault":
        ctypes.string_at(0)
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sys.exit":
        sys.exit(4)
    os._exit(3)


def talk_and_die() -> NoReturn:
    for number in range(20_000):
        print("line", number)
    sys.stdout.flush()
    os._exit(1)


def answer_and_retire(error: bool) -> int:
    retire()
    if error:
        raise ValueError(os.getpid())
    return os.getpid()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def read_stdin() -> str:
    return input()


def hang(file: Path, parent: int | None = None) -> None:
    """Writes its process id, and does not return in time. `parent` gets a Ctrl-C."""
    file.write_text(str(os.getpid()))
    if parent is not None:
        os.kill(parent, signal.SIGINT)
    time.sleep(2 * PATIENCE)


# Answers


def test_every_thread_gets_the_answer_to_its_own_question() -> None:
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda number: ask(WORKER, square, number), range(200)))
    assert answers == [square(number) for number in range(200)]


def test_questions_asked_at_once_have_a_worker_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        names = [("a", "b"), ("b", "a")]
        pids = list(threads.map(lambda pair: ask(WORKER, meet, tmp_path, *pair), names))
    assert len({*pids, os.getpid()}) == 3


def test_questions_that_follow_each_other_share_a_worker_and_other_variables_have_another() -> None:
    pids = [ask(WORKER, os.getpid) for _ in range(3)]
    assert len(set(pids)) == 1
    assert ask({"MLA_TEST_WORKER": "other"}, os.getpid) not in (*pids, os.getpid())


def test_variables_are_set_in_the_worker_and_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_TEST_OURS", "from here")
    assert ask(WORKER, variable, "MLA_TEST_WORKER") == "yes"
    assert ask(WORKER, variable, "MLA_TEST_OURS") == "from here"
    assert "MLA_TEST_WORKER" not in os.environ


def test_what_a_worker_prints_is_repeated_once_on_stderr() -> None:
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        ask(WORKER, say, "autotuned")
        ask(WORKER, say, "deprecated", "stderr")
        ask(WORKER, square, 2)
    assert stderr.getvalue() == "autotuned\ndeprecated\n"


def test_a_worker_has_no_input_to_wait_for() -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, WORKER, read_stdin)
        try:
            with pytest.raises(EOFError):
                waiting.result(PATIENCE)
        finally:
            close_workers()


# Exceptions


def test_an_exception_is_raised_here_with_its_type_and_the_worker_lives_on() -> None:
    pid = ask(WORKER, os.getpid)
    with pytest.raises(ValueError, match="kv_lens is negative") as caught:
        ask(WORKER, raise_value_error)
    assert caught.value.args == ("kv_lens is negative", 7)
    assert ask(WORKER, os.getpid) == pid


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raise_hinted, "HintedError: no page 0"),
        (raise_unpicklable, "FunctionError: an exception that no pickle holds"),
    ],
)
def test_an_exception_that_does_not_come_through_is_told_in_words(function: Callable[[], None], text: str) -> None:
    pid = ask(WORKER, os.getpid)
    with pytest.raises(RuntimeError) as caught:
        ask(WORKER, function)
    assert str(caught.value) == text
    assert ask(WORKER, os.getpid) == pid


# Deaths


@pytest.mark.parametrize(
    ("cause", "how"),
    [
        ("sigkill", "killed by SIGKILL"),
        ("segfault", "killed by SIGSEGV"),
        ("sys.exit", "exit code 4"),
        ("os._exit", "exit code 3"),
    ],
)
def test_a_worker_that_dies_says_how_with_its_last_words_and_the_next_question_has_another(
    cause: str, how: str
) -> None:
    pid = ask(WORKER, say, "the question before")
    with pytest.raises(WorkerDiedError) as caught:
        ask(WORKER, die, cause)
    assert (caught.value.how, str(caught.value)) == (how, how)
    assert caught.value.log.startswith(f"last words before {cause}\n")
    assert not is_alive(pid)
    assert ask(WORKER, os.getpid) != pid


def test_of_a_segfault_the_log_holds_the_calls_that_led_there() -> None:
    with pytest.raises(WorkerDiedError) as caught:
        ask(WORKER, die, "segfault")
    _, fatal, calls = caught.value.log.partition("Fatal Python error: Segmentation fault")
    assert fatal
    assert calls.index("in string_at") < calls.index("test_workers.py")


def test_of_a_long_log_the_end_is_kept() -> None:
    with pytest.raises(WorkerDiedError) as caught:
        ask(WORKER, talk_and_die)
    assert caught.value.log.endswith("line 19998\nline 19999\n")
    assert len(caught.value.log) < 10_000


def test_an_answer_that_cannot_be_sent_is_the_end_of_its_worker_and_says_why() -> None:
    with pytest.raises(WorkerDiedError, match="exit code 1") as caught:
        ask(WORKER, return_unpicklable)
    assert "return_unpicklable.<locals>.<lambda>" in caught.value.log


def test_one_death_leaves_the_workers_of_other_threads_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(ask, WORKER, meet, tmp_path, "waits", "came")
        wait_for(tmp_path / "waits")
        with pytest.raises(WorkerDiedError):
            ask(WORKER, die, "sigkill")
        (tmp_path / "came").write_text("here")
        assert is_alive(waiting.result(PATIENCE))


def test_modules_of_the_current_folder_do_not_replace_those_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("json", "pickle", "signal", "mla_verify"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('not the {name} that was meant')\n")
    monkeypatch.chdir(tmp_path)
    assert ask(WORKER, square, 3) == (3, 9)


def test_a_worker_that_was_killed_while_it_was_idle_costs_no_question() -> None:
    pid = ask(WORKER, os.getpid)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # until all its threads are gone; it stays to be waited for
    assert ask(WORKER, square, 3) == (3, 9)


# The end


def test_a_worker_that_retires_gives_its_answer_and_no_other() -> None:
    pid = ask(WORKER, answer_and_retire, False)
    assert not is_alive(pid)
    with pytest.raises(ValueError, match=r"\d+") as caught:
        ask(WORKER, answer_and_retire, True)
    assert not is_alive(caught.value.args[0])
    assert len({pid, caught.value.args[0], *(ask(WORKER, os.getpid) for _ in range(3))}) == 3


def test_close_workers_ends_idle_workers_and_the_next_question_has_a_new_one() -> None:
    pid = ask(WORKER, os.getpid)
    assert is_alive(pid)
    close_workers()
    assert not is_alive(pid)
    new = ask(WORKER, os.getpid)
    assert new != pid and is_alive(new)


def test_close_workers_ends_one_at_work_and_who_waits_for_it_is_told(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, WORKER, hang, tmp_path / "pid")
        pid = int(wait_for(tmp_path / "pid"))
        close_workers()
        with pytest.raises(WorkerDiedError, match="killed by SIGKILL"):
            waiting.result(PATIENCE)
    assert not is_alive(pid)


def test_ctrl_c_while_we_wait_for_an_answer_ends_the_worker(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(WORKER, hang, tmp_path / "pid", os.getpid())
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert ask(WORKER, square, 3) == (3, 9)


HANGING_KERNEL = """
import os, time
from pathlib import Path
from mla_verify.emulate import EmulatedKernel
from mla_verify.kernels import Contract, mla_kernel
from mla_verify.tensors import MLAOutput

@mla_kernel(Contract(phases=("decode",), facts=EmulatedKernel().facts))
def hangs(inputs, out):
    if inputs.num_requests > 1:
        Path(__file__).with_name("pid%d" % inputs.num_requests).write_text(str(os.getpid()))
        time.sleep(60)
    return MLAOutput(EmulatedKernel().run(inputs).out, None)
"""


# The one that is waited for and no other; and more than are begun at once on any machine.
@pytest.mark.parametrize("num_cases", [1, 38])
def test_ctrl_c_while_kernels_run_keeps_the_results_so_far_and_leaves_no_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_cases: int
) -> None:
    from mla_verify.ahead import Ahead
    from mla_verify.attempt import Attempt
    from mla_verify.results import Verdict
    from tests.kernels_helper import SINGLE, cases, verify

    (tmp_path / "hangs.py").write_text(HANGING_KERNEL)
    finish = Ahead.finish

    def finish_and_interrupt(ahead: Ahead, attempt: Attempt) -> bool:
        if attempt.entry.case_id == SINGLE:
            return finish(ahead, attempt)
        with ThreadPoolExecutor(1) as threads:
            # From another thread, when the kernel is at it: then this one is interrupted where it waits.
            threads.submit(lambda: (wait_for(tmp_path / "pid2"), os.kill(os.getpid(), signal.SIGINT)))
            return finish(ahead, attempt)

    monkeypatch.setattr(Ahead, "finish", finish_and_interrupt)
    batches = [SINGLE.replace("q1.kv130", f"{n}xq1.kv33") for n in range(2, 2 + num_cases)]
    run = verify(tmp_path, "--kernel", f"{tmp_path / 'hangs.py'}:hangs", *cases(SINGLE, *batches))
    assert (run.exit_code, run.verdicts) == (130, [Verdict.PASS] + [Verdict.NOT_RUN] * len(batches))
    assert {result.reason for result in run.report.results[1:]} == {"interrupted"}
    # Whoever is left would begin the next case, in a new process.
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(PATIENCE)
            assert not thread.is_alive()
    pids = [int(text) for file in tmp_path.glob("pid*") if (text := file.read_text())]
    assert pids and not any(map(is_alive, pids))
