"""The engines are started once, both at the same time, and stopped by their ids."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from harness.processes import free_ports  # noqa: E402
from engine import Engine, started  # noqa: E402


@pytest.fixture(scope="session")
def third():
    """One more, for those who need three."""
    with started(Engine("c", free_ports(4))) as (engine,):
        yield engine


@pytest.fixture(scope="session")
def engines():
    ports = free_ports(8)
    with started(Engine("a", ports[:4]), Engine("b", ports[4:])) as both:
        yield both
