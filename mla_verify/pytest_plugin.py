"""pytest plugin: the marker `mla_cases(contract, ...)` and the fixture `mla_case`. See mla_verify.testing.

It is loaded in every pytest run of everyone who has the package, so that it imports nothing until a test uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mla_verify.testing import MLACase

_MARKER = "mla_cases"
_SIGNATURE = f"{_MARKER}(contract, suite='smoke', cases=(), phases=(), dtypes=(), device='cpu')"
_DEVICES = ("auto", "cpu", "cuda")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_SIGNATURE}: run the test once for each case of the suite, or of `cases`, that the contract takes; "
        "fixture mla_case is the case. device: cpu, cuda, or auto.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A module's marker is for those of its tests that want cases; a test's own is for itself.
    has_own = any(mark.name == _MARKER for mark in metafunc.definition.own_markers)
    if "mla_case" not in metafunc.fixturenames and not has_own:
        return
    from mla_verify.errors import UsageError

    parameters, problem = [], ""
    try:
        if "mla_case" not in metafunc.fixturenames:
            raise UsageError(f"the test has {_MARKER} and no argument mla_case", "without it, it runs once, on no case")
        parameters = _parameters(metafunc.definition)
    except UsageError as error:
        problem = f"{metafunc.definition.nodeid}: {error}"
    if problem:
        # Outside of `except`, and no pytest.UsageError: what is shown is the problem, without frames of pytest or ours.
        pytest.fail(problem, pytrace=False)
    metafunc.parametrize("mla_case", parameters, indirect=True, ids=[case.spec.id for case, *_ in parameters])


def _parameters(definition: pytest.Item) -> list[Any]:
    """What the fixture is given, for each case: the case, its contract and the device."""
    import inspect

    from mla_verify.errors import UsageError, did_you_mean
    from mla_verify.testing import mla_cases

    marker = definition.get_closest_marker(_MARKER)
    if marker is None:
        raise UsageError("fixture mla_case has no cases", f"mark the test: @pytest.mark.{_MARKER}(CONTRACT)")
    # The closest one counts, so that a test can differ from its module; of two on one test, one would be lost.
    if sum(own.name == _MARKER for own in definition.own_markers) > 1:
        raise UsageError(f"two {_MARKER} markers on one test", "write two tests, or name the cases in one marker")
    choice: dict[str, Any] = dict(marker.kwargs)
    device = choice.pop("device", "cpu")
    if device not in _DEVICES:
        hint = did_you_mean(str(device), _DEVICES, f"known: {', '.join(_DEVICES)}")
        raise UsageError(f"{_MARKER}: unknown device {device!r}", hint)
    try:
        bound = inspect.signature(mla_cases).bind(*marker.args, **choice)
    except TypeError as error:
        raise UsageError(f"{_MARKER}: {error}", f"it is {_SIGNATURE}") from error
    contract = bound.arguments["contract"]
    return [(case, contract, device) for case in mla_cases(*bound.args, **bound.kwargs)]


@pytest.fixture
def mla_case(request: pytest.FixtureRequest) -> Iterator[MLACase]:
    """Each case that @pytest.mark.mla_cases(CONTRACT) chooses, for assert_mla(my_kernel(mla_case.inputs), mla_case).

    `mla_case.inputs` are the tensors, `mla_case.output_buffers()` buffers full of NaN to write into, `mla_case.spec`
    the case as a value, `mla_case.claim` what it is for. Inputs that are not what they were are an error of the test.
    """
    from mla_verify.testing import MLACase

    case, contract, device = request.param
    mine = MLACase(case.spec, contract, case.claim, _resolved(device))
    yield mine
    broken = mine.broken_rule()
    if broken:
        pytest.fail(f"{mine}: {broken}, or the test did", pytrace=False)


def _resolved(device: str) -> str:
    if device == "cpu":
        return device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    # An error and no skip: whoever asks for a GPU wants to know that nothing ran on it.
    if device == "cuda":
        pytest.fail(
            f"{_MARKER}(device='cuda'): torch sees no CUDA device\n"
            "hint: device='auto' takes the CPU then, @pytest.mark.skipif(not torch.cuda.is_available(), ...) skips",
            pytrace=False,
        )
    return "cpu"
