"""Two builds of a kernel: the outputs of one are dumped, and those of the other are held against them."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mla_verify.against import is_against
from mla_verify.cases import CaseSpec
from mla_verify.compare_builds import BothNoises, compare_builds, worst_ulp
from mla_verify.dump import inputs_digest, read_dump, safe_name
from mla_verify.emulate import EmulatedKernel
from mla_verify.expected import expect
from mla_verify.inputs import make_inputs
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.outputs import with_other_build
from mla_verify.results import CaseResult, Comparison, Verdict
from mla_verify.tensors import MLAInputs, MLAOutput
from tests import failing_kernels as failing
from tests import wrong_kernels as wrong
from tests.cli_helper import Result, invoke
from tests.fakes import comparison
from tests.kernels_helper import DECODE, RAGGED, cases, register, verify

ROOT = Path(__file__).parents[1]
FP32 = DECODE.replace("bf16", "fp32")


def dump(folder: Path, *args: str | Path) -> Result:
    return invoke("kernels", "--device", "cpu", "--dump", folder, *args)


def against(result: CaseResult) -> dict[str, Comparison]:
    return {c.tensor.removeprefix("against "): c for c in result.comparisons if is_against(c)}


def values(comparison: Comparison) -> dict[str, float]:
    return {check.name: check.value for check in comparison.checks}


# What a dump holds


def test_a_dump_holds_every_output_that_was_obtained_and_lists_every_planned_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [wrong.Honest, wrong.Scaled, failing.Raises])
    done = dump(tmp_path / "d", *cases(DECODE, RAGGED))
    assert done.exit_code == 1
    index = json.loads((tmp_path / "d" / "dump.json").read_text())
    listed = {(p["case"], p["kernel"]): (p["verdict"], p["file"] is not None) for p in index["pairs"]}
    assert listed == {
        (case, kernel): outcome
        for case in (DECODE, RAGGED)
        for kernel, outcome in {"honest": ("PASS", True), "scaled": ("FAIL", True), "raises": ("ERROR", False)}.items()
    }
    there = {path.relative_to(tmp_path / "d").as_posix() for path in (tmp_path / "d").rglob("*") if path.is_file()}
    assert there == {"dump.json", *(p["file"] for p in index["pairs"] if p["file"])}
    assert index["environment"]["versions"]["honest"] == "emulated"


def test_a_dumped_output_is_the_kernels_bit_for_bit_and_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [wrong.Honest])
    dump(tmp_path / "d", *cases(DECODE))
    made = wrong.EMULATED.run(make_inputs(CaseSpec.parse(DECODE)))  # type: ignore[arg-type]
    (file,) = (tmp_path / "d").rglob("*.safetensors")
    tensors = load_file(file)
    assert tensors.keys() == {"out", "lse"}
    assert made.lse is not None
    assert torch.equal(tensors["out"].view(torch.int16), made.out.view(torch.int16))
    assert torch.equal(tensors["lse"], made.lse)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert (
        metadata.pop("package_hash")
        == json.loads((tmp_path / "d/dump.json").read_text())["environment"]["package_hash"]
    )
    assert metadata == {
        "case": DECODE, "kernel": "honest", "version": "emulated", "dtype": "bf16", "device": "cpu", "gpu": "none",
    }  # fmt: skip


def test_an_lse_by_heads_is_dumped_by_tokens_like_any_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class ByHeads(wrong.Honest):
        contract = replace(wrong.Honest.contract, lse_layout="HT")

        def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
            assert result.lse is not None
            return MLAOutput(result.out, result.lse.T.contiguous())

    monkeypatch.setattr(wrong, "ByHeads", ByHeads, raising=False)
    ByHeads.__module__ = wrong.__name__
    register(monkeypatch, [ByHeads])
    assert dump(tmp_path / "d", *cases(DECODE)).exit_code == 0
    register(monkeypatch, [wrong.Honest])
    run = verify(tmp_path, *cases(DECODE), "--against", tmp_path / "d", "--bit-equal")
    assert run.exit_code == 0
    assert set(against(run.only)) == {"out", "lse"}


@pytest.mark.parametrize("name", ["/a/b.py:f", "x" * 300, "..", ".hidden", "a b", "ü"])
def test_any_name_becomes_the_name_of_one_file_and_no_two_the_same(name: str) -> None:
    safe = safe_name(name)
    assert Path(safe).name == safe
    assert len(safe) < 150
    assert not safe.startswith(".")
    assert safe.isascii()
    assert safe != safe_name(f"{name}_")
    assert safe_name("decode-h16_x.y+z") == "decode-h16_x.y+z"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: folder.write_text("x"), "it is no folder"),
        (lambda folder: (folder.mkdir(), (folder / "x").touch()), "it is not empty and holds no finished dump"),
        (lambda folder: (folder.mkdir(), (folder / "dump.json").touch()), "it holds a dump already"),
    ],
)
def test_a_folder_that_holds_something_is_not_dumped_into(
    prepare: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    prepare(tmp_path / "d")
    before = sorted(tmp_path.rglob("*"))
    done = dump(tmp_path / "d", "--kernel", "torch-absorbed", *cases(DECODE))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: --dump {tmp_path / 'd'}: {message}\nhint: ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("folder", ["{tmp}/missing/d", "/proc/d"])
def test_a_dump_that_cannot_be_written_is_told_before_anything_runs(folder: str, tmp_path: Path) -> None:
    done = dump(Path(folder.format(tmp=tmp_path)), "--kernel", "torch-absorbed", *cases(DECODE))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --dump ")


def test_a_full_disk_costs_the_dump_and_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path, content: str | bytes) -> None:
        if path.suffix == ".safetensors":  # the index is small enough
            raise OSError(28, "No space left on device")

    register(monkeypatch, [wrong.Honest])
    monkeypatch.setattr("mla_verify.dump.write_whole", full)
    done = dump(tmp_path / "d", *cases(DECODE))
    assert done.exit_code == 3
    assert f"error: {tmp_path / 'd'} could not be written: [Errno 28]" in done.stderr
    assert "PASS: 1 of 1 planned cases decided" in done.stdout
    assert not (tmp_path / "d/dump.json").exists()


# Two processes, two installs

KERNEL = """
import torch
from mla_verify.kernels import Contract, RoundingFacts, mla_kernel

@mla_kernel(Contract(phases=("decode",), facts=lambda dtype: RoundingFacts(dtype), returns_lse=True))
def decode(inputs, out):
    size = inputs.ckv_cache.shape[1]
    for b, n in enumerate(inputs.kv_lens.tolist()):
        pages = inputs.page_table[b, : -(-n // size)].long()
        ckv, kpe = (c[pages].flatten(0, 1)[:n].float() for c in (inputs.ckv_cache, inputs.kpe_cache))
        order = ORDER
        ckv, kpe = ckv[order], kpe[order]
        scores = (inputs.q_nope[b].float() @ ckv.T + inputs.q_pe[b].float() @ kpe.T) * inputs.sm_scale
        out.lse[b] = scores.logsumexp(-1)
        out.out[b] = ((scores - out.lse[b][:, None]).exp() @ ckv * FACTOR).to(out.out.dtype)
    return out
"""
SAME, OTHER_ORDER, FACTOR = ("torch.arange(n)", "1.0"), ("torch.arange(n).flip(0)", "1.0"), ("torch.arange(n)", "1.005")


def build(folder: Path, order: str, factor: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own, on a build of the kernel that lies in `folder`."""
    folder.mkdir()
    (folder / "kernel.py").write_text(KERNEL.replace("ORDER", order).replace("FACTOR", factor))
    command = [sys.executable, "-m", "mla_verify", "kernels", "--kernel", "kernel.py:decode", "--device", "cpu"]
    return subprocess.run(
        [*command, *cases(FP32, DECODE), *map(str, args)],
        cwd=folder, env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def old_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old") / "build"
    done = build(folder, *SAME, "--dump", folder.parent / "dump")
    assert done.returncode == 0, done.stderr
    return folder.parent / "dump"


@pytest.mark.parametrize(
    ("change", "flags", "exit_code", "first_line"),
    [
        (SAME, ["--bit-equal"], 0, "2 of 2 outputs bit-equal"),
        (OTHER_ORDER, [], 0, "0 of 2 outputs bit-equal"),
        (OTHER_ORDER, ["--bit-equal"], 1, "0 of 2 outputs bit-equal"),
        (FACTOR, [], 1, "0 of 2 outputs bit-equal"),
    ],
    ids=["same", "other order", "other order, bits asked for", "wrong by 1.005"],
)
def test_a_changed_build_in_another_process_is_told_from_an_equal_one(
    old_build: Path, tmp_path: Path, change: tuple[str, str], flags: list[str], exit_code: int, first_line: str
) -> None:
    report = tmp_path / "r.json"
    done = build(tmp_path / "new", *change, "--against", old_build, "--json", report, *flags)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert f"against {old_build} (kernel.py sha256 " in done.stdout
    assert first_line in done.stdout
    for result in json.loads(report.read_text())["results"]:
        found = {c["tensor"]: c for c in result["comparisons"]}
        # The other order differs in bits, and its numbers are right; the factor is wrong in both ways.
        assert found["out"]["passed"] is (change is not FACTOR)
        assert found["against out"]["passed"] is (exit_code == 0)
        z = next(check for check in found["against out"]["checks"] if check["name"] == "max_z")
        if change is OTHER_ORDER:
            assert 0 < z["value"] < z["limit"] or "bf16" in result["case"]
        if exit_code:
            assert result["repeat"].endswith(" ".join(["--against", str(old_build), *flags]))


def test_a_right_build_against_a_wrong_old_one_is_a_difference_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [wrong.Scaled])
    dump(tmp_path / "d", *cases(DECODE))
    register(monkeypatch, [wrong.Honest])
    run = verify(tmp_path, *cases(DECODE), "--against", tmp_path / "d")
    assert (run.exit_code, run.only.verdict) == (1, Verdict.FAIL)
    assert all(c.passed for c in run.only.comparisons if not is_against(c))
    assert run.only.reason.startswith("out differs from the other build's by more than the roundings of both: rms_z")
    assert "  note: honest here is held against scaled there\n" in run.done.stdout
    # The worst z of a kernel is that against the reference.
    assert "worst z of honest: against" not in run.done.stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CaseResult(DECODE, "k", Verdict.PASS, ""), Verdict.FAIL),
        (CaseResult(DECODE, "k", Verdict.FAIL, "out: too far"), Verdict.FAIL),
        # Inputs that cannot tell a wrong kernel from a right one can still tell two builds apart.
        (CaseResult(DECODE, "k", Verdict.NOT_RUN, "vacuous", comparisons=(comparison(),)), Verdict.FAIL),
        (CaseResult(DECODE, "k", Verdict.NOT_RUN, "error of the tool", tool_error=True), Verdict.NOT_RUN),
        (CaseResult(DECODE, "k", Verdict.WRONG_SHAPE, "lse is missing"), Verdict.WRONG_SHAPE),
    ],
)
def test_verdict_of_a_pair_that_differs_from_the_other_build(before: CaseResult, after: Verdict) -> None:
    other = comparison(tensor="against out", value=9.0, limit=6.0)
    found = with_other_build(before, (other,), "--against d")
    assert found.verdict is after
    assert found.comparisons == (*before.comparisons, other)
    assert ("more than the roundings of both" in found.reason) is (after is Verdict.FAIL)
    assert found.reason.startswith(before.reason if before.verdict is Verdict.FAIL else "")
    assert with_other_build(before, (replace(other, checks=()),), "--against d").verdict is before.verdict


# What cannot be compared


@pytest.fixture
def honest_dump(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    register(monkeypatch, [wrong.Honest])
    assert dump(tmp_path / "d", *cases(DECODE)).exit_code == 0
    return tmp_path / "d"


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / "dump.json").read_text())
    edit(index)
    (folder / "dump.json").write_text(json.dumps(index))


def test_a_case_that_the_dump_lacks_leaves_the_run_inconclusive(honest_dump: Path, tmp_path: Path) -> None:
    run = verify(tmp_path, *cases(DECODE, RAGGED), "--against", honest_dump)
    assert run.exit_code == 3
    assert run.report.reasons == ("honest: 1 case is not compared with the dump: the dump does not have the case.",)
    assert "1 of 1 outputs bit-equal" in run.done.stdout


def test_other_inputs_than_the_dumps_are_not_compared(honest_dump: Path, tmp_path: Path) -> None:
    edit_index(honest_dump, lambda index: index["pairs"][0].update(inputs="0" * 64))
    run = verify(tmp_path, *cases(DECODE), "--against", honest_dump)
    assert run.exit_code == 3
    assert "its inputs were others when the dump was made" in run.report.reasons[0]
    assert not against(run.only)


@pytest.mark.parametrize("there", [True, False])
def test_a_pair_without_an_output_in_one_of_the_builds_leaves_the_run_inconclusive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool
) -> None:
    class Refuses(wrong.Honest):
        def why_not(self, spec: CaseSpec, device: str) -> str | None:
            return "not today" if len(spec.requests) == 3 else None

    monkeypatch.setattr(wrong, "Refuses", Refuses, raising=False)
    Refuses.__module__ = wrong.__name__
    first, second = ([wrong.Honest], [Refuses]) if there else ([Refuses], [wrong.Honest])
    register(monkeypatch, first)
    dump(tmp_path / "d", *cases(DECODE, RAGGED))
    register(monkeypatch, second)
    run = verify(tmp_path, *cases(DECODE, RAGGED), "--against", tmp_path / "d")
    assert run.exit_code == 3
    why = "there is no output of it here" if there else "the dump has no output of it"
    assert f"honest: 1 case is not compared with the dump: {why}, its verdict" in " ".join(run.report.reasons)
    assert "UNSUPPORTED." in " ".join(run.report.reasons)


def test_a_kernel_is_held_against_the_one_of_its_name_and_any_other_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [wrong.Honest, wrong.OtherRounding])
    dump(tmp_path / "d", *cases(DECODE))
    run = verify(tmp_path, *cases(DECODE), "--against", tmp_path / "d", "--bit-equal")
    assert run.exit_code == 0  # each its own
    register(monkeypatch, [wrong.NoLSE])
    run = verify(tmp_path, *cases(DECODE), "--against", tmp_path / "d")
    assert run.exit_code == 3
    assert "the dump has no kernel no-lse; it has honest, other-rounding" in run.report.reasons[0]
    # One of each: held together, whatever they are called.
    register(monkeypatch, [wrong.Honest])
    dump(tmp_path / "one", *cases(DECODE))
    register(monkeypatch, [wrong.NoLSE])
    run = verify(tmp_path, *cases(DECODE), "--against", tmp_path / "one", "--bit-equal")
    assert run.exit_code == 0
    assert "  note: no-lse here is held against honest there\n" in run.done.stdout
    assert "  note: 1 outputs have an LSE in one build only, which is not compared\n" in run.done.stdout


def test_an_error_of_the_comparison_costs_no_verdict_and_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, honest_dump: Path, tmp_path: Path
) -> None:
    def fail(*args: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("mla_verify.compare_builds.compare_builds", fail)
    run = verify(tmp_path, *cases(DECODE), "--against", honest_dump)
    assert (run.exit_code, run.only.verdict) == (3, Verdict.PASS)
    assert "comparing raised MemoryError: no room" in run.report.reasons[0]


# Dumps that are none


def cut_short(folder: Path) -> None:
    (file,) = folder.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])


def remove_output(folder: Path) -> None:
    (file,) = folder.rglob("*.safetensors")
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "there is no such folder"),
        (lambda folder: (folder / "dump.json").unlink(), "it has no dump.json"),
        (lambda folder: (folder / "dump.json").write_text("{"), "is no index of a dump"),
        (lambda folder: (folder / "dump.json").write_text("[]"), "is no index of a dump"),
        (lambda folder: edit_index(folder, lambda index: index.update(dump_version=9)), "schema version 9"),
        (lambda folder: edit_index(folder, lambda i: i["pairs"][0].update(verdict="FINE")), "is not a valid Verdict"),
        (lambda folder: edit_index(folder, lambda i: i["pairs"][0]["facts"].update(p_dtype="x")), "p_dtype has 'x'"),
        (cut_short, "damaged, cut short or replaced"),
        (remove_output, "cannot be read: No such file"),
    ],
)
def test_a_damaged_dump_is_told_before_anything_runs(
    damage: Callable[[Path], object], message: str, honest_dump: Path
) -> None:
    damage(honest_dump)
    done = invoke("kernels", *cases(DECODE), "--device", "cpu", "--against", honest_dump)
    assert (done.exit_code, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bit-equal"], "--bit-equal has no effect without --against"),
        (["--list", "--dump", "x"], "--list runs nothing, so --dump has no effect"),
        (["--list", "--against", "x"], "--list runs nothing, so --against has no effect"),
    ],
)
def test_flags_without_an_effect_are_told(arguments: list[str], message: str) -> None:
    done = invoke("kernels", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


# ULPs, bits and z


def bf16(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("a", "b", "ulp"),
    [
        (bf16(1.0), bf16(1.0078125), 1),
        (bf16(1.0), bf16(0.99609375), 1),
        (bf16(1.0, -2.0), bf16(1.0, -2.03125), 2),
        (bf16(0.0), bf16(-0.0), 0),
        (bf16(9.2e-41), bf16(-9.2e-41), 2),  # the smallest numbers of both signs, on either side of 0
        (bf16(math.nan), bf16(math.nan), 0),
        (bf16(math.nan), torch.tensor([-63], dtype=torch.int16).view(torch.bfloat16), 0),  # NaN, other sign and payload
        (bf16(math.nan), bf16(1.0), math.inf),
        (bf16(math.inf), bf16(3.3895314e38), 1),
        (bf16(1.0), torch.tensor([1.005]), 1),  # in the coarser of both
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64) + 2**-23, 1),
        (bf16(), bf16(), 0),
    ],
)
def test_distance_in_ulps(a: Tensor, b: Tensor, ulp: float) -> None:
    assert (worst_ulp(a, b), worst_ulp(b, a)) == (ulp, ulp)


def case_of(case: str, *facts: RoundingFacts) -> tuple[MLAInputs, dict[RoundingFacts, Any]]:
    inputs = make_inputs(CaseSpec.parse(case))
    return inputs, expect(inputs, facts).noise  # type: ignore[arg-type]


def compared(
    a: MLAOutput, b: MLAOutput, inputs: MLAInputs, noises: BothNoises | None, exact: bool = False
) -> Comparison:
    return compare_builds(a, b, inputs, noises, exact)[0]


def test_a_zero_of_the_other_sign_is_another_bit_and_no_distance() -> None:
    facts = RoundingFacts("bf16")
    inputs, noise = case_of(DECODE, facts)
    both = BothNoises(noise[facts], noise[facts])
    out = torch.zeros(2, 8, 512, dtype=torch.bfloat16)
    other = out.clone()
    other[1, 3, 5] = -0.0
    found = compared(MLAOutput(out, None), MLAOutput(other, None), inputs, both)
    assert (values(found)["bits"], values(found)["ulp"], values(found)["max_z"], found.passed) == (1, 0, 0, True)
    assert not compared(MLAOutput(out, None), MLAOutput(other, None), inputs, both, exact=True).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_element_of_one_build_alone_is_a_difference(bad: float) -> None:
    facts = RoundingFacts("bf16")
    inputs, noise = case_of(DECODE, facts)
    both = BothNoises(noise[facts], noise[facts])
    out = torch.ones(2, 8, 512, dtype=torch.bfloat16)
    other = out.clone()
    other[1, 3, 5] = bad
    found = compared(MLAOutput(out, None), MLAOutput(other, None), inputs, both)
    assert values(found)["nonfinite"] == 1
    assert not found.passed
    assert found.worst is not None
    assert (found.worst.request, found.worst.head, found.worst.dim) == (1, 3, 5)
    same = compared(MLAOutput(other, None), MLAOutput(other, None), inputs, both)
    assert (values(same)["nonfinite"], values(same)["bits"], same.passed) == (0, 0, True)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("regime", ["uniform", "normal", "peaked", "needle", "mixed", "channel"])
def test_two_honest_builds_differ_by_no_more_than_their_roundings_and_a_wrong_one_by_more(
    dtype: str, regime: str
) -> None:
    case = DECODE.replace("bf16-normal", f"{dtype}-{regime}")
    old, new = EmulatedKernel(splits=4, tile=64), EmulatedKernel(tile=32, rounds_p=False)
    facts = [kernel.facts(dtype) for kernel in (new, old)]
    inputs, noise = case_of(case, *facts)
    both = BothNoises(noise[facts[0]], noise[facts[1]])
    a, b = new.run(inputs), old.run(inputs)  # type: ignore[arg-type]
    for found in compare_builds(a, b, inputs, both, False):
        assert found.passed, found
    scaled = replace(a, out=(a.out.double() * 1.005).to(a.out.dtype))
    assert not compared(scaled, b, inputs, both).passed
    shifted = a.out.clone()
    shifted[1, 2, 7] += 8 * (both.here.out + both.there.out).sqrt()[1, 2, 7].to(a.out.dtype)
    assert not compared(replace(a, out=shifted), b, inputs, both).passed


def test_each_build_is_charged_its_own_roundings() -> None:
    """An fp32 result against a bf16 one: nearly all of the difference is the rounding of the bf16 one."""
    fine, coarse = RoundingFacts("fp32"), RoundingFacts("bf16")
    inputs, noise = case_of(DECODE, fine, coarse)
    out = expect(inputs, [fine]).attention.out  # type: ignore[arg-type]
    here, there = MLAOutput(out.float(), None), MLAOutput(out.bfloat16(), None)
    found = compared(here, there, inputs, BothNoises(noise[fine], noise[coarse]))
    assert found.passed
    assert found.checks[0].detail == "fp32 here, bf16 in the other build: no bits in common"
    assert not compared(here, there, inputs, BothNoises(noise[fine], noise[fine])).passed


@pytest.mark.parametrize(("regime", "differs"), [("rows", True), ("repeated", False)])
def test_of_a_cache_write_slots_that_tokens_share_are_left_out(regime: str, differs: bool) -> None:
    inputs: Any = make_inputs(CaseSpec.parse(f"append-write-h1-q8.kv20-p64-bf16-{regime}-s0"))
    cache = inputs.kv_cache.clone()
    cache.view(-1, 576)[inputs.slots] = torch.cat([inputs.ckv, inputs.kpe], -1)
    other = cache.clone()
    # Token 3 has the slot of token 2 where slots are repeated, and one of its own where they are not.
    other.view(-1, 576)[inputs.slots[3]] = 7.0
    found = compared(MLAOutput(cache, None), MLAOutput(other, None), inputs, None)
    assert found.passed is not differs
    assert "max_z" not in values(found)
    other.view(-1, 576)[inputs.slots[0], 3] = 7.0
    assert not compared(MLAOutput(cache, None), MLAOutput(other, None), inputs, None).passed


def test_the_digest_of_inputs_changes_with_any_bit_and_any_number() -> None:
    inputs: Any = make_inputs(CaseSpec.parse(DECODE))
    same = make_inputs(CaseSpec.parse(DECODE))
    assert inputs_digest(inputs) == inputs_digest(same)
    changed = inputs.ckv_cache.clone()
    changed.view(torch.int16).view(-1)[-1] ^= 1
    for other in (
        replace(inputs, ckv_cache=changed),
        replace(inputs, sm_scale=inputs.sm_scale * (1 + 2**-50)),
        replace(inputs, causal=False),
        replace(inputs, kv_lens=inputs.kv_lens.long()),
        replace(inputs, page_table=inputs.page_table.view(1, -1)),
    ):
        assert inputs_digest(other) != inputs_digest(inputs)


def test_an_interrupted_run_leaves_a_dump_of_what_there_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, [wrong.Honest, failing.Interrupted])
    single = "decode-absorbed-h8-q1.kv130-p64-bf16-normal-s7"
    assert dump(tmp_path / "d", *cases(single, DECODE)).exit_code == 130
    found = read_dump(tmp_path / "d")
    assert {key for key, pair in found.pairs.items() if pair.file} >= {(single, "honest"), (single, "interrupted")}
    assert found.pairs[DECODE, "interrupted"].verdict is Verdict.NOT_RUN
