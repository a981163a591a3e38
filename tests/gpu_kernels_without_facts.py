"""The GPU kernels of the table, called as they are, under a contract that leaves one of their rounding facts out.

`mla-verify kernels --kernel tests/gpu_kernels_without_facts.py:flashinfer_mla_fa3_without_p_dtype --case ...`.
KERNELS has the names. `*_with_all` leaves nothing out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mla_verify.kernels import load_kernel, mla_kernel
from mla_verify.tensors import MLAOutput

# What is claimed where a fact is left out. `tile` is not there: to leave it out excuses more, not less.
_CLAIMED: dict[str, Any] = {
    "p_dtype": "fp32",
    "partial_dtype": "fp32",
    "max_splits": 1,
    "tensor_core_k": None,
    "chunk": None,
}
# The row sum of fa3 rounds less than that of fa2, so that claiming fa2's excuses more.
_FACTS = {
    "flashinfer-mla-fa2": ("p_dtype", "rowsum", "partial_dtype", "max_splits", "tensor_core_k"),
    "flashinfer-mla-fa3": ("p_dtype", "partial_dtype", "max_splits", "tensor_core_k"),
    "flashinfer-ragged-fa2": ("p_dtype", "rowsum", "partial_dtype", "max_splits"),
    "flashinfer-ragged-fa3": ("p_dtype", "tensor_core_k"),
    "sgl-merge": ("p_dtype", "chunk"),
    "sglang-merge": ("p_dtype", "chunk"),
    "flashinfer-merge": ("p_dtype", "chunk"),
}


def _without(name: str, fact: str | None) -> Any:
    kernel = load_kernel(name, "cuda")
    contract = kernel.contract
    if fact is not None:
        claimed = {fact: "unrounded" if fact == "rowsum" else _CLAIMED[fact]}
        contract = replace(contract, facts=lambda dtype: replace(kernel.contract.facts(dtype), **claimed))

    @mla_kernel(contract)
    def call(inputs: Any, out: MLAOutput) -> MLAOutput:
        return kernel.run(inputs, out)

    return call


KERNELS: dict[str, str | None] = {}  # the function's name -> the fact that is left out
for _name, _facts in _FACTS.items():
    for _fact in (None, *_facts):
        _function = f"{_name.replace('-', '_')}_with{f'out_{_fact}' if _fact else '_all'}"
        KERNELS[_function] = _fact
        globals()[_function] = _without(_name, _fact)
