"""A training loop inside a memory budget, on a GPU or on a CPU.

    python examples/train.py --budget 20GiB                       # on a GPU: bfloat16 activations, AdamW
    python examples/train.py --device cpu --toy --budget 4MiB     # seconds on a CPU

The only line that is new to a training loop is the one with `backend="remat"`.  The script ends with what the backend reports.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import compile_remat


class Block(nn.Module):
    """A transformer block on float[batch, tokens, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).split(width, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    """A small language model; the loss is part of it, so that logits and their gradients are planned for as well."""

    def __init__(self, layers: int, width: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width, heads=4) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(arguments: argparse.Namespace, memory_budget: str) -> list[float]:
    """The loss of each step."""
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    layers, width, batch, length = (4, 32, 4, 33) if arguments.toy else (24, 1024, 16, 1025)
    model = Model(layers, width).to(device)
    options = compile_remat.options(memory_budget=memory_budget, compiler=arguments.compiler)
    step = torch.compile(model, backend="remat", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(arguments.steps):
        tokens = torch.randint(256, (batch, length), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = step(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train inside the budget, or with the lowest plan where none fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", default="auto", help='such as "20GiB", "0.5", "min" (default auto)')
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    arguments = parser.parse_args(argv)
    try:
        losses = train(arguments, arguments.budget)
    except compile_remat.BudgetError as error:
        print(error)
        print("training with the lowest plan")
        losses = train(arguments, "min")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    for report in compile_remat.reports()[-1:]:  # none under a torch that is not supported
        print(report)
    return losses


if __name__ == "__main__":
    main()
