"""What holds for all tests: no time limit that a busy machine breaks, one thread, a case to repeat in every failure."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Tests are small: more threads would only take turns with those of the next process.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=6, help="how many seeds the simulations try")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> int:
    """How many seeds a sweep tries."""
    count: int = request.config.getoption("--seeds")
    return count
