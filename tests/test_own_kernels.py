"""Kernels from a user's file, `--kernel file.py:function`: what is wrong exits 1 and says so, what is right passes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mla_verify.results import CaseResult, Verdict
from mla_verify.workers import close_workers
from tests.kernels_helper import SINGLE, Run, cases, verify

OWN = Path(__file__).parent / "own_kernels"
PASS, FAIL, UNSUPPORTED = Verdict.PASS, Verdict.FAIL, Verdict.UNSUPPORTED

BATCH = "decode-absorbed-h8-q1.kv300+q1.kv201-p64-bf16-normal-s7"
NEEDLE = BATCH.replace("normal", "needle")
FUSED = BATCH.replace("-s7", "-fused-s7")
PREFILL = "prefill-absorbed-h8-q9.kv9-p64-bf16-normal-s7"
# Rows 1 and 4 to 5 of its queries see no key.
EMPTIES = "mixed-absorbed-h8-q1.kv130+q3.kv2+q2.kv0-p64-bf16-normal-s7"
EMPTY_ROWS = 1 + 2
WRITE = "append-write-h1-q100.kv300-p64-fp16-rows-s0"
REPEATED, OUTSIDE = WRITE.replace("rows", "repeated"), WRITE.replace("rows", "outside")


def run(folder: Path, kernel: str, *case_ids: str) -> Run:
    """kernel: "file:function", of own_kernels."""
    file, _, function = kernel.partition(":")
    return verify(folder, "--kernel", f"{OWN / file}.py:{function}", *cases(*case_ids))


def line_of(text: str) -> int:
    lines = (OWN / "misbehaves.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return number


def shown(run: Run) -> str:
    """The block of the first wrong result, as the terminal shows it."""
    start = run.done.stdout.index("  claim   ")
    return run.done.stdout[start : run.done.stdout.index("\n\n", start)]


def failed_checks(result: CaseResult) -> set[tuple[str, str]]:
    return {(c.tensor, check.name) for c in result.comparisons for check in c.checks if not check.passed}


@pytest.fixture
def one_fresh_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread runs the kernels, hence one worker. What they leave behind ends with it."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    close_workers()
    yield
    close_workers()


# Wrong numbers


@pytest.mark.parametrize("case", [NEEDLE, BATCH])
@pytest.mark.parametrize("kernel", ["wrong_numbers:honest", "misbehaves:prints", "conventions:garbage_rows"])
def test_a_right_kernel_passes(tmp_path: Path, kernel: str, case: str) -> None:
    done = run(tmp_path, kernel, case)
    assert (done.exit_code, done.verdicts) == (0, [PASS])
    function = kernel.partition(":")[2]
    assert done.only.ran == function
    version = done.report.environment["versions"][done.only.kernel]
    assert re.fullmatch(rf"{kernel.partition(':')[0]}\.py sha256 [0-9a-f]{{12}}", version)


def test_a_kernel_that_drops_the_last_key_is_wrong_where_a_head_looks_for_it(tmp_path: Path) -> None:
    done = run(tmp_path, "wrong_numbers:drops_last_key", NEEDLE)
    assert (done.exit_code, done.verdicts) == (1, [FAIL])
    # Head 0 looks at the last key.
    assert "out: worst at request 0, token 0, head 0, dim " in shown(done)
    assert "lse: worst at request 1, token 0, head 0: actual 5.30" in shown(done)
    assert ", expected 7.10" in shown(done)
    assert f"repeat  mla-verify kernels --kernel {done.only.kernel} --case {NEEDLE} --device cpu" in shown(done)


def test_a_kernel_that_scales_its_output_by_half_a_percent_is_told_the_factor(tmp_path: Path) -> None:
    done = run(tmp_path, "wrong_numbers:scales_output", BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL])
    assert "out: slope " in shown(done) and "(all 8 heads, head " in shown(done)
    assert ": output times 1.005" in shown(done)
    # Its LSE is right.
    assert {tensor for tensor, _ in failed_checks(done.only)} == {"out"}


@pytest.mark.parametrize("case", [BATCH, NEEDLE, BATCH.replace("normal", "rope")])
def test_a_kernel_that_swaps_the_halves_of_q_pe_is_wrong_in_every_head(tmp_path: Path, case: str) -> None:
    done = run(tmp_path, "wrong_numbers:swaps_rope_halves", case)
    assert (done.exit_code, done.verdicts) == (1, [FAIL])
    assert "out: rms_z " in shown(done) and "(all 8 heads, head " in shown(done)
    assert failed_checks(done.only) >= {("out", "max_z"), ("lse", "max_z")}


def test_a_kernel_that_ignores_the_page_table_reads_pages_of_nobody(tmp_path: Path) -> None:
    done = run(tmp_path, "wrong_numbers:ignores_page_table", BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL])
    # The first request reads another's keys, the second a page that no request refers to: it holds NaN.
    assert "out: nonfinite 4096, limit 0 (4096 of 8192 elements, in heads 0-7)" in shown(done)
    assert "out: worst at request 1, token 0, head 0, dim 0: actual nan, expected " in shown(done)
    assert failed_checks(done.only) >= {("out", "max_z"), ("lse", "max_z")}


def test_an_lse_in_base_2_that_was_not_declared_is_wrong_by_that_factor(tmp_path: Path) -> None:
    done = run(tmp_path, "wrong_numbers:base2_undeclared", BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL])
    assert failed_checks(done.only) == {("lse", "max_z")}
    worst = done.only.comparisons[1].worst
    assert worst is not None and worst.actual / worst.expected == pytest.approx(1.442695, rel=1e-5)
    assert f"lse: worst at request 0, token 0, head 0: actual {worst.actual:.9g}, expected {worst.expected:.9g}" in (
        shown(done)
    )
    assert "(all of it is 1.4427 times the expected: base 2 where base e is declared)" in shown(done)


def test_a_natural_lse_that_was_declared_as_base_2_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:base2_declared_and_natural", BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL])
    assert "(all of it is 0.6931 times the expected: base e where base 2 is)" in shown(done)


def test_an_lse_that_is_wrong_in_another_way_is_not_taken_for_another_base(tmp_path: Path) -> None:
    done = run(tmp_path, "wrong_numbers:drops_last_key", BATCH)
    assert "times the expected: base" not in done.done.stdout


def test_one_nan_fails_and_is_located(tmp_path: Path) -> None:
    done = run(tmp_path, "wrong_numbers:one_nan", BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL])
    assert "out: nonfinite 1, limit 0 (1 of 8192 elements, in heads 3)" in shown(done)
    assert "out: worst at request 1, token 0, head 3, dim 77: actual nan, expected -0.06" in shown(done)


# Results of another kind, rules, and no result. All are right on a batch of one, which must stay a PASS.


@pytest.mark.parametrize(
    ("function", "verdict", "reason"),
    [
        ("flattens_heads", "WRONG_SHAPE", "out has shape [2, 4096], it must be [2, 8, 512]"),
        ("returns_fp32", "WRONG_SHAPE", "out has dtype torch.float32, it must be torch.bfloat16"),
        ("returns_none", "WRONG_SHAPE", "run returned NoneType, it must return MLAOutput(out, lse)"),
        ("scales_the_query_in_place", "FAIL", "the kernel changed its input q_pe in place"),
        (
            "writes_past_its_output",
            "FAIL",
            "the kernel wrote outside its output: 8192 bytes right after its out buffer",
        ),
        (
            "raises",
            "ERROR",
            "the kernel raised NotImplementedError: no batches yet [WIP] "
            f"(misbehaves.py, line {line_of('raise NotImplementedError')})",
        ),
        ("exits_politely", "ERROR", f"the kernel raised SystemExit: 0 (misbehaves.py, line {line_of('sys.exit(0)')})"),
        ("segfaults", "CRASH", "the kernel's process ended: killed by SIGSEGV, as an address outside a tensor does"),
        ("exits_at_once", "CRASH", "the kernel's process ended: exit code 3"),
    ],
)
def test_what_is_no_result_exits_1_with_its_reason_and_the_other_cases_get_their_verdicts(
    tmp_path: Path, function: str, verdict: str, reason: str
) -> None:
    done = run(tmp_path, f"misbehaves:{function}", SINGLE, BATCH, SINGLE.replace("kv130", "kv131"))
    assert (done.exit_code, done.verdicts) == (1, [PASS, Verdict(verdict), PASS])
    assert done.report.results[1].reason == reason
    assert f"{verdict}  {OWN / 'misbehaves.py'}:{function}  {BATCH}\n" in done.done.stdout
    assert f"  reason  {reason}\n" in shown(done) + "\n"
    assert "Traceback" not in done.done.stderr


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("raises", line_of("raise NotImplementedError")),
        ("exits_politely", line_of("sys.exit(0)")),
        ("segfaults", line_of("ctypes.string_at(0)")),
    ],
)
def test_the_report_of_a_kernel_that_ends_shows_the_line_of_the_users_file(
    tmp_path: Path, function: str, line: int
) -> None:
    done = run(tmp_path, f"misbehaves:{function}", BATCH)
    comma = "" if function == "segfaults" else ","  # a fault handler's report, not a traceback
    assert f'File "{OWN / "misbehaves.py"}", line {line}{comma} in {function}' in shown(done)
    assert f"line {line}" in done.only.traceback
    assert "Extension modules" not in done.only.traceback  # of which torch alone has dozens


def test_what_a_kernel_printed_before_its_process_ended_is_shown(tmp_path: Path) -> None:
    done = run(tmp_path, "misbehaves:exits_at_once", BATCH)
    assert "    assertion failed in kernel.cu:17\n" in shown(done)


def test_what_a_kernel_printed_before_a_segfault_is_kept(
    one_fresh_worker: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a terminal it would have been there at once."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    done = run(tmp_path, "misbehaves:segfaults", BATCH)
    assert "step 19\n" in done.only.traceback  # stderr
    assert "what stands in a buffer\n" in done.only.traceback


def test_what_a_kernel_prints_stands_on_stderr_and_not_in_the_report(tmp_path: Path) -> None:
    done = run(tmp_path, "misbehaves:prints", SINGLE)
    assert done.exit_code == 0
    assert sorted(done.done.stderr.splitlines()) == ["autotuned: 2 warps", "deprecated: sm_70"]
    assert "autotuned" not in done.done.stdout


def test_rows_left_unwritten_are_nan_and_fail(tmp_path: Path) -> None:
    done = run(tmp_path, "misbehaves:leaves_nan", SINGLE, BATCH)
    assert (done.exit_code, done.verdicts) == (1, [PASS, FAIL])
    assert "out: nonfinite 4096, limit 0 (4096 of 8192 elements, in heads 0-7)" in shown(done)
    assert "out: worst at request 1, token 0, head 0, dim 0: actual nan" in shown(done)


@pytest.mark.usefixtures("one_fresh_worker")
def test_a_setting_of_torchs_that_one_kernel_leaves_behind_is_no_failure_of_another(tmp_path: Path) -> None:
    careless, honest = f"{OWN / 'misbehaves.py'}:changes_torchs_default_dtype", f"{OWN / 'wrong_numbers.py'}:honest"
    done = verify(tmp_path, "--kernel", careless, "--kernel", honest, *cases(BATCH, SINGLE))
    assert {result.verdict for result in done.report.results if result.kernel == honest} == {PASS}


@pytest.mark.parametrize("name", ["partial", "called_object"])
def test_whatever_can_be_called_is_a_kernel(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, f"misbehaves:{name}", BATCH)
    assert (done.exit_code, done.verdicts) == (0, [PASS]), done.only.reason


# What a contract claims, and the kernel cannot do


def test_a_phase_that_is_claimed_and_raises_exits_1(tmp_path: Path) -> None:
    done = run(tmp_path, "misbehaves:claims_prefill", BATCH, PREFILL)
    assert (done.exit_code, done.verdicts) == (1, [PASS, Verdict.ERROR])
    assert "  reason  the kernel raised ValueError: this kernel takes one query token a request (" in shown(done)
    assert f'misbehaves.py", line {line_of("raise ValueError")}, in claims_prefill' in shown(done)


def test_an_lse_that_is_claimed_and_not_returned_exits_1(tmp_path: Path) -> None:
    done = run(tmp_path, "misbehaves:claims_lse", BATCH)
    assert (done.exit_code, done.verdicts) == (1, [Verdict.WRONG_SHAPE])
    assert "  reason  lse is NoneType, it must be a tensor [2, 8]\n" in shown(done)


# Conventions


def test_an_lse_in_base_2_with_heads_first_passes_when_it_is_declared(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:base2_heads_first", BATCH, PREFILL, EMPTIES)
    assert (done.exit_code, done.verdicts) == (0, [PASS] * 3)
    assert all([c.tensor for c in result.comparisons] == ["out", "lse"] for result in done.report.results)


@pytest.mark.parametrize("case", [BATCH, SINGLE])
def test_an_lse_with_heads_first_that_was_not_declared_has_the_wrong_shape(tmp_path: Path, case: str) -> None:
    done = run(tmp_path, "conventions:heads_first_undeclared", case)
    tokens = 2 if case == BATCH else 1
    assert (done.exit_code, done.verdicts) == (1, [Verdict.WRONG_SHAPE])
    assert done.only.reason == f"lse has shape [8, {tokens}], it must be [{tokens}, 8]"


def test_plus_infinity_for_rows_without_keys_passes_when_it_is_declared(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:plus_inf", EMPTIES, BATCH)
    assert (done.exit_code, done.verdicts) == (0, [PASS] * 2)


def test_plus_infinity_for_rows_without_keys_fails_when_it_is_not_declared(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:plus_inf_undeclared", EMPTIES, BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL, PASS])
    assert "lse: worst at request 1, token 0, head 0: actual inf, expected -inf" in shown(done)


def test_minus_infinity_where_plus_infinity_is_declared_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:minus_inf_where_plus_is_declared", EMPTIES, BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL, PASS])
    assert done.report.results[0].reason.startswith("lse of a query that sees no key: actual -inf, expected inf")


def test_of_a_wrong_infinity_the_one_that_was_returned_is_shown(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:minus_inf_where_plus_is_declared", EMPTIES)
    assert "actual -inf, expected inf" in shown(done)


def test_garbage_in_rows_without_keys_passes_when_nobody_reads_them(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:garbage_rows", EMPTIES, BATCH)
    assert (done.exit_code, done.verdicts) == (0, [PASS] * 2)


def test_garbage_in_rows_without_keys_fails_by_default(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:garbage_rows_undeclared", EMPTIES, BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL, PASS])
    # One row of NaN, two of 7.
    assert "out: nonfinite 4096, limit 0 (4096 of 24576 elements, in heads 0-7)" in shown(done)
    assert failed_checks(done.report.results[0]) >= {("out", "nonfinite"), ("out", "max_z")}
    assert "out: worst at request 1, token 0, head 0, dim 0: actual nan, expected 0" in shown(done)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_kernel_that_gives_slots_after_the_last_key_the_weight_0_passes_when_it_declares_a_finite_tail(
    tmp_path: Path, dtype: str
) -> None:
    done = run(tmp_path, "conventions:whole_pages", *(case.replace("bf16", dtype) for case in (BATCH, FUSED)))
    assert (done.exit_code, done.verdicts) == (0, [PASS] * 2)


def test_a_kernel_that_gives_slots_after_the_last_key_the_weight_0_fails_by_default(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:whole_pages_undeclared", BATCH, BATCH.replace("kv300+q1.kv201", "kv64+q1.kv128"))
    # Full pages have no tail.
    assert (done.exit_code, done.verdicts) == (1, [FAIL, PASS])
    assert "out: nonfinite 8192, limit 0 (8192 of 8192 elements, in heads 0-7)" in shown(done)


# Strides


def test_a_kernel_that_declares_contiguous_tensors_is_not_given_others(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:takes_contiguous", FUSED, BATCH)
    assert (done.exit_code, done.verdicts) == (3, [UNSUPPORTED, PASS])
    reason = "the tensors are views of others, and the contract asks for contiguous ones"
    assert done.report.results[0].reason == reason
    assert f": 1 x {reason}\n" in done.done.stdout
    assert done.report.reasons == (f"No kernel decided {FUSED}.",)


def test_a_kernel_that_takes_contiguous_tensors_for_granted_fails_on_views(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:takes_contiguous_undeclared", FUSED, BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL, PASS])
    assert failed_checks(done.report.results[0]) >= {("out", "max_z"), ("out", "cat_free")}
    assert "(elements differ from those of the same tensors apart, not fused)" in shown(done)


def test_a_kernel_that_is_right_by_another_way_on_views_fails_by_its_bits_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "conventions:splits_by_layout", FUSED, BATCH)
    assert (done.exit_code, done.verdicts) == (1, [FAIL, PASS])
    assert failed_checks(done.report.results[0]) == {("out", "cat_free")}
    assert "out: cat_free " in done.report.results[0].reason


# Limits


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("h8", "h12"), "12 heads: not among 8, 128"),
        (("p64", "p16"), "page size 16 is not among 32, 64"),
        (("bf16", "fp16"), "dtype fp16 is not among bf16"),
        (("decode-absorbed-h8-q1.kv130", "prefill-absorbed-h8-q9.kv9"), "phase prefill is not among decode"),
    ],
)
def test_a_case_outside_declared_limits_is_unsupported_with_the_reason(
    tmp_path: Path, change: tuple[str, str], reason: str
) -> None:
    outside = SINGLE.replace(*change)
    done = run(tmp_path, "conventions:limited", SINGLE, outside, SINGLE.replace("p64", "p32"))
    assert (done.exit_code, done.verdicts) == (3, [PASS, UNSUPPORTED, PASS])
    assert done.report.results[1].reason == reason
    assert f"UNSUPPORTED  {OWN / 'conventions.py'}:limited: 1 x {reason}\n" in done.done.stdout
    assert done.report.reasons == (f"No kernel decided {outside}.",)


# Cache writes


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_right_cache_write_passes_also_with_repeated_slots_and_slots_outside(tmp_path: Path, dtype: str) -> None:
    ids = [case.replace("fp16", dtype) for case in (WRITE, REPEATED, OUTSIDE, WRITE.replace("-s0", "-fused-s0"))]
    done = run(tmp_path, "cache_writes:leaves_out_what_is_outside", *ids)
    assert (done.exit_code, done.verdicts) == (0, [PASS] * 4)


def test_the_cache_write_of_the_examples_passes_with_repeated_slots_and_is_not_given_slots_outside(
    tmp_path: Path,
) -> None:
    example = OWN.parents[1] / "examples" / "my_kernel.py"
    done = verify(tmp_path, "--kernel", f"{example}:my_cache_write", *cases(REPEATED, OUTSIDE))
    assert (done.exit_code, done.verdicts) == (3, [PASS, UNSUPPORTED])
    reason = "slots outside the cache: the contract does not claim that their tokens are left out"
    assert done.report.results[1].reason == reason


def test_a_cache_write_that_also_writes_the_next_row_fails_by_the_rows_of_others(tmp_path: Path) -> None:
    done = run(tmp_path, "cache_writes:writes_the_neighbour_too", WRITE)
    assert (done.exit_code, done.verdicts) == (1, [FAIL])
    assert failed_checks(done.only) == {("kv_cache", "other_rows")}
    # 100 tokens lie on two runs of pages.
    assert "kv_cache: other_rows 2, limit 0 (2 of 412 rows of other slots changed: slots 128, 492)" in shown(done)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_cache_write_that_takes_negative_slots_from_the_end_fails(tmp_path: Path, dtype: str) -> None:
    outside, ordinary = OUTSIDE.replace("fp16", dtype), WRITE.replace("fp16", dtype)
    done = run(tmp_path, "cache_writes:wraps_negative_slots", outside, ordinary)
    assert (done.exit_code, done.verdicts) == (1, [FAIL, PASS])
    assert "claim   tokens whose slot is negative or past the end leave no trace\n" in shown(done)
    assert " rows of other slots changed: slot" in shown(done) or " written rows have a wrong " in shown(done)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_cache_write_next_to_the_cache_fails_and_says_on_which_side(tmp_path: Path, where: str) -> None:
    done = run(tmp_path, f"cache_writes:writes_{where}_the_cache", WRITE, REPEATED)
    assert (done.exit_code, done.verdicts) == (1, [FAIL, FAIL])
    row = 576 * torch.float16.itemsize
    assert f"  reason  the kernel wrote outside its output: {row} bytes right {where} its out buffer\n" in shown(done)


def test_a_cache_write_that_forgets_the_rope_part_is_told_that_part_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "cache_writes:forgets_the_rope_part", WRITE)
    assert (done.exit_code, done.verdicts) == (1, [FAIL])
    assert failed_checks(done.only) == {("kv_cache", "rope")}
    assert "100 of 100 written rows have a wrong rope part and still hold what was there before: slots " in shown(done)
    assert "kv_cache: worst at request 0, token 0, head 0, dim 512: actual nan, expected " in shown(done)


DEEP = """
import statistics
from mla_verify.kernels import Contract, mla_kernel

def average(values):
    return statistics.mean(values)

@mla_kernel(Contract(phases=("decode",)))
def decode(inputs, out):
    try:
        average([])
    except statistics.StatisticsError as error:
        raise RuntimeError("compilation failed") from error
"""


def test_an_error_names_the_innermost_line_of_the_users_own_file(tmp_path: Path) -> None:
    """Also where a library, as Triton's compiler does, raises something of its own from it."""
    (tmp_path / "deep.py").write_text(DEEP)
    done = verify(tmp_path, "--kernel", f"{tmp_path / 'deep.py'}:decode", *cases(SINGLE))
    assert done.only.reason == "the kernel raised RuntimeError: compilation failed (deep.py, line 6)"
