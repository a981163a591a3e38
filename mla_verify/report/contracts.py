"""A contract in words, for `mla-verify list kernels` and docs/kernels.md."""

from __future__ import annotations

from collections.abc import Sequence

from mla_verify.cases import RAGGED_FORMS
from mla_verify.kernels.contract import LOW_LSE, Contract

HEADINGS = ("form", "dtypes", "phases", "pages", "heads", "strides", "LSE", "row without keys", "tail", "slots outside")


def describe_contract(contract: Contract) -> dict[str, str]:
    """Every field but the rounding facts, by HEADINGS; those that mean nothing for its form are left out."""
    words = {"form": contract.form, "dtypes": ", ".join(contract.dtypes), "phases": ", ".join(contract.phases)}
    if contract.form not in RAGGED_FORMS:
        words["pages"] = _numbers(contract.page_sizes)
    if contract.form == "write":
        outside = "left out" if contract.skips_out_of_range else "not taken"
        return {**words, "strides": contract.strides, "slots outside": outside}
    words |= {"heads": _numbers(contract.num_heads), "strides": contract.strides}
    if contract.form == "concat":
        return words
    words["LSE"] = "not returned"
    words["row without keys"] = {"zero": "out 0", "any": "out unread"}[contract.empty_out]
    if contract.returns_lse:
        words["LSE"] = f"base {contract.lse_base}, [{', '.join(contract.lse_layout)}]"
        said = {"any": "unread", "low": f"at most {LOW_LSE:g}"}
        words["row without keys"] += f", LSE {said.get(contract.empty_lse, contract.empty_lse)}"
    if contract.form in ("absorbed", "layer"):
        words["tail"] = "finite" if contract.finite_tail else "any"
    return words


def _numbers(values: Sequence[int] | None) -> str:
    return ", ".join(map(str, values)) if values else "any"
