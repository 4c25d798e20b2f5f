"""Lightning's Trainer and Fabric inside a memory budget, with a callback that reports what a step takes.

    python examples/stacks/lightning_trainer.py --budget 0.5
    python examples/stacks/lightning_trainer.py --budget 0.5 --fabric
    python examples/stacks/lightning_trainer.py --plain

The network inside of the LightningModule is compiled, in `configure_model`.  To compile the LightningModule itself is no way:
`self.log` is not for Dynamo.
"""

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from compile_remat.integrations import MemoryReport
from compile_remat.integrations.lightning import MemoryCallback


class Net(nn.Module):
    """A residual network on float[batch, width], the loss inside."""

    def __init__(self, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, target)


def compile_keywords(budget: str | float | None) -> dict[str, Any]:
    """Of `torch.compile`; None is torch's own backend."""
    return {} if budget is None else {"backend": "remat", "options": {"memory_budget": budget}}


class Module(lightning.LightningModule):
    """What Lightning trains."""

    def __init__(self, budget: str | float | None) -> None:
        super().__init__()
        self.budget = budget
        self.net = Net()
        self.losses: list[float] = []
        self.configured = False

    def configure_model(self) -> None:
        """Compile the network in place; Lightning calls this for `fit`, `validate` and `test`."""
        if not self.configured:
            self.net.compile(**compile_keywords(self.budget))
            self.configured = True

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of one batch."""
        loss: Tensor = self.net(*batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """The same network without a backward."""
        loss = self.net(*batch)
        self.losses.append(loss.item())
        self.log("validation", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(number: int = 3, size: int = 512, last: int = 200) -> DataLoader[Any]:
    """Random data, with a smaller last batch."""
    generator = torch.Generator().manual_seed(0)
    rows = number * size + last
    data = TensorDataset(torch.randn(rows, 64, generator=generator), torch.randn(rows, 64, generator=generator))
    return DataLoader(data, batch_size=size)


def fit(budget: str | float | None, callbacks: Sequence[Callback] = (), **arguments: Any) -> list[float]:
    """The losses of training and validation under Lightning's Trainer: clipping, accumulation, a checkpoint at each epoch."""
    torch.manual_seed(0)
    checkpoint = arguments.pop("ckpt_path", None)
    given = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **arguments}
    given = {"default_root_dir": tempfile.mkdtemp(), **given}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="auto", devices=1, callbacks=list(callbacks), **{**quiet, **given})
    module = Module(budget)
    trainer.fit(module, batches(), batches(1, 512, 0), ckpt_path=checkpoint)
    return module.losses


def fabric_loop(budget: str | float | None, steps: int = 4, **arguments: Any) -> list[float]:
    """The losses of a loop of one's own with Fabric: the model is compiled before `setup`."""
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="auto", devices=1, **arguments)
    fabric.launch()
    net = torch.compile(Net(), **compile_keywords(budget))
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(batches(steps))
    report = MemoryReport()
    losses = []
    for index, batch in enumerate(loader):
        is_accumulating = index % 2 == 0
        report.begin()
        with fabric.no_backward_sync(net, enabled=is_accumulating):
            loss = net(*batch)
            fabric.backward(loss)
        report.end()
        losses.append(loss.item())
        if not is_accumulating:
            fabric.clip_gradients(net, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and print the losses and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="0.5", help='such as "20GiB", "0.5", "min" (default 0.5)')
    parser.add_argument("--plain", action="store_true", help="plain torch.compile, without a budget")
    parser.add_argument("--fabric", action="store_true", help="a loop of one's own with Fabric")
    parser.add_argument("--precision", default="32-true", help="of Lightning and Fabric, such as bf16-mixed")
    arguments = parser.parse_args(argv)
    budget = None if arguments.plain else arguments.budget
    if arguments.fabric:
        losses = fabric_loop(budget, precision=arguments.precision)
    else:
        losses = fit(budget, [MemoryCallback()], precision=arguments.precision)
    print("losses", " ".join(f"{loss:.5f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
