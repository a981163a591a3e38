"""The commands. Each builds one value from its flags and hands it on; errors become messages and exit codes here."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from mla_verify import __version__
from mla_verify.config import DEFAULT_SUITE, DEVICES, make_config, resolve_device
from mla_verify.decision import EXIT_INCONCLUSIVE, EXIT_INTERRUPTED, EXIT_USAGE
from mla_verify.errors import UsageError, did_you_mean
from mla_verify.report.files import discard_stdout
from mla_verify.watch import DEFAULT_TIMEOUT

_EXIT_PIPE = 141  # 128 + SIGPIPE: what a shell reports for a program whose reader has gone
_FILE = click.Path(path_type=Path)


class _Group(click.Group):
    """A group that answers an unknown command with the ones it resembles, in every version of click."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            raise UsageError(f"unknown command {name!r}", did_you_mean(name, known, f"known: {', '.join(known)}"))
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mla-verify")
def cli() -> None:
    """Correctness and accuracy verification for Multi-head Latent Attention."""


@cli.command()
@click.option("--suite", metavar="NAME", help=f"Cases to run: mla-verify list suites.  [default: {DEFAULT_SUITE}]")
@click.option("--case", "cases", metavar="ID", multiple=True, help="A case by its id, of a suite or not. Repeatable.")
@click.option("--inputs", type=_FILE, metavar="FILE", help="Real activations from a .safetensors file, as one case.")
@click.option(
    "--kernel",
    "kernels",
    metavar="NAME",
    multiple=True,
    help="One of `list kernels`, or FILE.py:FUNCTION. Repeatable.  [default: all available here]",
)
@click.option("--require", "required", metavar="NAME", multiple=True, help="Inconclusive unless it decides a case.")
@click.option(
    "--dtype", "dtypes", metavar="NAME", multiple=True, help="Only cases of this dtype: fp32, fp16, bf16. Repeatable."
)
@click.option(
    "--device", type=click.Choice(DEVICES), default="auto", show_default=True, help="auto: cuda if there is one."
)
@click.option("--seed", type=click.IntRange(0, 10**18 - 1), help="Replaces the seed of every case.")
@click.option("--seeds", metavar="N or A-B", help="Every case with each of the seeds 0 to N - 1, or A to B.")
@click.option("--json", type=_FILE, metavar="PATH", help="Write the report as JSON.")
@click.option("--junit", type=_FILE, metavar="PATH", help="Write the report as JUnit XML.")
@click.option("--summary", type=_FILE, metavar="PATH", help="Write a small JSON: counts, one letter a verdict.")
@click.option("--dump", type=_FILE, metavar="DIR", help="Write every output, for --against of another build's run.")
@click.option("--against", type=_FILE, metavar="DIR", help="Compare the outputs with another build's, from its --dump.")
@click.option("--bit-equal", is_flag=True, help="With --against: any bit that differs is wrong.")
@click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help=f"Of one kernel call in a process of its own; compiling is not counted.  [default: {DEFAULT_TIMEOUT:g}]",
)
@click.option("--list", "list_only", is_flag=True, help="Print what would run, and why, and stop.")
@click.option(
    "--jobs", type=click.IntRange(1, 256), default=1, show_default=True, metavar="N", help="Processes that judge cases."
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first case that is wrong.")
@click.pass_context
def kernels(
    ctx: click.Context,
    suite: str | None,
    cases: Sequence[str],
    inputs: Path | None,
    kernels: Sequence[str],
    required: Sequence[str],
    dtypes: Sequence[str],
    device: str,
    seed: int | None,
    seeds: str | None,
    json: Path | None,
    junit: Path | None,
    summary: Path | None,
    dump: Path | None,
    against: Path | None,
    bit_equal: bool,
    timeout: float | None,
    list_only: bool,
    jobs: int,
    fail_fast: bool,
) -> None:
    """Verify attention kernels against the float64 reference.

    Exit code: 0 every claim decided and none wrong, 1 a kernel is wrong, 2 usage, 3 inconclusive, 130 interrupted.
    """
    if list_only:
        for flag, given in (
            ("--json", json),
            ("--junit", junit),
            ("--summary", summary),
            ("--dump", dump),
            ("--against", against),
            ("--fail-fast", fail_fast),
            ("--timeout", timeout),
        ):
            if given:
                raise UsageError(f"--list runs nothing, so {flag} has no effect", f"leave out --list or {flag}")
    config = make_config(
        suite=suite,
        cases=cases,
        inputs=inputs,
        kernels=kernels,
        required=required,
        dtypes=dtypes,
        device=device,
        seed=seed,
        seeds=seeds,
        json=json,
        junit=junit,
        summary=summary,
        dump=dump,
        against=against,
        bit_equal=bit_equal,
        jobs=jobs,
        fail_fast=fail_fast,
        timeout=timeout,
    )
    from mla_verify.plan import build_plan

    plan = build_plan(config)
    for line in plan.notes():
        click.echo(line, err=True)
    if list_only:
        from mla_verify.report.listing import list_plan

        click.echo(list_plan(plan))
        return
    from mla_verify.session import verify

    ctx.exit(verify(config, plan, argv=["mla-verify", *ctx.obj]))


@cli.group("list", cls=_Group)
def list_() -> None:
    """Print what there is: kernels, suites, dims."""


@list_.command("kernels")
def list_kernels_command() -> None:
    """Each kernel's contract, and whether it can run here or why not."""
    from mla_verify.report.listing import list_kernels

    click.echo(list_kernels(resolve_device("auto")))


@list_.command("suites")
def list_suites_command() -> None:
    """Each suite with its number of cases."""
    from mla_verify.report.listing import list_suites

    click.echo(list_suites())


@list_.command("dims")
def list_dims_command() -> None:
    """Head counts of real models by tensor parallelism, and their head dims."""
    from mla_verify.report.listing import list_dims

    click.echo(list_dims())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks must not cost the report.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        discard_stdout()
        code = _EXIT_PIPE
    except Exception:
        traceback.print_exc()
        click.echo("error: this is a fault of mla-verify, and no verdict on a kernel", err=True)
        code = EXIT_INCONCLUSIVE
    sys.exit(code)


def _run(args: list[str]) -> int:
    """click's standalone mode, but with our messages and codes: click exits 1 on a closed pipe, and 1 means wrong."""
    try:
        with cli.make_context("mla-verify", list(args), obj=tuple(args)) as ctx:
            cli.invoke(ctx)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.UsageError as error:
        return _complain(_as_ours(error))
    except UsageError as error:
        return _complain(error)
    return 0


def _as_ours(error: click.UsageError) -> UsageError:
    # click leaves out the context of an option that lacks its value.
    hint = f"{error.ctx.command_path} --help lists the options" if error.ctx else "--help lists a command's options"
    if isinstance(error, click.NoSuchOption):
        known = [name for param in error.ctx.command.params for name in param.opts] if error.ctx else []
        return UsageError(f"unknown option {error.option_name!r}", did_you_mean(error.option_name, known, hint))
    return UsageError(error.format_message(), hint)


def _complain(error: UsageError) -> int:
    click.echo(f"error: {error.message}\nhint: {error.hint}", err=True)
    return EXIT_USAGE
