"""FlashInfer's kernels: what is said without FlashInfer, and, on a stand-in for it, how it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_verify.errors import FallbackError
from mla_verify.kernels import KERNELS, load_kernel
from mla_verify.kernels.flashinfer import (
    FlashInferAppend,
    FlashInferConcat,
    FlashInferMLAFA2,
    FlashInferMLAFA3,
    FlashInferMLATokensFA2,
    FlashInferMLATokensFA3,
    FlashInferRaggedFA2,
    FlashInferRaggedFA3,
    _FlashInfer,
)
from mla_verify.kernels.flashinfer_api import MLA_KERNELS, RAGGED_KERNELS
from mla_verify.kernels.launches import confirm
from mla_verify.results import Verdict
from tests.kernels_helper import Run, cases, verify
from tests.test_gpu_wrong_calls import assert_told_apart
from tests.wrong_gpu_calls import KERNELS as WRONG_CALLS

ROOT = Path(__file__).parents[1]
MLA = (FlashInferMLAFA2, FlashInferMLAFA3, FlashInferMLATokensFA2, FlashInferMLATokensFA3)
RAGGED = (FlashInferRaggedFA2, FlashInferRaggedFA3)
ALL = (*MLA, *RAGGED, FlashInferAppend, FlashInferConcat)

EMPTIES = "mixed-absorbed-h8-q1.kv33+q1.kv0+q5.kv100+q0.kv64+q3.kv2+q2.kv0-p16-bf16-normal-s0"
DECODE = "decode-absorbed-h8-q1.kv130+q1.kv64-p{page}-{dtype}-needle-s0"
MLA_CASES = (
    EMPTIES,
    *(DECODE.format(page=page, dtype=dtype) for page, dtype in ((1, "bf16"), (16, "fp16"), (64, "bf16"))),
    "prefix-absorbed-h8-q5.kv90+q3.kv40-p16-fp16-needle-fused-s0",
    "prefix-absorbed-h8-q5.kv90+q3.kv40-p16-bf16-needle-transposed-s0",
    "mixed-absorbed-h8-q5.kv100+q1.kv33-p16-fp16-normal-full-s0",
    "decode-absorbed-h8-q1.kv100-p16-bf16-mixed-scale0.25-s0",
)
RAGGED_CASES = (
    "mixed-mha-h8-q1.kv33+q1.kv0+q5.kv100+q0.kv64+q3.kv2+q2.kv0-ragged-bf16-normal-s0",
    "prefix-mha-h8-q5.kv90+q3.kv40-ragged-fp16-needle-fused-s0",
    "decode-mha-h8-q1.kv130+q1.kv65-ragged-bf16-needle-s0",
    "mixed-mha-h8-q5.kv100+q1.kv33-ragged-bf16-normal-full-s0",
)
APPENDS = (
    "append-write-h1-q30.kv100+q0.kv77+q1.kv65+q40.kv40-p16-bf16-rows-s0",
    "append-write-h1-q100.kv130-p1-fp16-rows-fused-s0",
    "append-write-h1-q50.kv70+q20.kv30-p64-bf16-repeated-s0",
)
KEYS = ("keys-concat-h128-q5.kv5-ragged-bf16-rows-s0", "keys-concat-h128-q9.kv9-ragged-fp16-rows-fused-s0")

Verify = Callable[..., Run]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in in FlashInfer's place, and kernels that run on a CPU as if it were a GPU."""
    from mla_verify.kernels import flashinfer_calls

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
            del sys.modules[name]
        flashinfer_calls._wrapper.cache_clear()
        flashinfer_calls._workspace.cache_clear()

    forget()
    monkeypatch.setattr(flashinfer_calls, "WORKSPACE_BYTES", 1 << 20)
    monkeypatch.syspath_prepend(ROOT / "tests/fake_flashinfer")
    why = _FlashInfer.why_unavailable
    monkeypatch.setattr("mla_verify.kernels.flashinfer._why_no_gpu", lambda backend: None)
    monkeypatch.setattr(_FlashInfer, "why_unavailable", lambda self, device: why(self, "cuda"))
    import flashinfer as stand_in  # type: ignore[import-not-found]

    yield stand_in
    forget()


def decided(run: Run) -> list[tuple[str, str]]:
    return [(result.case, result.reason) for result in run.report.results if result.verdict is not Verdict.PASS]


# Without FlashInfer


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
def test_a_kernel_without_flashinfer_says_how_to_get_it(
    kernel: type[FlashInferMLAFA2], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_verify.kernels.flashinfer.find_spec", lambda name: None)
    reason = kernel().missing()
    assert reason is not None
    assert "pip install 'mla-verify[gpu]'" in reason
    assert 'gpu = ["flashinfer-python>=0.6.14;' in (ROOT / "pyproject.toml").read_text()
    assert isinstance(load_kernel(kernel.name), kernel)
    assert sum(name.startswith("flashinfer-") and "kernels.flashinfer:" in KERNELS[name] for name in KERNELS) == 8


def test_contracts_and_the_missing_reason_import_no_library() -> None:
    from tests.test_sglang_kernels import run_python

    names = ", ".join(kernel.__name__ for kernel in ALL)
    done = run_python(
        f"import sys; from mla_verify.kernels.flashinfer import {names}\n"
        f"for kernel in ({names}): kernel().missing(); kernel().version(); kernel().contract.facts('fp16')\n"
        "print(sorted({'flashinfer', 'torch', 'triton'} & {*sys.modules}))"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_cpu_and_a_gpu_of_another_kind_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "this run is on the CPU" in str(FlashInferMLAFA2().why_unavailable("cpu"))
    for place in ("flashinfer", "gpu"):
        monkeypatch.setattr(f"mla_verify.kernels.{place}.capability", lambda: (10, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA B200")
    for kernel in (FlashInferMLAFA3(), FlashInferMLATokensFA3(), FlashInferRaggedFA3()):
        needed = "FlashInfer's fa3 kernels need a Hopper GPU, SM 9.0; this is an NVIDIA B200, SM 10.0"
        assert kernel.why_unavailable("cuda") == needed
    # The others are asked for FlashInfer itself next.
    assert "SM" not in str(FlashInferMLAFA2().why_unavailable("cuda"))
    for place in ("flashinfer", "gpu"):
        monkeypatch.setattr(f"mla_verify.kernels.{place}.capability", lambda: (7, 5))
    assert "need SM 8.0" in str(FlashInferConcat().why_unavailable("cuda"))


# How it is called


@pytest.mark.parametrize("kernel", MLA, ids=lambda kernel: kernel.name)
def test_paged_attention_is_given_each_requests_pages_or_tokens_and_its_lse_is_read_in_base_2(
    kernel: type[FlashInferMLAFA2], flashinfer: Any, tmp_path: Path
) -> None:
    run = verify(tmp_path, "--kernel", kernel.name, *cases(*MLA_CASES))
    assert (run.exit_code, decided(run)) == (0, [])
    by_token = "tokens" in kernel.name
    assert {call["page_size"] for _, call in flashinfer.calls} == ({1} if by_token else {1, 16, 64})
    assert all(f"BatchMLAPagedAttentionWrapper, {kernel.backend}" in result.ran for result in run.report.results)


def test_parts_are_handed_over_as_they_lie_and_nothing_is_concatenated(flashinfer: Any, tmp_path: Path) -> None:
    fused = "prefix-absorbed-h8-q5.kv90+q3.kv40-p16-fp16-needle-fused-s0"
    run = verify(tmp_path, "--kernel", "flashinfer-mla-fa2", *cases(fused, fused.replace("fused", "transposed")))
    assert run.exit_code == 0
    strides = {call["q_nope"].stride()[:2] for _, call in flashinfer.calls}
    assert {(8 * 576, 576), (512, 8 * 512)} <= strides
    assert any(call["ckv_cache"].stride() == (16 * 576, 576, 1) for _, call in flashinfer.calls)


def test_fed_as_sglang_feeds_it_both_caches_are_slices_of_one_pool(flashinfer: Any, tmp_path: Path) -> None:
    fused = "prefix-absorbed-h8-q5.kv90+q3.kv40-p16-fp16-needle-fused-s0"
    decode = DECODE.format(page=16, dtype="bf16")
    run = verify(tmp_path, "--kernel", "flashinfer-mla-fa2-tokens", *cases(fused, decode))
    assert run.exit_code == 0
    for _, call in flashinfer.calls:
        assert call["ckv_cache"].shape[1:] == (1, 512)
        assert call["ckv_cache"].stride(0) == call["kpe_cache"].stride(0) == 576
        assert call["kpe_cache"].data_ptr() - call["ckv_cache"].data_ptr() == 2 * 512
        # A batch of one query each is planned without a mask.
        assert call["causal"] == (len(call["q_nope"]) > len(call["kv_len_arr"]))
    assert {call["causal"] for _, call in flashinfer.calls} == {True, False}
    assert "pool a view" in run.report.results[0].ran
    assert "pool copied side by side" in run.report.results[1].ran


@pytest.mark.parametrize("kernel", RAGGED, ids=lambda kernel: kernel.name)
def test_ragged_attention_is_given_dtypes_scale_and_mask(
    kernel: type[FlashInferRaggedFA2], flashinfer: Any, tmp_path: Path
) -> None:
    run = verify(tmp_path, "--kernel", kernel.name, *cases(*RAGGED_CASES))
    assert (run.exit_code, decided(run)) == (0, [])
    assert {call["q_data_type"] for _, call in flashinfer.calls} == {torch.bfloat16, torch.float16}
    assert any(call["v"].stride(0) == 8 * 320 for _, call in flashinfer.calls)


def test_a_ragged_kernel_that_puts_something_into_a_row_without_keys_fails_where_it_claims_0(
    flashinfer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FlashInferRaggedFA3, "contract", replace(FlashInferRaggedFA3.contract, empty_out="zero"))
    assert verify(tmp_path, "--kernel", "flashinfer-ragged-fa3", *cases(RAGGED_CASES[0])).exit_code == 1


def test_the_cache_write_finds_request_and_position_of_every_slot(flashinfer: Any, tmp_path: Path) -> None:
    run = verify(tmp_path, "--kernel", "flashinfer-append", *cases(*APPENDS))
    assert (run.exit_code, decided(run)) == (0, [])


def test_slots_outside_the_cache_are_not_given_to_it(flashinfer: Any, tmp_path: Path) -> None:
    run = verify(tmp_path, "--kernel", "flashinfer-append", *cases(APPENDS[2].replace("repeated", "outside")))
    assert run.only.verdict is Verdict.UNSUPPORTED
    assert "does not claim" in run.only.reason


def test_a_slot_that_belongs_to_no_request_is_refused() -> None:
    from mla_verify.cases import CaseSpec
    from mla_verify.inputs import make_inputs
    from mla_verify.kernels.flashinfer_calls import owners

    inputs: Any = make_inputs(CaseSpec.parse(APPENDS[0]))
    request, position = owners(inputs, 16)
    assert request.dtype == position.dtype == torch.int32
    assert request.tolist() == [0] * 30 + [2] + [3] * 40
    assert position.tolist() == [*range(70, 100), 64, *range(40)]
    with pytest.raises(ValueError, match="belongs to no request"):
        owners(replace(inputs, slots=inputs.slots.clone().index_fill_(0, torch.tensor([3]), 0)), 16)


def test_keys_are_concatenated_in_place_for_128_heads_alone(flashinfer: Any, tmp_path: Path) -> None:
    run = verify(tmp_path, "--kernel", "flashinfer-concat", *cases(*KEYS))
    assert (run.exit_code, decided(run)) == (0, [])
    run = verify(tmp_path, "--kernel", "flashinfer-concat", *cases(KEYS[0].replace("h128", "h64")))
    assert (run.only.verdict, run.only.reason) == (Verdict.UNSUPPORTED, "64 heads: not among 128")


def test_other_dims_than_it_is_built_for_are_unsupported(flashinfer: Any, tmp_path: Path) -> None:
    case = DECODE.format(page=16, dtype="bf16").replace("-s0", "-dims256.32.128.128-s0")
    run = verify(tmp_path, "--kernel", "flashinfer-mla-fa2", *cases(case))
    assert run.only.verdict is Verdict.UNSUPPORTED
    assert run.only.reason.startswith("kv_lora_rank 256, qk_rope_head_dim 32: it is built for kv_lora_rank 512")


def test_a_batch_without_any_query_is_not_run(flashinfer: Any, tmp_path: Path) -> None:
    names = [word for name in ("flashinfer-mla-fa2", "flashinfer-mla-fa3-tokens") for word in ("--kernel", name)]
    verify(tmp_path, *names, *cases("mixed-absorbed-h8-2xq0.kv64-p16-bf16-normal-s0"))
    assert flashinfer.calls == []


# What it must not get away with


@pytest.mark.parametrize("kernel", [FlashInferMLAFA2, FlashInferRaggedFA3], ids=lambda kernel: kernel.name)
def test_an_lse_in_another_base_than_declared_is_named(
    kernel: type[FlashInferMLAFA2], flashinfer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel, "contract", replace(kernel.contract, lse_base="e"))
    case = DECODE.format(page=16, dtype="bf16") if kernel in MLA else RAGGED_CASES[2]
    run = verify(tmp_path, "--kernel", kernel.name, *cases(case))
    assert run.exit_code == 1
    assert "1.4427 times the expected: base 2 where base e is declared" in run.done.stdout


def test_a_backend_that_the_library_chose_itself_fails(flashinfer: Any, tmp_path: Path) -> None:
    flashinfer.falls_back_to = "fa2"
    names = [word for name in ("flashinfer-mla-fa3", "flashinfer-mla-fa2") for word in ("--kernel", name)]
    run = verify(tmp_path, *names, *cases(DECODE.format(page=16, dtype="bf16")))
    found = {result.kernel: (result.verdict, result.reason) for result in run.report.results}
    reason = "asked for fa3, and BatchMLAPagedAttentionWrapper chose fa2"
    assert found == {"flashinfer-mla-fa3": (Verdict.FAIL, reason), "flashinfer-mla-fa2": (Verdict.PASS, "")}


def test_the_kernel_of_another_backend_in_a_trace_is_a_fallback_and_an_unknown_name_is_none() -> None:
    hopper = "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<flashinfer::...>(Params)"
    ampere = "void flashinfer::mla::BatchMLAPagedAttentionKernel<flashinfer::mla::KernelTraits<...>>(Params)"
    fill = "void at::native::vectorized_elementwise_kernel<...>"
    assert confirm("fa3", MLA_KERNELS, (fill, hopper)) == "BatchMLAPageAttentionHopperKernel"
    assert confirm("fa2", MLA_KERNELS, (ampere,)) == "BatchMLAPagedAttentionKernel"
    with pytest.raises(FallbackError, match="asked for fa3, and the GPU ran BatchMLAPagedAttentionKernel"):
        confirm("fa3", MLA_KERNELS, (fill, ampere))
    assert confirm("fa3", MLA_KERNELS, (fill,)) is None
    ragged = "flashinfer::BatchPrefillWithRaggedKVCacheKernel<...>"
    assert confirm("fa2", RAGGED_KERNELS, (ragged,)) == "BatchPrefillWithRaggedKVCacheKernel"
    with pytest.raises(FallbackError):
        confirm("fa2", RAGGED_KERNELS, ("flashinfer::PrefillWithKVCacheKernel<...>",))
    with pytest.raises(FallbackError):
        confirm("fa3", RAGGED_KERNELS, (ragged,))


def test_on_a_gpu_the_first_call_of_each_kind_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_verify.kernels import flashinfer_calls

    traces: list[object] = []

    def traced(call: Callable[[], object]) -> tuple[object, tuple[str, ...]]:
        traces.append(call())
        return traces[-1], ("BatchMLAPagedAttentionKernel",)

    monkeypatch.setattr("mla_verify.kernels.launches.traced", traced)
    monkeypatch.setattr(flashinfer_calls, "_seen", {})
    calls: list[int] = []

    def launch(asked: str, key: str) -> str | None:
        return flashinfer_calls.launched(lambda: calls.append(len(calls)), (key,), "cuda", asked, MLA_KERNELS)

    seen = "BatchMLAPagedAttentionKernel"
    later = f"{seen}, as traced in the first call"
    assert [launch("fa2", "bf16") for _ in range(3)] == [seen, later, later]
    assert (len(calls), len(traces)) == (3, 1)
    with pytest.raises(FallbackError):
        launch("fa3", "fp16")
    with pytest.raises(FallbackError):  # again: what fell back once is no longer trusted
        launch("fa3", "fp16")


def test_wrong_calls_fail_and_right_ones_pass_on_the_stand_in_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests/fake_flashinfer")  # which the process that runs them takes over
    names = tuple(
        name for name, kernel in WRONG_CALLS.items() if kernel in ("flashinfer-mla-fa2", "flashinfer-ragged-fa3")
    )
    small = (
        "prefix-absorbed-h8-q5.kv90+q3.kv70-p16-fp16-mixed-s0",
        "prefix-mha-h8-q5.kv90+q3.kv70-ragged-fp16-mixed-s0",
    )
    assert_told_apart(names, small, "cpu", tmp_path)


# Other versions


def test_a_signature_without_a_parameter_that_is_passed_is_unavailable_by_name(
    flashinfer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, return_lse=False): ...  # type: ignore[no-untyped-def]

    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found]

    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "run", run)
    reason = str(FlashInferMLAFA3().why_unavailable("cuda"))
    assert "BatchMLAPagedAttentionWrapper.run" in reason
    assert reason.endswith("is not as mla-verify knows it: its signature has no lse")
    assert FlashInferRaggedFA3().why_unavailable("cuda") is None


def test_a_signature_that_needs_more_is_unavailable_and_one_that_grew_options_is_taken(
    flashinfer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found]

    def needs_more(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out,
        lse,
        return_lse,
        ckv_scale_arr,  # type: ignore[no-untyped-def]
    ): ...

    def grown(self, q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, *, new=0, **options): ...  # type: ignore[no-untyped-def]

    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "run", needs_more)
    assert str(FlashInferMLAFA2().why_unavailable("cuda")).endswith("its signature also needs ckv_scale_arr")
    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "run", grown)
    assert FlashInferMLAFA2().why_unavailable("cuda") is None


def test_every_rounding_fact_names_file_and_line() -> None:
    for kernel in (*MLA, *RAGGED):
        for dtype in kernel.contract.dtypes:
            facts = kernel.contract.facts(dtype)
            assert facts.tensor_core_k == 16
            assert facts.p_dtype == facts.out_dtype == dtype
            assert all(source.startswith("flashinfer/data/") and ".cuh:" in source for source in facts.sources)
