"""Values that a plan leaves one reader in the backward, and that Inductor is told to write to memory nevertheless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from compile_remat._torch import joint_graph
from compile_remat.cost_models import UnitCost
from compile_remat.passes import Planner, build_problem, extract
from tests.passes.graph.test_extraction import inputs, joint_of, none


def many_reads(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The ReLU reads five buffers: two readers of it are too many."""
    return (((x + a) * b + c) * (x.t() @ a)).relu().reciprocal()


def few_reads(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return ((x + a) * b * c).relu().reciprocal()


@pytest.mark.parametrize(
    ("function", "saved", "is_written"),
    [
        pytest.param(many_reads, ["reciprocal"], True, id="the gradient would read six buffers"),
        pytest.param(many_reads, [], False, id="two readers"),
        pytest.param(many_reads, ["relu"], False, id="saved"),
        pytest.param(few_reads, ["reciprocal"], False, id="few reads"),
    ],
)
def test_what_the_one_reader_would_be_written_for_is_written(
    function: Callable[..., Tensor], saved: list[str], is_written: bool
) -> None:
    """A ResNet in bfloat16 needed 509 MiB at its lowest plan, of 411 predicted."""
    joint, _ = joint_of(function, inputs())
    prepared = joint_graph.prepare(joint, num_fwd_outputs=1)
    plan = Planner(build_problem(prepared, cost=UnitCost())).plan_of(none(prepared), None)
    _, backward = extract(prepared, replace(plan, saved=tuple(saved)))
    found = [n.name for n in backward.graph.nodes if n.meta.get("inductor_realize_to_strides")]
    assert found == (["relu"] if is_written else [])
