"""Keys or values in float64, block by block: converted once where they fit, again each time where they do not."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_BLOCK_BYTES = 48 << 20  # one float64 block
_RESIDENT_BYTES = 256 << 20  # of all blocks and their squares together


class Keys:
    """x [groups, kv_len, dim] of any dtype, as float64 blocks of consecutive keys. x itself is never written."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.groups, self.length, self.dim = x.shape
        key_bytes = max(1, 8 * self.groups * self.dim)  # keys may have no dims
        self._resident = 2 * key_bytes * self.length <= _RESIDENT_BYTES
        step = max(1, _BLOCK_BYTES // key_bytes)
        self._slices = [slice(start, min(start + step, self.length)) for start in range(0, self.length, step)]
        self._values: dict[int, Tensor] = {}
        self._squares: dict[int, Tensor] = {}

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(which keys, their float64 values [groups, keys, dim])."""
        for i, keys in enumerate(self._slices):
            yield keys, self._value(i)

    def blocks_and_squares(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(which keys, their float64 values, the squares of those)."""
        for i, keys in enumerate(self._slices):
            value = self._value(i)
            square = self._squares.get(i)
            if square is None:
                square = value.square()
                if self._resident:
                    self._squares[i] = square
            yield keys, value, square

    def _value(self, i: int) -> Tensor:
        value = self._values.get(i)
        if value is None:
            value = self.x[:, self._slices[i]].double()
            if self._resident:
                self._values[i] = value
        return value

    def part(self, keys: slice) -> Keys:
        """The same for some of the keys."""
        return Keys(self.x[:, keys])
