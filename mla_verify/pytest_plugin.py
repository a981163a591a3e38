"""pytest plugin: the marker `mla_cases(contract, ...)` and the fixture `mla_case`. See mla_verify.testing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mla_verify.testing import MLACase

_MARKER = "mla_cases"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(contract, suite='smoke', cases=(), phases=(), device='cpu'): "
        "the cases that fixture mla_case runs through, as far as the contract takes them",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mla_case" not in metafunc.fixturenames:
        return
    from mla_verify.errors import UsageError
    from mla_verify.testing import mla_cases

    marker = metafunc.definition.get_closest_marker(_MARKER)
    if marker is None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: mla_case needs @pytest.mark.{_MARKER}(CONTRACT)")
    choice: dict[str, Any] = dict(marker.kwargs)
    device = choice.pop("device", "cpu")
    try:
        cases = mla_cases(*marker.args, **choice)
    except (UsageError, TypeError) as error:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {error}") from error
    parameters = [pytest.param((case, device), id=case.spec.id) for case in cases]
    metafunc.parametrize("mla_case", parameters, indirect=True)


@pytest.fixture
def mla_case(request: pytest.FixtureRequest) -> Iterator[MLACase]:
    """One case of the marker's choice: `mla_case.inputs`, `mla_case.spec`, `mla_case.claim`."""
    from mla_verify.testing import run_case

    yield from run_case(*request.param)
