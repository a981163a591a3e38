"""The kernel of my_kernel.py in pytest: one test for each case of the suite that the contract takes."""

from __future__ import annotations

import pytest

from examples.my_kernel import CONTRACT, my_decode
from mla_verify.tensors import output_buffers
from mla_verify.testing import MLACase, assert_mla


@pytest.mark.mla_cases(CONTRACT)
def test_my_decode_is_right(mla_case: MLACase) -> None:
    inputs = mla_case.inputs
    result = my_decode(inputs, output_buffers(inputs, inputs.q_nope.dtype).output)
    assert_mla(result, mla_case, CONTRACT)
