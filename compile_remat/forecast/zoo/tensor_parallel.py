"""Tensor parallelism of the named transformers: projections to heads and to the MLP's width by columns, those back by rows.

Norms are on every rank, and so are embeddings and heads that share a matrix: the scheme of Megatron-LM (Shoeybi and others, 2019).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from compile_remat.errors import ConfigError

COLUMNS = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"),  # Llama, ViT
        *("query", "key", "value", "intermediate.dense"),  # BERT
        *("q", "k", "v", "wi", "relative_attention_bias"),  # T5; the bias is an embedding with one column for each head
    )
)
ROWS = frozenset(("o_proj", "down_proj", "fc2", "output.dense", "o", "wo"))


def spread_over(model: nn.Module, mesh: Any, *, heads: int, vocabulary: bool = False) -> None:
    """Spread the matrices of a transformer's layers over ``mesh["tp"]``; does nothing without a mesh, or over one rank.

    Args:
        heads: Number of heads, which the ranks share evenly; that of keys and values if they have fewer.
        vocabulary: True to spread the embedding and the head over the vocabulary as well.

    Raises:
        ConfigError: The number of ranks does not divide the heads.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if mesh is None or mesh["tp"].size() == 1:
        return
    size = mesh["tp"].size()
    if heads % size:
        raise ConfigError(f"tp = {size}: {heads} attention heads cannot be divided by it.")
    plan: dict[str, Any] = {}
    for path, module in model.named_modules():
        names = path.split(".")
        ends = {names[-1], ".".join(names[-2:])}
        if ends & COLUMNS:
            plan[path] = ColwiseParallel()
        elif ends & ROWS and isinstance(module, nn.Linear):
            plan[path] = RowwiseParallel()
        elif vocabulary and names[-1] == "embed_tokens":
            plan[path] = RowwiseParallel(input_layouts=Replicate())
        elif vocabulary and names[-1] == "lm_head":
            plan[path] = ColwiseParallel(output_layouts=Replicate())
        if isinstance(getattr(module, "n_heads", None), int):  # T5 makes its position biases for this number
            module.n_heads //= size
    parallelize_module(model, mesh["tp"], plan)
