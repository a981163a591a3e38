"""What GPU tests need of the machine."""

from __future__ import annotations

import pytest

from mla_verify.calls import availability
from mla_verify.kernels import load_kernel


def needs(*names: str) -> None:
    """Skip the test, with the reason, where one of these kernels of the table cannot run."""
    for name in dict.fromkeys(names):
        if why := availability(load_kernel(name, "cuda"), "cuda").why_not:
            pytest.skip(f"{name}: {why}")
