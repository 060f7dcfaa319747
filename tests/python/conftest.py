"""What several suites share. Every fixture stops what it started."""

import os

import pytest
from harness.cluster import Cluster, Serve
from harness.recorder import Behaviour, Recorder

# litellm asks a public server for prices unless told that its own copy will do.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

FAST = ("--speed-up", "20")


@pytest.fixture(scope="session")
def cluster():
    """One worker of each role and a second hybrid, for suites that only look at answers."""
    with Cluster("prefill", "decode", "hybrid", "hybrid", sim=FAST) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def _recorded():
    recorder = Recorder()
    serve = Serve([recorder.url]).wait()
    yield recorder, serve
    serve.stop()
    recorder.stop()


@pytest.fixture
def recorded(_recorded):
    """A recorder, forgetful of earlier tests, and the serve in front of it."""
    recorder, serve = _recorded
    recorder.behaviour = Behaviour()
    recorder.seen.clear()
    recorder.left = 0
    return recorder, serve
