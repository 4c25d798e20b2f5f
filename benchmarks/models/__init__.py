"""The models that the benchmarks train: builders that return a frozen `Case`.

Full sizes take 0.1 to 0.6 s a step on two CPU cores. `scale` in (0, 1] shrinks depth, width and batch for tests
(`--toy` is 0.1). A model whose output is a scalar carries its own loss; for the others the loss is `out.mean()`,
outside the compiled module.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import branching, chains, convolutional, heldout, transformers
from benchmarks.models.building import DTYPES as DTYPES
from benchmarks.models.building import Built, in_dtype

TOY_SCALE = 0.1


@dataclass(frozen=True)
class Case:
    """A module, the inputs of one training step, and what is special about it."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    note: str


def build(
    name: str, *, device: torch.device | str = "cpu", scale: float = 1.0, seed: int = 0, dtype: str = "float32"
) -> Case:
    """The named case with weights and inputs drawn from `seed`: two calls give equal numbers.

    Args:
        dtype: One of `DTYPES`.
    """
    if name not in CASES:
        raise ValueError(f"no benchmark model {name!r}; there are: {', '.join(CASES)}")
    if not 0.0 < scale <= 1.0:
        raise ValueError(f"scale must lie in (0, 1], got {scale}")
    torch.manual_seed(seed)
    module, inputs = CASES[name](scale)
    module, inputs = in_dtype((module.to(device), tuple(value.to(device) for value in inputs)), dtype)
    return Case(name, module.train(), inputs, note(name))


def note(name: str) -> str:
    """Describes the named model: the docstring of its builder."""
    return (CASES[name].__doc__ or "").strip()


CASES: dict[str, Callable[[float], Built]] = {
    "gpt": transformers.gpt,
    "chain256": chains.chain256,
    "chain1024": chains.chain1024,
    "bert": transformers.bert,
    "resnet": convolutional.resnet,
    "mixer": transformers.mixer,
    "unet": branching.unet,
    "densenet": branching.densenet,
    "encoder_decoder": branching.encoder_decoder,
    "two_passes": branching.two_passes,
    "recurrent": branching.recurrent,
    "fourier": branching.fourier,
    "llama": heldout.llama,
    "vit": heldout.vit,
    "convnext": heldout.convnext,
    "experts": heldout.experts,
    "wavenet": heldout.wavenet,
    "autoencoder": heldout.autoencoder,
}
MAX_SPEED = ("chain256", "gpt", "bert", "resnet", "mixer")
HELD_OUT = ("llama", "vit", "convnext", "experts", "wavenet", "autoencoder")
DEEP = (
    "gpt",
    "chain256",
    "mixer",
    "encoder_decoder",
    "two_passes",
    "recurrent",
    "fourier",
    "llama",
    "vit",
    "convnext",
    "wavenet",
)
"""Eight blocks or more."""
