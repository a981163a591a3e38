"""What a kernel declares: what it takes, what it returns, and which roundings its arithmetic makes.

Nothing here imports torch, so that contracts can be listed in an instant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import MLAInputs, MLAOutput


@dataclass(frozen=True)
class RoundingFacts:
    """The roundings a kernel makes for one dtype. Every fact carries its source in `sources`."""

    out_dtype: str
    # Probabilities as they enter P.V. "fp32": not rounded below the accumulator's precision.
    p_dtype: str = "fp32"
    # Whether the softmax denominator sums the rounded or the unrounded probabilities.
    rowsum: Literal["rounded", "unrounded"] = "unrounded"
    # Split-KV partial outputs as they are stored. "fp32", or the kernel never splits.
    partial_dtype: str = "fp32"
    max_splits: int = 1
    # How sm_scale enters: one fp32 factor of the scores, or its square root as a factor of q and of k.
    scale: Literal["product", "root"] = "product"
    # Keys that are summed before the running accumulator takes them; None: one chain over all keys.
    tile: int | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contract:
    """What a kernel claims. A claim that no case decides leaves the run inconclusive."""

    form: Literal["absorbed", "mha"]
    dtypes: tuple[str, ...]
    phases: tuple[str, ...]
    facts: Callable[[str], RoundingFacts]  # by case dtype
    returns_lse: bool = False  # natural log, [T, H] float32
    page_sizes: tuple[int, ...] | None = None  # None: any


class Kernel(Protocol):
    """One kernel under test. Instances are cheap; the library is imported by `why_unavailable`, `version` or `run`."""

    name: str
    contract: Contract

    def why_unavailable(self, device: str) -> str | None:
        """Why this kernel cannot run here at all on "cpu" or "cuda", or None."""

    def why_not(self, spec: CaseSpec) -> str | None:
        """Why this kernel cannot take this case, or None."""

    def version(self) -> str:
        """The library that provides it and its version, e.g. "torch 2.13.0"."""

    def run(self, inputs: MLAInputs, out: MLAOutput) -> MLAOutput:
        """Run on `inputs`. Write into `out` (NaN before the call) and return it, or return tensors of its own."""

    def ran(self) -> str:
        """What the last `run` really executed."""
