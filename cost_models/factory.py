"""From the setting ``cost_model`` to a cost model."""

from __future__ import annotations

import torch

from compile_remat.cost_models.device import Device
from compile_remat.cost_models.kinds import OpKind
from compile_remat.cost_models.protocol import CostModel
from compile_remat.cost_models.roofline import Roofline
from compile_remat.cost_models.unit import UnitCost
from compile_remat.errors import ConfigError
from compile_remat.names import did_you_mean

_NAMES = ("roofline", "unit")


def cost_model_names() -> tuple[str, ...]:
    """Names that `make_cost_model` accepts."""
    return _NAMES


def make_cost_model(name: str, device: Device, tf32: tuple[OpKind, ...] | None = None) -> CostModel:
    """The cost model called `name` for `device`; None reads from torch's present settings where float32 means TF32.

    Raises:
        ConfigError: there is no such cost model.
    """
    if name == "unit":
        return UnitCost()
    if name == "roofline":
        return Roofline(device, tf32_kinds() if tf32 is None else tf32)
    raise ConfigError(
        f'cost_model = "{name}": no such cost model; there are {", ".join(_NAMES)}.{did_you_mean(name, _NAMES)}'
    )


def tf32_kinds() -> tuple[OpKind, ...]:
    """Kinds whose float32 arithmetic torch now lets run in TF32 on a device that has it."""
    products = (OpKind.MATMUL, OpKind.ATTENTION) if _matmul_allows_tf32() else ()
    return (*products, OpKind.CONV) if torch.backends.cudnn.allow_tf32 else products


def _matmul_allows_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the old and the new way to set it were mixed; then the new one holds
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
