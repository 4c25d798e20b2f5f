"""Copies that start late, by random times, in threads of their own: gradients stay as they are."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from compile_remat._torch.offload.streams import Direction, ThreadStreams, streams_replaced
from tests.correctness.test_offload import CPU, MODELS, Pinned, equal

pytestmark = pytest.mark.usefixtures("own_caches")
DELAYS = 1000
LONGEST_SECONDS = 0.01


def train_with_delays(name: str, folder: Path, compiler: str, delays: int) -> None:
    """Steps whose saved tensors leave, until so many copies were delayed; gradients equal those of the plan that keeps all."""
    pinned = Pinned(name, folder, compiler)
    expected = pinned.gradients(pinned.compiled())
    pinned.offload(*pinned.saved)
    call, draw, made = pinned.compiled(), random.Random(0), 0

    def delay() -> None:
        nonlocal made
        made += 1
        time.sleep(draw.random() * LONGEST_SECONDS)

    streams = ThreadStreams()
    for direction in Direction:
        streams.engine(CPU, direction).before_copy = delay
    with streams_replaced("cpu", streams):
        while made < delays:
            before = made
            assert equal(pinned.gradients(call), expected)
            streams.drain()
            assert made > before


def test_some_delays(tmp_path: Path) -> None:
    train_with_delays("attention", tmp_path, "eager", 50)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_a_thousand_delays(name: str, tmp_path: Path) -> None:
    train_with_delays(name, tmp_path, "inductor", DELAYS)
