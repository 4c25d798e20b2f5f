"""The trace that a device's calls make is that of the emitted code; on a GPU, that of a real step."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.correctness.test_offload import MODELS
from tests.races import on_device
from tests.races.clocks import Access, Event, Mark, Wait, has_race
from tests.races.device_trace import KERNELS, DeviceTrace, order
from tests.races.steps import Case, of_models, one_step


def replayed(trace: list[Event]) -> DeviceTrace:
    """The calls that a device would make for a step: addresses are handed out again, and others ask for events, too."""
    found, handles, free = DeviceTrace(), dict[str, int](), list[int]()
    addresses, events, fresh = dict[int, int](), dict[int, int](), itertools.count(1)
    for agent in {event.agent for event in trace} - {KERNELS}:
        handles[agent] = next(fresh)
        found.named(handles[agent], agent)
    for event in trace:
        stream = handles.get(event.agent, 0)
        match event:
            case Access(label="take"):
                addresses[event.storage] = free.pop() if free else 256 * next(fresh)
                found.take(addresses[event.storage])
            case Access(label="free"):
                free.append(addresses[event.storage])
                found.free(addresses.pop(event.storage))
            case Access(label="copy") if event.storage in addresses:
                found.copy(event.agent, addresses[event.storage], writes=event.writes)
            case Mark():
                events[event.number] = next(fresh)
                found.record(next(fresh), 0)  # of someone else
                with found.calls():
                    found.record(events[event.number], stream)
            case Wait():
                found.wait(events[event.mark], 0)
                with found.calls():
                    found.wait(events[event.mark], stream)
    return found


@pytest.fixture(scope="module")
def step() -> list[Event]:
    found: Case
    found, compiled = next(of_models(0, ["attention"]))
    assert found.seed == 0
    return compiled.trace(one_step)


def test_a_device_s_calls_give_the_order_of_the_code(step: list[Event]) -> None:
    found = replayed(step)
    expected = order(step)
    assert order(found.trace) == expected and not has_race(found.trace)
    assert {kind for _, kind, _ in expected} == {"take", "copy", "free", "mark", "wait"}


def test_a_wait_that_is_missing_is_a_race_and_another_order(step: list[Event]) -> None:
    waits = [event for event in step if isinstance(event, Wait) and event.agent == KERNELS]
    assert waits
    for wait in waits:
        found = replayed([event for event in step if event is not wait])
        assert order(found.trace) != order(step)
    assert any(has_race(replayed([event for event in step if event is not wait]).trace) for wait in waits)


def test_memory_from_before_the_trace_is_no_event() -> None:
    found = DeviceTrace()
    found.free(512)
    assert found.trace == []
    found.copy(KERNELS, 512, writes=False)
    found.free(512)
    assert [event.label for event in found.trace if isinstance(event, Access)] == ["copy", "free"]


def test_the_code_alone_gives_the_order_of_a_step_that_autograd_runs(step: list[Event]) -> None:
    trained = on_device.Trained("attention", 0, torch.device("cpu"))
    trained.step()
    assert trained.expected() == order(step)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", MODELS)
def test_the_command_finds_the_code_s_order_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "MODELS", {name: MODELS[name]})
    assert on_device.main(["--plans", "2"]) == 0
