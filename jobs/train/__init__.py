"""One training run in this process: the loop around the streamed model.

Everything that decides what is learned is a pure function of the job file and the step: learning rate, order of the
rows, dropout. So a run that was killed goes on from its last checkpoint to the same weights.
"""

from .export import Exported, export_run
from .lost import reconcile
from .pace import shown
from .result import Result
from .run import train

__all__ = ["Exported", "Result", "export_run", "reconcile", "shown", "train"]
