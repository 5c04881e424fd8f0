"""The learning rate as a pure function of the step, so that a resumed run cannot have another one."""

from __future__ import annotations

import math

from .spec import Train


def learning_rate(section: Train, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 1 to ``total_steps``): linear warm-up, then the schedule.

    ``wsd`` (warm-up, stable, decay; Hu et al., MiniCPM, 2024) stays at the highest rate until the decay, then falls to
    zero along a line.
    """
    warmup = section.warmup_steps(total_steps)
    if step <= warmup:
        return section.learning_rate * step / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    decay = section.decay_steps(total_steps)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "wsd": min(1.0, (total_steps - step) / decay) if decay else 1.0,
    }[section.schedule]
    return section.learning_rate * factor
