"""Plans for a GPU that is not there, from Python: what does a budget cost?

    python examples/plan.py [--device h100-sxm]

The model is traced without data, so nothing of its size is allocated.  All times are estimates of the cost model.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import compile_remat
from compile_remat.passes import Plan

MIB = 1 << 20
LAYERS = 24
BUDGETS = ("max", 0.8, 0.6, 0.4, "min")


def mlp(batch: int = 16384, width: int = 4096) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module and the inputs of one step; called where tensors have no data."""
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks), (torch.randn(batch, width),)


def main(argv: Sequence[str] | None = None) -> list[Plan]:
    """Print the fastest plan within some budgets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100-sxm", help="a name that `compile-remat devices` prints")
    parser.add_argument("--batch", type=int, default=16384)
    arguments = parser.parse_args(argv)
    plans = []
    print(f"{'budget':>8}  {'region peak':>12}  {'extra time':>10}  {'lower bound':>11}")
    for budget in BUDGETS:
        plan = compile_remat.plan(
            f"{__name__}:mlp", device=arguments.device, memory_budget=budget, batch=arguments.batch, dtype="bf16"
        )
        extra, bound = plan.extra_share, plan.bound_share  # beyond the step of plain torch.compile
        print(f"{budget!s:>8}  {plan.peak_bytes / MIB:>8.0f} MiB  {extra:>+10.1%}  {bound:>+11.1%}")
        plans.append(plan)
    return plans


if __name__ == "__main__":
    main()
