"""What a planner decides (`artifact`) and the operations it becomes (`lowering` makes a `program`)."""

from .artifact import Boundary, Certificate, Home, LayerPolicy, Policy, Predicted
from .lowering import lower, lower_forward
from .program import Buffer, Op, Program

__all__ = [
    "Boundary",
    "Buffer",
    "Certificate",
    "Home",
    "LayerPolicy",
    "Op",
    "Policy",
    "Predicted",
    "Program",
    "lower",
    "lower_forward",
]
