"""What a planner decides (`artifact`) and the operations it becomes (`lowering` makes a `program`)."""

from .artifact import Boundary, Certificate, Home, LayerPolicy, Policy, Predicted
from .lowering import lower, lower_forward
from .parked import Parked
from .program import DIRECT, UPDATE_PHASE, Buffer, Op, Program

__all__ = [
    "DIRECT",
    "UPDATE_PHASE",
    "Boundary",
    "Buffer",
    "Certificate",
    "Home",
    "LayerPolicy",
    "Op",
    "Parked",
    "Policy",
    "Predicted",
    "Program",
    "lower",
    "lower_forward",
]
