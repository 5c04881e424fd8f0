"""From a policy to the step program: first the order of compute, then each transfer as early as memory permits.

Everything that comes to the GPU comes in the order in which compute needs it. What a layer needs is sent for when the
layer that was used ``weight_slots`` layers before it is done; its weights, when the oldest slot is free.

`sequence` has the order of compute, `draft` the program while it is made; `weights`, `boundaries`, `internals` and
`gradients` place what moves, `memory` says what is held; `lower` runs them in turn.
"""

from .boundaries import NVME_STAGING
from .gradients import GRADIENT_STAGING
from .lower import lower, lower_forward, lower_rest
from .weights import HEAD_AHEAD

__all__ = ["GRADIENT_STAGING", "HEAD_AHEAD", "NVME_STAGING", "lower", "lower_forward", "lower_rest"]
