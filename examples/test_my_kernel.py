"""The kernels of my_kernel.py in pytest: one test for each case of suite smoke that the contract takes.

pytest examples/test_my_kernel.py -k "needle and bf16"
"""

from __future__ import annotations

import pytest

from examples.my_kernel import CONTRACT, WRITE_CONTRACT, my_cache_write, my_decode  # where your kernel is
from mla_verify.tensors import AbsorbedInputs, WriteInputs
from mla_verify.testing import MLACase, assert_mla


@pytest.mark.mla_cases(CONTRACT)
def test_my_decode_is_right(mla_case: MLACase) -> None:
    inputs = mla_case.inputs  # never written: a kernel that changes them fails
    assert isinstance(inputs, AbsorbedInputs)
    assert_mla(my_decode(inputs, mla_case.output_buffers()), mla_case)


@pytest.mark.mla_cases(WRITE_CONTRACT)
def test_my_cache_write_is_right(mla_case: MLACase) -> None:
    assert isinstance(mla_case.inputs, WriteInputs)
    assert_mla(my_cache_write(mla_case.inputs, mla_case.output_buffers()), mla_case)
