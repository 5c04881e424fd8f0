"""One training run in this process: the loop around the streamed model.

Everything that decides what is learned is a pure function of the job file and the step: learning rate, order of the
rows, dropout. So a run that was killed goes on from its last checkpoint to the same weights.
"""

from .export import Exported, export_run
from .inference import Evaluated, complete, evaluate_model, trained_model
from .lost import reconcile
from .pace import shown
from .pausing import Pause
from .result import Result
from .run import train

__all__ = [
    "Evaluated",
    "Exported",
    "Pause",
    "Result",
    "complete",
    "evaluate_model",
    "export_run",
    "reconcile",
    "shown",
    "train",
    "trained_model",
]
