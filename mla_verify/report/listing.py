"""What `mla-verify list` and `mla-verify kernels --list` print."""

from __future__ import annotations

from itertools import groupby

from mla_verify.calls import availability
from mla_verify.dims import ODD_HEADS, PRESETS
from mla_verify.errors import UsageError
from mla_verify.kernels import kernel_names, load_kernel
from mla_verify.kernels.other_gpus import NeedsOtherGPU
from mla_verify.plan import Plan, why_outside
from mla_verify.report.contracts import describe_contract
from mla_verify.report.text import columns
from mla_verify.suites import SUITES, suite_cases


def list_suites() -> str:
    rows = [("suite", "cases", "summary")]
    rows += [(name, str(len(suite_cases(name))), suite.summary) for name, suite in SUITES.items()]
    return columns(rows, right=(1,))


def list_dims() -> str:
    """Heads that one rank holds, by preset and tensor parallelism, and the dims that go with them."""
    sizes = sorted({tp for preset in PRESETS.values() for tp in preset.tensor_parallel_sizes()})
    rows = [("heads per rank", *(f"TP {tp}" for tp in sizes), "source")]
    for preset in PRESETS.values():
        heads = [str(preset.heads_at(tp)) if tp in preset.tensor_parallel_sizes() else "-" for tp in sizes]
        rows.append((preset.name, *heads, preset.source))
    lines = [columns(rows, right=range(1, len(sizes) + 1)), ""]
    for dims in dict.fromkeys(preset.dims for preset in PRESETS.values()):
        names = ", ".join(name for name, preset in PRESETS.items() if preset.dims == dims)
        lines.append(
            f"kv_lora_rank {dims.kv_lora_rank}, qk_rope_head_dim {dims.qk_rope_head_dim}, "
            f"qk_nope_head_dim {dims.qk_nope_head_dim}, v_head_dim {dims.v_head_dim}: {names}"
        )
    return "\n".join([*lines, f"odd head counts, of no preset: {' '.join(map(str, ODD_HEADS))}"])


def list_kernels(device: str) -> str:
    """Each kernel's contract, and whether it can run here on `device` or why not."""
    blocks = []
    for name in kernel_names():
        try:
            kernel = load_kernel(name, device)
        except UsageError as error:  # of another package, which must not cost the list
            blocks.append(f"{name}  unavailable: {error.message}")
            continue
        found = availability(kernel, device)
        why = found.why_not
        state = f"available on {device}, {kernel.version()}" if why is None else f"unavailable on {device}: {why}"
        words = kernel.words() if isinstance(kernel, NeedsOtherGPU) else describe_contract(kernel.contract)
        facts = [
            *words.items(),
            *((f"not {dtype}", why) for dtype, why in found.dtypes.items()),
        ]
        blocks.append("\n".join([f"{name}  {state}", *(f"  {line}" for line in columns(facts).splitlines())]))
    return "\n\n".join(blocks)


def list_plan(plan: Plan) -> str:
    """Each case with its kernels and its claim."""
    lines = []
    for (case_id, claim), group in groupby(plan.entries, key=lambda entry: (entry.case_id, entry.claim)):
        reasons = [(entry.kernel.name, why_outside(entry)) for entry in group]
        lines += [f"{case_id}  {' '.join(name for name, why in reasons if why is None)}".rstrip(), f"    {claim}"]
        lines += [f"    UNSUPPORTED by {name}: {why}" for name, why in reasons if why]
    cases, outside = (
        len({entry.case_id for entry in plan.entries}),
        sum(why_outside(e) is not None for e in plan.entries),
    )
    some = f", {outside} of them UNSUPPORTED" if outside else ""
    return "\n".join([*lines, "", f"{cases} cases, {len(plan.entries)} verdicts planned{some}"])
