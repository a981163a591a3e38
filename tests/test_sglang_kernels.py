"""SGLang's kernels: what is said without SGLang, and, where it is installed, what they compute in the interpreter."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mla_verify.cases import CaseSpec
from mla_verify.kernels.entry import Entry
from mla_verify.kernels.sglang import (
    SGLangDecode,
    SGLangExtend,
    SGLangExtendMHA,
    SGLangSetMLAKVBuffer,
    SGLangWriteDecode,
)
from mla_verify.kernels.sglang_api import DECODE, EXTEND, JIT_WRITE, WRITE

ROOT = Path(__file__).parents[1]
KERNELS = (SGLangDecode, SGLangWriteDecode, SGLangExtend, SGLangExtendMHA, SGLangSetMLAKVBuffer)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


# Without SGLang


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_whose_library_is_missing_says_how_to_get_it(
    kernel: type[SGLangDecode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_verify.kernels.sglang.find_spec", lambda name: None)
    reason = kernel().missing()
    assert reason is not None
    assert "sglang is not installed: requirements/gpu.txt has it" in reason
    assert "requirements/sglang-cpu.txt" in reason
    assert (ROOT / "requirements/sglang-cpu.txt").is_file()


def test_contracts_and_the_missing_reason_import_no_library() -> None:
    names = ", ".join(kernel.__name__ for kernel in KERNELS)
    done = run_python(
        f"import sys; from mla_verify.kernels.sglang import {names}\n"
        "import mla_verify.kernels.sglang_jit\n"
        f"for kernel in ({names}): kernel().missing(); kernel().version(); kernel().contract.facts('fp16')\n"
        "print(sorted({'sglang', 'torch', 'triton'} & {*sys.modules}))"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def stand_in(monkeypatch: pytest.MonkeyPatch, entry: Entry, function: Any) -> None:
    """`function` in SGLang's place."""
    module: Any = ModuleType(entry.module)
    module.is_arch_support_pdl = lambda: False
    setattr(module, entry.name, function)
    monkeypatch.setitem(sys.modules, entry.module, module)


def test_a_signature_that_only_grew_optional_parameters_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def grown(kv_buffer, loc, cache_k_nope, cache_k_rope, *, new=0, **options): ...  # type: ignore[no-untyped-def]

    stand_in(monkeypatch, WRITE, grown)
    stand_in(monkeypatch, JIT_WRITE, grown)
    assert SGLangSetMLAKVBuffer().why_unavailable("cuda") is None


# Parameters of SGLang's functions by release; those after "|" have defaults.
SIGNATURES = {
    ("0.5.16", DECODE): "q k_buffer v_buffer o kv_indptr kv_indices attn_logits attn_lse num_kv_splits max_kv_splits "
    "sm_scale k_scale v_scale | logit_cap sinks xai_temperature_len has_mla use_pdl page_size score_mod aux_tensors",
    ("0.5.23", DECODE): "q k_buffer v_buffer o kv_indptr kv_indices attn_logits attn_lse num_kv_splits max_kv_splits "
    "sm_scale k_scale v_scale | logit_cap sinks xai_temperature_len has_mla use_pdl page_size score_mod aux_tensors "
    "enable_lean lean_Mp lean_Lp lean_Op lean_locks uneven_batch",
    ("0.5.16", EXTEND): "q_extend k_extend v_extend o_extend k_buffer v_buffer qo_indptr kv_indptr kv_indices "
    "custom_mask is_causal mask_indptr max_len_extend k_scale v_scale | sm_scale logit_cap skip_prefix_custom_mask "
    "sliding_window_size sinks window_kv_offsets xai_temperature_len lse_extend skip_prefix skip_extend page_size "
    "score_mod aux_tensors",
    ("0.5.23", EXTEND): "q_extend k_extend v_extend o_extend k_buffer v_buffer qo_indptr kv_indptr kv_indices "
    "custom_mask is_causal mask_indptr max_len_extend k_scale v_scale | sm_scale logit_cap skip_prefix_custom_mask "
    "sliding_window_size sinks window_kv_offsets xai_temperature_len lse_extend skip_prefix skip_extend page_size "
    "score_mod aux_tensors extend_seq_lens_cpu identity_kv_indices",
    ("0.5.16", WRITE): "kv_buffer loc cache_k_nope cache_k_rope |",
    ("0.5.23", WRITE): "kv_buffer loc cache_k_nope cache_k_rope | reserved_skip_index",
    ("0.5.16", JIT_WRITE): "kv_buffer loc cache_k_nope cache_k_rope | num_warps",
    ("0.5.23", JIT_WRITE): "kv_buffer loc cache_k_nope cache_k_rope | num_warps reserved_skip_index",
}


def of_signature(parameters: str) -> Any:
    required, _, optional = parameters.partition("|")
    scope: dict[str, Any] = {}
    exec(f"def it({', '.join([*required.split(), *(f'{name}=0' for name in optional.split())])}): ...", scope)
    return scope["it"]


@pytest.mark.parametrize(("release", "entry"), SIGNATURES, ids=lambda value: getattr(value, "name", value))
def test_the_signatures_of_both_releases_are_taken_and_none_without_what_we_pass(
    release: str, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = SIGNATURES[release, entry]
    stand_in(monkeypatch, entry, of_signature(known))
    assert entry.why_unusable() is None
    for name in entry.parameters:
        renamed = " ".join(f"{word}_" if word == name else word for word in known.split())
        stand_in(monkeypatch, entry, of_signature(renamed))
        assert f"has no {name}" in str(entry.why_unusable())


def test_a_signature_that_differs_makes_the_kernel_unavailable_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(kv_buffer, loc, k_nope, cache_k_rope, layer): ...  # type: ignore[no-untyped-def]

    stand_in(monkeypatch, WRITE, renamed)
    reason = SGLangSetMLAKVBuffer().why_unavailable("cpu")
    assert reason is not None
    assert reason.endswith("its signature has no cache_k_nope and also needs k_nope, layer")
    assert "set_mla_kv_buffer_triton of sglang" in reason


def test_a_kernel_of_two_functions_needs_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(kv_buffer, loc, cache_k_nope, cache_k_rope): ...  # type: ignore[no-untyped-def]

    def empty() -> None: ...

    stand_in(monkeypatch, WRITE, whole)
    stand_in(monkeypatch, JIT_WRITE, whole)
    stand_in(monkeypatch, DECODE, empty)
    assert SGLangSetMLAKVBuffer().why_unavailable("cuda") is None
    assert "decode_attention_fwd" in str(SGLangWriteDecode().why_unavailable("cuda"))


def test_a_library_that_does_not_import_is_a_reason_with_the_exceptions_first_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, WRITE.module, None)  # importing it raises
    reason = SGLangSetMLAKVBuffer().why_unavailable("cpu")
    assert reason is not None
    assert reason.startswith(f"{SGLangSetMLAKVBuffer().version()} does not import: ModuleNotFoundError: ")
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("kernel", "case", "reason"),
    [
        (SGLangDecode, "decode-absorbed-h16-q1.kv64-p64-fp16-normal-s0", None),
        (SGLangDecode, "decode-absorbed-h1-q1.kv64-p64-fp16-normal-s0", "one head"),
        (SGLangDecode, "decode-absorbed-h16-q1.kv64-p64-fp16-normal-dims128.64.128.128-s0", "128 and 64"),
        (SGLangDecode, "decode-absorbed-h16-q1.kv64+q2.kv0-p64-fp16-normal-s0", "several queries"),
        (SGLangWriteDecode, "decode-absorbed-h1-q1.kv64-p64-fp16-normal-s0", "one head"),
        (SGLangDecode, "decode-absorbed-h128-q1.kv65-p64-fp16-normal-s0", "interpreter"),
        (SGLangExtend, "mixed-absorbed-h16-q2.kv2+q0.kv7-p64-fp16-normal-s0", None),
        (SGLangExtend, "mixed-absorbed-h16-q2.kv2+q1.kv0-p64-fp16-normal-s0", "more queries than keys"),
        (SGLangExtendMHA, "mixed-mha-h16-q2.kv2+q3.kv2-ragged-fp16-normal-s0", "more queries than keys"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.count("-") > 3 else "",
)
def test_cases_that_sglang_has_no_call_for_are_declined(
    kernel: type[SGLangDecode], case: str, reason: str | None
) -> None:
    why_not = kernel().why_not(CaseSpec.parse(case), "cpu")
    assert why_not is None if reason is None else reason in str(why_not)


def test_fp32_attention_is_declined_on_a_gpu_and_fp32_writes_are_not() -> None:
    assert "TF32" in str(SGLangDecode().why_not_dtype("fp32", "cuda"))
    assert "TF32" in str(SGLangExtend().why_not_dtype("fp32", "cuda"))
    assert SGLangDecode().why_not_dtype("bf16", "cuda") is None
    assert SGLangSetMLAKVBuffer().why_not_dtype("fp32", "cuda") is None


def test_tensors_that_lie_side_by_side_are_joined_without_a_copy_and_others_with_one() -> None:
    import torch

    from mla_verify.kernels.sglang_calls import side_by_side

    whole = torch.arange(2 * 3 * 10.0).view(2, 3, 10)
    for first, second, is_view in (
        (whole[..., :6], whole[..., 6:], True),
        (whole[:, 1:, :6], whole[:, 1:, 6:], True),
        (whole[..., 6:], whole[..., :6], False),
        (whole[..., :5], whole[..., 6:], False),
        (whole[0, :, :6], whole[1, :, 6:], False),
        (whole[..., :6].clone(), whole[..., 6:].clone(), False),
    ):
        joined, how = side_by_side(first, second)
        assert torch.equal(joined, torch.cat([first, second], dim=-1))
        assert (joined.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) is is_view
        assert how == ("a view" if is_view else "copied side by side")


# With SGLang, interpreted

needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed")

ATTENTION = (
    (SGLangDecode, "decode-absorbed-h16-3xq1.kv300-p16-fp16-needle-s0"),
    (SGLangDecode, "decode-absorbed-h16-q1.kv512+q1.kv33+q0.kv40+q1.kv1-p1-fp32-mixed-s0"),
    (SGLangDecode, "decode-absorbed-h16-q1.kv511+q1.kv64-p64-fp32-unequal-fused-s0"),
    (SGLangDecode, "decode-absorbed-h12-q1.kv511+q1.kv0-p64-fp16-normal-fused-s0"),
    (SGLangWriteDecode, "decode-absorbed-h16-2xq1.kv200-p16-fp16-needle-s0"),
    (SGLangWriteDecode, "decode-absorbed-h16-q1.kv300+q1.kv64-p64-fp32-unequal-fused-s0"),
    (SGLangExtend, "prefill-absorbed-h16-q100.kv100-p16-fp16-needle-s0"),
    (SGLangExtend, "prefix-absorbed-h8-q17.kv300+q40.kv129-p64-fp32-unequal-full-s0"),
    (SGLangExtend, "spec-absorbed-h16-q4.kv200+q2.kv512-p16-fp32-needle-fused-s0"),
    (SGLangExtend, "chunked-absorbed-h8-q64.kv64+q64.kv128+q40.kv168-p1-fp16-mixed-s0"),
    (SGLangExtend, "mixed-absorbed-h16-q1.kv33+q5.kv100+q0.kv7+q32.kv32-p16-fp32-mixed-s0"),
    (SGLangExtendMHA, "mixed-mha-h4-q33.kv200+q64.kv64-ragged-fp16-unequal-s0"),
    (SGLangExtendMHA, "prefill-mha-h8-q100.kv100-ragged-fp32-needle-fused-s0"),
)
WRITES = (
    "append-write-h1-q1.kv1-p64-fp16-rows-s0",
    "append-write-h1-q767.kv767-p64-fp16-rows-s0",
    "append-write-h1-q768.kv768-p16-fp32-rows-s0",
    "append-write-h1-q769.kv800-p1-bf16-rows-fused-s0",
    "append-write-h1-q1025.kv1025-p64-bf16-rows-s0",
    "append-write-h1-q100.kv300+q0.kv5-p16-fp16-repeated-s0",
)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What `run_cases` printed, from the one process in which Triton interprets."""
    done = run_python("from tests.test_sglang_kernels import run_cases; run_cases()", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_cases() -> None:
    """In the process of its own: every case, as JSON of what is wrong with it and what ran."""
    kernels: Any = importlib.import_module("mla_verify.kernels.sglang")
    cases: list[tuple[Any, str]] = [*ATTENTION, *((SGLangSetMLAKVBuffer, case) for case in WRITES)]
    found: dict[str, Any] = {f"{kernel.name} {case}": judged(kernel(), case) for kernel, case in cases}
    # Two that must be wrong: facts that leave out a rounding, and a cache that nobody has written.
    found["exact p"] = judged(SGLangDecode(), ATTENTION[0][1], p_dtype="fp32")
    kernels.write = lambda *args: "nothing"
    found["unwritten"] = judged(SGLangWriteDecode(), ATTENTION[4][1])
    print(json.dumps(found))


def judged(kernel: Any, case: str, **facts_changed: Any) -> dict[str, Any]:
    from dataclasses import replace

    from mla_verify.compare import compare_output
    from mla_verify.compare_write import compare_cache
    from mla_verify.execute import execute
    from mla_verify.expected import expect
    from mla_verify.inputs import make_inputs
    from mla_verify.tensors import ConcatInputs, WriteInputs

    spec = CaseSpec.parse(case)
    why_not = (
        kernel.missing()
        or kernel.why_unavailable("cpu")
        or kernel.contract.why_not(spec)
        or kernel.why_not_dtype(spec.dtype, "cpu")
        or kernel.why_not(spec, "cpu")
    )
    if why_not:
        return {"wrong": f"UNSUPPORTED: {why_not}"}
    inputs = make_inputs(replace(spec, layout="split"))
    done = execute(kernel, inputs, spec.dtype, spec.layout)
    if done.output is None or done.verdict is not None:
        return {"wrong": f"{done.verdict}: {done.reason}\n{done.traceback}"}
    if isinstance(inputs, WriteInputs):
        comparisons = [compare_cache(done.output.out, inputs)]
    else:
        assert not isinstance(inputs, ConcatInputs)
        facts = replace(kernel.contract.facts(spec.dtype), **facts_changed)
        comparisons = [*compare_output(done.output, expect(inputs, [facts]), facts, inputs)]
    checks = [f"{c.tensor} {check}" for c in comparisons for check in c.checks if not check.passed]
    return {"wrong": "; ".join(checks), "tensors": [c.tensor for c in comparisons], "ran": done.ran}


@needs_sglang
@pytest.mark.parametrize(("kernel", "case"), ATTENTION, ids=lambda value: getattr(value, "name", value))
def test_attention_is_the_references_within_the_roundings_declared(
    kernel: type[SGLangDecode], case: str, seen: dict[str, Any]
) -> None:
    result = seen[f"{kernel.name} {case}"]
    assert not result["wrong"]
    assert result["tensors"] == (["out", "lse"] if kernel.contract.returns_lse else ["out"])
    assert "Triton, interpreted" in result["ran"]
    if kernel in (SGLangDecode, SGLangExtend):
        how = "a view" if case.endswith("-fused-s0") else "copied side by side"
        assert f"q {how}; cache {how}" in result["ran"]


@needs_sglang
@pytest.mark.parametrize("case", WRITES)
def test_the_cache_write_is_bit_equal_and_is_tritons(case: str, seen: dict[str, Any]) -> None:
    # On a CPU SGLang would take torch: its platform denies Triton.
    result = seen[f"{SGLangSetMLAKVBuffer.name} {case}"]
    assert not result["wrong"]
    assert result["ran"] == "Triton, interpreted; set_mla_kv_buffer_triton"


@needs_sglang
def test_a_kernel_that_rounds_p_is_rejected_by_facts_that_say_it_does_not(seen: dict[str, Any]) -> None:
    assert "rms_z" in seen["exact p"]["wrong"]


@needs_sglang
def test_a_decode_over_a_cache_that_was_never_written_is_rejected(seen: dict[str, Any]) -> None:
    assert "nonfinite" in seen["unwritten"]["wrong"]
