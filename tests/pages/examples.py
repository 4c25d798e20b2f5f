"""Figures to draw: a step of a few columns whose bytes can be read off, and one as large as pages have to bear."""

from __future__ import annotations

import random
from dataclasses import replace

from compile_remat.pages.figures import (
    PLAIN,
    BaseStep,
    Curve,
    FrontierPoint,
    Kind,
    ModuleRow,
    PageFigures,
    StepFigures,
    Tensor,
)

MIB = 1 << 20
HOSTILE = "<script>alert('x')</script>&\"'</title>"


def small_step() -> StepFigures:
    """a is saved, b is freed and computed again; the peak is 9 MiB, at the second b; plain torch.compile has 12."""
    return StepFigures(
        columns=("a", "b", "end of the forward", "b", "g", "output"),
        num_forward=3,
        areas={
            Kind.OUTPUT: (0, 0, MIB, MIB, MIB, MIB),
            Kind.GRADIENT: (0, 0, 0, 0, 2 * MIB, 2 * MIB),
            Kind.SAVED: (4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 0),
            Kind.RECOMPUTED: (0, 0, 0, 3 * MIB, 0, 0),
            Kind.TEMPORARY: (0, 3 * MIB, 0, MIB, 0, 0),
        },
        tensors=(
            Tensor(
                "a", 4 * MIB, Kind.SAVED, 0, 4, "saved for the backward", (1024, 1024), "float32", "body.0", "/u/m.py:3"
            ),
            Tensor("b", 3 * MIB, Kind.TEMPORARY, 1, 1, "freed, and computed again in the backward"),
            Tensor("out", MIB, Kind.OUTPUT, 2, 5, "output of the forward"),
            Tensor("b", 3 * MIB, Kind.RECOMPUTED, 3, 3, "computed again in the backward", (), "", "body.1"),
            Tensor("g", 2 * MIB, Kind.GRADIENT, 4, 5, "gradient that the backward returns"),
        ),
        times_ns=(1000, 500, 0, 500, 2000, 0),
        other=Curve("plain torch.compile", (5 * MIB, 9 * MIB, 12 * MIB, 12 * MIB, 10 * MIB, 3 * MIB)),
    )


def small() -> PageFigures:
    """A page of that step, with everything that a page may have."""
    return PageFigures(
        title="Graph 0123, memory_budget 10MiB",
        summary="Peaks at 9.0 MiB.",
        peaks=(("plain torch.compile", 12 * MIB), ("predicted peak", 9 * MIB), ("measured peak", 9 * MIB + 1000)),
        budget_bytes=10 * MIB,
        floor_bytes=8 * MIB,
        base=BaseStep(10_000_000, PLAIN),
        facts=(("status", "feasible"),),
        notes=("something to note",),
        step=small_step(),
        modules=(ModuleRow("body.0-1", 2, 1, 4 * MIB, 1, 3 * MIB, 500_000),),
        frontier=(
            FrontierPoint(12 * MIB, 10_000_000),
            FrontierPoint(9 * MIB, 10_500_000, is_chosen=True),
            FrontierPoint(8 * MIB, 10_900_000),
        ),
    )


def hostile() -> PageFigures:
    """The same with names that would break a page that does not escape them."""
    step = small_step()
    tensors = tuple(
        replace(t, name=HOSTILE, module_path=HOSTILE, source_line=HOSTILE, dtype=HOSTILE, fate=HOSTILE)
        for t in step.tensors
    )
    other = replace(step.other, label=HOSTILE) if step.other is not None else None
    step = replace(step, columns=(HOSTILE,) * len(step.columns), tensors=tensors, other=other)
    modules = (ModuleRow(HOSTILE, 1, 1, 1, 1, 1, 1),)
    return replace(
        small(),
        title=HOSTILE,
        summary=HOSTILE,
        notes=(HOSTILE,),
        facts=((HOSTILE, HOSTILE),),
        step=step,
        modules=modules,
    )


def large(nodes: int = 2000) -> PageFigures:
    """A forward and a backward of so many nodes each, with a tensor of its own for each node and none equal to another."""
    rng = random.Random(0)
    count = 2 * nodes
    tensors = []
    areas = {kind: [0] * count for kind in Kind}
    for k in range(count):
        kind = Kind.SAVED if k < nodes and k % 3 else Kind.TEMPORARY
        end = count - 1 - k if kind is Kind.SAVED else min(count - 1, k + 3)
        nbytes = rng.randrange(1, 64 * MIB)
        source = f"/usr/lib/python3/site-packages/transformers/models/llama/modeling_llama.py:{k % 900}"
        module = f"model.layers.{k % 80}.self_attn.q_proj"
        shape = (8, 4096, k)
        fate = "saved for the backward" if kind is Kind.SAVED else "freed after its last reader"
        tensors.append(
            Tensor(f"convert_element_type_{k}", nbytes, kind, k, end, fate, shape, "bfloat16", module, source)
        )
        for column in range(k, end + 1):
            areas[kind][column] += nbytes
    columns = tuple(f"convert_element_type_{k}" for k in range(count))
    levels = {kind: tuple(area) for kind, area in areas.items()}
    step = StepFigures(columns, nodes, levels, tuple(tensors), (1000,) * count)
    rows = tuple(ModuleRow(f"model.layers.{k}.mlp.up_proj", 1, 1, k * MIB, 2, MIB, 1000) for k in range(300))
    return replace(small(), budget_bytes=None, floor_bytes=None, step=step, modules=rows)
