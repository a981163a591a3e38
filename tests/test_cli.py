from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_verify import __version__
from mla_verify.cli import main
from mla_verify.config import repeat_command
from mla_verify.kernels.contract import Contract
from mla_verify.plan import PlanEntry
from mla_verify.report.json_report import read_json
from mla_verify.results import CaseResult, Verdict
from mla_verify.run import RunOutcome
from tests.cli_helper import invoke
from tests.fakes import DECODE, MHA, PREFILL, Absorbed, Gone, MHAKernel, Other, register, result

ALL_CASES = ("--case", DECODE, "--case", PREFILL)


class FakeRun:
    """Stands in for run_plan: one verdict for every entry, or whatever `then` does after the first."""

    def __init__(self) -> None:
        self.verdict = Verdict.PASS
        self.fields: dict[str, Any] = {}  # of every result
        self.then: Callable[[], None] = lambda: None
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, entries: Sequence[PlanEntry], *, on_result: Callable[[CaseResult], None], **settings: object
    ) -> RunOutcome:
        self.calls.append({"entries": [(entry.case_id, entry.kernel.name) for entry in entries], **settings})
        results = []
        for entry in entries:
            verdict = Verdict.UNSUPPORTED if entry.kernel.why_unavailable("cpu") else self.verdict
            made = result(verdict, kernel=entry.kernel.name, **self.fields)
            results.append(replace(made, case=entry.case_id, phase=entry.phase, dtype=entry.dtype))
            on_result(results[-1])
            self.then()
        return RunOutcome(tuple(results), interrupted=False)


@pytest.fixture(autouse=True)
def fake_run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    register(monkeypatch, Absorbed, MHAKernel)
    fake = FakeRun()
    monkeypatch.setattr("mla_verify.run.run_plan", fake)
    return fake


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def raise_error() -> None:
    raise ZeroDivisionError("a fault of the tool")


def terminate_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)  # the signal ends it at once


def verdicts(path: Path) -> list[str]:
    return [result.verdict.value for result in read_json(path).results]


# Usage errors


BAD_ARGUMENTS: list[tuple[list[str], str, str]] = [
    (["kernls"], "unknown command 'kernls'", "did you mean kernels?"),
    (["list", "suite"], "unknown command 'suite'", "did you mean suites?"),
    (["kernels", "--suit", "smoke"], "unknown option '--suit'", "did you mean --suite"),
    (["kernels", "surplus"], "surplus", "mla-verify kernels --help"),
    (["kernels", "--json"], "--json", "--help lists a command's options"),
    (["kernels", "--seed", "-1"], "--seed", "mla-verify kernels --help"),
    (["kernels", "--device", "gpu"], "--device", "mla-verify kernels --help"),
    (["kernels", "--kernel", "absorb"], "unknown kernel 'absorb'", "did you mean absorbed?"),
    (["kernels", "--require", "absorb"], "unknown kernel 'absorb'", "did you mean absorbed?"),
    (["kernels", "--suite", "smok"], "unknown suite 'smok'", "did you mean smoke?"),
    (["kernels", "--suite", "x"], "unknown suite 'x'", "known: smoke, standard, full"),
    (["kernels", "--dtype", "bf61"], "unknown dtype 'bf61'", "did you mean bf16 or"),
    (["kernels", "--case", "decode-absorbed"], "not a case id: 'decode-absorbed'", "an id reads like decode-"),
    (["kernels", "--case", DECODE.replace("h16", "16")], "not a case id", "'16' stands where the heads is expected"),
    (["kernels", "--case", DECODE.replace("normal", "normale")], "unknown regime 'normale'", "did you mean normal or"),
    (
        ["kernels", "--case", "decode-absorbed-h16-q1.kv4096-p64-fp32-uniform-0"],
        "not a case id",
        "did you mean decode-absorbed-h16-q1.kv4096-p64-fp32-uniform-s0?",
    ),
    (["kernels", "--case", MHA, "--kernel", "absorbed"], "absorbed takes form absorbed", "kernels of that form: mha"),
    (["kernels", "--case", DECODE, "--dtype", "fp16"], "no selected case has dtype fp16", "they have: fp32"),
    (["kernels", "--suite", "smoke", "--case", DECODE], "--suite and --case exclude each other", "leave out --suite"),
    (["kernels", "--inputs", "x", "--case", DECODE], "--inputs and --case exclude each other", "leave out --case"),
    (["kernels", "--inputs", "x", "--suite", "smoke"], "--inputs and --suite exclude", "leave out --suite"),
    (["kernels", "--inputs", "x", "--seed", "1"], "--inputs and --seed exclude", "leave out --seed"),
    (["kernels", "--inputs", "/missing.safetensors"], "there is no such file", "give a .safetensors file"),
    (["kernels", "--list", "--json", "x"], "--list runs nothing, so --json has no effect", "leave out --list"),
    (["kernels", "--list", "--junit", "x"], "--list runs nothing, so --junit has no effect", "leave out --list"),
    (["kernels", "--list", "--fail-fast"], "--list runs nothing, so --fail-fast has no effect", "leave out --list"),
]


@pytest.mark.parametrize(("arguments", "message", "hint"), BAD_ARGUMENTS, ids=lambda value: str(value)[:60])
def test_a_wrong_argument_is_told_with_a_hint_and_nothing_runs(
    arguments: list[str], message: str, hint: str, fake_run: FakeRun
) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert second.startswith("hint: ")
    assert hint in second
    assert fake_run.calls == []


@pytest.mark.parametrize("flag", ["--json", "--junit"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{tmp}/missing/report", "the folder {tmp}/missing does not exist"),
        ("{tmp}/file/report", "the folder {tmp}/file does not exist"),
        ("{tmp}", "it is a folder"),
        ("/dev/null", "it is no regular file"),
        # Not even root can make a file there, which a folder without permission bits does not stop.
        ("/proc/report", "no file can be made in /proc"),
    ],
)
def test_a_report_that_cannot_be_written_is_told_before_anything_runs(
    flag: str, path: str, message: str, tmp_path: Path, fake_run: FakeRun
) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    done = invoke("kernels", flag, path.format(tmp=tmp_path))
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {flag} {path.format(tmp=tmp_path)}: {message.format(tmp=tmp_path)}")
    assert "\nhint: " in done.stderr
    assert fake_run.calls == []
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where permission bits forbid it")
def test_a_folder_without_write_permission_is_told_before_anything_runs(tmp_path: Path, fake_run: FakeRun) -> None:
    tmp_path.chmod(0o500)
    done = invoke("kernels", "--json", tmp_path / "report.json")
    assert done.exit_code == 2
    assert "Permission denied" in done.stderr
    assert fake_run.calls == []


def test_two_outputs_or_an_output_and_the_input_in_one_file_are_told(tmp_path: Path, fake_run: FakeRun) -> None:
    path = tmp_path / "x"
    done = invoke("kernels", "--json", path, "--junit", tmp_path / "y" / ".." / "x")
    assert done.exit_code == 2
    (tmp_path / "y").mkdir()
    done = invoke("kernels", "--json", path, "--junit", tmp_path / "y" / ".." / "x")
    assert (done.exit_code, "--json and --junit name the same place" in done.stderr) == (2, True)
    path.write_text("activations")
    done = invoke("kernels", "--inputs", path, "--json", path)
    assert (done.exit_code, "--inputs and --json name the same place" in done.stderr) == (2, True)
    assert path.read_text() == "activations"
    assert fake_run.calls == []


@pytest.mark.parametrize(
    ("built_for", "message"),
    [(None, "is built without CUDA"), ("13.0", "is built for CUDA 13.0 but finds no device")],
)
def test_device_cuda_without_one_says_what_torch_sees(
    monkeypatch: pytest.MonkeyPatch, fake_run: FakeRun, built_for: str | None, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built_for)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    done = invoke("kernels", "--device", "cuda")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --device cuda: torch sees no CUDA device (torch ")
    assert message in done.stderr
    assert "CUDA_VISIBLE_DEVICES is '9'" in done.stderr
    assert "--device cpu" in done.stderr.splitlines()[1]
    assert fake_run.calls == []


@pytest.mark.parametrize(("there", "device"), [(True, "cuda"), (False, "cpu")])
def test_device_auto_takes_cuda_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, fake_run: FakeRun, there: bool, device: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    invoke("kernels", *ALL_CASES)
    assert fake_run.calls[0]["device"] == device


# Runs


def test_a_run_hands_on_every_flag_and_writes_both_reports(tmp_path: Path, fake_run: FakeRun) -> None:
    json_path, junit_path = tmp_path / "report.json", tmp_path / "report.xml"
    arguments = ["kernels", *ALL_CASES, "--kernel", "absorbed", "--require", "absorbed", "--dtype", "fp32", "--dtype"]
    arguments += ["bf16", "--device", "cpu", "--seed", "4", "--fail-fast", "--json", str(json_path)]
    done = invoke(*arguments, "--junit", junit_path)
    assert (done.exit_code, done.stderr) == (0, "")
    entries = [(case.replace("-s7", "-s4"), "absorbed") for case in (DECODE, PREFILL)]
    (call,) = fake_run.calls
    wanted = {"entries": entries, "device": "cpu", "fail_fast": True, "inputs_file": None}
    assert {name: call[name] for name in wanted} == wanted
    report = read_json(json_path)
    assert [(planned.case, planned.kernel) for planned in report.plan] == entries
    assert (report.decision, report.exit_code) == ("pass", 0)
    assert report.environment["argv"] == ["mla-verify", *arguments, "--junit", str(junit_path)]
    assert (report.environment["device"], report.environment["seed"]) == ("cpu", 4)
    assert junit_path.read_text().count("<testcase ") == 2
    assert done.stdout.rstrip().endswith("PASS: 2 of 2 planned cases decided, 0 wrong (exit 0)")


def test_an_inputs_file_reaches_the_run_as_one_case(tmp_path: Path, fake_run: FakeRun) -> None:
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "real.safetensors"
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    tensors = {"q": torch.zeros(3, 2, 192), "k": torch.zeros(3, 2, 192), "v": torch.zeros(3, 2, 128)}
    save_file({**tensors, "qo_indptr": indptr, "kv_indptr": indptr.clone()}, path, {"sm_scale": "0.1"})
    done = invoke("kernels", "--inputs", path, "--device", "cpu")
    assert (done.exit_code, done.stderr) == (0, "")
    assert fake_run.calls[0]["inputs_file"] == path
    assert [kernel for _, kernel in fake_run.calls[0]["entries"]] == ["mha"]


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.FAIL, 1), (Verdict.TIMEOUT, 3), (Verdict.UNSUPPORTED, 3)])
def test_reports_are_written_and_the_exit_code_is_the_decisions_whatever_the_verdicts(
    tmp_path: Path, fake_run: FakeRun, verdict: Verdict, code: int
) -> None:
    fake_run.verdict = verdict
    done = invoke("kernels", *ALL_CASES, "--json", tmp_path / "r.json", "--junit", tmp_path / "r.xml")
    assert done.exit_code == code
    assert verdicts(tmp_path / "r.json") == [verdict.value] * 2
    assert (tmp_path / "r.xml").exists()


@pytest.mark.parametrize("interrupt", [raise_interrupt, terminate_this_process], ids=["INT", "TERM"])
def test_an_interrupted_run_exits_130_with_the_results_so_far_written(
    tmp_path: Path, fake_run: FakeRun, interrupt: Callable[[], None]
) -> None:
    fake_run.then = interrupt
    before = signal.getsignal(signal.SIGTERM)
    done = invoke("kernels", *ALL_CASES, "--json", tmp_path / "r.json", "--junit", tmp_path / "r.xml")
    assert done.exit_code == 130
    assert verdicts(tmp_path / "r.json") == ["PASS", "NOT_RUN"]
    assert (tmp_path / "r.xml").read_text().count("<error ") == 1
    assert "INTERRUPTED: 1 of 2 planned cases decided" in done.stdout
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.PASS, 3), (Verdict.FAIL, 1)])
def test_a_run_that_breaks_down_keeps_its_results_and_shows_the_traceback(
    tmp_path: Path, fake_run: FakeRun, verdict: Verdict, code: int
) -> None:
    fake_run.verdict, fake_run.then = verdict, raise_error
    done = invoke("kernels", *ALL_CASES, "--json", tmp_path / "r.json", "--junit", tmp_path / "r.xml")
    assert done.exit_code == code
    assert verdicts(tmp_path / "r.json") == [verdict.value, "NOT_RUN"]
    assert read_json(tmp_path / "r.json").results[1].tool_error
    assert "in raise_error" in done.stdout
    assert "ZeroDivisionError: a fault of the tool" in done.stdout


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.PASS, 3), (Verdict.FAIL, 1)])
def test_a_disk_that_fills_up_during_the_run_costs_one_file_and_the_green(
    tmp_path: Path, fake_run: FakeRun, verdict: Verdict, code: int
) -> None:
    fake_run.verdict = verdict
    fake_run.then = lambda: shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    (tmp_path / "gone").mkdir()
    done = invoke("kernels", *ALL_CASES, "--json", tmp_path / "gone" / "r.json", "--junit", tmp_path / "r.xml")
    assert done.exit_code == code
    assert f"error: {tmp_path / 'gone' / 'r.json'} could not be written" in done.stderr
    assert (tmp_path / "r.xml").exists()
    assert "2 of 2 planned cases decided" in done.stdout


def test_a_report_whose_rendering_breaks_costs_no_other_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_verify.session.to_junit", lambda report: raise_error())
    done = invoke("kernels", *ALL_CASES, "--json", tmp_path / "r.json", "--junit", tmp_path / "r.xml")
    assert done.exit_code == 3
    assert verdicts(tmp_path / "r.json") == ["PASS", "PASS"]
    assert "2 of 2 planned cases decided" in done.stdout
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.PASS, 0), (Verdict.FAIL, 1)])
def test_a_reader_that_closes_the_pipe_does_not_change_the_verdict(
    fake_run: FakeRun, verdict: Verdict, code: int
) -> None:
    fake_run.verdict = verdict
    assert run_into_closed_pipe("kernels", *ALL_CASES) == code


def test_a_list_into_a_closed_pipe_exits_as_a_shell_expects_and_not_as_wrong() -> None:
    assert run_into_closed_pipe("list", "dims") == 141


def run_into_closed_pipe(*args: str) -> int:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, redirect_stdout(stdout), pytest.raises(SystemExit) as done:
        main(args)
    return int(str(done.value.code))


def test_an_unavailable_required_kernel_is_told_first_and_the_rest_still_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_run: FakeRun
) -> None:
    register(monkeypatch, Absorbed, Gone, Other)
    done = invoke("kernels", *ALL_CASES, "--require", "gone", "--device", "cpu", "--json", tmp_path / "r.json")
    assert done.exit_code == 3
    warning, hint = done.stderr.splitlines()
    assert warning == "warning: gone is required and unavailable here: gonelib is not installed on cpu"
    assert hint.startswith("hint: the rest runs, but the run ends inconclusive (exit 3)")
    report = read_json(tmp_path / "r.json")
    assert report.reasons == ("gone was required, and none of its cases was decided: gonelib is not installed on cpu.",)
    assert [r.verdict.value for r in report.results] == ["PASS", "UNSUPPORTED", "PASS"] * 2
    assert report.environment["unavailable_kernels"] == {"gone": "gonelib is not installed on cpu"}


def test_a_kernel_left_out_is_named_before_the_run_and_in_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, Absorbed, Gone)
    done = invoke("kernels", *ALL_CASES, "--device", "cpu", "--json", tmp_path / "r.json")
    assert done.exit_code == 0
    assert done.stderr == "note: gone left out, unavailable here: gonelib is not installed on cpu\n"
    report = read_json(tmp_path / "r.json")
    assert {planned.kernel for planned in report.plan} == {"absorbed"}
    assert "gone" in report.environment["unavailable_kernels"]


def test_list_prints_each_case_with_its_kernels_and_claim_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, fake_run: FakeRun
) -> None:
    register(monkeypatch, Absorbed, Other)
    done = invoke("kernels", *ALL_CASES, "--list")
    lines = done.stdout.splitlines()
    assert lines[0] == f"{DECODE}  absorbed other"
    assert lines[1].strip() == "named on the command line, in no suite"
    assert lines[-1] == "2 cases, 4 verdicts planned"
    assert fake_run.calls == []


def test_the_repeat_command_plans_that_case_on_that_kernel_alone(
    monkeypatch: pytest.MonkeyPatch, fake_run: FakeRun
) -> None:
    register(monkeypatch, Absorbed, Other)
    program, *arguments = shlex.split(repeat_command("other", DECODE, "cpu"))
    assert program == "mla-verify"
    invoke(*arguments)
    assert fake_run.calls[0]["entries"] == [(DECODE, "other")]
    assert fake_run.calls[0]["device"] == "cpu"


# The rest of the command line


def test_version_and_help_exit_0() -> None:
    assert invoke("--version").stdout == f"mla-verify, version {__version__}\n"
    for arguments in (["--help"], ["kernels", "-h"], ["list", "--help"]):
        done = invoke(*arguments)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.startswith("Usage: mla-verify")


def test_no_command_prints_the_help_and_is_a_usage_error() -> None:
    done = invoke()
    assert (done.exit_code, done.stdout) == (2, "")
    assert "kernels" in done.stderr


def test_a_bug_keeps_its_traceback_and_is_no_verdict_on_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_verify.cli.make_config", lambda **flags: raise_error())
    done = invoke("kernels")
    assert done.exit_code == 3
    assert "in raise_error" in done.stderr
    assert done.stderr.endswith("error: this is a fault of mla-verify, and no verdict on a kernel\n")


def test_an_interrupt_before_the_run_exits_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_verify.cli.make_config", lambda **flags: raise_interrupt())
    done = invoke("kernels")
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")


def test_list_kernels_shows_each_contract_and_why_a_kernel_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Absorbed, Gone)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    first, second = invoke("list", "kernels").stdout.split("\n\n")
    assert first.startswith("absorbed  available on cpu, fake 1.0\n")
    assert second.startswith("gone  unavailable on cpu: gonelib is not installed on cpu\n")
    facts = {" ".join(line.split()) for line in first.splitlines()[1:]}
    assert facts == {
        *("form absorbed", "dtypes fp32, bf16", "phases decode, prefill", "pages any", "heads any", "strides any"),
        *("LSE not returned", "row without keys out 0", "tail any"),
    }


def test_list_kernels_puts_every_convention_of_a_contract_into_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Absorbed):
        contract = Contract(
            page_sizes=(64, 128),
            num_heads=(8, 16),
            strides="contiguous",
            returns_lse=True,
            lse_base="2",
            lse_layout="HT",
            empty_out="any",
            empty_lse="+inf",
            finite_tail=True,
        )

    monkeypatch.setattr("tests.fakes.Absorbed", Odd)
    register(monkeypatch, Absorbed)
    shown = {" ".join(line.split()) for line in invoke("list", "kernels").stdout.splitlines()}
    assert shown >= {
        *("pages 64, 128", "heads 8, 16", "strides contiguous", "LSE base 2, [H, T]", "tail finite"),
        "row without keys out unread, LSE +inf",
    }


def test_list_suites_shows_every_suite_with_its_number_of_cases() -> None:
    from mla_verify.suites import SUITES, suite_cases

    rows = invoke("list", "suites").stdout.splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [[name, str(len(suite_cases(name)))] for name in SUITES]
    assert all(row.endswith(suite.summary) for row, suite in zip(rows, SUITES.values(), strict=True))


def test_list_dims_shows_the_heads_of_one_rank() -> None:
    lines = invoke("list", "dims").stdout.splitlines()
    assert lines[0].split()[-11:] == ["TP", "1", "TP", "2", "TP", "4", "TP", "8", "TP", "16", "source"]
    heads = {line.split()[0]: line.split()[1:6] for line in lines[1:5]}
    assert heads["deepseek-v3"] == ["128", "64", "32", "16", "8"]
    assert heads["deepseek-v2-lite"] == ["16", "8", "-", "-", "-"]
    assert "kv_lora_rank 512, qk_rope_head_dim 64, qk_nope_head_dim 128, v_head_dim 128" in lines[6]
    assert lines[-1].endswith("12 20 96")


def test_a_terminal_that_lacks_a_character_still_gets_the_whole_report(fake_run: FakeRun) -> None:
    fake_run.verdict, fake_run.fields = Verdict.ERROR, {"reason": "Gr\u00f6\u00dfe"}
    written_to = io.BytesIO()
    stdout = io.TextIOWrapper(written_to, encoding="ascii")
    with redirect_stdout(stdout), pytest.raises(SystemExit) as done:
        main(["kernels", *ALL_CASES])
    written = written_to.getvalue().decode("ascii")
    assert done.value.code == 1
    assert "Gr\\xf6\\xdfe" in written
    assert "WRONG: 2 of 2 planned cases decided, 2 wrong (exit 1)" in written


def test_the_json_report_on_disk_is_strict_json(tmp_path: Path) -> None:
    invoke("kernels", *ALL_CASES, "--json", tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["schema_version"] == 1
    assert set(document) == {
        "schema_version",
        "plan",
        "results",
        "environment",
        "decision",
        "exit_code",
        "reasons",
    }
