"""In a checkout that is not installed, pytest knows nothing of the package's plugin, which some tests need."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("mla_verify"):
        from mla_verify import pytest_plugin

        config.pluginmanager.register(pytest_plugin, "mla_verify")
