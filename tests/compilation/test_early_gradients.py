"""For which graphs gradients may leave early, asked before one is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from compile_remat.compilation.early_gradients import OFF, leaf_positions, why_off
from compile_remat.config import RematConfig

EARLY = RematConfig(gradients="early")
LEAF = torch.ones(2, requires_grad=True)


def test_leaves_that_need_a_gradient_are_found() -> None:
    assert leaf_positions([torch.ones(2), LEAF, 3, LEAF * 2, LEAF.detach()]) == (1,)


@pytest.mark.parametrize(
    ("patches", "inputs", "reason"),
    [
        ({}, [LEAF], ""),
        ({"cpp_wrapper": True}, [LEAF], OFF + "cpp_wrapper is on"),
        ({"triton.cudagraphs": True}, [LEAF], OFF + "a replayed CUDA graph would skip the hooks of the parameters"),
        ({}, [TwoTensor(torch.ones(2), torch.ones(2))], OFF + "it takes tensor subclasses"),
    ],
    ids=["plain", "cpp_wrapper", "CUDA graphs", "subclass"],
)
def test_what_turns_the_setting_off_is_named(patches: dict[str, Any], inputs: list[Any], reason: str) -> None:
    assert why_off(EARLY, inputs, patches) == reason
    assert why_off(RematConfig(), inputs, patches) == ""
