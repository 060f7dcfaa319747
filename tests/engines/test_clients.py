"""Clients that nobody here wrote, unchanged, through `ownerserve serve`: each finds what it finds when it talks straight to vLLM.

A client is a program in clients/ that is given a URL and prints what it found: final objects, and its deltas joined.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from harness.cluster import Serve
from harness.processes import ROOT
from harness.talk import TEXT

CLIENTS = Path(__file__).resolve().parent / "clients"
INSTALLED = ROOT / "target/engines/clients"
PYTHON = INSTALLED / "venv/bin/python"
# How many findings each has at least, so that one that stops asking does not pass.
LEAST = {
    "openai_python.py": 27, "openai_node.cjs": 11, "anthropic_python.py": 11, "litellm_python.py": 11,
    "langchain_python.py": 13, "agents_python.py": 4,
}
# Of one request: names, times, and how much of the prompt a cache held.
OWN = {"id", "created", "created_at", "completed_at", "response_id", "call_id", "tool_call_id", "item_id", "prompt_tokens_details",
       "input_tokens_details", "input_token_details", "cache_read_input_tokens", "cache_creation_input_tokens"}
# A known loss: vLLM puts the fingerprint of a stream only in the usage event where one is asked for. Serve always asks, and keeps that
# event from a client that did not: these did not.
LOST = {name: {"system_fingerprint"} for name in ("a named tool, accumulated", "parsed, accumulated")}
NAMES = re.compile(r"(?:chatcmpl|cmpl|chatcmpl-tool|call|resp|msg|fc|rs|lc_run|toolu)[-_]+[0-9a-zA-Z-]{8,}")


@pytest.fixture(scope="module")
def serve(engines):
    serve = Serve([f"{engine.url}#hybrid" for engine in engines], settings=(TEXT,)).wait()
    yield serve
    serve.stop()


def findings(program: str, url: str, python: Path) -> dict:
    runner = "node" if program.endswith(".cjs") else str(python)
    env = {**os.environ, "NODE_PATH": str(INSTALLED / "node_modules"), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run([runner, str(CLIENTS / program), url], capture_output=True, text=True, timeout=400, env=env)
    assert ended.returncode == 0, f"{program} at {url}:\n{ended.stderr[-3000:]}"
    return json.loads(ended.stdout)


def plain(found, left_out=OWN):
    """Without what differs between two requests to the same engine."""
    if isinstance(found, dict):
        if found.get("input_tokens") and "cache_read_input_tokens" in found:
            # In Anthropic's words what the cache held, or now holds, is not among these.
            held = (found["cache_read_input_tokens"] or 0) + (found.get("cache_creation_input_tokens") or 0)
            found = {**found, "input_tokens": found["input_tokens"] + held}
        return {name: plain(value, left_out) for name, value in found.items() if name not in left_out}
    if isinstance(found, list):
        return [plain(value, left_out) for value in found]
    return NAMES.sub("NAME", found) if isinstance(found, str) else found


@pytest.mark.parametrize("program", LEAST)
def test_a_client_finds_behind_serve_what_it_finds_at_the_engine(engines, serve, program):
    finds_the_same(program, engines[0].url, serve.url, PYTHON)


def finds_the_same(program: str, engine: str, serve: str, python: Path) -> None:
    """Asserts that a client finds the same at both URLs."""
    straight, through = (
        {name: plain(found, OWN | LOST.get(name, set())) for name, found in findings(program, url, python).items()}
        for url in (engine, serve))
    assert len(straight) >= LEAST[program], list(straight)
    assert list(through) == list(straight)
    differ = {name: (expected, through[name]) for name, expected in straight.items() if through[name] != expected}
    assert not differ, json.dumps(differ, indent=1)
