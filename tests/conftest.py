"""Which tests run: `gpu` needs a device, `closing` runs last and only in a session that leaves no test out."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LEFT_OUT = pytest.StashKey[list[str]]()  # ids of deselected tests; gpu tests, which need hardware, do not count


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = []


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.get_closest_marker("gpu"):
            item.config.stash[LEFT_OUT].append(item.nodeid)


def is_full_session(config: pytest.Config) -> bool:
    """Whether this process runs every test that needs no GPU, in order."""
    # Each drops files before tests are deselected, or reorders tests after this hook.
    options = ("lf", "failedfirst", "newfirst", "stepwise", "ignore", "ignore_glob")
    folders = [config.invocation_params.dir / arg for arg in config.args]  # path::test is no folder
    return (
        not config.stash[LEFT_OUT]
        and not any(getattr(config.option, option, None) for option in options)
        and any(TESTS.is_relative_to(folder.resolve()) for folder in folders)
        and not hasattr(config, "workerinput")  # of pytest-xdist, where no process sees all tests
    )


# trylast: after -k and -m have deselected.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    closing = [item for item in items if item.get_closest_marker("closing")]
    items[:] = [item for item in items if item not in closing]
    if is_full_session(config):
        items += closing
    elif closing:
        config.hook.pytest_deselected(items=closing)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
