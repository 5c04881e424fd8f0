"""Checkpoints that are complete or absent: safetensors and JSON only, hashed, published by one rename."""

from __future__ import annotations

from .export import WeightWriter, export_folder, export_weights, saved_weights
from .random_state import random_state, set_random_state
from .store import Checkpoint, CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "WeightWriter",
    "export_folder",
    "export_weights",
    "random_state",
    "saved_weights",
    "set_random_state",
]
