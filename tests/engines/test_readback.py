"""NIXL's bidirectional mode at two real engines of its own: the next turn's prefill pulls what the decoder has computed."""

import pytest
from engine import Engine, known_exactly, known_to_be_busy, started
from harness.cluster import Serve
from harness.processes import free_ports, until
from harness.talk import TEXT, busy, decisions, post, prose

CLIENTS = 12
ANSWER = 100


@pytest.fixture
def pair():
    ports = free_ports(8)
    with started(*(Engine(name, ports[at:at + 4], bidirectional_kv_xfer=True) for name, at in (("prefill", 0), ("decode", 4)))) as both:
        yield both


@pytest.fixture
def serve(pair, tmp_path):
    config = tmp_path / "ownerserve.toml"
    config.write_text("".join(
        f'[[workers]]\nurl = "{engine.url}#{engine.name}"\n[workers.profile.link]\nconnector = "nixl_bidirectional"\n'
        for engine in pair))
    front = Serve([], "--config", str(config), settings=(TEXT, "planner.interference_weight=50"))
    front.workers = [engine.url for engine in pair]
    try:
        front.wait()
        known_exactly(front)
        yield front
    finally:
        front.stop()


def ask(url: str, prompt: list[int], **more) -> dict:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return post(url, "/v1/completions", {**body, **more}, None if more else "both-ways")


def test_the_next_turns_prefill_pulls_from_the_decoder_what_that_has_computed(pair, serve):
    prefill, decode = pair
    tokens = [prefill.post("/tokenize", {"model": "tiny", "prompt": prose(1200, seed)})["tokens"] for seed in (51, 52)]
    with busy(decode, clients=CLIENTS, words=10):
        known_to_be_busy(serve, decode, CLIENTS)
        first = ask(serve.url, tokens[0])
        assert first["kv_transfer_params"] is None
        assert prefill.prompt_tokens_from("external_kv_transfer") == 0
        second_prompt = [*tokens[0], *first["choices"][0]["token_ids"], *tokens[1]]
        second = ask(serve.url, second_prompt)
    plans = [receipt["decision"]["plan"]["action"] for receipt in decisions(serve, 2)]
    assert plans == ["remote_prefill"] * 2
    assert [attempt["events"] for receipt in decisions(serve, 2) for attempt in receipt["attempts"]] == [[], []]
    pulled = prefill.prompt_tokens_from("external_kv_transfer")
    assert ANSWER - 1 <= pulled < ANSWER + 32, "the answer, and what stands with it in a block"
    assert serve.metric("reverse_pulls_total", outcome="pulled") == 1
    # A salt of its own finds nothing in the cache: what one engine alone computes.
    for prompt, answer in ((tokens[0], first), (second_prompt, second)):
        alone = ask(decode.url, prompt, cache_salt="alone")
        assert alone["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    assert prefill.prompt_tokens_from("external_kv_transfer") == pulled, "it was pulled once"
