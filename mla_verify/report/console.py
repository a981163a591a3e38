"""RunReport -> what the terminal shows: a table by kernel, each failure in full, the decision with its reasons last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_verify.report.against_text import against_lines
from mla_verify.report.text import bits_lines, failed_checks, failure_lines, worst_of
from mla_verify.results import CaseResult, RunReport, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Of each kernel: enough to see what is wrong, and the lines after them to see where. The JSON report has all.
MAX_BLOCKS = 3
MAX_LINES = 20  # of anything else that could be long
_STYLES = {"pass": "bold green", "wrong": "bold red", "inconclusive": "bold yellow", "interrupted": "bold yellow"}


def print_report(report: RunReport, console: Console) -> None:
    """Print the whole report. Ids and commands are never wrapped, so that they can be copied and searched for."""
    wrong = [result for result in report.results if result.verdict.wrong]
    by_kernel: dict[str, list[CaseResult]] = {}
    # No verdict on its numbers, but somebody has to see where it hangs.
    for result in (*wrong, *(result for result in report.results if result.verdict is Verdict.TIMEOUT)):
        by_kernel.setdefault(result.kernel, []).append(result)
    for mine in by_kernel.values():
        for result in mine[:MAX_BLOCKS]:
            _line(console, f"{result.verdict.value}  {result.kernel}  {result.case}", style="bold red")
            _lines(console, [*failure_lines(result), ""])
        more = mine[MAX_BLOCKS:]
        for result in more[:MAX_LINES]:
            _line(console, f"{result.verdict.value}  {result.kernel}  {result.case}  {_first_check(result)}")
        if len(more) > MAX_LINES:
            _line(console, f"... and {len(more) - MAX_LINES} more of {result.kernel}: --json has all")
        _lines(console, [""] if more else [])
    _lines(console, _not_decided(report.results))
    _print_table(console, _table(report))
    _lines(console, _worst_lines(report))
    _lines(console, bits_lines(report))
    _lines(console, against_lines(report))
    decided = sum(result.verdict.decided for result in report.results)
    headline = f"{report.decision.upper()}: {decided} of {len(report.plan)} planned cases decided, {len(wrong)} wrong"
    _line(console, f"{headline} (exit {report.exit_code})", style=_STYLES.get(report.decision, ""))
    _lines(console, [f"  {reason}" for reason in report.reasons])
    _lines(console, _unchecked(report))


def _first_check(result: CaseResult) -> str:
    """The shortest word on what is wrong."""
    failed = failed_checks(result)
    return failed[0] if failed else result.reason


def _unchecked(report: RunReport) -> list[str]:
    """Dtypes in which cases of a kernel were planned and none was decided: nothing is known of these."""
    kernels: dict[str, list[str]] = {}
    for kernel in dict.fromkeys(planned.kernel for planned in report.plan):
        mine = [result for result in report.results if result.kernel == kernel]
        decided = {result.dtype for result in mine if result.verdict.decided}
        for dtype in dict.fromkeys(result.dtype for result in mine if result.dtype not in decided):
            kernels.setdefault(dtype, []).append(kernel)
    return [f"  not checked: {dtype} of {', '.join(names)}" for dtype, names in kernels.items()]


def _line(console: Console, text: str, style: str = "") -> None:
    # Plain text: a kernel's message may well hold what rich takes for markup.
    console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        _line(console, line)


def _not_decided(results: Sequence[CaseResult]) -> list[str]:
    """One line for all cases that stay open for the same reason, with the kernels that it concerns."""
    open_results = [result for result in results if not result.verdict.decided]
    kinds: dict[tuple[str, str], Counter[str]] = {}
    for result in open_results:
        kinds.setdefault((result.verdict.value, result.reason), Counter())[result.kernel] += 1
    lines = [
        f"{verdict}  {', '.join(kernels)}: {kernels.total()} x {reason}"
        for (verdict, reason), kernels in sorted(kinds.items(), key=lambda item: -item[1].total())
    ]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"... and {len(lines) - MAX_LINES} more reasons: see --json"]
    for result in open_results:
        if result.tool_error and result.traceback:
            lines += ["", f"mla-verify itself failed on {result.case}:", *result.traceback.rstrip().splitlines()]
            break  # the first: those that follow mostly repeat it
    return [*lines, ""] if lines else []


def _table(report: RunReport) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    for heading in ("planned", "decided", "passed", "failed", "unsupported", "worst z"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kernel in dict.fromkeys(planned.kernel for planned in report.plan):
        mine = [result for result in report.results if result.kernel == kernel]
        failed = sum(result.verdict.wrong for result in mine)
        worst = worst_of(mine)
        table.add_row(
            Text(kernel),
            str(len(mine)),
            str(sum(result.verdict.decided for result in mine)),
            str(sum(result.verdict is Verdict.PASS for result in mine)),
            Text(str(failed), style="bold red" if failed else ""),
            str(sum(result.verdict is Verdict.UNSUPPORTED for result in mine)),
            f"{abs(worst[2].z):.3g}" if worst else "-",
        )
    return table


def _print_table(console: Console, table: Table) -> None:
    """As wide as its names need, like all that is printed here: a path broken in two cannot be copied."""
    from rich.measure import Measurement

    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, needed)
    console.print(table)


def _worst_lines(report: RunReport) -> list[str]:
    lines = []
    for kernel in dict.fromkeys(planned.kernel for planned in report.plan):
        worst = worst_of([result for result in report.results if result.kernel == kernel])
        if worst:
            result, tensor, location = worst
            lines += [f"worst z of {kernel}: {tensor} of {result.case}", f"  {location}"]
    return [*lines, ""] if lines else []
