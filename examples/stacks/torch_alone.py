"""Parts of torch that people compile inside a memory budget: nn.Transformer, an optimizer beside the model, a whole training step.

python examples/stacks/torch_alone.py --what transformer --budget 0.5
python examples/stacks/torch_alone.py --what optimizer
python examples/stacks/torch_alone.py --what train_step
python examples/stacks/torch_alone.py --what train_step --plain
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compile_remat.integrations import MemoryReport

Step = Callable[[Tensor], Tensor]


class Translator(nn.Module):
    """torch.nn.Transformer on float[batch, tokens, 64], with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(64, 4, 2, 2, 128, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.body(x, x).pow(2).mean()
        return mean


class Perceptron(nn.Module):
    """Linear layers with GELU on float[..., 64], with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.body(x).pow(2).mean()
        return mean


def transformer(**keywords: Any) -> tuple[Step, Callable[[], None]]:
    """Forward and backward, and what comes behind them."""
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _forward_backward(torch.compile(model, **keywords)), _update(optimizer, optimizer.step)


def optimizer(**keywords: Any) -> tuple[Step, Callable[[], None]]:
    """The model and the update, each compiled; the update has no backward and so no plan."""
    model = Perceptron()
    chosen = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(lambda: chosen.step(), **keywords)
    return _forward_backward(torch.compile(model, **keywords)), _update(chosen, compiled)


def train_step(**keywords: Any) -> tuple[Step, Callable[[], None]]:
    """Forward, backward and update in one compiled function; Dynamo breaks the graph at `backward`."""
    model = Perceptron()
    chosen = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def whole(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        return loss

    return torch.compile(whole, **keywords), lambda: None


WAYS = {"transformer": transformer, "optimizer": optimizer, "train_step": train_step}


def _forward_backward(model: Callable[[Tensor], Tensor]) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        return loss

    return step


def _update(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        update()
        optimizer.zero_grad()

    return run


def train(what: str, budget: str | float | None, steps: int = 4) -> list[float]:
    """The loss of each step; None is plain torch.compile."""
    torch.manual_seed(0)
    keywords = {} if budget is None else {"backend": "remat", "options": {"memory_budget": budget}}
    step, update = WAYS[what](**keywords)
    report = MemoryReport(step=steps)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 32, 64)
        report.begin()
        losses.append(step(x).item())
        report.end()
        update()
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and print the losses and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="transformer", choices=WAYS)
    parser.add_argument("--budget", default="0.5", help='such as "20GiB", "0.5", "min" (default 0.5)')
    parser.add_argument("--plain", action="store_true", help="plain torch.compile, without a budget")
    arguments = parser.parse_args(argv)
    losses = train(arguments.what, None if arguments.plain else arguments.budget)
    print("losses", " ".join(f"{loss:.5f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
