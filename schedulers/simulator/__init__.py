"""Runs a step program on paper: when each operation starts and ends, who waits for whom, what fills which memory."""

from .predict import predict, simulate, step_seconds
from .run import run

__all__ = ["predict", "run", "simulate", "step_seconds"]
