"""SGLang's JIT CUDA kernels on a machine that cannot run them: what they say, and how they would be called."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from mla_verify.cases import CaseSpec
from mla_verify.execute import execute
from mla_verify.inputs import make_inputs
from mla_verify.kernels import sglang_jit
from mla_verify.kernels.sglang_api import CONCAT_ABSORB_Q, CONCAT_K, JIT_WRITE, WRITE, MovedEntry
from mla_verify.kernels.sglang_jit import SGLangConcatAbsorbQ, SGLangConcatK, SGLangSetMLAKVBufferTMA

KERNELS = (SGLangSetMLAKVBufferTMA, SGLangConcatK, SGLangConcatAbsorbQ)
KEYS = "keys-concat-h128-q3.kv3-ragged-bf16-rows"
QUERIES = "queries-concat-h16-q3.kv3+q2.kv2-ragged-bf16-rows"


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1)], dim=-1, out=k)


def concat_mla_absorb_q(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b], dim=-1)


def leaves_last_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(*a.shape[:-1], a.shape[-1] + b.shape[-1], dtype=a.dtype)
    out[:-1] = torch.cat([a, b], dim=-1)[:-1]
    return out


def install(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    made = ModuleType(module)
    for name, function in functions.items():
        setattr(made, name, function)
    monkeypatch.setitem(sys.modules, module, made)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_jit_kernel_without_sglang_or_without_a_gpu_says_so(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_jit, "find_spec", lambda name: None)
    assert "requirements/gpu.txt has it" in kernel().missing()
    assert "CUDA code" in kernel().why_unavailable("cpu")


def on_gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(sglang_jit, "capability", lambda: (major, 0))
    monkeypatch.setattr(sglang_jit, "this_gpu", lambda: f"this is a fake, SM {major}.0")
    install(monkeypatch, CONCAT_K.module, concat_mla_k=concat_mla_k, concat_mla_absorb_q=concat_mla_absorb_q)
    for entry in (JIT_WRITE, WRITE):
        install(monkeypatch, entry.module, **{entry.name: lambda kv_buffer, loc, cache_k_nope, cache_k_rope: None})


def test_the_bulk_copy_needs_hopper_and_the_concatenations_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_jit, "_has_nvcc", lambda: True)
    on_gpu(monkeypatch, 8)
    assert str(SGLangSetMLAKVBufferTMA().why_unavailable("cuda")).endswith("this is a fake, SM 8.0")
    assert SGLangConcatK().why_unavailable("cuda") is None
    on_gpu(monkeypatch, 9)
    assert SGLangSetMLAKVBufferTMA().why_unavailable("cuda") is None


def test_without_a_compiler_the_kernels_are_unavailable_and_not_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    on_gpu(monkeypatch, 9)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sglang_jit, "USUAL_CUDA_HOME", str(tmp_path))
    assert "nvcc" in str(SGLangConcatK().why_unavailable("cuda"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert SGLangConcatK().why_unavailable("cuda") is None


@pytest.mark.parametrize(
    ("kernel", "case", "why"),
    [
        (SGLangConcatK, f"{KEYS}-s0", None),
        (SGLangConcatK, f"{KEYS}-dims512.64.64.128-s0", "64 and 64: it takes 128 and 64"),
        (SGLangConcatAbsorbQ, f"{QUERIES}-s0", None),
        (SGLangConcatAbsorbQ, f"{QUERIES}-dims256.32.128.128-s0", "256 and 32: it takes 512 and 64"),
    ],
)
def test_dims_that_a_concatenation_is_not_compiled_for_are_declined(kernel: Any, case: str, why: str | None) -> None:
    reason = kernel().why_not(CaseSpec.parse(case), "cuda")
    assert reason is None if why is None else why in reason


def test_keys_of_other_than_128_heads_are_outside_the_contract() -> None:
    assert "16 heads" in str(SGLangConcatK.contract.why_not(CaseSpec.parse(f"{KEYS.replace('h128', 'h16')}-s0")))


@pytest.mark.parametrize("layout", ["", "-fused", "-transposed"])
@pytest.mark.parametrize(("kernel", "case"), [(SGLangConcatK, KEYS), (SGLangConcatAbsorbQ, QUERIES)])
def test_the_concatenations_are_given_both_parts_as_they_lie_and_their_result_is_taken(
    kernel: Any, case: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def noted(function: Any) -> Any:
        def call(**tensors: torch.Tensor) -> Any:
            given.append({name: tensor.is_contiguous() for name, tensor in tensors.items()})
            return function(**tensors)

        return call

    functions = (concat_mla_k, concat_mla_absorb_q)
    install(monkeypatch, CONCAT_K.module, **{function.__name__: noted(function) for function in functions})
    spec = CaseSpec.parse(f"{case}{layout}-s0")
    done = execute(kernel(), make_inputs(CaseSpec.parse(f"{case}-s0")), spec.dtype, spec.layout)
    assert (done.verdict, done.ran) == (None, kernel.entries[0].name)
    inputs: Any = make_inputs(CaseSpec.parse(f"{case}-s0"))
    expected = torch.cat([inputs.nope, inputs.rope.expand(-1, inputs.nope.shape[1], -1)], dim=-1)
    assert done.output is not None
    assert torch.equal(done.output.out.view(torch.int16), expected.view(torch.int16))
    (contiguous,) = given
    assert {is_so for name, is_so in contiguous.items() if name != "k"} == {layout == ""}


def test_a_row_that_the_kernel_leaves_unwritten_is_nan_and_not_an_earlier_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, CONCAT_ABSORB_Q.module, concat_mla_absorb_q=leaves_last_row)
    inputs: Any = make_inputs(CaseSpec.parse(f"{QUERIES}-s0"))
    out = SGLangConcatAbsorbQ().run(inputs, None).out  # type: ignore[arg-type]
    assert bool(out[-1].isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("before", [0, 1, 2])
def test_how_deterministic_torch_is_stays_as_it_was_also_when_the_kernel_raises(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Tensor a must be 16-byte aligned")

    install(monkeypatch, CONCAT_ABSORB_Q.module, concat_mla_absorb_q=refuses)
    torch.set_deterministic_debug_mode(before)
    try:
        with pytest.raises(RuntimeError, match="aligned"):
            SGLangConcatAbsorbQ().run(make_inputs(CaseSpec.parse(f"{QUERIES}-s0")), None)  # type: ignore[arg-type]
        assert torch.get_deterministic_debug_mode() == before
    finally:
        torch.set_deterministic_debug_mode(0)


def test_a_function_that_has_moved_is_found_where_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = MovedEntry("lib", "lib_before.ops", "f", (), later="lib_now.ops")
    assert "No module named 'lib_" in str(entry.why_unusable())
    install(monkeypatch, "lib_now.ops", f=lambda: "now")
    assert entry.load()() == "now"
    install(monkeypatch, "lib_before.ops", f=lambda: "before")
    assert entry.load()() == "before"


def test_a_module_that_lacks_something_it_needs_is_not_taken_for_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "lib_half.py").write_text("import a_package_that_is_not_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    install(monkeypatch, "lib_now.ops", f=lambda: "now")
    why = MovedEntry("lib", "lib_half", "f", (), later="lib_now.ops").why_unusable()
    assert "No module named 'a_package_that_is_not_here'" in str(why)
