"""Which GPU this is, for kernels that are written for some only. Imports torch when it is asked."""

from __future__ import annotations


def capability() -> tuple[int, int]:
    """Compute capability of the current CUDA device: (9, 0) is SM 9.0, Hopper."""
    import torch

    return torch.cuda.get_device_capability()


def this_gpu() -> str:
    """In words: "this is an NVIDIA H200, SM 9.0"."""
    import torch

    name = torch.cuda.get_device_name()
    major, minor = capability()
    return f"this is {'an ' if name.startswith('NVIDIA') else ''}{name}, SM {major}.{minor}"
