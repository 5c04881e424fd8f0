"""Settings of every test: nothing is fetched, and tiny tensors do not pay for threads."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["OMP_NUM_THREADS"] = "1"  # also for the processes that tests start

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
