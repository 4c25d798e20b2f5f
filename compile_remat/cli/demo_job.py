"""The training job of the demo: a byte-level GPT on the Python standard library's own source.

Every machine with Python has the text: all *.py files of the standard library in sorted order (without tests and
installed packages) up to `max_bytes`; the last twentieth of the files is held out for validation. One token is
one byte, and the loss is computed inside the module, so that one compiled graph holds the whole step but the optimizer.
"""

import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_remat.device.measure import Peak, peak_bytes, synchronize

VOCABULARY = 256
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, from different files."""

    train: Tensor
    validation: Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]


@dataclass(frozen=True)
class JobSize:
    """The sizes that determine the shape and the length of the job."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    seed: int
    device: str


@dataclass(frozen=True)
class JobResult:
    """One finished run. `losses` has one training loss per step; all losses are in nats per byte."""

    peak: Peak
    step_ns: int
    losses: tuple[float, ...]
    validation_loss: float


def standard_library_files(root: Path | None = None, max_bytes: int = 4 << 20) -> list[Path]:
    """Returns the sorted *.py files of the standard library, as many as fit into `max_bytes`.

    Raises:
        FileNotFoundError: There are fewer than two such files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    chosen, total = [], 0
    for path in sorted(folder.rglob("*.py")):
        if _LEFT_OUT.intersection(path.relative_to(folder).parts[:-1]) or not path.is_file():
            continue
        total += path.stat().st_size
        if total > max_bytes:
            break
        chosen.append(path)
    if len(chosen) < 2:
        raise FileNotFoundError(f"the demo trains on the *.py files below {folder} and found {len(chosen)} of them")
    return chosen


def load_text(files: list[Path], held_out: float = 0.05) -> Text:
    """Returns the text of the files: the last `held_out` share (at least one file) for validation, the rest for training."""
    validation_count = max(1, round(len(files) * held_out))
    train, validation = files[:-validation_count], files[-validation_count:]
    return Text(_read(train), _read(validation), tuple(map(str, train)), tuple(map(str, validation)))


def _read(files: list[Path]) -> Tensor:
    data = bytearray(b"\n".join(path.read_bytes() for path in files))
    return torch.frombuffer(data, dtype=torch.uint8)


class Block(nn.Module):
    """Pre-norm causal attention and a GELU MLP of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        b, t, d = x.shape
        heads = self.qkv(self.attention_norm(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).reshape(b, t, d))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x


class ByteGPT(nn.Module):
    """A small GPT over bytes; returns the cross entropy of each next byte."""

    def __init__(self, size: JobSize) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[B, T], [B, T] -> scalar"""
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batches(data: Tensor, size: JobSize, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields endless random windows of `data`, inputs and targets of shape [B, T]; the same seed gives the same windows."""
    generator = torch.Generator().manual_seed(seed)
    if len(data) <= size.context:
        raise ValueError(f"{len(data)} bytes of text are too few for a context of {size.context}")
    while True:
        starts = torch.randint(len(data) - size.context, (size.batch, 1), generator=generator)
        window = data[starts + torch.arange(size.context + 1)].long()
        yield window[:, :-1].contiguous().to(size.device), window[:, 1:].contiguous().to(size.device)


Compile = Callable[[nn.Module], Callable[[Tensor, Tensor], Tensor]]


@dataclass(frozen=True)
class _ForwardBackward:
    """The part of a step over which the peak is measured: only the compiled graphs allocate in it, as the budget counts.

    The batch exists before, and so does the gradient of the loss, which autograd would allocate between the two graphs.
    """

    compiled: Callable[[Tensor, Tensor], Tensor]
    window: tuple[Tensor, Tensor]
    loss_gradient: Tensor
    losses: list[float]

    def __call__(self) -> None:
        loss = self.compiled(*self.window)
        loss.backward(self.loss_gradient)
        self.losses.append(float(loss.detach()))


def train(text: Text, size: JobSize, compile_module: Compile, on_step: Callable[[int, float], None]) -> JobResult:
    """Train from `size.seed`; measures the peak of forward and backward in the second step, and times the steps after it."""
    torch.manual_seed(size.seed)
    model = ByteGPT(size).to(size.device)
    compiled = compile_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows = batches(text.train, size, size.seed)
    losses: list[float] = []
    times_ns: list[int] = []
    loss_gradient = torch.ones((), device=size.device)
    peak = Peak(0, 0, 0, 0)

    for step in range(size.steps):
        optimizer.zero_grad(set_to_none=True)
        forward_backward = _ForwardBackward(compiled, next(windows), loss_gradient, losses)
        start_ns = time.perf_counter_ns()
        if step == 1:
            peak = peak_bytes(forward_backward, size.device)
        else:
            forward_backward()
        optimizer.step()
        synchronize(size.device)
        times_ns.append(time.perf_counter_ns() - start_ns)
        on_step(step + 1, losses[-1])
    steady = sorted(times_ns[2:])
    median_ns = steady[len(steady) // 2]
    return JobResult(peak, median_ns, tuple(losses), validation_loss(model, text, size))


@torch.no_grad()
def validation_loss(model: nn.Module, text: Text, size: JobSize) -> float:
    """Returns the mean loss on fixed windows of the held-out files, run eagerly, so that every run uses the same code."""
    windows = batches(text.validation, size, seed=1)
    total = sum(float(model(*next(windows))) for _ in range(_VALIDATION_BATCHES))
    return total / _VALIDATION_BATCHES
