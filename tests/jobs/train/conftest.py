from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick(facts_are_measured_once: None) -> None:
    """Every run here is of one of a few tiny models."""
