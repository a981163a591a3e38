"""The pytest plugin as its user meets it: a small test file, a pytest of its own, and what that prints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from mla_verify.kernels.contract import Contract
from mla_verify.testing import mla_cases

ROOT = Path(__file__).parents[1]
CASE = "decode-absorbed-h8-q1.kv300+q1.kv201-p64-bf16-normal-s7"

# The beginning of the test files below.
KERNEL = """
    from dataclasses import replace
    import pytest
    import torch
    from mla_verify.emulate import EmulatedKernel
    from mla_verify.kernels import Contract
    from mla_verify.testing import assert_mla

    KERNEL = EmulatedKernel()
    CONTRACT = Contract(phases=("decode",), dtypes=("bf16",), facts=KERNEL.facts, returns_lse=True)
    CASE = "decode-absorbed-h8-q1.kv300+q1.kv201-p64-bf16-normal-s7"
"""
# The same for tests that run no kernel: torch takes a second to import.
LIGHT = """
    import pytest
    from mla_verify.kernels import Contract

    CONTRACT = Contract(phases=("decode",), dtypes=("bf16",))
    CASE = "decode-absorbed-h8-q1.kv300+q1.kv201-p64-bf16-normal-s7"
"""


@dataclass(frozen=True)
class Pytest:
    exit_code: int
    output: str

    @property
    def outcome(self) -> str:
        """The counts of the last line, e.g. "2 passed, 1 error"."""
        found = re.search(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s", self.output.splitlines()[-1])
        assert found, self.output
        return found[1]

    def report_of(self, test: str) -> str:
        """What is shown of one failed test or error: between its heading and the next one."""
        parts = re.split(r"^[_=]+ (.+?) [_=]+$", self.output, flags=re.MULTILINE)
        return "\n".join(text for heading, text in zip(parts[1::2], parts[2::2], strict=True) if test in heading)


def run_pytest(folder: Path, *args: str) -> Pytest:
    """pytest in `folder`, with the plugin found as an installed one is, and the code of this checkout."""
    (folder / "pytest.ini").touch()  # its root: nothing above it has a say
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", *args]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert "INTERNALERROR" not in done.stdout + done.stderr
    return Pytest(done.returncode, done.stdout.rstrip() + done.stderr)


def write_tests(folder: Path, name: str, text: str, beginning: str = KERNEL) -> None:
    (folder / name).write_text(dedent(beginning) + dedent(text))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Pytest:
    """One pytest run over tests each of which shows one thing."""
    folder = tmp_path_factory.mktemp("judged")
    write_tests(
        folder,
        "test_kernels.py",
        """
        pytestmark = pytest.mark.mla_cases(CONTRACT, cases=CASE)

        def test_honest(mla_case):
            assert_mla(KERNEL.run(mla_case.inputs), mla_case)

        def test_honest_with_buffers(mla_case):
            buffers = mla_case.output_buffers()
            assert buffers.out.isnan().all()
            result = KERNEL.run(mla_case.inputs)
            buffers.out.copy_(result.out)
            buffers.lse.copy_(result.lse)
            assert_mla(buffers, mla_case)

        def test_scaled(mla_case):
            result = KERNEL.run(mla_case.inputs)
            assert_mla((result.out * 1.005, result.lse), mla_case)

        def test_raises(mla_case):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def test_changes_query_before_it_is_judged(mla_case):
            result = KERNEL.run(mla_case.inputs)
            mla_case.inputs.q_nope.mul_(2)
            assert_mla(result, mla_case)

        def test_changes_cache_and_judges_nothing(mla_case):
            mla_case.inputs.ckv_cache.nan_to_num_()

        def test_writes_beside_its_buffers(mla_case):
            out = mla_case.output_buffers().out
            out.as_strided((out.numel() + 1,), (1,))[-1] = 0

        def test_cannot_tell(mla_case):
            inputs = replace(mla_case.inputs, ckv_cache=torch.zeros_like(mla_case.inputs.ckv_cache))
            assert_mla(KERNEL.run(inputs), inputs, CONTRACT)

        def test_form(mla_case):
            assert_mla(KERNEL.run(mla_case.inputs), mla_case, Contract(form="mha"))

        @pytest.mark.mla_cases(CONTRACT, cases=CASE, device="cuda")
        def test_on_a_gpu_that_is_not_there(mla_case):
            pass

        @pytest.mark.mla_cases(CONTRACT, cases=CASE, device="auto")
        def test_on_what_there_is(mla_case):
            assert mla_case.inputs.device.type == mla_case.device

        class TestClass:
            @pytest.fixture
            def judged(self, mla_case):
                return KERNEL.run(mla_case.inputs), mla_case

            @pytest.mark.parametrize("other", [False, True])
            def test_fixture_of_a_fixture(self, judged, other):
                assert_mla(*judged)
        """,
    )
    (folder / "conftest.py").write_text("import torch\ntorch.cuda.is_available = lambda: False\n")
    return run_pytest(folder, "-rA")


def test_an_honest_kernel_passes_and_each_of_the_others_does_not(judged: Pytest) -> None:
    found: dict[str, list[str]] = {}
    for outcome, test in re.findall(
        r"^(PASSED|FAILED|ERROR) test_kernels\.py::([\w:]+)\[", judged.output, re.MULTILINE
    ):
        found.setdefault(test, []).append(outcome)
    assert found == {
        "test_honest": ["PASSED"],
        "test_honest_with_buffers": ["PASSED"],
        "test_scaled": ["FAILED"],
        "test_raises": ["FAILED"],
        "test_changes_query_before_it_is_judged": ["FAILED"],  # and no second time after the test
        "test_changes_cache_and_judges_nothing": ["PASSED", "ERROR"],
        "test_writes_beside_its_buffers": ["PASSED", "ERROR"],
        "test_cannot_tell": ["FAILED"],
        "test_form": ["FAILED"],
        "test_on_a_gpu_that_is_not_there": ["ERROR"],
        "test_on_what_there_is": ["PASSED"],
        "TestClass::test_fixture_of_a_fixture": ["PASSED", "PASSED"],
    }


def test_a_wrong_result_is_told_at_the_line_of_the_test_without_frames_of_ours(judged: Pytest) -> None:
    report = judged.report_of("test_scaled")
    lines = report.strip().splitlines()
    assert lines[0] == f"mla_case = MLACase({CASE})"
    assert ">       assert_mla((result.out * 1.005, result.lse), mla_case)" in lines
    told = [line.removeprefix("E       ") for line in lines if line.startswith("E ")]
    assert told[:2] == [f"AssertionError: FAIL  {CASE}", "  claim   named by the test, in no suite"]
    assert any(re.fullmatch(r"  out: slope [\d.]+, limit [\d.]+ \(.*output times 1\.00\d+\)", line) for line in told)
    assert re.fullmatch(
        r"  out: worst at request \d, token 0, head \d, dim \d+: actual \S+, expected \S+, z \S+", told[-1]
    )
    assert "mla_verify" not in report
    assert len(lines) <= 16, report


def test_what_else_a_kernel_does_wrong_is_told_in_a_line(judged: Pytest) -> None:
    for test, line in {
        "test_changes_query": "E         reason  the kernel changed its input q_nope in place",
        "test_changes_cache": f"{CASE}: the kernel changed its input ckv_cache in place, or the test did",
        "test_writes_beside": f"{CASE}: the kernel wrote outside its output: 2 bytes right after its out buffer, or",
        "test_cannot_tell": "E         the case cannot tell: it would pass a kernel that returns zeros",
        "test_form": "E       mla_verify.errors.UsageError: inputs of form absorbed, a contract of form mha",
        "test_on_a_gpu": "mla_cases(device='cuda'): torch sees no CUDA device\nhint: device='auto'",
    }.items():
        report = judged.report_of(test)
        assert line in report, judged.output
        assert "testing.py" not in report, report
        assert "pytest_plugin.py" not in report, report


# Which tests there are


def test_the_marker_makes_one_test_for_each_case_of_smoke_that_the_contract_takes(tmp_path: Path) -> None:
    """And imports no torch to do so."""
    write_tests(
        tmp_path,
        "test_chosen.py",
        """
        @pytest.mark.mla_cases(Contract())
        def test_all(mla_case): ...

        @pytest.mark.mla_cases(Contract("write", dtypes=("fp16",)))
        def test_write(mla_case): ...

        @pytest.mark.mla_cases(Contract(), suite="standard", phases=("spec", "prefix"), dtypes="bf16")
        def test_some(mla_case): ...

        class TestClosest:
            pytestmark = pytest.mark.mla_cases(Contract())

            @pytest.mark.mla_cases(contract=Contract(), phases="chunked")
            def test_method(self, mla_case): ...
        """,
        LIGHT,
    )
    (tmp_path / "conftest.py").write_text(
        "import sys\ndef pytest_unconfigure(): print('torch is there:', 'torch' in sys.modules)\n"
    )
    done = run_pytest(tmp_path, "--collect-only", "-q")
    found: dict[str, list[str]] = {}
    for test, case in re.findall(r"^test_chosen\.py::([\w:]+)\[(.*)\]$", done.output, re.MULTILINE):
        found.setdefault(test, []).append(case)
    wanted = {
        "test_all": mla_cases(Contract()),
        "test_write": mla_cases(Contract("write", dtypes=("fp16",))),
        "test_some": mla_cases(Contract(), suite="standard", phases=("spec", "prefix"), dtypes="bf16"),
        "TestClosest::test_method": mla_cases(Contract(), phases="chunked"),
    }
    assert found == {test: [case.spec.id for case in cases] for test, cases in wanted.items()}
    assert len(found["test_all"]) > 40
    assert "torch is there: False" in done.output


def test_a_test_is_selected_by_its_case(tmp_path: Path) -> None:
    write_tests(tmp_path, "test_a.py", "@pytest.mark.mla_cases(CONTRACT)\ndef test_a(mla_case): ...\n", LIGHT)
    smoke = mla_cases(Contract(phases=("decode",), dtypes=("bf16",)))
    ids = [case.spec.id for case in smoke]
    by_k = run_pytest(tmp_path, "-k", ids[0])
    assert by_k.outcome == f"1 passed, {len(ids) - 1} deselected"
    by_part = run_pytest(tmp_path, "-k", "needle and not p64", "--collect-only", "-q")
    wanted = [i for i in ids if "needle" in i and "p64" not in i]
    assert re.findall(r"^test_a\.py::test_a\[(.*)\]$", by_part.output, re.MULTILINE) == wanted
    assert run_pytest(tmp_path, f"test_a.py::test_a[{ids[1]}]").outcome == "1 passed"


MISTAKES = {
    "": "fixture mla_case has no cases\nhint: mark the test: @pytest.mark.mla_cases(CONTRACT)",
    "@pytest.mark.mla_cases": "missing a required argument: 'contract'\nhint: it is mla_cases(contract, ",
    "@pytest.mark.mla_cases(CONTRACT, phase='decode')": "unexpected keyword argument 'phase'\nhint: it is mla_cases(",
    "@pytest.mark.mla_cases(CONTRACT, suite='smok')": "unknown suite 'smok'\nhint: did you mean smoke?",
    "@pytest.mark.mla_cases(CONTRACT, device='gpu')": "unknown device 'gpu'\nhint: did you mean cpu?",
    "@pytest.mark.mla_cases(CONTRACT, device=0)": "unknown device 0\nhint: known: auto, cpu, cuda",
    "@pytest.mark.mla_cases(Contract(page_sizes=(256,)))": "no case of suite smoke is left for this contract: ",
    "@pytest.mark.mla_cases(CONTRACT, phases='spec')": "no case of suite smoke is left for this contract: ",
    "@pytest.mark.mla_cases(CONTRACT)\n@pytest.mark.mla_cases(CONTRACT, cases=CASE)": "two mla_cases markers",
}


def test_a_mistake_in_a_marker_is_told_at_collection_with_the_next_step_and_nothing_else(tmp_path: Path) -> None:
    for number, marker in enumerate(MISTAKES):
        write_tests(tmp_path, f"test_{number}.py", f"{marker}\ndef test_a(mla_case): ...\n", LIGHT)
    done = run_pytest(tmp_path)
    assert done.exit_code == pytest.ExitCode.INTERRUPTED
    assert done.outcome == f"{len(MISTAKES)} errors"
    for number, message in enumerate(MISTAKES.values()):
        report = done.report_of(f"ERROR collecting test_{number}.py")
        assert f"test_{number}.py::test_a: " in report, done.output
        assert message in report, report
        assert report.count("\nhint: ") == 1
        assert len(report.strip().splitlines()) == 2, report


def test_a_test_that_is_marked_and_takes_no_case_is_no_test_that_passed(tmp_path: Path) -> None:
    text = "@pytest.mark.mla_cases(CONTRACT)\ndef test_a(): ...\n"
    write_tests(tmp_path, "test_marked.py", text, LIGHT)
    done = run_pytest(tmp_path)
    assert done.exit_code == pytest.ExitCode.INTERRUPTED
    assert "test_a: the test has mla_cases and no argument mla_case\nhint: without it, it runs once" in done.output
    # A module's marker is for those of its tests that take cases.
    write_tests(tmp_path, "test_marked.py", "pytestmark = pytest.mark.mla_cases(CONTRACT)\ndef test_a(): ...\n", LIGHT)
    assert run_pytest(tmp_path).outcome == "1 passed"


# Everybody else's pytest


def test_a_run_without_mla_tests_imports_the_plugin_and_nothing_more(tmp_path: Path) -> None:
    """Everyone who has the package loads it in every run."""
    (tmp_path / "test_other.py").write_text(
        dedent("""
        import sys
        import pytest

        @pytest.fixture
        def my_case(): ...

        def test_other(my_case):
            heavy = ("mla_verify", "torch", "numpy", "click", "rich", "triton", "safetensors")
            print("imported:", *sorted(name for name in sys.modules if name.partition(".")[0] in heavy))
        """)
    )
    done = run_pytest(tmp_path, "-s", "-p", "no:hypothesispytest")
    assert done.outcome == "1 passed"
    assert re.findall("^.*imported: (.*)$", done.output, re.MULTILINE) == ["mla_verify mla_verify.pytest_plugin"]


def test_marker_and_fixture_are_described_where_pytest_lists_them(tmp_path: Path) -> None:
    markers = run_pytest(tmp_path, "--markers").output
    assert "@pytest.mark.mla_cases(contract, suite='smoke', cases=(), phases=(), dtypes=(), device='cpu'): " in markers
    fixtures = run_pytest(tmp_path, "--fixtures", "-v").output
    described = fixtures[fixtures.index("\nmla_case -- ") :]
    for said in ("@pytest.mark.mla_cases(CONTRACT)", "assert_mla(", "mla_case.inputs", "mla_case.output_buffers()"):
        assert said in described


def test_strict_markers_know_the_marker_and_without_the_plugin_neither_it_nor_the_fixture_is_there(
    tmp_path: Path,
) -> None:
    text = "@pytest.mark.mla_cases(CONTRACT, cases=CASE)\ndef test_a(mla_case): ...\n"
    write_tests(tmp_path, "test_a.py", text, LIGHT)
    assert run_pytest(tmp_path, "--strict-markers").outcome == "1 passed"
    off = run_pytest(tmp_path, "-p", "no:mla_verify")
    assert off.exit_code == pytest.ExitCode.TESTS_FAILED
    assert "fixture 'mla_case' not found" in off.output
    assert "PytestUnknownMarkWarning: Unknown pytest.mark.mla_cases" in off.output


# The example


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example, as a reader makes it."""
    (folder := tmp_path / "examples").mkdir()
    for name in ("__init__.py", "my_kernel.py", "test_my_kernel.py"):
        shutil.copy(ROOT / "examples" / name, folder)
    return tmp_path


SELECTED = ("-k", "3xq1.kv1000")  # one case in each dtype; the other tests of this repository run them all


def test_a_copy_of_the_example_passes(example: Path) -> None:
    done = run_pytest(example, *SELECTED)
    assert done.outcome.startswith("3 passed"), done.output


def test_a_copy_of_the_example_with_a_kernel_that_is_wrong_by_half_a_percent_fails_readably(example: Path) -> None:
    with (example / "examples" / "my_kernel.py").open("a") as file:
        file.write("\n\ndef scaled(inputs, out, right=my_decode):\n    result = right(inputs, out)\n")
        file.write("    result.out.mul_(1.005)\n    return result\n\n\nmy_decode = scaled\n")
    done = run_pytest(example, *SELECTED)
    assert done.outcome.startswith("3 failed"), done.output
    for dtype in ("fp32", "fp16", "bf16"):
        report = done.report_of(f"[decode-absorbed-h16-3xq1.kv1000-p16-{dtype}-mixed-s0]")
        assert "claim   heads from flat to one-hot" in report, done.output
        assert re.search(r"^E +out: slope .*all 16 heads.*output times 1\.005", report, re.MULTILINE), report
        assert re.search(r"^E +out: worst at request \d, token 0, head \d+, dim \d+: actual ", report, re.MULTILINE)
        assert "lse: " not in report
