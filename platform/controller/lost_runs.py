"""MLflow hears of runs whose process died without a word, also of those whose jobs go on later.

python -m lazytrain.platform.controller.lost_runs RUN_DIR ...
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from ...jobs.errors import LazytrainError
from ..logs import quiet_libraries

log = logging.getLogger(__name__)


def reconcile_all(run_dirs: Sequence[str]) -> None:
    """Each in turn; one that MLflow does not take does not keep the others from it."""
    from ...jobs.train import reconcile  # brings torch, which the controller has no use for

    for run_dir in run_dirs:
        try:
            reconcile(run_dir)
        except (LazytrainError, OSError) as error:
            log.warning("MLflow has not heard of the lost run in %s: %s", run_dir, error)


if __name__ == "__main__":
    quiet_libraries()
    reconcile_all(sys.argv[1:])
