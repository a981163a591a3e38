"""A kernel file's kernels that do to their process what a broken kernel does. Each misbehaves in fp16 alone.

Run as "tests/isolation_kernels.py:NAME", in a worker: that finds the file by its path.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from mla_verify.emulate import EmulatedKernel
from mla_verify.kernels import Contract, mla_kernel
from mla_verify.tensors import AbsorbedInputs, MLAOutput

CONTRACT = Contract(phases=("decode",), facts=EmulatedKernel().facts)


def _honest(inputs: AbsorbedInputs) -> MLAOutput:
    return MLAOutput(EmulatedKernel().run(inputs).out, None)


def _is_bad(inputs: AbsorbedInputs) -> bool:
    return inputs.q_nope.dtype == torch.float16


@mla_kernel(CONTRACT)
def spins(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    while _is_bad(inputs):
        pass
    return _honest(inputs)


@mla_kernel(CONTRACT)
def sleeps_half_a_second(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    time.sleep(0.5)
    return _honest(inputs)


@mla_kernel(CONTRACT)
def allocates(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    held = []
    while _is_bad(inputs):
        held.append(bytearray(os.urandom(1)) * (64 << 20))
    return _honest(inputs)


@mla_kernel(CONTRACT)
def is_killed(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    if _is_bad(inputs):
        os.kill(os.getpid(), signal.SIGKILL)
    return _honest(inputs)


@mla_kernel(CONTRACT)
def compiles(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """For 1.5 s, in a child of a child, as nvcc runs below ninja."""
    if _is_bad(inputs):
        with tempfile.TemporaryDirectory() as folder:
            nvcc = Path(folder, "nvcc")
            shutil.copy(shutil.which("sleep") or "", nvcc)
            subprocess.run(["sh", "-c", f"{nvcc} 1.5; true"], check=True)
    return _honest(inputs)


@mla_kernel(CONTRACT)
def leaves_a_child(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """Dies, while a process that it forked lives on and holds all that was open."""
    if _is_bad(inputs):
        if os.fork() == 0:
            time.sleep(60)
        os._exit(5)
    return _honest(inputs)
