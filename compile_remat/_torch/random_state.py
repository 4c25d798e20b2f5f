"""The states of torch's random generators, read and put back."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read_random_state(devices: Sequence[torch.device]) -> dict[str, torch.Tensor]:
    """The state of the CPU's generator and of each device's."""
    states = {"cpu": torch.get_rng_state()}
    return states | {str(d): torch.get_device_module(d).get_rng_state(d) for d in devices}


def write_random_state(states: dict[str, torch.Tensor]) -> None:
    """Put back what `read_random_state` gave."""
    for place, state in states.items():
        if place == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(torch.device(place)).set_rng_state(state, torch.device(place))
