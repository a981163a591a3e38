"""Runs our Triton kernels in the interpreter, for test_triton_kernels.py: `python -m tests.triton_interpreted FILE`.

A process of its own: TRITON_INTERPRET counts when triton is imported. It saves what the kernels returned; the tests,
which import no triton, make the same inputs again and judge.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from mla_verify.cases import CaseSpec
from mla_verify.formats import FORMATS
from mla_verify.inputs import make_inputs
from mla_verify.kernels import load_kernel
from mla_verify.tensors import AbsorbedInputs, output_buffers

ATTENTION: dict[str, tuple[str, ...]] = {
    "triton-decode": (
        "decode-absorbed-h16-q1.kv512+q1.kv33+q1.kv1-p64-fp32-needle-s0",
        "decode-absorbed-h12-q1.kv300+q1.kv0+q1.kv64-p16-fp16-mixed-s0",
        "decode-absorbed-h8-q1.kv257-p1-fp16-unequal-s0",
        "decode-absorbed-h16-q1.kv200-p64-fp16-peaked-s0",
        "decode-absorbed-h16-q1.kv300+q1.kv65-p16-fp32-mixed-fused-s0",
        "spec-absorbed-h12-q4.kv132+q4.kv3-p1-fp32-needle-s0",
        "decode-absorbed-h20-q1.kv100-p64-fp16-normal-dims128.32.64.64-s0",
    ),
    "triton-prefill": (
        "prefill-absorbed-h12-q33.kv33-p16-fp32-mixed-s0",
        "prefix-absorbed-h8-q9.kv300-p1-fp16-unequal-s0",
        "prefix-absorbed-h16-q5.kv200-p64-fp16-needle-fused-s0",
        "spec-absorbed-h16-q3.kv131-p16-fp16-peaked-s0",
        "mixed-absorbed-h16-q1.kv33+q1.kv0+q5.kv70+q0.kv64+q3.kv2+q2.kv0-p64-fp32-needle-s0",
        "mixed-absorbed-h8-q5.kv100+q1.kv33-p16-fp16-mixed-full-s0",
        "chunked-absorbed-h16-q8.kv32+q7.kv39-p16-fp32-unequal-s0",
    ),
    "triton-write-decode": (
        "decode-absorbed-h8-q1.kv130+q1.kv0+q1.kv33-p16-fp16-mixed-s0",
        "spec-absorbed-h16-q2.kv65-p64-fp32-needle-fused-s0",
    ),
}
APPEND = tuple(f"append-write-h1-q9.kv40+q0.kv3+q70.kv70-p16-bf16-{end}-s0" for end in ("rows", "outside-fused"))
# Five splits by themselves; the second request has keys for three of eight.
SPLIT_CASE = "decode-absorbed-h16-q1.kv257+q1.kv70+q1.kv0-p16-fp32-unequal-s0"
SPLITS = (1, 2, 8)
NO_KEYS = "mixed-absorbed-h8-2xq1.kv0+q2.kv0-p64-fp16-normal-s0"
WRITTEN = (*((count, "bf16") for count in (0, 1, 767, 768, 769, 1025)), (100, "fp16"), (100, "fp32"))
GUARD_ROWS = 3
OUTSIDE_EVERY = 3


@dataclass(frozen=True)
class Write:
    """Random bits, NaN of every kind among them, and numbers that arithmetic would change and a copy does not."""

    ckv: torch.Tensor
    kpe: torch.Tensor
    slots: torch.Tensor
    pool: torch.Tensor  # GUARD_ROWS, the cache, GUARD_ROWS
    num_slots: int


def write_of(count: int, dtype: str, *, outside: bool = False) -> Write:
    """A write of `count` tokens; every OUTSIDE_EVERY-th has no slot if `outside`. A function of its arguments."""
    generator = torch.Generator().manual_seed(count)
    kind = FORMATS[dtype].torch_dtype
    num_slots = count + 5

    def bits(rows: int) -> torch.Tensor:
        data = torch.randint(256, (rows, 576 * kind.itemsize), dtype=torch.uint8, generator=generator).view(kind)
        info = torch.finfo(kind)
        odd = torch.tensor([-0.0, 0.0, info.smallest_normal / 2, -info.smallest_normal / 2, torch.inf, -torch.inf])
        data[:, :6] = data[:, 512:518] = odd.to(kind)
        return data

    rows = bits(count)
    slots = torch.randperm(num_slots, generator=generator)[:count]
    if outside:
        far = torch.tensor([-1, num_slots, 1 << 40, -(1 << 40), 2**63 - 1, -(2**63)])
        slots[::OUTSIDE_EVERY] = far[torch.arange(len(slots[::OUTSIDE_EVERY])) % len(far)]
    # Rows wider than their parts: the strides are not the widths.
    return Write(rows[:, :512], rows[:, 512:], slots, bits(num_slots + 2 * GUARD_ROWS), num_slots)


def main(path: str) -> None:
    import triton

    from mla_verify.kernels.triton_kernels import MAX_SPLITS, launch_cache_write, launch_decode

    def run(name: str, case: str) -> dict[str, object]:
        spec = CaseSpec.parse(case)
        inputs, kernel = make_inputs(spec), load_kernel(name)
        buffers = output_buffers(inputs, FORMATS[spec.dtype].torch_dtype)
        output = kernel.run(inputs, buffers.output)
        return {"out": output.out, "lse": output.lse, "ran": kernel.ran(), "overwritten": buffers.overwritten()}

    def split(num_splits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = make_inputs(CaseSpec.parse(SPLIT_CASE))
        assert isinstance(inputs, AbsorbedInputs)
        output = output_buffers(inputs, torch.float32).output
        launch_decode(inputs, output, num_splits)
        return output.out, output.lse

    def write(count: int, dtype: str, outside: bool) -> torch.Tensor:
        w = write_of(count, dtype, outside=outside)
        launch_cache_write(w.ckv, w.kpe, w.slots, w.pool[GUARD_ROWS : GUARD_ROWS + w.num_slots])
        return w.pool

    results = {
        "triton": triton.__version__,
        "max_splits": MAX_SPLITS,
        "attention": {(name, case): run(name, case) for name, cases in ATTENTION.items() for case in cases},
        "append": {case: run("triton-cache-write", case) for case in APPEND},
        "no_keys": {name: run(name, NO_KEYS) for name in ATTENTION},
        "splits": {num_splits: split(num_splits) for num_splits in SPLITS},
        "written": {(count, dtype): write(count, dtype, False) for count, dtype in WRITTEN},
        "outside": {dtype: write(100, dtype, True) for dtype in FORMATS},
    }
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1])
