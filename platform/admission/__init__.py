"""Whether and how a job can run on the nodes that there are. Planning itself happens in another process."""

from .planner import PlannerProcess
from .values import Admission, AdmissionOrder, Planner, Way

__all__ = ["Admission", "AdmissionOrder", "Planner", "PlannerProcess", "Way"]
