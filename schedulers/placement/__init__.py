"""Which waiting job starts where: `decide(question, seconds=...)` turns a `Question` into `Decisions`.

Nothing here knows a process, a clock or a database: the caller lists jobs and nodes, and does what is decided.
"""

from .decide import decide
from .decisions import Decisions, Preempt, SolverReport, Start, Wait, WaitCode
from .question import EVERYBODY, Gpu, NodeState, Option, Question, Rules, RunningJob, WaitingJob

__all__ = [
    "EVERYBODY",
    "Decisions",
    "Gpu",
    "NodeState",
    "Option",
    "Preempt",
    "Question",
    "Rules",
    "RunningJob",
    "SolverReport",
    "Start",
    "Wait",
    "WaitCode",
    "WaitingJob",
    "decide",
]
