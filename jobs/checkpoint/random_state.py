"""The state of every random generator that training uses, as JSON values."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """States of Python's, torch's CPU and, once CUDA is in use, torch's CUDA generators."""
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(words), gauss],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in cuda],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Continue from what ``random_state`` gave; CUDA states apply to as many devices as there are here."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_bytes(state["torch"]))
    for device, text in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(_bytes(text), device)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
