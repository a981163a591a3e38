"""For libraries that allocate what they return: memory that is freed may hold the right answer already."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """What `torch.empty` gives is full of NaN: a kernel that leaves a row unwritten must not find its last result.

    torch does so while deterministic algorithms are asked for (torch.utils.deterministic.fill_uninitialized_memory).
    """
    import torch

    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations that have no deterministic form
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
