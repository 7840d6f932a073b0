"""Copies on streams of their own, on a GPU that does nothing before it must."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from bapipe.runtime import copy_streams
from bapipe.runtime.copy_streams import copied_ahead, copied_to_host, copying_beside, wait_for_copies, wait_on_device

CUDA = torch.device("cuda", 0)


class Event:
    """A place in the queue of a stream."""

    def __init__(self, stream: "Stream") -> None:
        self.stream, self.at = stream, stream.num_given

    def synchronize(self) -> None:
        self.stream.run_to(self.at)


class Stream:
    """A queue of work that runs when another stream, or the host, waits for it."""

    device = CUDA

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.num_given = self.num_done = 0

    def give(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.num_given += 1

    def run_to(self, at: int) -> None:
        while self.num_done < at:
            self.num_done += 1
            self.queue.pop(0)()

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.give(event.synchronize)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.run_to(self.num_given)


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream on which the GPU computes; copies take the current one."""
    compute = Stream()
    current = [compute]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        copy_streams, "host_tensors", lambda tensors: {name: torch.zeros_like(x) for name, x in tensors.items()}
    )
    monkeypatch.setattr(copy_streams, "start_copy", lambda to, source: current[-1].give(lambda: to.copy_(source)))
    return compute


def test_a_checkpoint_has_what_there_was_when_it_was_asked_for(computing: Stream) -> None:
    """The next forward changes the buffer, the next update the weight, both long before the copies are waited for."""
    weight, buffer, moment = (torch.tensor([value]) for value in (1.0, 2.0, 3.0))

    def add(tensor: Tensor, value: float) -> None:
        computing.give(lambda: tensor.add_(value))

    add(weight, 10)  # of the step before, which the GPU has not done yet
    stream: Any = Stream()
    copy = copied_to_host({"weight": weight, "buffer": buffer, "moment": moment}, {"buffer"}, stream)
    assert (computing.num_done, stream.num_done) == (0, 0)  # nothing waits
    add(buffer, 100)
    wait_on_device(CUDA, copy.done)
    add(weight, 100)
    add(moment, 100)
    computing.run_to(computing.num_given)
    copy.wait()
    assert [weight.item(), buffer.item(), moment.item()] == [111, 102, 103]
    assert {name: tensor.item() for name, tensor in copy.tensors.items()} == {"weight": 11, "buffer": 2, "moment": 3}


def test_a_forward_goes_on_beside_the_copy_of_the_weights(computing: Stream) -> None:
    stream: Any = Stream()
    weight, buffer = torch.ones(1), torch.ones(1)
    copied_to_host({"weight": weight, "buffer": buffer}, {"buffer"}, stream)
    computing.run_to(computing.num_given)
    assert (stream.num_done, stream.num_given) == (2, 3)  # it has waited, and copied the buffer


def test_without_a_gpu_copies_are_made_at_once() -> None:
    weight = torch.ones(1)
    copy = copied_to_host({"weight": weight}, (), None)
    weight.add_(1)
    copy.wait()
    wait_on_device(torch.device("cpu"), copy.done)
    assert copy.tensors["weight"].item() == 1
    with copying_beside(torch.device("cpu"), None, ()) as copied:
        copied.append(weight)


def test_what_is_computed_waits_for_the_inputs(computing: Stream) -> None:
    recorded: list[object] = []

    class Input:
        def record_stream(self, stream: object) -> None:
            recorded.append(stream)

    stream: Any = Stream()
    done: list[str] = []
    with copying_beside(CUDA, stream, [torch.ones(1)]) as copied:
        torch.cuda.current_stream(CUDA).give(lambda: done.append("copied"))  # type: ignore[attr-defined]
        copied.append(Input())  # type: ignore[arg-type]
    computing.give(lambda: done.append("computed"))
    computing.run_to(computing.num_given)
    assert done == ["copied", "computed"]
    assert recorded == [computing]


def test_what_was_copied_may_be_overwritten_after_a_wait(computing: Stream) -> None:
    """As a caller that refills one page-locked buffer does; the GPU has not computed anything by then."""
    stream: Any = Stream()
    buffer, copy = torch.ones(1), torch.zeros(1)
    with copying_beside(CUDA, stream, [buffer]):
        torch.cuda.current_stream(CUDA).give(lambda: copy.copy_(buffer))  # type: ignore[attr-defined]
    wait_for_copies(stream)
    buffer.zero_()
    computing.run_to(computing.num_given)
    assert copy.item() == 1
    wait_for_copies(None)


def test_a_mini_batch_is_copied_ahead_on_the_stream_that_its_step_waits_for(
    computing: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def to(tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        assert non_blocking
        torch.cuda.current_stream(device).give(lambda: done.append("copied"))  # type: ignore[attr-defined]
        return torch.empty_like(tensor, device="meta")

    monkeypatch.setattr(Tensor, "to", to)
    stream: Any = Stream()
    computing.give(lambda: done.append("computed before"))
    ahead = copied_ahead(torch.ones(1), CUDA, stream)
    assert ahead is not None
    stream.run_to(1)
    assert done == ["copied"]  # beside what is computed
    with copying_beside(torch.device("meta"), stream, [ahead]):
        pass
    computing.give(lambda: done.append("computed"))
    computing.run_to(computing.num_given)
    assert done == ["copied", "computed before", "computed"]
    assert copied_ahead(None, CUDA, stream) is None
    assert copied_ahead(ahead, CUDA, None) is ahead


@pytest.mark.parametrize(("device", "done"), [("cpu", ["augmented", "converted"]), ("meta", ["converted"])])
def test_what_is_on_the_gpu_is_converted_when_it_is_computed(computing: Stream, device: str, done: list[str]) -> None:
    """As a channels-last plan converts images; with what is elsewhere, copies begin at once."""
    seen: list[str] = []
    stream: Any = Stream()
    computing.give(lambda: seen.append("augmented"))
    with copying_beside(torch.device("cpu"), stream, [None, torch.ones(1, device=device)]):
        torch.cuda.current_stream(CUDA).give(lambda: seen.append("converted"))  # type: ignore[attr-defined]
    stream.run_to(stream.num_given)
    assert seen == done
