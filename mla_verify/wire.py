"""Values between two processes, through a socket. Tensors go as their bytes, straight from and into their memory.

A pickled tensor would be copied several times over on its way, and the outputs of a case may be hundreds of MB.
"""

from __future__ import annotations

import io
import pickle
import select
import socket
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_COUNTS = struct.Struct("<QI")  # bytes of the pickle, number of buffers; then the bytes of each buffer
_SIZE = struct.Struct("<Q")


class Channel:
    """One end of a connection. `send` and `receive` take one value at a time; one thread at each end.

    Tensors arrive on the CPU and contiguous, whatever they were.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def ready(self, seconds: float) -> bool:
        """Whether there is something to receive, or the other end is closed, within this time."""
        return bool(self._poll.poll(1000 * seconds))

    def send(self, value: object) -> None:
        """Raises what pickle raises, before anything is sent; OSError when the other end is closed."""
        self.send_pickled(*pickled(value))

    def send_pickled(self, text: bytes, buffers: Sequence[pickle.PickleBuffer]) -> None:
        """The same, of what `pickled` has made."""
        views = [buffer.raw() for buffer in buffers]
        sizes = b"".join(_SIZE.pack(view.nbytes) for view in views)
        self._socket.sendall(_COUNTS.pack(len(text), len(views)) + sizes + text)
        for view in views:
            self._socket.sendall(view)

    def receive(self) -> Any:
        """Raises EOFError when the other end is closed."""
        length, count = _COUNTS.unpack(self._take(bytearray(_COUNTS.size)))
        sizes = [_SIZE.unpack(self._take(bytearray(_SIZE.size)))[0] for _ in range(count)]
        text = self._take(bytearray(length))
        return pickle.loads(text, buffers=[self._take(_room(size)) for size in sizes])

    def _take(self, buffer: Any) -> Any:
        """The buffer, filled."""
        rest = memoryview(buffer)
        while rest.nbytes:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise EOFError
            rest = rest[count:]
        return buffer


def pair() -> tuple[Channel, Channel]:
    """Two connected ends."""
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def pickled(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """A value's pickle, and the memory of the tensors in it."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.buffers


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor:
            return NotImplemented
        flat = value.detach().cpu().contiguous().view(-1)
        data = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
        return _tensor, (data, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _tensor(data: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    import torch

    if not data.nbytes:  # has no stride to be viewed with
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)


def _room(size: int) -> Any:
    import numpy as np  # not zeroed first, as a bytearray is

    return np.empty(size, dtype=np.uint8)
