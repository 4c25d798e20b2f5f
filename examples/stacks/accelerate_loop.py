"""A loop of one's own with Accelerate inside a memory budget.

    python examples/stacks/accelerate_loop.py --budget 0.5
    python examples/stacks/accelerate_loop.py --budget 0.5 --install
    python examples/stacks/accelerate_loop.py --plain

`Accelerator(dynamo_backend="remat")` is a ValueError: Accelerate has a fixed list of backends.  A model that is compiled before
`prepare` keeps the backend that it has.
"""

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import compile_remat
from compile_remat.integrations import MemoryReport


class Network(nn.Module):
    """Linear layers with GELU and dropout.  A class of one's own: torch compiles nothing for `nn.Sequential(...).compile()`."""

    def __init__(self, width: int = 64, layers: int = 8) -> None:
        super().__init__()
        body = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))]
        self.body = nn.Sequential(*body, nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


def train(budget: str | float | None, *, install: bool = False, precision: str = "no", steps: int = 4) -> list[float]:
    """The loss of each batch; gradients of two batches make a step.

    Args:
        install: Leave the compilation to Accelerate, which accepts no backend but Inductor.
        precision: Accelerate's `mixed_precision`.
    """
    torch.manual_seed(0)
    model: nn.Module = Network()
    if install:
        compile_remat.install(memory_budget=budget)
        accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision, dynamo_backend="inductor")
    else:
        accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
        if budget is None:
            model.compile()
        else:
            model.compile(backend="remat", options={"memory_budget": budget})  # the one line that is new
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    report = MemoryReport()
    losses = []
    for _ in range(steps):
        x = torch.randn(512, 64, device=accelerator.device)
        with accelerator.accumulate(model):
            report.begin()
            loss = model(x).pow(2).mean()
            accelerator.backward(loss)
            report.end()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and print the losses and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="0.5", help='such as "20GiB", "0.5", "min" (default 0.5)')
    parser.add_argument("--plain", action="store_true", help="plain torch.compile, without a budget")
    parser.add_argument("--install", action="store_true", help="compile_remat.install, and let Accelerate compile")
    parser.add_argument("--precision", default="no", help="Accelerate's mixed_precision, such as bf16")
    arguments = parser.parse_args(argv)
    budget = None if arguments.plain else arguments.budget
    losses = train(budget, install=arguments.install, precision=arguments.precision)
    print("losses", " ".join(f"{loss:.5f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
