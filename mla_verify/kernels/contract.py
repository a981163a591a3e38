"""What a kernel declares: what it takes, what it returns, and which roundings its arithmetic makes.

Nothing here imports torch, so that contracts can be listed in an instant. Defaults claim the most and excuse the least:
who declares nothing is held to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from mla_verify.cases import FORM_PHASES, FORMS
from mla_verify.errors import UsageError, did_you_mean
from mla_verify.formats import DTYPES

if TYPE_CHECKING:
    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import MLAInputs, MLAOutput

_F = TypeVar("_F", bound=Callable[..., Any])


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
    least_part: int = 1  # keys: a request of no more is not split, and a longer one into no smaller parts, on average
    # Cached keys of a request (all but its last q_len) that are attended over at once, as engines do it. The new keys
    # come first and the chunks in order; each part's output, and the running one after each merge, are rounded to
    # out_dtype. None: all keys at once.
    chunk: int | None = None
    # How sm_scale enters: one fp32 factor of the scores, or its square root as a factor of q and of k.
    scale: Literal["product", "root"] = "product"
    # Keys that are summed before the running accumulator takes them; None: one chain over all keys.
    tile: int | None = None
    # On a GPU: products that one tensor-core instruction sums (16 of 16-bit numbers), which cuts sums off instead of
    # rounding them. None: q.k and P.V are fp32 sums, rounded to nearest. On a CPU it counts for nothing.
    tensor_core_k: int | None = None
    # Form layer: how the kernel takes the weights. "absorbed": q_nope.w_kc and the latent output are stored in
    # out_dtype on the way; "expanded": keys and values of every head are. None: nothing is stored on the way.
    layer: Literal["absorbed", "expanded"] | None = None
    layer_tensor_core_k: int | None = None  # as tensor_core_k, of the products with the weights
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("out_dtype", "p_dtype", "partial_dtype"):
            _check("RoundingFacts", field, getattr(self, field), DTYPES)
        _check("RoundingFacts", "rowsum", self.rowsum, ("rounded", "unrounded"))
        _check("RoundingFacts", "scale", self.scale, ("product", "root"))
        _check("RoundingFacts", "layer", self.layer, (None, "absorbed", "expanded"))
        for field in ("max_splits", "least_part", "chunk", "tile", "tensor_core_k", "layer_tensor_core_k"):
            value = getattr(self, field)
            optional = value is None and field not in ("max_splits", "least_part")
            if not optional and (not isinstance(value, int) or value < 1):
                raise UsageError(f"RoundingFacts: {field} is {value!r}", "it must be a positive whole number")
        if not isinstance(self.sources, tuple):
            raise UsageError(f"RoundingFacts: sources is {self.sources!r}", 'a tuple of strings: ("file.cu, line 12",)')


def _check(what: str, field: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        is_text = isinstance(value, str)
        listed = f"known: {', '.join(map(str if is_text else repr, known))}"
        hint = did_you_mean(str(value), map(str, known), listed) if is_text else listed
        raise UsageError(f"{what}: {field} has {value!r}", hint)


@dataclass(frozen=True)
class FactsTable:
    """Facts that have been asked for: what a contract from another process holds."""

    by_dtype: Mapping[str, RoundingFacts]

    def __call__(self, dtype: str) -> RoundingFacts:
        return self.by_dtype[dtype]


def exact_facts(dtype: str) -> RoundingFacts:
    """fp32 arithmetic whose result is rounded once: nothing excused but what every kernel must do."""
    return RoundingFacts(out_dtype=dtype)


Form = Literal["absorbed", "mha", "write", "concat", "layer"]
LOW_LSE = -1000.0  # natural; exp of it is 0 beside whatever a row with keys has

LSEBase = Literal["e", "2"]
LSELayout = Literal["TH", "HT"]
EmptyOut = Literal["zero", "any"]
EmptyLSE = Literal["-inf", "+inf", "low", "any"]  # low: at most LOW_LSE, which merges give no weight
Strides = Literal["any", "contiguous"]


@dataclass(frozen=True)
class Contract:
    """What a kernel claims. A claim that no case decides leaves the run inconclusive.

    Raises UsageError for a value that no case or check knows.
    """

    form: Form = "absorbed"
    dtypes: tuple[str, ...] = DTYPES
    phases: tuple[str, ...] = ()  # empty: all phases of the form
    facts: Callable[[str], RoundingFacts] = exact_facts  # by case dtype
    returns_lse: bool = False
    lse_base: LSEBase = "e"
    lse_layout: LSELayout = "TH"  # [T, H] or [H, T]
    # What a query that sees no key gets. "any": nobody reads it, so that it may hold anything. "low": see EmptyLSE.
    empty_out: EmptyOut = "zero"
    empty_lse: EmptyLSE = "-inf"
    page_sizes: tuple[int, ...] | None = None  # None: any
    num_heads: tuple[int, ...] | None = None  # None: any
    strides: Strides = "any"  # "contiguous": takes no views of fused tensors
    # Whether slots after a request's last key must hold finite values. They then hold huge ones instead of NaN.
    finite_tail: bool = False
    # Cache writes: whether a token whose slot is negative or past the end is left out.
    skips_out_of_range: bool = False
    # Whether the same call gives the same bits again, and a request the same bits alone as among others. Both are
    # measured and reported for every kernel, and fail a case only where they are claimed.
    repeats: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if not self.phases and self.form in FORM_PHASES:
            object.__setattr__(self, "phases", FORM_PHASES[self.form])
        _check("contract", "form", self.form, FORMS)
        for field, known in (("dtypes", DTYPES), ("phases", FORM_PHASES[self.form])):
            values = getattr(self, field)
            if not isinstance(values, tuple | list) or not values:
                raise UsageError(f"contract: {field} is {values!r}", f"a tuple of one or more of {', '.join(known)}")
            for value in values:
                _check("contract", field, value, known)
        for field, literal in (
            ("lse_base", LSEBase),
            ("lse_layout", LSELayout),
            ("empty_out", EmptyOut),
            ("empty_lse", EmptyLSE),
            ("strides", Strides),
        ):
            _check("contract", field, getattr(self, field), get_args(literal))
        for field in ("page_sizes", "num_heads"):
            values = getattr(self, field)
            whole = isinstance(values, tuple | list) and all(isinstance(value, int) for value in values)
            if values is not None and not whole:
                raise UsageError(f"contract: {field} is {values!r}", "a tuple of numbers, e.g. (64,), or None for any")
        if not callable(self.facts):
            raise UsageError(
                f"contract: facts is {type(self.facts).__name__}",
                "a function from the case's dtype to RoundingFacts, e.g. lambda dtype: RoundingFacts(dtype)",
            )

    def why_not(self, spec: CaseSpec) -> str | None:
        """Why a case of this form is outside the contract, or None."""
        if spec.page_size and self.page_sizes is not None and spec.page_size not in self.page_sizes:
            return f"page size {spec.page_size} is not among {', '.join(map(str, self.page_sizes))}"
        if self.num_heads is not None and spec.num_heads not in self.num_heads:
            return f"{spec.num_heads} heads: not among {', '.join(map(str, self.num_heads))}"
        if spec.layout in ("fused", "transposed") and self.strides == "contiguous":
            return "the tensors are views of others, and the contract asks for contiguous ones"
        if spec.regime == "outside" and not self.skips_out_of_range:
            return "slots outside the cache: the contract does not claim that their tokens are left out"
        return None


def mla_kernel(contract: Contract) -> Callable[[_F], _F]:
    """Declare a function's contract, for `--kernel file.py:function`.

    The function takes (inputs, out): AbsorbedInputs, MHAInputs, LayerInputs, WriteInputs or ConcatInputs by the
    contract's form, and MLAOutput buffers to write into; it returns an MLAOutput, which may hold those buffers.
    """

    def declare(function: _F) -> _F:
        function.contract = contract  # type: ignore[attr-defined]
        return function

    return declare


def facts_on(contract: Contract, dtype: str, device: str) -> RoundingFacts:
    """The roundings of a dtype on "cpu" or "cuda": what only tensor cores do is not excused where there are none."""
    facts = contract.facts(dtype)
    return replace(facts, tensor_core_k=None, layer_tensor_core_k=None) if device == "cpu" else facts


class Kernel(Protocol):
    """One kernel under test. Instances are cheap; the library is imported by `why_unavailable`, `version` or `run`."""

    name: str
    contract: Contract

    def missing(self) -> str | None:
        """The library that is not installed and how to get it, or None. Must be quick: nothing is imported."""

    def own_process(self, device: str) -> Mapping[str, str] | None:
        """Environment variables of the process that this kernel needs for itself; None: it runs in the tool's own.

        Kernels that ask for the same variables share a process. All methods below are then called there.
        """

    def why_unavailable(self, device: str) -> str | None:
        """Why this kernel cannot run here at all on "cpu" or "cuda", or None."""

    def why_not_dtype(self, dtype: str, device: str) -> str | None:
        """Why no case of a dtype of the contract can run on this device, or None."""

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        """Why this kernel cannot take this case of its contract, or None."""

    def version(self) -> str:
        """The library that provides it and its version, e.g. "torch 2.13.0". Asked in the tool's own process."""

    def run(self, inputs: MLAInputs, out: MLAOutput) -> MLAOutput:
        """Run on `inputs`. Write into `out` (NaN before the call) and return it, or return tensors of its own.

        A cache write has the cache in `out.out`, and writes there. A concatenation has [T, H, D + P] there.
        """

    def ran(self) -> str:
        """What the last `run` really executed."""


class KernelBase:
    """The answers of a kernel that needs nothing special."""

    def missing(self) -> str | None:
        return None

    def own_process(self, device: str) -> Mapping[str, str] | None:
        # An illegal access, a trap or a hang leaves no use of a GPU to the process that it happened in.
        return {} if device == "cuda" else None

    def why_unavailable(self, device: str) -> str | None:
        return None

    def why_not_dtype(self, dtype: str, device: str) -> str | None:
        return None

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        return None

    def version(self) -> str:
        return type(self).__module__

    def ran(self) -> str:
        return type(self).__qualname__
