"""Names of graphs: the same on all ranks that run one program, on whatever device, and whatever one of them compiles alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from compile_remat._torch.cache_key_text import _DEVICE_NUMBER
from compile_remat._torch.ranks.groups import Frame, current_frame
from compile_remat.ranks.places import Place, Places, graph_name


def names(places: Places, *frames: tuple[str, int]) -> list[str]:
    return [_text(places.next(Frame(code, variant))) for code, variant in frames]


def _text(place: Place) -> str:
    return place.name + ("" if place.is_first else " later")


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([("f", 0), ("g", 0)], ["f #1.0", "g #1.0"]),
        ([("f", 0), ("f", 0), ("f", 0)], ["f #1.0", "f #1.1", "f #1.2"]),  # cut at the buckets of DDP
        ([("f", 0), ("f", 1), ("f", 1)], ["f #1.0", "f #1.0 later", "f #1.0 later"]),
        ([("f", 1), ("f", 2)], ["f #1.0", "f #1.0 later"]),  # variant 0 had no backward
        ([("f", 0), ("f", 1), ("f", 0), ("f", 1)], ["f #1.0", "f #1.0 later", "f #2.0", "f #2.0 later"]),  # reset
    ],
)
def test_places(frames: list[tuple[str, int]], expected: list[str]) -> None:
    assert names(Places(), *frames) == expected


def test_what_a_rank_compiles_alone_shifts_no_name() -> None:
    alone = names(Places(), ("f", 0), ("only on rank 0", 0), ("g", 0))
    assert [name for name in alone if "only" not in name] == names(Places(), ("f", 0), ("g", 0))


def seen_by_a_backend(
    model: Callable[[torch.Tensor], Any], *inputs: torch.Tensor
) -> list[tuple[Frame, str, fx.GraphModule, list[Any]]]:
    found: list[tuple[Frame, str, fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append((current_frame(), graph_name(gm, example_inputs), gm, example_inputs))
        return gm

    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    for each in inputs:
        compiled(each)
    return found


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        torch._dynamo.graph_break()
        return y.sin()


def test_dynamo_says_what_it_compiles() -> None:
    frames = [frame for frame, *_ in seen_by_a_backend(Two(), torch.ones(2, 4), torch.ones(3, 4))]
    assert [(frame.code.split("_at_")[0].split(" (")[0], frame.variant) for frame in frames] == [
        ("Two.forward", 0),
        ("Two.torch_dynamo_resume_in_forward", 0),
        ("Two.forward", 1),
        ("Two.torch_dynamo_resume_in_forward", 1),
    ]
    assert frames[0].code.startswith("Two.forward (test_places.py:")
    assert current_frame().code == ""


def test_equal_programs_have_equal_names_and_other_sizes_another() -> None:
    ((_, small, *_), *_) = seen_by_a_backend(Two(), torch.ones(2, 4))
    ((_, again, *_), *_) = seen_by_a_backend(Two(), torch.zeros(2, 4))
    ((_, large, *_), *_) = seen_by_a_backend(Two(), torch.ones(3, 4))
    assert small == again != large


def test_each_rank_has_a_device_of_its_own() -> None:
    lines = ["input Tensor (2, 4) cuda:0", "device(type='cuda', index=1)", "input Tensor (2, 4) cpu"]
    assert [_DEVICE_NUMBER.sub(r"\1", line) for line in lines] == [
        "input Tensor (2, 4) cuda",
        "device(type='cuda)",
        "input Tensor (2, 4) cpu",
    ]
