"""The homes of boundary activations, and the host's copy of weights and gradients."""

from .activations import ActivationStore
from .parameters import HostUnit, Optimizer, UnitOptimizer

__all__ = ["ActivationStore", "HostUnit", "Optimizer", "UnitOptimizer"]
