"""Checkpoints that are complete or absent: safetensors and JSON only, hashed, published by one rename."""

from __future__ import annotations

from .random_state import random_state, set_random_state
from .store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore", "random_state", "set_random_state"]
