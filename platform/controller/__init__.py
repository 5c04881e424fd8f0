"""The controller: decides from the store and the machines what happens to each job, and lets it happen."""

from .controller import Controller
from .ports import Admission, AdmissionOrder, Clock, Config, Decide, Planner, Way

__all__ = ["Admission", "AdmissionOrder", "Clock", "Config", "Controller", "Decide", "Planner", "Way"]
