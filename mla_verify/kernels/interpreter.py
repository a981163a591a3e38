"""Triton kernels without a GPU: in Triton's interpreter, if a variable is set before triton is imported.

Whether it computes a dtype rightly is asked of the interpreter itself, not of its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec

from mla_verify.cases import CaseSpec
from mla_verify.kernels.contract import KernelBase

# The interpreter's dots are many and small: on busy cores, threads make them several times slower.
ENVIRONMENT: Mapping[str, str] = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# 16 heads x 512 keys: the interpreter takes milliseconds for what a GPU does in nanoseconds.
MAX_SCORES = 16 * 512


class TritonKernel(KernelBase):
    """What every kernel that is written in Triton answers."""

    def missing(self) -> str | None:
        return None if find_spec("triton") else "triton is not installed: pip install triton"

    def own_process(self, device: str) -> Mapping[str, str] | None:
        return ENVIRONMENT if device == "cpu" else super().own_process(device)

    def why_not_dtype(self, dtype: str, device: str) -> str | None:
        return wrong_dtype(dtype) if device == "cpu" else None

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        return too_large(spec) if device == "cpu" else None


def too_large(spec: CaseSpec) -> str | None:
    """Why a case is left to a GPU, or None. Cache writes have one program a token, which is quick."""
    longest = max(request.kv_len for request in spec.requests)
    if spec.form == "write" or (spec.num_heads * longest <= MAX_SCORES and longest <= 512):
        return None
    return "over 512 keys a request, or 8192 scores a query, which Triton's interpreter would take too long for"


@lru_cache
def no_scalar_mask() -> str | None:
    """Why the interpreter of this process cannot store a block under one mask bit, as GPUs can, or None."""
    import torch
    import triton

    from mla_verify.kernels.probe import scalar_mask

    try:
        block = torch.arange(16.0)
        stored = scalar_mask(block)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
    else:
        if torch.equal(stored, block):
            return None
        what = "it stores something else"
    return f"the interpreter of triton {triton.__version__} cannot store a block under a scalar mask: {what}"


@lru_cache
def wrong_dtype(dtype: str) -> str | None:
    """Why the interpreter of this process cannot be trusted with a dtype, or None: one dot and one cast, tried."""
    import torch
    import triton

    from mla_verify.formats import FORMATS
    from mla_verify.kernels.probe import dot_and_cast

    kind = FORMATS[dtype].torch_dtype
    # Small integers: every product and sum is exact in every dtype.
    a = (torch.arange(256).view(16, 16) % 7 - 3).float()
    b = (torch.arange(256).view(16, 16) % 5 - 2).float()
    # A third of the way to the next number up, and two thirds: rounded to nearest, one goes down and one up.
    step = torch.finfo(kind).eps
    wide = 1 + step * torch.tensor([1 / 3, 2 / 3] * 128).view(16, 16)
    product, narrow = dot_and_cast(a.to(kind), b.to(kind), wide.float())
    for what, is_, needed in (("dot", product, a @ b), ("cast", narrow.float(), wide.float().to(kind).float())):
        if not torch.equal(is_, needed):
            at = int((is_ != needed).flatten().nonzero()[0])
            got, want = float(is_.flatten()[at]), float(needed.flatten()[at])
            return (
                f"the interpreter of triton {triton.__version__} cannot do {dtype}: "
                f"a {what} that must give {want:.9g} gave {got:.9g}"
            )
    return None
