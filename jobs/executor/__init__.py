"""The layer-streaming executor: runs a step program, on any device, driven by the model's own forward and backward."""

from .devices import Emulated, open_device
from .opening import stream
from .resident import resident
from .streamed import StepResult, Streamed

__all__ = ["Emulated", "StepResult", "Streamed", "open_device", "resident", "stream"]
