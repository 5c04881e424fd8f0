"""Whether and how a job can run on the nodes that there are. Planning itself happens in another process."""

from .planner import PlannerProcess
from .values import STAGE, Admission, AdmissionOrder, Answer, Beside, Found, Planner, Question, Way, ends_soon

__all__ = [
    "STAGE",
    "Admission",
    "AdmissionOrder",
    "Answer",
    "Beside",
    "Found",
    "Planner",
    "PlannerProcess",
    "Question",
    "Way",
    "ends_soon",
]
