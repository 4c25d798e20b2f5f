"""Cost models: bytes and time of one node on one device. This package does not depend on plans."""

from compile_remat.cost_models.device.caching_allocator import Event as Event
from compile_remat.cost_models.device.caching_allocator import Reservation as Reservation
from compile_remat.cost_models.device.caching_allocator import counted_bytes as counted_bytes
from compile_remat.cost_models.device.caching_allocator import reservation_of as reservation_of
from compile_remat.cost_models.device.description import Device as Device
from compile_remat.cost_models.device.links import CollectiveKind as CollectiveKind
from compile_remat.cost_models.device.links import Link as Link
from compile_remat.cost_models.device.links import Links as Links
from compile_remat.cost_models.device.links import link_names as link_names
from compile_remat.cost_models.device.links import load_link as load_link
from compile_remat.cost_models.device.table import detect as detect
from compile_remat.cost_models.device.table import device_names as device_names
from compile_remat.cost_models.device.table import load_device as load_device
from compile_remat.cost_models.operators.kinds import FUSED_KINDS as FUSED_KINDS
from compile_remat.cost_models.operators.kinds import OpKind as OpKind
from compile_remat.cost_models.operators.ops import Op as Op
from compile_remat.cost_models.operators.ops import describe as describe
from compile_remat.cost_models.operators.ops import is_random as is_random
from compile_remat.cost_models.operators.ops import is_view as is_view
from compile_remat.cost_models.operators.ops import op_kind as op_kind
from compile_remat.cost_models.profile import Profile as Profile
from compile_remat.cost_models.profile import Times as Times
from compile_remat.cost_models.profile_file import ProfileFile as ProfileFile
from compile_remat.cost_models.protocol import CostModel as CostModel
from compile_remat.cost_models.registry import cost_model_names as cost_model_names
from compile_remat.cost_models.registry import make_cost_model as make_cost_model
from compile_remat.cost_models.registry import tf32_kinds as tf32_kinds
from compile_remat.cost_models.roofline import Roofline as Roofline
from compile_remat.cost_models.timing.calibration import Calibration as Calibration
from compile_remat.cost_models.timing.calibration import calibrate as calibrate
from compile_remat.cost_models.timing.calibration import sources_of as sources_of
from compile_remat.cost_models.timing.clock import Clock as Clock
from compile_remat.cost_models.timing.replay import CannotTime as CannotTime
from compile_remat.cost_models.timing.replay import Recipe as Recipe
from compile_remat.cost_models.timing.replay import recipe_of as recipe_of
from compile_remat.cost_models.timing.replay import time_ns as time_ns
from compile_remat.cost_models.unit import UnitCost as UnitCost

__all__ = [
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
    "sources_of",
    "tf32_kinds",
    "time_ns",
]
