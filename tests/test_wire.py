"""Values between two processes: tensors arrive as they were, in their own memory, and large ones at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from mla_verify.tensors import MLAOutput
from mla_verify.wire import Channel, pair, pickled


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def through(ends: tuple[Channel, Channel], value: object) -> object:
    sender = threading.Thread(target=ends[1].send, args=(value,))
    sender.start()
    received = ends[0].receive()
    sender.join()
    return received


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.bool]
)
def test_a_tensor_arrives_with_its_bits_dtype_and_shape(ends: tuple[Channel, Channel], dtype: torch.dtype) -> None:
    sent = torch.randint(0, 2, (3, 5, 7)).to(dtype)
    received = through(ends, {"out": sent})
    assert isinstance(received, dict)
    assert received["out"].dtype == dtype
    assert torch.equal(received["out"], sent)


def test_nan_payloads_strides_empty_and_scalar_tensors_arrive(ends: tuple[Channel, Channel]) -> None:
    bits = torch.tensor([0x7FC01234, -1, 0], dtype=torch.int32)
    view = torch.arange(24.0).view(4, 6).t()[1:, ::2]
    sent = (bits.view(torch.float32), view, torch.empty(0, 5), torch.tensor(3.5))
    received = through(ends, sent)
    assert isinstance(received, tuple)
    assert torch.equal(received[0].view(torch.int32), bits)
    assert torch.equal(received[1], view)
    assert received[2].shape == (0, 5)
    assert (received[3].shape, float(received[3])) == ((), 3.5)


def test_what_arrives_can_be_written_to_and_is_nobody_elses(ends: tuple[Channel, Channel]) -> None:
    sent = torch.zeros(10)
    received = through(ends, sent)
    assert isinstance(received, torch.Tensor)
    received += 1
    assert float(sent.sum()) == 0 and float(received.sum()) == 10


def test_a_large_output_goes_through_whole_and_its_pickle_holds_none_of_it(ends: tuple[Channel, Channel]) -> None:
    sent = MLAOutput(torch.arange(1 << 23, dtype=torch.int32), None)  # far more than a socket holds
    text, buffers = pickled(sent)
    assert len(text) < 1000
    assert [buffer.raw().nbytes for buffer in buffers] == [4 << 23]
    received = through(ends, sent)
    assert isinstance(received, MLAOutput)
    assert torch.equal(received.out, sent.out)


def test_a_closed_end_is_an_end_of_file_also_in_the_middle_of_a_tensor(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(torch.ones(100))
    written = ends[1]._socket.recv(1 << 16)
    ours, theirs = pair()
    theirs.send("whole")
    theirs._socket.sendall(written[:-40])
    theirs.close()
    assert ours.ready(0)
    assert ours.receive() == "whole"
    with pytest.raises(EOFError):
        ours.receive()
