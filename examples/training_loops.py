"""Peaks of four loops beside plain torch.compile: gradient accumulation, LoRA, evaluation in between, resuming from a file.

    OMP_NUM_THREADS=1 python examples/training_loops.py accumulation    # or: lora, evaluation, resume

Prints a table of docs/guides: peaks in MiB, measured on the CPU with a model of 8 blocks.  Each table has a process of its own, as
a fraction is one of the largest step that the process has seen.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import compile_remat

WIDTH, BLOCKS, ROWS = 128, 8, 2048
PLAIN, COMPILER = "inductor", "inductor"
"""The backend that the tables compare with, and the setting `compiler` of ours."""


class Block(nn.Module):
    """A residual block on float[rows, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block(WIDTH) for _ in range(BLOCKS)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


class Adapter(nn.Module):
    """A frozen layer with a trained one of low rank beside it, as PEFT's LoRA makes them."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Linear(frozen.in_features, rank, bias=False)
        self.b = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.b(self.a(x))


def adapted(model: Model, rank: int = 4) -> Model:
    """Freeze the model and put an adapter beside each linear layer."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapter(block.up, rank), Adapter(block.down, rank)
    return model


class Loop:
    """A model under a budget, or under plain torch.compile if there is none, with a batch."""

    def __init__(self, model: Model, memory_budget: str | float | None, rows: int) -> None:
        torch.compiler.reset()
        self.model, self.batch = model, batch_of(rows)
        self.loss_of = compiled(model, memory_budget)
        self.train()  # compiles
        self.evaluate()

    def train(self, micro_batches: int = 1) -> None:
        """Forward and backward of each micro-batch."""
        for _ in range(micro_batches):
            (self.loss_of(*self.batch) / micro_batches).backward()

    def evaluate(self) -> None:
        """Forward of a batch."""
        self.model.eval()
        with torch.no_grad():
            self.loss_of(*self.batch)
        self.model.train()

    def peak(self, body: Callable[[], object]) -> int:
        """The most bytes that a call allocates when no gradient is there."""
        self.model.zero_grad()
        return peak_of(body)


def compiled(model: Model, memory_budget: str | float | None) -> Callable[[Tensor, Tensor], Tensor]:
    if memory_budget is None:
        return torch.compile(model, backend=PLAIN)
    options = compile_remat.options(memory_budget=memory_budget, compiler=COMPILER)
    return torch.compile(model, backend="remat", options=options)


def batch_of(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=numbers), torch.randn(rows, WIDTH, generator=numbers)


def peak_of(body: Callable[[], object]) -> int:
    """The most bytes that a call allocates."""
    with compile_remat.measured_step() as step:
        body()
    return step.peak_bytes or 0


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table whose columns of numbers are aligned to the right."""
    print(f"\n| {' | '.join(heads)} |\n|:--|{'--:|' * (len(heads) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def accumulation(budget: str = "24MiB") -> None:
    """Print the peak of a step for a batch at once and in micro-batches."""
    peaks: dict[str, list[str]] = {}
    for memory_budget in (None, budget):
        for rows, numbers in ((ROWS, (1,)), (ROWS // 4, (1, 2, 4))):
            loop = Loop(Model(), memory_budget, rows)
            for number in numbers:
                peak_bytes = loop.peak(partial(loop.train, number))
                peaks.setdefault(f"{number} of {rows} rows", []).append(mib(peak_bytes))
    gradients = mib(sum(parameter.nbytes for parameter in Model().parameters()))
    beside = "gradients of earlier micro-batches, MiB"
    print_table(
        ("micro-batches", "torch.compile, MiB", f'budget "{budget}", MiB', f"of it {beside}"),
        [(name, *found, "0.0" if name.startswith("1 ") else gradients) for name, found in peaks.items()],
    )


def lora() -> None:
    """Print the peak of a step that trains all parameters, and of one that trains adapters alone, of two batches."""
    lines = []
    for rows in (ROWS, ROWS // 4):
        for name, build in (("all parameters", Model), ("adapters of rank 4", lambda: adapted(Model()))):
            trained_bytes = sum(parameter.nbytes for parameter in build().parameters() if parameter.requires_grad)
            plain_bytes = peak_of_step(build(), None, rows)
            peaks = [plain_bytes, *(peak_of_step(build(), budget, rows) for budget in (f"{plain_bytes // 2}B", "min"))]
            lines.append((f"{name}, {rows} rows", mib(trained_bytes), *map(mib, peaks)))
    print_table(("trained", "their gradients, MiB", "torch.compile, MiB", "half of that, MiB", "`min`, MiB"), lines)


def peak_of_step(model: Model, memory_budget: str | float | None, rows: int) -> int:
    loop = Loop(model, memory_budget, rows)
    return loop.peak(loop.train)


def evaluation() -> None:
    """Print the peaks of a training step, of an evaluation behind it, and of the next training step."""
    lines = []
    for name, memory_budget in (("torch.compile", None), ("budget 0.5", 0.5)):
        loop = Loop(Model(), memory_budget, ROWS)
        lines.append((name, *(mib(loop.peak(body)) for body in (loop.train, loop.evaluate, loop.train))))
    print_table(("", "a training step, MiB", "the evaluation, MiB", "the next training step, MiB"), lines)


def resume() -> None:
    """Print the losses of steps 4 to 6 without an interruption, and after a resumption under other budgets."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.pt"
        rows = [("torch.compile, not interrupted", *trained(None, range(6))[3:])]
        trained(0.5, range(3), save_to=file)
        rows += [
            (f"saved under 0.5, resumed under {budget}", *trained(budget, range(3, 6), load_from=file))
            for budget in ("max", "min")
        ]
    print_table(("run", "loss of step 4", "of step 5", "of step 6", "peak of step 6, MiB"), rows)


def trained(
    memory_budget: str | float | None, steps: range, save_to: Path | None = None, load_from: Path | None = None
) -> list[str]:
    """The loss of each step, and the peak of the last."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if load_from is not None:
        state = torch.load(load_from)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    torch.compiler.reset()
    loss_of = compiled(model, memory_budget)
    found: list[str] = []
    for number in steps:
        loss, peak_bytes = step(loss_of, optimizer, number, is_last=number == steps[-1])
        found.append(f"{loss:.6f}")
    if save_to is not None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save_to)
    return [*found, mib(peak_bytes)]


def step(
    loss_of: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer, number: int, *, is_last: bool
) -> tuple[float, int]:
    """Train one step; returns the loss, and the peak of its forward and backward if it is the last."""
    losses: list[Tensor] = []
    batch = batch_of(ROWS, seed=number)

    def forward_and_backward() -> None:
        loss = loss_of(*batch)
        loss.backward()
        losses.append(loss.detach())

    peak_bytes = 0
    if is_last:
        peak_bytes = peak_of(forward_and_backward)
    else:
        forward_and_backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(losses[0]), peak_bytes


TABLES: dict[str, Callable[[], None]] = {
    "accumulation": accumulation,
    "lora": lora,
    "evaluation": evaluation,
    "resume": resume,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    TABLES[parser.parse_args(argv).table]()


if __name__ == "__main__":
    main()
