"""The layer-streaming executor: runs a step program, on any device, driven by the model's own forward and backward."""

from .devices import Emulated, open_device
from .resident import resident
from .streamed import StepResult, Streamed, stream

__all__ = ["Emulated", "StepResult", "Streamed", "open_device", "resident", "stream"]
