"""A folder that two real engines share (vLLM's ExampleConnector): what the prefill engine writes, the decode engine reads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine import BLOCK, Engine, known_exactly, known_to_be_busy, started
from harness.cluster import Serve, get_json
from harness.processes import free_ports, until
from harness.talk import TEXT, busy, prose
from streams import Stream, differences

# Answers that the decode engine gives to others meanwhile, so that prompts had better be computed elsewhere.
BUSY = 6
SETTINGS = (TEXT, "planner.interference_weight=1000")


@pytest.fixture
def pair(tmp_path):
    ports = free_ports(8)
    names = (("prefill", 0), ("decode", 4))
    with started(*(Engine(name, ports[at:at + 4], store=tmp_path) for name, at in names)) as both:
        yield both


@pytest.fixture
def serve(pair, tmp_path):
    config = tmp_path / "ownerserve.toml"
    config.write_text("".join(
        f'[[workers]]\nurl = "{engine.url}#{engine.name}"\n[workers.profile.link]\nconnector = "shared_store"\n' for engine in pair))
    front = Serve([], "--config", str(config), settings=SETTINGS)
    front.workers = [engine.url for engine in pair]
    try:
        front.wait()
        known_exactly(front)
        yield front
    finally:
        front.stop()


def test_prompts_of_growing_length_are_found_in_the_store_with_the_texts_of_one_engine(pair, serve, engines, capsys):
    _, decode = pair

    def run(number: int) -> Stream:
        text = prose(60 + 30 * number, 61_000 + number)
        stream = Stream(serve.url, text if number % 2 else [{"role": "user", "content": text}], 16)
        stream.run()
        return stream

    before = decode.prompt_tokens_from("external_kv_transfer")
    with busy(decode, clients=BUSY, words=10):
        known_to_be_busy(serve, decode, BUSY)
        with ThreadPoolExecutor(4) as pool:
            streams = list(pool.map(run, range(30)))
    until("nobody else is served", lambda: decode.running() == 0, 60)
    read = decode.prompt_tokens_from("external_kv_transfer") - before
    receipts = [get_json(f"{serve.operator}/ownerserve/v1/decisions/{stream.request}") for stream in streams]
    handed = [receipt for receipt in receipts if receipt["decision"]["plan"]["action"] == "remote_prefill"]
    noise = differences(engines[0], streams)
    with capsys.disabled():
        print(f"\nstore: {len(handed)} of {len(streams)} handed over, {read} tokens read by the engine's own count; "
              f"rounding: {noise or 'none'}")
    assert len(handed) >= 15, [receipt["decision"]["plan"]["action"] for receipt in receipts]
    assert [remark for receipt in receipts for attempt in receipt["attempts"] for remark in attempt["events"]] == []
    # Whole blocks are written; of a prompt of nothing else the last one is looked for where it is not.
    found = [receipt["lookup"]["prompt_tokens"] // BLOCK * BLOCK for receipt in handed if receipt["lookup"]["prompt_tokens"] % BLOCK]
    assert read > 0.9 * sum(found), "what was computed there was read"
