"""The blocks of a model: the modules around which FSDP2 is put one by one."""

from __future__ import annotations

from torch import nn

LEAST_WEIGHTS = 2
"""Fewest matrices in a block: a module list of single layers is no list of blocks."""


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the outermost entries of module lists with at least two matrices each, by path, in the model's order."""
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
            if name.isdecimal() and is_called and _num_weights(child) >= LEAST_WEIGHTS:
                if child not in found.values():
                    found[inner] = child
            else:
                look(child, inner)

    look(model, "")
    return found


def _num_weights(module: nn.Module) -> int:
    return sum(p.dim() >= 2 for p in module.parameters())
