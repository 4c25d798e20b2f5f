"""Makes the cost model that the setting ``cost_model`` names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from compile_remat._util.suggestions import did_you_mean
from compile_remat.cost_models.device.description import Device
from compile_remat.cost_models.operators.kinds import OpKind
from compile_remat.cost_models.operators.ops import Op
from compile_remat.cost_models.profile import Profile
from compile_remat.cost_models.protocol import CostModel
from compile_remat.cost_models.roofline import Roofline
from compile_remat.cost_models.unit import UnitCost
from compile_remat.errors import ConfigError

_NAMES = ("roofline", "profile", "unit")


def cost_model_names() -> tuple[str, ...]:
    """Names that `make_cost_model` accepts."""
    return _NAMES


def make_cost_model(
    name: str,
    device: Device,
    tf32: tuple[OpKind, ...] | None = None,
    measured: Sequence[tuple[str, int]] = (),
) -> CostModel:
    """The cost model called `name` for `device`.

    Args:
        tf32: Kinds whose float32 arithmetic runs in TF32; None takes `tf32_kinds`, torch's present settings.
        measured: For `profile`, names of the graph's nodes with measured ns; if empty, the roofline prices all nodes.

    Raises:
        ConfigError: There is no cost model of that name.
    """
    if name == "unit":
        return UnitCost()
    roofline = Roofline(device, tf32_kinds() if tf32 is None else tf32)
    if name in ("roofline", "profile"):
        return roofline if name == "roofline" else Profile(roofline, measured)
    raise ConfigError(
        f'cost_model = "{name}": no such cost model; there are {", ".join(_NAMES)}.{did_you_mean(name, _NAMES)}'
    )


def tf32_kinds() -> tuple[OpKind, ...]:
    """Kinds whose float32 arithmetic runs in TF32 under torch's present settings, on a device that has TF32."""
    products = (OpKind.MATMUL, OpKind.ATTENTION) if _matmul_allows_tf32() else ()
    return (*products, OpKind.CONV) if torch.backends.cudnn.allow_tf32 else products


def share_spared_by_tf32(ops: Iterable[Op], device: Device) -> float:
    """Share of the operators' time that TF32 would spare in float32 products, which run without it under torch's settings; else 0.

    0 also for a device that states no rate of TF32.
    """
    products = (OpKind.MATMUL, OpKind.ATTENTION)
    present = tf32_kinds()
    if "tf32" not in dict(device.flops_per_s) or set(products) <= set(present):
        return 0.0
    now, then = Roofline(device, present), Roofline(device, (*products, *present))
    times = [(now.op_time_ns(op), then.op_time_ns(op) if op.kind in products else None) for op in ops]
    total_ns = sum(time_ns for time_ns, _ in times)
    return sum(time_ns - fast_ns for time_ns, fast_ns in times if fast_ns is not None) / max(1, total_ns)


def _matmul_allows_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the old and the new setting were mixed; then the new one holds
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
