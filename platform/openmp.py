"""OpenMP's threads wait asleep.

A training process has several threads with parallel regions: the model's, the optimizer's. Each has a team of its own,
and teams that wait spinning take the cores from each other and from the other jobs of the node. On two cores, measured
in turn, three steps of the demo's model and two evaluations took 71 and 90 s with spinning threads, 3 s with sleeping
ones.
"""

from __future__ import annotations

import os

POLICY = "OMP_WAIT_POLICY"


def asleep() -> dict[str, str]:
    """The variable to set for processes that compute, before they import torch; what the user has set stays."""
    return {POLICY: os.environ.get(POLICY, "PASSIVE")}
