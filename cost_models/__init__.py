"""Cost models: bytes and time of one node on one device. This package does not depend on plans."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_remat.cost_models.api import *  # noqa: F403

__all__ = [  # noqa: F405
    "FUSED_KINDS",
    "Calibration",
    "CannotTime",
    "Clock",
    "CollectiveKind",
    "CostModel",
    "Device",
    "Event",
    "Link",
    "Links",
    "Op",
    "OpKind",
    "Profile",
    "ProfileFile",
    "Recipe",
    "Reservation",
    "Roofline",
    "Times",
    "UnitCost",
    "calibrate",
    "cost_model_names",
    "counted_bytes",
    "describe",
    "detect",
    "device_names",
    "is_random",
    "is_view",
    "link_names",
    "load_device",
    "load_link",
    "make_cost_model",
    "op_kind",
    "recipe_of",
    "reservation_of",
    "share_spared_by_tf32",
    "sources_of",
    "tf32_kinds",
    "time_ns",
]

if not TYPE_CHECKING:  # a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        """Import the names when one is first used: a package that is only looked at, as `TORCH_LOGS` does, imports no torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from compile_remat.cost_models.device import names

        if hasattr(names, name):  # the tables of devices and links need no torch: the command looks at them first
            return getattr(names, name)
        from compile_remat.cost_models import api

        return getattr(api, name)
