"""The controller: decides from the store and the machines what happens to each job, and lets it happen."""

from .controller import Controller
from .ports import Clock, Config, Decide

__all__ = ["Clock", "Config", "Controller", "Decide"]
