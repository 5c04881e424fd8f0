"""What a node says of itself when it joins, and while it is there. Imports nothing heavy."""

from .gpus import Device, list_devices
from .versions import Comparison, compare, versions

__all__ = ["Comparison", "Device", "compare", "list_devices", "versions"]
