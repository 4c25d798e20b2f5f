"""The tables of devices and of links between them, whose modules import no torch."""

from compile_remat.cost_models.device.links import link_names as link_names
from compile_remat.cost_models.device.links import load_link as load_link
from compile_remat.cost_models.device.table import device_names as device_names
from compile_remat.cost_models.device.table import load_device as load_device
