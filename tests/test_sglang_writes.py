"""SGLang's cache write has several kernels behind one name: which one ran is known, and the wrong one fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

from mla_verify.cases import CaseSpec
from mla_verify.compare_write import compare_cache
from mla_verify.execute import execute
from mla_verify.inputs import make_inputs
from mla_verify.kernels.sglang import SGLangSetMLAKVBuffer
from mla_verify.kernels.sglang_api import JIT_WRITE, WRITE
from mla_verify.kernels.sglang_jit import SGLangSetMLAKVBufferTMA
from mla_verify.kernels.sglang_writes import takes_jit
from mla_verify.results import Verdict
from mla_verify.tensors import MLAOutput, WriteInputs

BF16 = (1024, 128)


@dataclass
class FakeSGLang:
    """Modules in the places of SGLang's, which write with torch and choose a kernel as a release does."""

    least: int | None = 768  # slots from which the JIT kernel is taken; None: any number, as in 0.5.23
    hopper: bool = True
    builds: bool = True  # whether the JIT kernel compiles; if not, SGLang logs it and takes Triton's
    jit: Callable[..., None] | None = None  # in place of the right one
    calls: list[tuple[str, torch.dtype, int]] = field(default_factory=list)  # kernel, slots' dtype, slot left out

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeSGLang:
        dispatcher, jit, platforms = (ModuleType(n) for n in (WRITE.module, JIT_WRITE.module, "sglang.srt.platforms"))
        contents: dict[ModuleType, dict[str, Any]] = {
            dispatcher: {
                "is_arch_support_pdl": lambda: self.hopper,
                "set_mla_kv_buffer_kernel": _Triton(self),
                WRITE.name: self._dispatch,
            },
            jit: {JIT_WRITE.name: self._jit},
            platforms: {},
        }
        if self.least is not None:
            contents[dispatcher]["_TMA_BULK_STORE_MIN_LOCS"] = self.least
        for module, names in contents.items():
            for name, value in names.items():
                setattr(module, name, value)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return self

    def _dispatch(
        self, kv_buffer: Any, loc: Any, cache_k_nope: Any, cache_k_rope: Any, *, reserved_skip_index: int = 0
    ) -> None:
        rows = kv_buffer, loc, cache_k_nope, cache_k_rope
        if len(loc) >= (self.least or 0) and self.hopper and self.builds:
            getattr(sys.modules[JIT_WRITE.module], JIT_WRITE.name)(*rows, reserved_skip_index=reserved_skip_index)
        else:
            kernel = sys.modules[WRITE.module].set_mla_kv_buffer_kernel
            kernel[(len(loc), 1)](*rows, reserved_skip_index)

    def _jit(
        self, kv_buffer: Any, loc: Any, cache_k_nope: Any, cache_k_rope: Any, *, reserved_skip_index: int = 0
    ) -> None:
        self.calls.append(("jit", loc.dtype, reserved_skip_index))
        (self.jit or scatter)(kv_buffer, loc, cache_k_nope, cache_k_rope)


@dataclass
class _Triton:
    sglang: FakeSGLang

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(kv_buffer: Any, loc: Any, nope: Any, rope: Any, skip: int) -> None:
            self.sglang.calls.append(("triton", loc.dtype, skip))
            scatter(kv_buffer, loc, nope, rope)

        return launch


def scatter(kv_buffer: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
    kv_buffer[loc.long(), 0] = torch.cat([nope, rope], dim=-1)


def case(num_slots: int, dims: str = "", regime: str = "rows") -> CaseSpec:
    return CaseSpec.parse(f"append-write-h1-q{num_slots}.kv{num_slots}-p16-bf16-{regime}{dims}-s0")


def run(kernel: Any, spec: CaseSpec) -> tuple[Any, WriteInputs]:
    inputs = make_inputs(spec)
    assert isinstance(inputs, WriteInputs)
    return execute(kernel, inputs, spec.dtype), inputs


def wrong(output: MLAOutput, inputs: WriteInputs) -> list[str]:
    return [check.name for check in compare_cache(output.out, inputs).checks if not check.passed]


@pytest.mark.parametrize(
    ("sglang", "num_slots", "sizes", "expected"),
    [
        (FakeSGLang(), 767, BF16, False),
        (FakeSGLang(), 768, BF16, True),
        (FakeSGLang(), 768, (1024, 132), False),
        (FakeSGLang(), 768, (1026, 126), False),
        (FakeSGLang(hopper=False), 4096, BF16, False),
        (FakeSGLang(least=None), 1, BF16, True),
        (FakeSGLang(least=None, hopper=False), 1, BF16, False),
    ],
)
def test_the_kernel_that_sglang_chooses_is_known_beforehand(
    sglang: FakeSGLang, num_slots: int, sizes: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang.install(monkeypatch)
    assert takes_jit(num_slots, sizes) is expected


def test_a_size_that_goes_to_the_other_kernel_is_declined_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSGLang().install(monkeypatch)
    kernel = SGLangSetMLAKVBuffer()
    assert kernel.why_unavailable("cuda") is None
    assert kernel.why_not(case(767), "cuda") is None
    why = kernel.why_not(case(768), "cuda")
    assert why is not None
    assert "set_mla_kv_buffer_triton takes its JIT CUDA kernel for 768 slots" in why
    assert "sglang-set-mla-kv-buffer-tma" in why
    assert kernel.why_not(case(768), "cpu") is None


def test_a_release_that_never_takes_the_triton_kernel_makes_it_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSGLang(least=None).install(monkeypatch)
    assert "takes its JIT CUDA kernel for every size on this GPU" in str(SGLangSetMLAKVBuffer().why_unavailable("cuda"))
    FakeSGLang(least=None, hopper=False).install(monkeypatch)
    assert SGLangSetMLAKVBuffer().why_unavailable("cuda") is None


def test_the_triton_write_is_green_when_the_triton_kernel_ran_and_tells_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = FakeSGLang().install(monkeypatch)
    done, inputs = run(SGLangSetMLAKVBuffer(), case(100))
    assert (done.verdict, wrong(done.output, inputs)) == (None, [])
    assert done.ran == "Triton, interpreted; set_mla_kv_buffer_triton"
    assert sglang.calls == [("triton", torch.int64, -1)]


@pytest.mark.parametrize("kernel_gone", [False, True])
def test_a_silent_fallback_of_the_triton_write_fails(kernel_gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = FakeSGLang(least=1).install(monkeypatch)
    if kernel_gone:
        monkeypatch.setattr(
            sys.modules[WRITE.module], WRITE.name, lambda kv_buffer, loc, cache_k_nope, cache_k_rope: None
        )
    done, _ = run(SGLangSetMLAKVBuffer(), case(20))
    assert done.verdict is Verdict.FAIL
    ran = "neither its Triton nor its JIT kernel" if kernel_gone else "its JIT CUDA kernel"
    assert done.reason == f"asked for its Triton kernel, set_mla_kv_buffer_triton ran {ran}"
    assert bool(sglang.calls) is not kernel_gone


@pytest.mark.parametrize(
    ("num_slots", "how"), [(767, "set_mla_kv_buffer called directly"), (768, f"through {WRITE.name}")]
)
def test_the_jit_write_is_run_at_every_size_with_slots_of_both_widths(
    num_slots: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang = FakeSGLang().install(monkeypatch)
    done, inputs = run(SGLangSetMLAKVBufferTMA(), case(num_slots))
    assert (done.verdict, wrong(done.output, inputs)) == (None, [])
    assert sglang.calls == [("jit", torch.int32, -1), ("jit", torch.int64, -1)]
    assert done.ran == f"its JIT CUDA kernel, {how}; slots in int64, and in int32 with the same result"


def test_a_jit_write_that_does_not_build_and_gives_way_to_triton_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = FakeSGLang(builds=False).install(monkeypatch)
    done, _ = run(SGLangSetMLAKVBufferTMA(), case(768))
    assert done.verdict is Verdict.FAIL
    assert done.reason.startswith("asked for its JIT CUDA kernel, set_mla_kv_buffer_triton ran its Triton kernel")
    assert [call[0] for call in sglang.calls] == ["triton"]


def zero_in_int32(kv_buffer: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
    """Rows that are all 0 where slots are int32, as a copy that reads shared memory too early writes."""
    scatter(kv_buffer, loc, nope, rope)
    if loc.dtype == torch.int32:
        kv_buffer[loc[5].long()] = 0


def test_slots_of_32_bits_that_are_written_otherwise_are_an_error_with_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeSGLang(jit=zero_in_int32).install(monkeypatch)
    done, inputs = run(SGLangSetMLAKVBufferTMA(), case(40))
    assert done.verdict is Verdict.ERROR
    assert f"another cache than in int64: first in slot {int(inputs.slots[5])}" in done.reason


def last_wins_in_int64(kv_buffer: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
    order = torch.arange(len(loc)) if loc.dtype == torch.int64 else torch.arange(len(loc)).flip(0)
    for t in order.tolist():
        scatter(kv_buffer, loc[t : t + 1], nope[t : t + 1], rope[t : t + 1])


def test_tokens_that_race_for_a_slot_may_end_otherwise_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSGLang(jit=last_wins_in_int64).install(monkeypatch)
    done, inputs = run(SGLangSetMLAKVBufferTMA(), case(40, regime="repeated"))
    assert (done.verdict, wrong(done.output, inputs)) == (None, [])


def test_rows_that_the_bulk_copy_cannot_store_are_declined() -> None:
    kernel = SGLangSetMLAKVBufferTMA()
    assert kernel.why_not(case(8), "cuda") is None
    assert "1024 and 132 bytes" in str(kernel.why_not(case(8, "-dims512.66.128.128"), "cuda"))


def test_a_launch_is_seen_once_and_the_library_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSGLang().install(monkeypatch)
    before = [dict(vars(sys.modules[entry.module])) for entry in (WRITE, JIT_WRITE)]
    for num_slots in (10, 800):
        run(SGLangSetMLAKVBuffer(), case(num_slots))
    assert [dict(vars(sys.modules[entry.module])) for entry in (WRITE, JIT_WRITE)] == before
