"""Bytes and time of one node on one device. Knows nothing of plans."""

from compile_remat.cost_models.device.description import Device as Device
from compile_remat.cost_models.device.table import detect as detect
from compile_remat.cost_models.device.table import device_names as device_names
from compile_remat.cost_models.device.table import load_device as load_device
from compile_remat.cost_models.operators.kinds import OpKind as OpKind
from compile_remat.cost_models.operators.ops import Op as Op
from compile_remat.cost_models.operators.ops import describe as describe
from compile_remat.cost_models.operators.ops import op_kind as op_kind
from compile_remat.cost_models.profile import Profile as Profile
from compile_remat.cost_models.profile import Times as Times
from compile_remat.cost_models.protocol import CostModel as CostModel
from compile_remat.cost_models.registry import cost_model_names as cost_model_names
from compile_remat.cost_models.registry import make_cost_model as make_cost_model
from compile_remat.cost_models.registry import tf32_kinds as tf32_kinds
from compile_remat.cost_models.roofline import Roofline as Roofline
from compile_remat.cost_models.unit import UnitCost as UnitCost

__all__ = [
    "CostModel",
    "Device",
    "Op",
    "OpKind",
    "Profile",
    "Roofline",
    "Times",
    "UnitCost",
    "cost_model_names",
    "describe",
    "detect",
    "device_names",
    "load_device",
    "make_cost_model",
    "op_kind",
    "tf32_kinds",
]
