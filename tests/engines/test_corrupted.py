"""A link between real engines that begins to damage what goes over it: found by what is said, and used no more."""

from engine import Engine, known_exactly, known_to_be_busy, listed, started
from harness.cluster import Serve, get_json
from harness.processes import free_ports, until
from harness.talk import TEXT, busy, legs, prose
from streams import Stream, differences

import pytest

# Answers that the decode engine gives to others, so that prompts had better be computed elsewhere.
BUSY = 6
SETTINGS = (TEXT, "planner.interference_weight=1000")
# Sound transfers before the link breaks; so many after that it has to be found.
SOUND, WITHIN = 3, 20


@pytest.fixture
def fleet(engines, tmp_path):
    """Two prefill engines and a decode engine, to which the link from the first one can be broken by a file."""
    broken = tmp_path / "broken"
    with started(Engine("decode", free_ports(4), damaged=(engines[0], broken))) as (decode,):
        roles = zip([*engines, decode], ("prefill", "prefill", "decode"))
        serve = Serve([f"{engine.url}#{role}" for engine, role in roles], settings=SETTINGS).wait()
        try:
            known_exactly(serve)
            yield serve, decode, broken
        finally:
            serve.stop()


def test_a_link_that_begins_to_damage_kv_is_found_within_20_transfers_and_barred(fleet, engines, capsys):
    serve, decode, broken = fleet
    ids = {line["endpoint"]: line["id"] for line in listed(serve)}
    bad, target = ids[engines[0].url], ids[decode.url]
    streams: list[Stream] = []

    def step() -> str | None:
        """A new prompt; who computed it for the decode engine."""
        stream = Stream(serve.url, prose(700, 71_000 + len(streams)), 8)
        streams.append(stream)
        stream.run()
        receipt = get_json(f"{serve.operator}/ownerserve/v1/decisions/{stream.request}")
        assert receipt["observed"]["outcome"] == "complete", receipt
        plan = receipt["decision"]["plan"]
        return legs(plan)[0]["worker"] if plan["action"] == "remote_prefill" else None

    def barred() -> list[tuple[str, str]]:
        return [(link["source"], link["target"]) for link in get_json(f"{serve.operator}/ownerserve/v1/transfer-checks")["disabled_links"]]

    def checks(outcome: str) -> float:
        return serve.metric("transfer_checks_total", outcome=outcome)

    with busy(decode, clients=BUSY, words=10):
        known_to_be_busy(serve, decode, BUSY)
        over_bad = 0
        while over_bad < SOUND:
            assert len(streams) < 40
            over_bad += step() == bad
        until("the first transfers are checked", lambda: checks("match") >= 1, 60)
        assert barred() == []
        before = len(streams)
        broken.touch()
        over_bad = 0
        while not barred():
            assert over_bad < WITHIN and len(streams) < 120, {outcome: checks(outcome) for outcome in ("match", "mismatch", "inconclusive")}
            over_bad += step() == bad
        found_after, last = over_bad, len(streams)
        after = [step() for _ in range(8)]
    assert barred() == [(bad, target)]
    assert bad not in after, "the link is used no more"
    assert any(after), "the other one is"
    until("nobody else is served", lambda: decode.running() == 0, 60)
    wrong = [stream for stream in streams[before:last] if differs(engines[1], stream)]
    noise = differences(engines[1], streams[:before] + streams[last:])
    with capsys.disabled():
        print(f"\ndamaged: {over_bad} transfers over the broken link, found with the {found_after}th, {len(wrong)} wrong answers until "
              f"then, none before and after; rounding: {noise or 'none'}")
    assert wrong, "it did damage"


def differs(engine, stream: Stream) -> bool:
    try:
        return bool(differences(engine, [stream]))
    except AssertionError:
        return True
