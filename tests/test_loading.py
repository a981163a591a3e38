"""Kernels from files and from other packages: what is none exits 2, says what is missing, and shows no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_verify.kernels import registered_kernels
from mla_verify.results import Verdict
from mla_verify.workers import close_workers
from tests.cli_helper import Result, invoke
from tests.kernels_helper import SINGLE, cases, verify

HEAD = "from mla_verify.kernels import Contract, KernelBase, RoundingFacts, mla_kernel\n"
KERNEL = HEAD + (
    "from mla_verify.emulate import EmulatedKernel\n"
    "from mla_verify.tensors import MLAOutput\n"
    "emulated = EmulatedKernel()\n"
    "@mla_kernel(Contract(phases=('decode',), facts=emulated.facts))\n"
    "def decode(inputs, out):\n"
    "    return MLAOutput(emulated.run(inputs).out, None)\n"
)


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def run(kernel: str | Path) -> Result:
    return invoke("kernels", "--kernel", kernel, "--case", SINGLE, "--device", "cpu")


def refused(kernel: str | Path) -> tuple[str, str]:
    """Message and hint of a kernel that exits 2, and nothing else on either stream."""
    done = run(kernel)
    assert (done.exit_code, done.stdout) == (2, "")
    message, hint = done.stderr.removesuffix("\n").split("\nhint: ")
    assert message.startswith("error: ") and "\n" not in hint
    return message.removeprefix("error: "), hint


# Files


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    message, hint = refused(f"{path}:decode")
    assert message == f"--kernel {path}:decode: there is no file {path}"
    assert hint == "give path/to/file.py:function"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").mkdir()
    assert f"there is no file {tmp_path / 'mine.py'}" in refused(f"{tmp_path / 'mine.py'}:decode")[0]


def test_a_file_that_does_not_parse_is_refused_with_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, "import torch\n\ndef decode(inputs, out:\n    return out\n")
    message, _ = refused(f"{path}:decode")
    assert message == f"{path} does not parse: line 3: '(' was never closed"


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
    ],
)
def test_a_file_that_raises_is_refused_with_the_type_and_the_line(tmp_path: Path, statement: str, what: str) -> None:
    path = write(tmp_path, f"import math\n\n{statement}\n")
    message, hint = refused(f"{path}:decode")
    assert message == f"{path} does not import: {what} (line 3)"
    assert "must import without arguments" in hint


def test_the_line_of_a_file_that_raises_in_a_function_is_the_innermost_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, "import json\ndef load():\n    return json.loads('{')\nCONFIG = load()\n")
    message, _ = refused(f"{path}:decode")
    assert message.startswith(f"{path} does not import: JSONDecodeError: ")
    assert message.endswith("(line 3)")


def test_a_neighbour_that_does_not_parse_is_the_file_that_is_named(tmp_path: Path) -> None:
    write(tmp_path, "x = 1\ndef broken(:\n", "neighbour_without_syntax.py")
    path = write(tmp_path, "import neighbour_without_syntax\n")
    message, _ = refused(f"{path}:decode")
    assert "neighbour_without_syntax.py" in message


def test_a_file_imports_its_neighbours_and_they_do_not_replace_anybodys_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the worker as well. A neighbour with the name of a module of the library does not stand in for that."""
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    write(tmp_path, "def helps(out):\n    return out\n", "neighbour_that_helps.py")
    write(tmp_path, "raise ImportError('not the sched that was meant')\n", "sched.py")
    path = write(tmp_path, KERNEL + "from neighbour_that_helps import helps\nfrom sched import scheduler\n")
    done = verify(tmp_path, "--kernel", f"{path}:decode", *cases(SINGLE))
    assert (done.exit_code, done.verdicts) == (0, [Verdict.PASS])


def test_two_files_of_one_name_are_two_kernels(tmp_path: Path) -> None:
    """Modules are found again by their name, so that the second must not be taken for the first."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    right = write(folders[0], KERNEL)
    wrong = write(folders[1], KERNEL.replace("emulated.run(inputs).out", "emulated.run(inputs).out * 2"))
    done = verify(tmp_path, "--kernel", f"{right}:decode", "--kernel", f"{wrong}:decode", *cases(SINGLE))
    assert (done.exit_code, done.verdicts) == (1, [Verdict.PASS, Verdict.FAIL])


def test_a_path_with_a_space_is_quoted_in_the_command_that_repeats_it(tmp_path: Path) -> None:
    (tmp_path / "my kernels").mkdir()
    path = write(tmp_path / "my kernels", KERNEL.replace(".out, None", ".out * 2, None"))
    done = verify(tmp_path, "--kernel", f"{path}:decode", *cases(SINGLE))
    assert done.repeats() == [f"mla-verify kernels --kernel '{path}:decode' --case {SINGLE} --device cpu"]


def test_a_file_that_imports_here_and_not_in_the_kernels_process_is_no_fault_of_the_tool(tmp_path: Path) -> None:
    text = "import os\nif 'TRITON_INTERPRET' in os.environ:\n    raise RuntimeError('no interpreter, please')\n"
    path = write(tmp_path, text + KERNEL)
    done = run(f"{path}:decode")
    assert "no interpreter, please" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "fault of mla-verify" not in done.stderr


# What the file holds


def test_a_function_that_is_not_there_is_answered_with_the_one_it_resembles(tmp_path: Path) -> None:
    path = write(tmp_path, KERNEL)
    message, hint = refused(f"{path}:decod")
    assert message == f"kernel {path}:decod: {path} has no 'decod'"
    assert hint == "did you mean decode?"


def test_a_function_that_resembles_none_is_answered_with_all_that_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, "def paged(i, o): return o\ndef ragged(i, o): return o\ndef _private(i, o): return o\n")
    assert refused(f"{path}:xyzzy")[1] == "it has paged, ragged"


def test_a_file_without_functions_says_so(tmp_path: Path) -> None:
    assert refused(f"{write(tmp_path, 'x = 1')}:decode")[1] == "it has no function"


@pytest.mark.parametrize(
    "parameters", ["q, kv_cache, page_table", "inputs", "", "inputs, out, splits", "inputs, *, out", "*, inputs, out"]
)
def test_a_function_with_other_parameters_is_shown_with_them(tmp_path: Path, parameters: str) -> None:
    path = write(tmp_path, f"def decode({parameters}): return None\n")
    message, hint = refused(f"{path}:decode")
    assert message == f"kernel {path}:decode: its signature is decode({parameters})"
    assert hint == "it must take (inputs, out) and return MLAOutput: see examples/my_kernel.py"


@pytest.mark.parametrize("parameters", ["inputs, out", "i, o, splits=4", "*args", "inputs, out=None, **more"])
def test_a_function_that_can_take_inputs_and_out_is_a_kernel(tmp_path: Path, parameters: str) -> None:
    path = write(tmp_path, KERNEL + f"@mla_kernel(decode.contract)\ndef mine({parameters}): return None\n")
    done = verify(tmp_path, "--kernel", f"{path}:mine", *cases(SINGLE))
    assert done.verdicts == [Verdict.WRONG_SHAPE]  # it ran


@pytest.mark.parametrize(("value", "kind"), [("3", "int"), ("'decode'", "str"), ("[1]", "list"), ("{}", "dict")])
def test_what_cannot_be_called_is_no_kernel(tmp_path: Path, value: str, kind: str) -> None:
    path = write(tmp_path, f"decode = {value}\n")
    message, hint = refused(f"{path}:decode")
    assert message == f"kernel {path}:decode: decode is {kind}, no function"
    assert "see examples/my_kernel.py" in hint


def test_a_class_without_contract_is_no_kernel_and_a_whole_one_is(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        KERNEL + "class Half(KernelBase):\n    def run(self, inputs, out): return decode(inputs, out)\n"
        "class Whole(Half):\n    contract = decode.contract\n"
        "class Stranger:\n    contract = decode.contract\n    run = Half.run\n",
    )
    for name in ("Half", "Stranger"):
        message, hint = refused(f"{path}:{name}")
        assert message == f"kernel {path}:{name}: class {name} is no kernel"
        assert "mla_verify.kernels.KernelBase" in hint and "`contract`" in hint
    done = verify(tmp_path, "--kernel", f"{path}:Whole", *cases(SINGLE))
    assert (done.exit_code, done.only.kernel) == (0, f"{path}:Whole")


@pytest.mark.parametrize("init", ["def __init__(self, splits): pass", "def __init__(self): raise RuntimeError('why')"])
def test_a_class_that_cannot_be_made_without_arguments_is_refused(tmp_path: Path, init: str) -> None:
    text = f"class Mine(KernelBase):\n    contract = Contract()\n    {init}\n    def run(self, i, o): return o\n"
    message, _ = refused(f"{write(tmp_path, HEAD + text)}:Mine")
    assert "why" in message or "splits" in message


def test_a_function_written_in_c_is_no_fault_of_the_tool(tmp_path: Path) -> None:
    """As those of an extension that pybind11 made: its arguments are known when it is called, and not before."""
    done = run(f"{write(tmp_path, 'decode = min')}:decode")
    assert "Traceback (most recent call last)" not in done.stderr


# Contracts


def test_a_contract_of_another_type_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "def decode(inputs, out): return out\ndecode.contract = {'form': 'absorbed'}\n")
    message, hint = refused(f"{path}:decode")
    assert message == f"kernel {path}:decode: its contract is dict"
    assert hint == "@mla_kernel(Contract(...)), from mla_verify.kernels"


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ("phases=('decod',)", "phases has 'decod'", "did you mean decode?"),
        ("phases=('decode', 'prefil')", "phases has 'prefil'", "did you mean prefill"),
        ("phases=('append',)", "phases has 'append'", "known: decode, spec, prefill, prefix, chunked, mixed"),
        ("form='write', phases=('decode',)", "phases has 'decode'", "known: append"),
        ("form='absorb'", "form has 'absorb'", "did you mean absorbed?"),
        ("dtypes=('bfloat16',)", "dtypes has 'bfloat16'", "did you mean bf16"),
        ("dtypes=('fp8',)", "dtypes has 'fp8'", "did you mean fp"),
        ("lse_base='10'", "lse_base has '10'", "known: e, 2"),
        ("lse_layout='HTD'", "lse_layout has 'HTD'", "did you mean HT"),
        ("empty_out='nan'", "empty_out has 'nan'", "any"),
        ("empty_lse='inf'", "empty_lse has 'inf'", "-inf"),
        ("strides='none'", "strides has 'none'", "any"),
        ("facts='bf16'", "facts is str", "a function from the case's dtype to RoundingFacts"),
        ("facts=RoundingFacts('bf16')", "facts is RoundingFacts", "lambda dtype: RoundingFacts(dtype)"),
    ],
)
def test_a_value_that_no_contract_knows_is_refused_with_those_it_does(
    tmp_path: Path, fields: str, message: str, hint: str
) -> None:
    path = write(tmp_path, HEAD + f"@mla_kernel(Contract({fields}))\ndef decode(inputs, out): return out\n")
    said, hinted = refused(f"{path}:decode")
    assert said == f"{path}: contract: {message}"
    assert hint in hinted


def test_a_number_where_a_string_is_needed_is_answered_with_the_string(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "contract = Contract(lse_base=2)\n")
    message, hint = refused(f"{path}:decode")
    assert message == f"{path}: contract: lse_base has 2"
    assert "'2'" in hint


@pytest.mark.parametrize("field", ["phases", "dtypes"])
def test_a_bare_string_is_no_tuple(tmp_path: Path, field: str) -> None:
    """Letter by letter it would be taken for five unknown phases."""
    value = {"phases": "decode", "dtypes": "bf16"}[field]
    path = write(tmp_path, HEAD + f"contract = Contract({field}='{value}')\n")
    message, hint = refused(f"{path}:decode")
    assert message == f"{path}: contract: {field} is '{value}'"
    assert hint.startswith("a tuple of one or more of ") and value in hint


def test_no_dtype_at_all_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "contract = Contract(dtypes=())\n")
    assert refused(f"{path}:decode")[0] == f"{path}: contract: dtypes is ()"


@pytest.mark.parametrize("field", ["page_sizes", "num_heads"])
def test_a_bare_number_is_no_tuple(tmp_path: Path, field: str) -> None:
    path = write(tmp_path, HEAD + f"@mla_kernel(Contract({field}=64))\ndef decode(inputs, out): return out\n")
    assert field in refused(f"{path}:decode")[0]


@pytest.mark.parametrize(
    "facts",
    [
        "RoundingFacts('bfloat16')",
        "RoundingFacts(d, p_dtype='bfloat16')",
        "RoundingFacts(d, sources=['x'])",
        "RoundingFacts(d, tile=0)",
        "RoundingFacts(d, rowsum='sometimes')",
    ],
)
def test_rounding_facts_that_make_no_sense_are_refused(tmp_path: Path, facts: str) -> None:
    text = KERNEL.replace("emulated.facts", f"lambda d: {facts}")
    assert "RoundingFacts" in refused(f"{write(tmp_path, text)}:decode")[0]


# Names


def test_an_unknown_name_is_answered_with_the_one_it_resembles_and_the_form_of_ones_own() -> None:
    message, hint = refused("triton-decod")
    assert message == "unknown kernel 'triton-decod'"
    assert hint.startswith("did you mean triton-decode") and hint.endswith("; your own: path/to/file.py:function")


def test_a_name_that_resembles_none_says_where_they_are_listed() -> None:
    message, hint = refused("xyzzy")
    assert message == "unknown kernel 'xyzzy'"
    assert hint == "mla-verify list kernels shows what there is; your own: path/to/file.py:function"


# Entry points


class Packages:
    """Installed packages, each with one module and the kernels that it registers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, package: str, module: str, text: str, **kernels: str) -> None:
        """kernels: name -> function of the module; underscores in names are dashes."""
        (self._folder / f"{module}.py").write_text(text)
        info = self._folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '-')} = {module}:{function}" for name, function in kernels.items()]
        (info / "entry_points.txt").write_text("\n".join(["[mla_verify.kernels]", *lines, ""]))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Packages]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    # Workers know the sys.path of when they were started, and which kernels there were.
    close_workers()
    registered_kernels.cache_clear()
    yield Packages(folder)
    registered_kernels.cache_clear()


def test_a_registered_kernel_is_listed_and_runs_under_its_name(packages: Packages, tmp_path: Path) -> None:
    packages.install("acme", "acme_one", KERNEL + "__version__ = '1.2'\n", acme_decode="decode")
    listed = invoke("list", "kernels")
    assert listed.exit_code == 0
    assert "\n\nacme-decode  available on " in listed.stdout and ", acme_one 1.2\n" in listed.stdout
    done = verify(tmp_path, "--kernel", "acme-decode", *cases(SINGLE))
    assert (done.exit_code, done.only.kernel, done.only.ran) == (0, "acme-decode", "decode")


def test_a_registered_kernel_is_among_all_that_run_when_none_is_named(packages: Packages, tmp_path: Path) -> None:
    packages.install("acme", "acme_two", KERNEL.replace(".out, None", ".out * 2, None"), acme_decode="decode")
    done = verify(tmp_path, *cases(SINGLE))
    verdicts = {result.kernel: result.verdict for result in done.report.results}
    assert (done.exit_code, verdicts["acme-decode"], verdicts["torch-absorbed"]) == (1, Verdict.FAIL, Verdict.PASS)


def test_a_registered_kernel_takes_part_in_did_you_mean(packages: Packages) -> None:
    packages.install("acme", "acme_three", KERNEL, acme_decode="decode")
    assert refused("acme-decod")[1].startswith("did you mean acme-decode")


def test_a_registered_kernel_that_dies_takes_nothing_else_along(packages: Packages, tmp_path: Path) -> None:
    text = KERNEL.replace("    return", "    import os; os._exit(5)\n    return")
    packages.install("acme", "acme_four", text, acme_decode="decode")
    done = verify(tmp_path, "--kernel", "acme-decode", "--kernel", "torch-absorbed", *cases(SINGLE))
    assert (done.exit_code, done.verdicts) == (1, [Verdict.CRASH, Verdict.PASS])
    assert done.report.results[0].reason == "the kernel's process ended: exit code 5"


@pytest.mark.parametrize("arguments", [["list", "kernels"], ["kernels", "--kernel", "acme-decode", "--case", SINGLE]])
def test_two_packages_with_one_name_are_refused_with_both(packages: Packages, arguments: list[str]) -> None:
    packages.install("acme", "acme_five", KERNEL, acme_decode="decode")
    packages.install("other", "other_five", KERNEL, acme_decode="decode")
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    message, hint = done.stderr.splitlines()
    assert message.startswith("error: two kernels of one name: 'acme-decode' is ")
    assert "acme_five:decode" in message and "other_five:decode" in message
    assert hint.startswith("hint: rename one")


@pytest.mark.parametrize("arguments", [["list", "kernels"], ["kernels", "--case", SINGLE]])
def test_a_package_with_a_name_of_ours_is_refused_with_both(packages: Packages, arguments: list[str]) -> None:
    packages.install("acme", "acme_six", KERNEL, torch_absorbed="decode")
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    message, _ = done.stderr.splitlines()
    assert "two kernels of one name: 'torch-absorbed' is of acme (acme_six:decode)" in message
    assert "mla-verify itself" in message


def test_a_package_with_a_name_of_ours_does_not_replace_the_kernel(packages: Packages, tmp_path: Path) -> None:
    packages.install("acme", "acme_seven", KERNEL.replace(".out, None", ".out * 2, None"), torch_absorbed="decode")
    done = verify(tmp_path, "--kernel", "torch-absorbed", *cases(SINGLE))
    assert (done.exit_code, done.verdicts) == (0, [Verdict.PASS])


BROKEN = "raise ImportError('libfoo.so.3: cannot open shared object file')\n"


def test_a_registered_module_that_does_not_import_is_refused_when_it_is_named(packages: Packages) -> None:
    packages.install("acme", "acme_eight", BROKEN, acme_decode="decode")
    message, hint = refused("acme-decode")
    assert message.startswith("kernel acme-decode (acme_eight:decode) does not import: ImportError: libfoo.so.3: ")
    assert hint == "mend or uninstall the package that registers it"


def test_a_registered_function_that_is_not_there_is_refused_when_it_is_named(packages: Packages) -> None:
    packages.install("acme", "acme_nine", KERNEL, acme_decode="decod")
    message, hint = refused("acme-decode")
    assert message.startswith("kernel acme-decode: ") and message.endswith("acme_nine.py has no 'decod'")
    assert hint == "did you mean decode?"


def test_a_registered_module_that_does_not_import_does_not_stop_a_run_of_others(
    packages: Packages, tmp_path: Path
) -> None:
    packages.install("acme", "acme_ten", BROKEN, acme_decode="decode")
    done = verify(tmp_path, "--kernel", "torch-absorbed", *cases(SINGLE))
    assert (done.exit_code, done.verdicts) == (0, [Verdict.PASS])


@pytest.mark.parametrize("text", [BROKEN, HEAD], ids=["raises", "lacks the function"])
def test_a_registered_kernel_that_does_not_load_is_listed_as_unavailable_beside_the_others(
    packages: Packages, text: str
) -> None:
    packages.install("acme", "acme_eleven", text, acme_decode="decode")
    listed = invoke("list", "kernels")
    assert listed.exit_code == 0
    assert "torch-absorbed  available" in listed.stdout and "acme-decode  unavailable" in listed.stdout


def test_a_registered_module_that_does_not_import_is_left_out_of_a_run_of_all(
    packages: Packages, tmp_path: Path
) -> None:
    packages.install("acme", "acme_twelve", BROKEN, acme_decode="decode")
    done = verify(tmp_path, *cases(SINGLE))
    assert done.exit_code == 0
    assert "libfoo.so.3" in done.done.stderr


def test_a_registered_module_that_exits_on_import_does_not_end_the_tool_as_if_all_had_passed(
    packages: Packages,
) -> None:
    packages.install("acme", "acme_thirteen", "import sys\nsys.exit(0)\n", acme_decode="decode")
    done = run("acme-decode")
    assert done.exit_code == 2


def test_a_function_without_a_contract_is_said_to_be_held_to_the_default_one(tmp_path: Path) -> None:
    path = write(tmp_path, KERNEL.replace("@mla_kernel(Contract(phases=('decode',), facts=emulated.facts))\n", ""))
    done = invoke("kernels", "--kernel", f"{path}:decode", "--case", SINGLE, "--list")
    assert f"note: {path}:decode declares no contract and is held to the default one (form absorbed, " in done.stderr
    with_one = invoke("kernels", "--kernel", f"{write(tmp_path, KERNEL, 'b.py')}:decode", "--case", SINGLE, "--list")
    assert "declares no contract" not in with_one.stderr


def test_the_list_of_what_would_run_marks_what_is_outside_the_contract(tmp_path: Path) -> None:
    text = KERNEL.replace("phases=('decode',)", "phases=('decode',), page_sizes=(16,)")
    path = write(tmp_path, text)
    here, outside = SINGLE.replace("p64", "p16"), SINGLE
    done = invoke("kernels", "--kernel", f"{path}:decode", *cases(here, outside), "--list")
    lines = done.stdout.splitlines()
    assert f"{here}  {path}:decode" in lines and outside in lines
    assert f"    UNSUPPORTED by {path}:decode: page size 64 is not among 16" in lines
    assert lines[-1] == "2 cases, 2 verdicts planned, 1 of them UNSUPPORTED"


@pytest.mark.parametrize("name", ["mine.py", "mine:decode", "folder/mine.py:"])
def test_a_file_without_its_function_is_told_how_it_is_written(name: str) -> None:
    message, hint = refused(name)
    assert message == f"unknown kernel {name!r}"
    assert hint == "your own is path/to/file.py:function"
