"""Random generators continue where they were, through JSON."""

import json
import random

import torch

from lazytrain.jobs.checkpoint import random_state, set_random_state


def draw() -> tuple[list[float], float, float]:
    return torch.rand(5).tolist(), random.random(), random.gauss(0, 1)


def test_draws_continue_after_a_trip_through_json() -> None:
    torch.manual_seed(3)
    random.seed(3)
    draw()
    saved = json.loads(json.dumps(random_state()))
    expected = draw()
    assert draw() != expected
    set_random_state(saved)
    assert draw() == expected
