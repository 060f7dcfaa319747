"""`ownerserve serve` in front of two real engines: transfers it planned, seen in the engines' own figures, with equal text."""

from contextlib import contextmanager

from engine import BLOCK, known_exactly, known_to_be_busy
from harness.cluster import Serve
from harness.processes import until
from harness.talk import TEXT, Talk, busy, decisions, handoffs, legs, post, prose, sealed_session

CLIENTS = 12


@contextmanager
def serving(engines, roles: tuple[str, str], *disabled: str):
    """Who would be slowed down by a step counts much, so that a step leaves an engine that answers others."""
    without = ",".join(f'"{action}"' for action in disabled)
    settings = (TEXT, f"planner.disabled_actions=[{without}]", "planner.interference_weight=10")
    serve = Serve([f"{engine.url}#{role}" for engine, role in zip(engines, roles)], settings=settings).wait()
    try:
        known_exactly(serve)
        yield serve
    finally:
        serve.stop()


def alone(engine, talk: Talk, step: int) -> str:
    """What an engine that never fetched anything answers to the same request."""
    path, body, _ = talk.asked[step]
    return post(engine.url, path, body)["choices"][0]["message"]["content"]


def newest(serve, handoff: str) -> dict:
    """The receipt of the last step, which was carried out as planned."""
    receipt = decisions(serve, 1)[0]
    plan = receipt["decision"]["plan"]
    assert [moved["kind"] for moved in handoffs(plan)] == [handoff], receipt["decision"]
    assert [attempt["events"] for attempt in receipt["attempts"]] == [[]], receipt["attempts"]
    assert receipt["lookup"]["token_ids_unavailable"] is None, "the prompt was not known by its tokens"
    return receipt


def test_a_session_leaves_a_busy_owner_with_its_kv(engines):
    with serving(engines, ("hybrid", "hybrid"), "remote_prefill", "state_migration") as serve:
        talk = Talk(serve.url, "real", prose(2000, 31))
        talk.say(prose(1000, 32), tokens=20)
        endpoint = sealed_session(serve, "real")["owner"]["endpoint"]
        source, target = engines if engines[0].url == endpoint else engines[::-1]
        before = target.prompt_tokens_from("external_kv_transfer")
        with busy(source, clients=CLIENTS, words=10):
            known_to_be_busy(serve, source, CLIENTS)
            talk.say("What next?", tokens=32)
        receipt = newest(serve, "replicate")
        assert legs(receipt["decision"]["plan"])[-1]["worker"] != receipt["lookup"]["owner"]["worker"]
        moved = target.prompt_tokens_from("external_kv_transfer") - before
        assert moved >= receipt["lookup"]["sealed_tokens"] - BLOCK > 0
        seen = receipt["observed"]
        assert seen["cached_tokens"] == seen["predicted_cached_tokens"] >= moved
        until("nobody else is served", lambda: source.running() == 0)
        assert [answer for _, _, answer in talk.asked] == [alone(source, talk, 0), alone(source, talk, 1)]


def test_a_long_prompt_is_computed_at_one_engine_and_answered_by_the_other(engines):
    prefill, decode = engines
    with serving(engines, ("prefill", "decode")) as serve:
        talk = Talk(serve.url, "split", prose(2500, 41))
        before = decode.prompt_tokens_from("external_kv_transfer")
        with busy(decode, clients=CLIENTS, words=10):
            known_to_be_busy(serve, decode, CLIENTS)
            talk.say("Tell me all of it.", tokens=32)
        receipt = newest(serve, "remote_prefill")
        first, last = legs(receipt["decision"]["plan"])
        assert first["worker"] != last["worker"]
        assert decode.prompt_tokens_from("external_kv_transfer") - before >= receipt["lookup"]["prompt_tokens"] - BLOCK
        assert talk.asked[0][2] == alone(prefill, talk, 0)
        talk.say("And then?", tokens=16)
        assert talk.asked[1][2] == alone(prefill, talk, 1)
