"""Tables in the docs that come from data: `python tools/docs_tables.py` checks them, with `--write` it writes them.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->` in README.md, docs/*.md or benchmarks/*.md; NAME is a
key of TABLES.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the checkout's mla_verify, not an installed one

from mla_verify.dims import ODD_HEADS, PRESETS  # noqa: E402
from mla_verify.kernels import KERNELS, load_kernel  # noqa: E402
from mla_verify.kernels.contract import RoundingFacts  # noqa: E402
from mla_verify.kernels.other_gpus import NeedsOtherGPU  # noqa: E402
from mla_verify.report.contracts import HEADINGS, describe_contract  # noqa: E402
from mla_verify.suites import SUITES, suite_cases  # noqa: E402
from tools import evidence_tables  # noqa: E402


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def suites() -> str:
    rows = [[f"`{name}`", str(len(suite_cases(name))), suite.summary] for name, suite in SUITES.items()]
    return markdown(["suite", "cases", "what it is for"], rows)


def dims() -> str:
    """Heads of one rank, by model and tensor parallelism."""
    sizes = sorted({tp for preset in PRESETS.values() for tp in preset.tensor_parallel_sizes()})
    rows = []
    for preset in PRESETS.values():
        possible = preset.tensor_parallel_sizes()
        heads = [str(preset.heads_at(tp)) if tp in possible else "" for tp in sizes]
        rows.append([f"`{preset.name}`", preset.source, *heads])
    odd = f"Head counts of no model, which kernels pad or fold differently: {', '.join(map(str, ODD_HEADS))}."
    return f"{markdown(['model', 'source', *(f'TP {tp}' for tp in sizes)], rows)}\n\n{odd}"


def kernels() -> str:
    words = {name: describe_contract(load_kernel(name).contract) for name in KERNELS if not for_other_gpus(name)}
    rows = [[f"`{name}`", *(found.get(heading, "") for heading in HEADINGS)] for name, found in words.items()]
    return markdown(["kernel", *HEADINGS], rows)


def for_other_gpus(name: str) -> NeedsOtherGPU | None:
    kernel = load_kernel(name)
    return kernel if isinstance(kernel, NeedsOtherGPU) else None


def other_gpus() -> str:
    found = [kernel for name in KERNELS if (kernel := for_other_gpus(name))]
    return markdown(["name", *found[0].words()], [[f"`{kernel.name}`", *kernel.words().values()] for kernel in found])


def rounding() -> str:
    """Each kernel's facts by dtype, and below them the sources, numbered."""
    rows, sources = [], list[str]()
    for name in KERNELS:
        if for_other_gpus(name):
            continue
        contract = load_kernel(name).contract
        for dtype in contract.dtypes if contract.form not in ("write", "concat") else ():  # a copy rounds nothing
            facts = contract.facts(dtype)
            sources += [source for source in facts.sources if source not in sources]
            numbers = " ".join(f"[{sources.index(source) + 1}]" for source in facts.sources)
            rows.append([f"`{name}`", dtype, *cells(facts), numbers])
    roundings = ["output", "P", "row sum", "partial outputs", "tile", "sm_scale", "tensor cores"]
    numbered = "\n".join(f"{number}. {source}" for number, source in enumerate(sources, 1))
    return f"{markdown(['kernel', 'inputs', *roundings, 'source'], rows)}\n\n{numbered}"


def cells(facts: RoundingFacts) -> list[str]:
    """One row of `rounding`."""
    partial = "not split" if facts.max_splits == 1 else f"{facts.partial_dtype}, up to {facts.max_splits} splits"
    if facts.chunk:
        partial += f"; chunks of {facts.chunk} keys, merged in turn"
    scale = "one factor" if facts.scale == "product" else "its root on q and k"
    tile = "one chain" if facts.tile is None else f"{facts.tile} keys"
    cores = f"k {facts.tensor_core_k}" if facts.tensor_core_k else "no"
    return [facts.out_dtype, facts.p_dtype, f"of {facts.rowsum} P", partial, tile, scale, cores]


def evidence(table: Callable[[], tuple[Sequence[str], list[list[str]], str]]) -> Callable[[], str]:
    """A table of recorded figures, and below it where they come from."""

    def render() -> str:
        header, rows, origin = table()
        return f"{markdown(header, rows)}\n\n{origin}"

    return render


TABLES: dict[str, Callable[[], str]] = {
    "suites": suites,
    "dims": dims,
    "kernels": kernels,
    "other_gpus": other_gpus,
    "rounding": rounding,
    "error_regimes": evidence(evidence_tables.error_regimes),
    "error_rules": evidence(evidence_tables.error_rules),
    "tensor_cores": evidence(evidence_tables.tensor_cores),
    "gpu_functions": evidence(evidence_tables.gpu_functions),
    "measured": evidence(evidence_tables.measured),
}

START, END = "<!-- table:{} -->", "<!-- /table -->"
BLOCK = re.compile(rf"{START.format('(.*?)')}\n.*?{END}", re.DOTALL)


def rewritten(text: str) -> str:
    """`text` with the content of every table block made anew. Raises ValueError for a block that cannot be."""

    def render(block: re.Match[str]) -> str:
        name = block[1]
        if name not in TABLES:
            raise ValueError(f"unknown table {name!r}; there are {', '.join(TABLES)}")
        return f"{START.format(name)}\n{TABLES[name]()}\n{END}"

    if not len(BLOCK.findall(text)) == text.count(START.split("{}")[0]) == text.count(END):
        raise ValueError(f"a {START.format('NAME')} without its {END}, or the reverse")
    return BLOCK.sub(render, text)


def main(write: bool) -> int:
    status = 0
    for file in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "benchmarks").glob("*.md")),
    ]:
        text, name = file.read_text(), str(file.relative_to(ROOT))
        try:
            new = rewritten(text)
        except ValueError as error:
            print(f"{name}: {error}")
            status = 1
            continue
        if new == text:
            continue
        if write:
            file.write_text(new)
            print(f"{name}: written")
        else:
            print(
                *difflib.unified_diff(text.splitlines(), new.splitlines(), name, "from the data", n=0, lineterm=""),
                sep="\n",
            )
            print(f"{name}: run tools/docs_tables.py --write")
            status = 1
    return status


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(f"usage: {sys.argv[0]} [--write]")
    sys.exit(main(write=bool(sys.argv[1:])))
