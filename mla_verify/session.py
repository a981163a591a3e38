"""Plan -> run -> decision -> reports: the order in which a run of `mla-verify kernels` does its work."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

import click

from mla_verify.against import Against
from mla_verify.config import RunConfig, repeat_command
from mla_verify.decision import EXIT_INCONCLUSIVE, decide
from mla_verify.dump import DumpWriter
from mla_verify.environment import describe_environment, gpu_name, package_hash
from mla_verify.outputs import Outputs
from mla_verify.plan import Plan, PlanEntry
from mla_verify.report.console import print_report
from mla_verify.report.files import discard_stdout, write_whole
from mla_verify.report.json_report import to_json
from mla_verify.report.junit import to_junit
from mla_verify.report.progress import progress_bar
from mla_verify.report.summary import to_summary
from mla_verify.results import CaseResult, Planned, RunReport, Verdict


def verify(config: RunConfig, plan: Plan, argv: Sequence[str]) -> int:
    """Run the plan, write and print the reports, and return the exit code."""
    started, clock = datetime.now(timezone.utc), time.perf_counter()
    outputs = _outputs(config, plan)
    results, interrupted = _run(config, plan, outputs)
    more = outputs.open_questions(results)
    decision = decide(plan, results, interrupted, more)
    environment = describe_environment(
        argv=argv,
        device=config.device,
        seed=config.seed,
        timeout=config.timeout,
        kernels=plan.kernels,
        unavailable=plan.unavailable,
        started=started,
        seconds=time.perf_counter() - clock,
    )
    environment |= outputs.described()
    planned = tuple(Planned(entry.case_id, entry.kernel.name) for entry in plan.entries)
    report = RunReport(planned, results, environment, *decision)
    try:
        # Before the console, whose reader may go away.
        written = _write(report, config, plan, outputs, more)
    finally:
        _print(report)
    return report.exit_code if written else report.exit_code or EXIT_INCONCLUSIVE


def _outputs(config: RunConfig, plan: Plan) -> Outputs:
    writer = against = None
    if config.dump is not None:
        about = {"device": config.device, "gpu": gpu_name() if config.device == "cuda" else "none"}
        writer = DumpWriter(config.dump, about | {"package_hash": package_hash()})
    if config.against is not None:
        planned = dict.fromkeys(entry.kernel.name for entry in plan.entries)
        against = Against.of(config.against, tuple(planned), config.bit_equal)
    return Outputs(writer, against)


def _run(config: RunConfig, plan: Plan, outputs: Outputs) -> tuple[tuple[CaseResult, ...], bool]:
    """One result for every entry and whether the run was interrupted, also when the run itself breaks down."""
    from mla_verify.run import run_plan

    seen: list[CaseResult] = []
    with progress_bar(len(plan.entries)) as show, _termination_as_interrupt():

        def on_result(result: CaseResult) -> None:
            seen.append(result)
            show(result)

        try:
            outcome = run_plan(
                plan.entries,
                device=config.device,
                jobs=config.jobs,
                fail_fast=config.fail_fast,
                timeout=config.timeout,
                on_result=on_result,
                inputs_file=config.inputs,
                outputs=outputs if outputs.are_wanted else None,
            )
            return outcome.results, outcome.interrupted
        except KeyboardInterrupt:
            return _completed(config, plan, seen, "interrupted"), True
        except Exception as error:
            reason = f"mla-verify failed: {type(error).__name__}: {error}"
            return _completed(config, plan, seen, reason, traceback.format_exc()), False


def _completed(
    config: RunConfig, plan: Plan, seen: Sequence[CaseResult], reason: str, trace: str = ""
) -> tuple[CaseResult, ...]:
    """The results so far, and NOT_RUN for the entries that have none."""
    by_entry = {(result.case, result.kernel): result for result in seen}

    def not_run(entry: PlanEntry) -> CaseResult:
        return CaseResult(
            case=entry.case_id,
            kernel=entry.kernel.name,
            verdict=Verdict.NOT_RUN,
            reason=reason,
            repeat=repeat_command(entry.kernel.name, entry.case_id, config.device, config.inputs, config.timeout),
            claim=entry.claim,
            phase=entry.phase,
            dtype=entry.dtype,
            traceback=trace,
            tool_error=bool(trace),
        )

    return tuple(by_entry.get((entry.case_id, entry.kernel.name)) or not_run(entry) for entry in plan.entries)


# Seconds. A second signal at once would be raised in the clean-up after the first, where it leaves locks held.
_ONE_INTERRUPT = 0.5


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM, which CI services send to a job past its time, like Ctrl-C: the results so far are written."""
    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield
        return

    last = -_ONE_INTERRUPT

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _ONE_INTERRUPT:
            last = now
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _write(report: RunReport, config: RunConfig, plan: Plan, outputs: Outputs, more: Sequence[str]) -> bool:
    """Write the files that were asked for. False when one could not be written; the others are all the same."""
    steps: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
        (config.json, lambda path: write_whole(path, to_json(report))),
        (config.junit, lambda path: write_whole(path, to_junit(report))),
        (config.summary, lambda path: write_whole(path, to_summary(report, plan, more))),
        (config.dump, lambda path: outputs.finish(report)),
    )
    written = True
    for path, step in steps:
        if path is None:
            continue
        try:
            step(path)
        except OSError as error:
            click.echo(f"error: {path} could not be written: {error}", err=True)
            written = False
    return written


def _print(report: RunReport) -> None:
    from rich.console import Console

    console = Console()
    with console.capture() as captured:  # not rich's own printing, which exits 1 on a closed pipe: 1 means wrong
        print_report(report, console)
    try:
        sys.stdout.write(captured.get())
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()  # `| head` has seen enough; the verdict stays what it is
