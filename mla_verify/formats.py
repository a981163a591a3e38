"""Floating-point formats by the names users type (fp32, fp16, bf16), without importing torch.

`unit_roundoff` u is half a unit in the last place of 1.0: rounding x to nearest errs by at most u |x|.
`min_subnormal` is the smallest positive number; nothing is rounded more finely than half of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FloatFormat:
    name: str
    torch_name: str
    mantissa_bits: int  # stored bits, without the implicit one
    min_exponent: int  # of the smallest normal number, 2 ** min_exponent

    @property
    def unit_roundoff(self) -> float:
        return float(2.0 ** -(self.mantissa_bits + 1))

    @property
    def min_subnormal(self) -> float:
        return float(2.0 ** (self.min_exponent - self.mantissa_bits))

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype = getattr(torch, self.torch_name)
        assert isinstance(dtype, torch.dtype)
        return dtype


# IEEE 754 binary32 and binary16; bfloat16 is binary32 cut to 7 stored mantissa bits.
FORMATS = {
    fmt.name: fmt
    for fmt in (
        FloatFormat("fp32", "float32", mantissa_bits=23, min_exponent=-126),
        FloatFormat("fp16", "float16", mantissa_bits=10, min_exponent=-14),
        FloatFormat("bf16", "bfloat16", mantissa_bits=7, min_exponent=-126),
    )
}
DTYPES = tuple(FORMATS)


def format_of(dtype: torch.dtype) -> FloatFormat | None:
    """The format with this torch dtype, or None for one that no case uses."""
    return next((fmt for fmt in FORMATS.values() if fmt.torch_dtype == dtype), None)
