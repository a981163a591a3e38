"""PyTorch's concatenation, on any device: what kernels of form concat replace, and what decides the form on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_verify.kernels.contract import Contract, KernelBase

if TYPE_CHECKING:
    from mla_verify.tensors import ConcatInputs, MLAOutput


class TorchConcat(KernelBase):
    name = "torch-concat"
    contract = Contract(form="concat")

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def run(self, inputs: ConcatInputs, out: MLAOutput) -> MLAOutput:
        import torch

        from mla_verify.tensors import MLAOutput

        rope = inputs.rope.expand(-1, inputs.nope.shape[1], -1)  # of keys, all heads' at once
        return MLAOutput(torch.cat([inputs.nope, rope], dim=-1, out=out.out), None)

    def ran(self) -> str:
        return "torch.cat"
