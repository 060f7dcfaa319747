"""The engines are started once, both at the same time, and stopped by their ids."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from harness.processes import free_ports  # noqa: E402
from engine import Engine  # noqa: E402


@pytest.fixture(scope="session")
def third():
    """One more, for those who need three."""
    engine = Engine("c", free_ports(4))
    try:
        engine.wait()
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def engines():
    ports = free_ports(8)
    both = [Engine("a", ports[:4]), Engine("b", ports[4:])]
    try:
        for engine in both:
            engine.wait()
        yield both
    finally:
        for engine in both:
            engine.stop()
