"""Mooncake's real connector over TCP: a prefill and a decode engine behind serve, and what a dead or another peer costs."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine import Engine, known_exactly, known_to_be_busy, listed, started
from harness.cluster import Serve, get_json
from harness.processes import free_ports, until
from harness.talk import TEXT, busy, prose
from streams import Stream, differences

# Who serves a step is to think much of those whose answers it would slow down: prompts are computed by the prefill engine.
SETTINGS = (TEXT, "planner.interference_weight=1000")
# Answers that the consumer gives to others meanwhile.
BUSY = 6


@pytest.fixture(scope="module")
def pair():
    ports = free_ports(8)
    with started(Engine("producer", ports[:4], mooncake="kv_producer"), Engine("consumer", ports[4:], mooncake="kv_consumer")) as both:
        yield both


@pytest.fixture
def serve(pair, tmp_path):
    workers = "".join(
        f'[[workers]]\nurl = "{engine.url}"\nrole = "{role}"\n[workers.profile.link]\nconnector = "mooncake"\n'
        f'bootstrap_url = "http://127.0.0.1:{engine.side_channel}"\n'
        for engine, role in zip(pair, ("prefill", "decode")))
    (tmp_path / "mooncake.toml").write_text(workers)
    front = Serve([], "--config", str(tmp_path / "mooncake.toml"), settings=SETTINGS)
    front.workers = [engine.url for engine in pair]
    front.wait()
    known_exactly(front)
    until("both can exchange KV", lambda: all(line["link"] for line in listed(front)), 60)
    yield front
    front.stop()


def run(serve, numbers, words, tokens=16) -> list[Stream]:
    def one(number: int) -> Stream:
        text = prose(words(number), 52_000 + number)
        stream = Stream(serve.url, text if number % 2 else [{"role": "user", "content": text}], tokens)
        stream.run()
        return stream

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, numbers))


def receipts(serve, streams) -> list[dict]:
    return [get_json(f"{serve.operator}/ownerserve/v1/decisions/{stream.request}") for stream in streams]


def actions(serve, streams) -> list[str]:
    return [receipt["decision"]["plan"]["action"] for receipt in receipts(serve, streams)]


def test_prompts_of_growing_length_are_handed_over_with_the_texts_of_one_engine(pair, serve, engines, capsys):
    _, consumer = pair
    before = consumer.prompt_tokens_from("external_kv_transfer")
    with busy(consumer, clients=BUSY, words=10):
        known_to_be_busy(serve, consumer, BUSY)
        streams = run(serve, range(40), lambda number: 60 + 30 * number)
    until("nobody else is served", lambda: consumer.running() == 0, 60)
    pulled = consumer.prompt_tokens_from("external_kv_transfer") - before
    served = actions(serve, streams)
    noise = differences(engines[0], streams)
    with capsys.disabled():
        print(f"\nmooncake: {served.count('remote_prefill')} of {len(served)} handed over, {pulled} tokens pulled by the engine's own "
              f"count; rounding: {noise or 'none'}")
    assert served.count("remote_prefill") >= 20, served
    remarks = [remark for receipt in receipts(serve, streams) for attempt in receipt["attempts"] for remark in attempt["events"]]
    assert remarks == []
    moved = sum(receipt["lookup"]["prompt_tokens"] for receipt, action in zip(receipts(serve, streams), served) if action == "remote_prefill")
    assert pulled > 0.9 * moved, "what was computed there was pulled"


def test_a_dead_producer_holds_nobody_up_and_another_one_is_asked_for_its_name(pair, serve, engines, capsys):
    producer, consumer = pair

    def pulled() -> int:
        return consumer.prompt_tokens_from("external_kv_transfer")

    with busy(consumer, clients=BUSY, words=10):
        known_to_be_busy(serve, consumer, BUSY)
        before = pulled()
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(run, serve, range(100, 124), lambda _: 1500)
            until("it hands over", lambda: pulled() > before, 60, 0.01)
            producer.signal(signal.SIGKILL)
            since = time.monotonic()
            streams = under_way.result(150)
            took = time.monotonic() - since
    assert took < 100, took
    # How it was served: what broke was computed again at the one that is left.
    remarks = [remark for receipt in receipts(serve, streams) for attempt in receipt["attempts"] for remark in attempt["events"]]
    assert remarks, "nothing was under way"
    producer.process.child.wait()
    producer.start()
    producer.wait()
    until("it is taken back", lambda: all(line["health"] == "ready" and line["link"] for line in listed(serve)), 60)
    known_exactly(serve)
    with busy(consumer, clients=BUSY, words=10):
        known_to_be_busy(serve, consumer, BUSY)
        before = pulled()
        again = run(serve, range(130, 134), lambda _: 900)
        assert "remote_prefill" in actions(serve, again)
        assert pulled() > before + 500, "by its new name"
    until("nobody is served", lambda: consumer.running() == 0, 60)
    noise = differences(engines[0], streams + again)
    with capsys.disabled():
        print(f"\nmooncake: {took:.1f} s from the kill to the last of {len(streams)} answers, rounding: {noise or 'none'}")
