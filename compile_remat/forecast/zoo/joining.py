"""Helpers of the builders of `transformers` models: import, quiet construction, and the loss as the only output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compile_remat.errors import RematError

CAUSAL = "compile_remat_causal"
"""Name of an attention in `transformers` that is causal by a flag and gets no mask, as flash attention does."""


@contextmanager
def transformers() -> Iterator[Any]:
    """Yields the package `transformers`, with its logging reduced to errors inside this context.

    Raises:
        RematError: The package cannot be imported.
    """
    try:
        import transformers as package
    except ImportError as error:
        raise RematError(
            f"this model is built by the package transformers, which cannot be imported ({error}): "
            'pip install "compile-remat[models]".'
        ) from error
    logging: Any = package.logging  # not all of its functions have annotations
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        package.AttentionInterface.register(CAUSAL, _causal_attention)
        yield package
    finally:
        logging.set_verbosity(level)


class Loss(nn.Module):
    """A model of `transformers` as a function of its inputs and labels that returns its loss."""

    def __init__(self, model: nn.Module, first: str = "input_ids") -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss of one batch, a scalar."""
        loss: Tensor = self.model(**{self.first: inputs, "labels": labels}).loss
        return loss


def tokens(batch: int, seq: int) -> Tensor:
    """Returns token numbers, all 0, of shape [batch, seq]."""
    return torch.zeros(batch, seq, dtype=torch.int64)


def _causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """[B, H, T, D] -> [B, T, H, D]; keys and values may have fewer heads."""
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None,
        scale=scaling,
        enable_gqa=key.size(1) != query.size(1),
    )
    return output.transpose(1, 2).contiguous(), None
