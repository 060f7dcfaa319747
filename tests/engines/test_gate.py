"""Real vLLM in a few minutes: three engines that start together, and each thing that only they can show, once.

What the other files here do at length is done here with fewer requests and with the same assertions.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine import BLOCK, Engine, started
from harness.cluster import Serve
from harness.processes import free_ports
from harness.talk import TEXT
from streams import differences
from test_clients import finds_the_same
from test_conversations import CELLS, served_in_every_way
from test_residency import BYTES_PER_TOKEN, predicted_as_found
from test_resume import Loss, lose, serving

# How many conversations of each cell and how many words their openings have: long ones are worth moving.
SIZES = {"at_home": (12, 400), "handed_over": (4, 2000), "fetched": (6, 2000), "moved": (6, 2000), "together": (6, 2000)}
# The third engine's cache is small, so that it evicts.
CACHE_BLOCKS = 320
REQUESTS = 360
STREAMS = 10


@pytest.fixture(scope="module")
def fleet():
    ports = free_ports(12)
    small = {"context": 4096, "cache_bytes": CACHE_BLOCKS * BLOCK * BYTES_PER_TOKEN}
    with started(Engine("first", ports[:4]), Engine("second", ports[4:8]), Engine("small", ports[8:], **small)) as engines:
        yield engines


def test_every_action_serves_conversations_with_the_text_of_one_engine_alone(fleet, capsys):
    cells = {name: replace(CELLS[name], count=count, words=words) for name, (count, words) in SIZES.items()}
    served_in_every_way(fleet, cells, 1, capsys)


def test_the_index_predicts_what_vllm_finds_under_evictions(fleet):
    predicted_as_found(fleet[2], REQUESTS, CACHE_BLOCKS)


@pytest.mark.parametrize("program", ["openai_python.py", "anthropic_python.py"])
def test_a_client_finds_behind_serve_what_it_finds_at_the_engine(fleet, program):
    serve = Serve([f"{engine.url}#hybrid" for engine in fleet[:2]], settings=(TEXT,)).wait()
    try:
        finds_the_same(program, fleet[0].url, serve.url, Path(sys.executable))
    finally:
        serve.stop()


def test_an_engine_is_killed_in_the_midst_of_streams_and_not_missed(fleet):
    """The last one: it leaves an engine dead."""
    other, victim, _ = fleet
    with serving((other, victim), "decode") as serve:
        streams, _ = lose(Loss("decode", "killed", victim, other), serve, 9000, STREAMS)
        differences(other, streams)
