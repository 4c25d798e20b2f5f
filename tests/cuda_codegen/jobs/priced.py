"""Bytes that fused kernels move, priced and emitted: python -m tests.cuda_codegen.jobs.priced [--budget max] [NAME ...]

Prints a line of JSON for each norm, or for each model of `benchmarks.models.codegen` if these are named: bytes of the emitted code,
and of the prices of its plan for the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

from compile_remat._torch.fake_cuda.installation import install

if TYPE_CHECKING:
    from torch import nn

    from compile_remat.passes.graph.pricing import Works
    from compile_remat.passes.problem.plan import Plan

    Norms = dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]
    Models = dict[str, Callable[[], Any]]


def norms() -> Norms:
    """By name, a function that makes the module, and the shape of its input."""
    import torch
    from torch import nn

    class Step(nn.Module):
        """A norm; a convolution before it has its tensors laid out with channels last."""

        def __init__(self, norm: nn.Module, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
            super().__init__()
            self.norm, self.before, self.after = norm, before or nn.Identity(), after or nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.norm(self.before(x)))

    class OfPictures(nn.Module):
        """Divides each picture by the root of its mean square: few results of many elements."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """[B, C, H, W] -> [B, C, H, W]"""
            return x * torch.rsqrt(x.float().square().mean((1, 2, 3), keepdim=True)).to(x.dtype)

    class Loss(nn.Module):
        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            """[T, V] -> scalar"""
            return nn.functional.cross_entropy(logits.float(), torch.arange(len(logits), device=logits.device))

    def behind_convolution() -> nn.Module:
        return Step(nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3, bias=False))

    return {
        "layer norm, mixed": (lambda: Step(nn.LayerNorm(1024), after=nn.Linear(1024, 64, bias=False)), (8192, 1024)),
        "layer norm, small": (lambda: Step(nn.LayerNorm(1024)), (1024, 1024)),
        "rms norm": (lambda: Step(nn.RMSNorm(2048)), (8192, 2048)),
        "batch norm": (lambda: Step(nn.BatchNorm2d(64)), (32, 64, 56, 56)),
        "batch norm behind a convolution": (behind_convolution, (32, 64, 56, 56)),
        "batch norm of rows": (lambda: Step(nn.BatchNorm1d(512)), (8192, 512)),
        "norm of pictures": (OfPictures, (8, 64, 64, 64)),
        "group norm": (lambda: Step(nn.GroupNorm(16, 64), after=nn.Identity()), (32, 64, 64, 64)),
        "instance norm": (lambda: Step(nn.InstanceNorm2d(64, affine=True)), (16, 64, 64, 64)),
        "softmax": (lambda: Step(nn.Softmax(-1)), (4096, 4096)),
        "cross entropy": (Loss, (4096, 8192)),
    }


SCATTER = "scatter"


def priced(works: Works, plan: Plan) -> dict[bool, int]:
    """Bytes that the kernels of a plan move, by whether they are the backward's."""
    moved = {False: 0, True: 0}
    for draft, work in works.once.items():
        of_scatter = draft.op.read_bytes + draft.op.write_bytes if draft.kernel == SCATTER else 0
        moved[draft.in_backward] += work.moved_bytes + of_scatter
    for draft, work in works.again.items():
        moved[True] += work.moved_bytes if draft.node.name in plan.recomputed else 0
    for draft, saving in works.saving.items():
        moved[False] += sum(work.moved_bytes for work in saving) if draft.node.name in plan.saved else 0
    return moved


def models() -> Models:
    """By name, a function that makes a model of several blocks with its inputs."""
    from benchmarks.models import codegen

    return {name: getattr(codegen, name) for name in ("gpt", "llama", "bert", "vit", "resnet", "unet", "convnext")}


def of_norm(module: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[], Any]:
    def make() -> Any:
        import torch

        return module(), (torch.randn(shape, requires_grad=True),)

    return make


def row(name: str, make: Callable[[], Any], budget: str) -> dict[str, Any]:
    import torch

    import compile_remat
    from benchmarks.common.fake_cuda import step, traffic
    from benchmarks.models.building import converted
    from compile_remat.passes.graph import build, pricing

    seen: list[Works] = []

    def price(values: Any, steps: Any, cost: Any) -> int:
        seen.append(pricing.works_of(values, steps, cost.cache_bytes))
        return pricing.price(values, steps, cost)

    def model() -> tuple[nn.Module, list[torch.Tensor]]:
        made, inputs = make()
        converted(made, torch.bfloat16)
        casts = (x.detach().bfloat16().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs)
        return made.train(), list(casts)

    with traffic.recorded() as found, mock.patch.object(build, "price", price):
        step.compile_step(model, step.ours(budget))
    emitted = {
        is_backward: sum(kernel.moved_bytes for kernel in kernels if kernel.kind == "fused")
        for is_backward, kernels in found.kernels.items()
    }
    by_prices = priced(seen[-1], compile_remat.reports()[-1].plan)
    return {"name": name, "emitted": [emitted[b] for b in (False, True)], "priced": [*by_prices.values()]}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="max")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args(argv)
    install()
    of_norms = {name: of_norm(*each) for name, each in norms().items()}
    for name in arguments.names or of_norms:
        print(json.dumps(row(name, (of_norms | models())[name], arguments.budget)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
