"""What all builders share."""

from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]


def scaled(full: int, scale: float, *, step: int = 1, least: int = 1) -> int:
    """`full * scale`, rounded down to a multiple of `step`, at least `least`."""
    return max(least, int(full * scale) // step * step)
