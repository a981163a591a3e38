"""Rules of the house that no linter knows: options, packages, imports, start-up, docs tables."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def run_python(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, timeout=120)


# Options


def option_uses(command: click.Command, path: str = "") -> Iterator[set[str]]:
    """For each use of an option (the on and the off of a flag are two) its spellings: {"list -k", "list --kernel"}."""
    prefix = f"{path} " if path else ""
    for option in command.params:
        if isinstance(option, click.Option):
            for spellings in filter(None, (option.opts, option.secondary_opts)):
                yield {prefix + spelling for spelling in spellings}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from option_uses(child, prefix + name)


def untested_options(command: click.Command, passed: set[str]) -> list[str]:
    return sorted(max(spellings, key=len) for spellings in option_uses(command) if not spellings & passed)


@pytest.mark.closing
def test_every_command_line_option_is_passed_by_some_test() -> None:
    from mla_verify.cli import cli
    from tests.cli_helper import PASSED_OPTIONS

    untested = untested_options(cli, PASSED_OPTIONS)
    assert not untested, f"no test passes these options to tests/cli_helper.py: {', '.join(untested)}"


def test_option_check_names_each_option_that_no_test_passes() -> None:
    @click.group()
    @click.option("--color")
    def app() -> None: ...

    @app.command()
    @click.option("-k", "--kernel")
    @click.option("--poison/--no-poison")
    @click.option("--seed")
    def kernels() -> None: ...

    @app.group("list")
    def list_() -> None: ...

    @list_.command()
    @click.option("--seed")
    def suites() -> None: ...

    every = ["--color", "kernels --kernel", "kernels --no-poison", "kernels --poison", "kernels --seed"]
    assert untested_options(app, set()) == [*every, "list suites --seed"]
    passed = {"--color", "kernels -k", "kernels --poison", "kernels --seed"}
    assert untested_options(app, passed) == ["kernels --no-poison", "list suites --seed"]


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ([], True),
        (["tests"], True),
        (["-k", "test_"], True),
        (["-k", "closes"], False),
        (["tests/test_a.py"], False),
        (["tests/test_b.py::test_other"], False),
        (["--deselect", "tests/test_b.py::test_other"], False),
        (["--ignore", "tests/test_b.py"], False),
        (["--last-failed"], False),
        (["-m", "not gpu and not closing"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_closing_tests_run_last_in_a_full_session_and_not_in_a_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], runs: bool
) -> None:
    (tests := tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests/conftest.py", tests)
    # The first test of the first file, so that only the rule can move it behind test_other.
    (tests / "test_a.py").write_text(
        "import pytest\n@pytest.mark.closing\ndef test_closes(): assert 0\ndef test_first(): pass\n"
    )
    (tests / "test_b.py").write_text(
        "import pytest\ndef test_other(): pass\n@pytest.mark.gpu\ndef test_device(): pass\n"
    )
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # some plugins take a second to load
    done = run_python("-m", "pytest", "-v", *arguments, cwd=tmp_path)
    ran = re.findall(r"^tests/test_\w\.py::(\w+) [A-Z]", done.stdout, re.MULTILINE)
    assert ("test_closes" in ran) is runs, done.stdout + done.stderr
    if runs:
        assert ran == ["test_first", "test_other", "test_closes"]
        assert done.returncode == pytest.ExitCode.TESTS_FAILED


# Packages


def test_packages_in_pyproject_are_the_folders_that_hold_one() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = []
    for folder in ("mla_verify", "reference", "evals"):
        for file in (ROOT / folder).rglob("__init__.py"):
            package = ".".join(file.parent.relative_to(ROOT).parts)
            found.append(package if folder == "mla_verify" else f"mla_verify.{package}")
    assert tool["packages"] == sorted(found)


def test_a_folder_of_modules_is_a_package() -> None:
    """Without __init__.py it would import in a checkout and be missing from the wheel."""
    for folder in ("mla_verify", "reference", "evals"):
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent.relative_to(ROOT)} has no __init__.py"


@pytest.mark.parametrize("command", [["cli.py"], ["-m", "mla_verify"]], ids=" ".join)
def test_a_checkout_runs_uninstalled(command: list[str]) -> None:
    done = run_python(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert "kernels" in done.stdout


@pytest.mark.parametrize("package", ["reference", "evals"])
def test_leaf_packages_refuse_a_second_name(package: str) -> None:
    done = run_python("-c", f"import {package}")
    assert done.returncode == 1
    assert f"import it as mla_verify.{package}" in done.stderr
    done = run_python("-c", f"import mla_verify.{package} as package; print(package.__file__)")
    assert Path(done.stdout.strip()) == ROOT / package / "__init__.py", done.stderr


# Imports


def imported_modules(file: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            # `from mla_verify import reference` names a module too.
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def is_within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("file", sorted((ROOT / "reference").rglob("*.py")), ids=lambda file: file.name)
def test_reference_imports_torch_and_the_standard_library_only(file: Path) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "mla_verify.reference"}
    assert [module for module in imported_modules(file) if not is_within(module, allowed)] == []


@pytest.mark.parametrize("file", sorted((ROOT / "evals").rglob("*.py")), ids=lambda file: file.name)
def test_evals_imports_no_torch_and_nothing_else_of_mla_verify(file: Path) -> None:
    forbidden = {"mla_verify", "torch", "transformers", "triton"}
    modules = {module for module in imported_modules(file) if not is_within(module, {"mla_verify.evals"})}
    assert [module for module in modules if is_within(module, forbidden)] == []


@pytest.mark.parametrize("arguments", ["--help", "--version", "kernels --help", "list suites", "list dims"])
def test_a_command_that_computes_nothing_starts_without_torch(arguments: str) -> None:
    script = (
        "import sys\n"
        "from mla_verify.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'numpy', 'torch', 'transformers', 'triton'} & {*sys.modules}), file=sys.stderr)\n"
    )
    done = run_python("-c", script, *arguments.split())
    assert done.stderr == "[]\n"
    assert done.returncode == 0


# Documentation


def test_docs_tables_equal_the_data_they_were_made_from() -> None:
    done = run_python("tools/docs_tables.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_docs_tables_rewrites_each_table_and_refuses_a_block_it_cannot_make() -> None:
    from tools.docs_tables import TABLES, rewritten

    stale = "".join(f"{name}\n<!-- table:{name} -->\n| stale |\n<!-- /table -->\n" for name in TABLES)
    fresh = rewritten(stale)
    assert "stale" not in fresh
    assert rewritten(fresh) == fresh
    for wrong in ("<!-- table:none -->\n<!-- /table -->", "<!-- table:dims -->\n", "<!-- /table -->"):
        with pytest.raises(ValueError, match="table"):
            rewritten(wrong)
