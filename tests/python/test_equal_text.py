"""Whatever action served a step, its text is that of one hybrid worker that serves the same conversation alone."""

from contextlib import contextmanager

import pytest
from harness.cluster import Cluster, get_json
from harness.processes import until
from harness.talk import TEXT, Talk, asked_alone, busy, decisions, owner_of, prose, sealed_session

SIM = ("--speed-up", "4")
ACTIONS = ["colocated_prefill", "decode_continuation", "remote_prefill", "artifact_fetch", "tail_recompute", "state_migration"]


@contextmanager
def cluster_without(roles: tuple[str, ...], *disabled: str, settings: tuple[str, ...] = ()):
    listed = ",".join(f'"{action}"' for action in disabled)
    with Cluster(*roles, settings=(TEXT, f"planner.disabled_actions=[{listed}]", *settings), sim=SIM) as cluster:
        yield cluster


def served_by(cluster, action: str) -> float:
    return cluster.serve.metric("plan_actions_total", action=action)


def load_of(cluster, worker) -> dict:
    """As the router sees it."""
    lines = get_json(f"{cluster.serve.operator}/ownerserve/v1/workers")["workers"]
    return next(line["load"] for line in lines if line["endpoint"] == worker.url)


def known_to_be_busy(cluster, worker) -> None:
    until("the load is known", lambda: load_of(cluster, worker)["running"] >= 8)


def without_loss(cluster) -> None:
    """Nothing fell back on the way: the action did what its name says."""
    attempts = [attempt for decision in decisions(cluster.serve) for attempt in decision["attempts"]]
    assert attempts and not any(attempt["events"] for attempt in attempts), attempts


def equal_alone(*talks: Talk) -> None:
    pairs = asked_alone(list(talks), *SIM)
    assert pairs and all(here for here, _ in pairs)
    assert [here for here, _ in pairs] == [alone for _, alone in pairs]


def test_colocated_prefill():
    with cluster_without(("hybrid", "hybrid")) as cluster:
        talk = Talk(cluster.url, "colocated", prose(500, 1))
        talk.say(prose(100, 2))
        talk.say(prose(200, 3))
        assert served_by(cluster, "colocated_prefill") >= 1
        without_loss(cluster)
    equal_alone(talk)


def test_decode_continuation():
    with cluster_without(("hybrid", "hybrid")) as cluster:
        talk = Talk(cluster.url, "continued", "")
        prompt = prose(600, 4)
        for _ in range(6):
            # Less than a block at a time: whole blocks are what a head knows.
            prompt += talk.complete(prompt, tokens=3)
            sealed_session(cluster.serve, "continued")
        assert served_by(cluster, "decode_continuation") >= 1
        without_loss(cluster)
    equal_alone(talk)


def test_remote_prefill():
    """The decode worker answers others: computing a long prompt there would hold all of them up."""
    with cluster_without(("prefill", "decode"), settings=("planner.interference_weight=20",)) as cluster:
        talk = Talk(cluster.url, "remote", prose(3000, 5))
        with busy(cluster.workers[1], clients=8, words=20):
            known_to_be_busy(cluster, cluster.workers[1])
            talk.say(prose(3000, 6))
        assert served_by(cluster, "remote_prefill") >= 1
        without_loss(cluster)
        talk.say("And now?")
    equal_alone(talk)


# Who serves a step is to think much of those whose answers it would slow down.
CONSIDERATE = ("planner.interference_weight=10",)


def moved(action: str, first_answer: int, *disabled: str, settings: tuple[str, ...] = ()) -> None:
    """A long session whose owner answers many others: its next step is served elsewhere, with the KV fetched."""
    roles = ("hybrid", "hybrid")
    with cluster_without(roles, "remote_prefill", *disabled, settings=CONSIDERATE + settings) as cluster:
        talk = Talk(cluster.url, action, prose(3000, 7))
        talk.say(prose(2500, 8), tokens=first_answer)
        owner = owner_of(cluster, action)
        with busy(owner, clients=24, words=20):
            known_to_be_busy(cluster, owner)
            talk.say("What next?")
        assert served_by(cluster, action) >= 1, decisions(cluster.serve, 1)
        without_loss(cluster)
        if action == "state_migration":
            until("the session has moved", lambda: owner_of(cluster, action) is not owner)
        else:
            assert owner_of(cluster, action) is owner
        talk.say("And then?")
    equal_alone(talk)


def test_artifact_fetch():
    """An answer of one token: everything that the owner holds is sealed, and all of it is moved."""
    moved("artifact_fetch", 1, "state_migration")


def test_state_migration():
    moved("state_migration", 24, settings=("planner.overload.max_kv_cache_usage=0.01",))


def test_tail_recompute_after_a_fetch():
    """The answer's blocks are not sealed: they are computed again where the sealed ones went."""
    moved("tail_recompute", 48, "state_migration")


def test_tail_recompute_where_an_older_copy_lies():
    """Two sessions share a long opening. The second worker got it once; what was added since at the first is short."""
    moves = ("remote_prefill", "artifact_fetch", "state_migration")
    with cluster_without(("hybrid", "hybrid"), *moves, settings=CONSIDERATE) as cluster:
        opening = prose(3000, 9)
        first = Talk(cluster.url, "tail-1", opening)
        first.say("Tell me.")
        owner = owner_of(cluster, "tail-1")
        second = Talk(cluster.url, "tail-2", opening)
        with busy(owner, clients=24, words=20):
            known_to_be_busy(cluster, owner)
            second.say("Tell me more.")
        until("the load is gone", lambda: load_of(cluster, owner)["running"] == 0)
        first.say(prose(300, 10))
        assert owner_of(cluster, "tail-1") is owner
        before = served_by(cluster, "tail_recompute")
        with busy(owner, clients=24, words=20):
            known_to_be_busy(cluster, owner)
            first.say("And then?")
        assert served_by(cluster, "tail_recompute") == before + 1, decisions(cluster.serve, 1)
        without_loss(cluster)
    equal_alone(first, second)


@pytest.mark.parametrize("roles", [("prefill", "decode", "hybrid"), ("prefill", "prefill", "decode", "decode", "hybrid")])
def test_mixed_traffic_over_all_roles_says_what_one_worker_says(roles):
    with cluster_without(roles) as cluster:
        talks = [Talk(cluster.url, f"mixed-{number}", prose(200 + 900 * (number % 3), 20 + number % 4)) for number in range(6)]
        for turn in range(4):
            for number, talk in enumerate(talks):
                talk.say(prose(30 + 700 * ((number + turn) % 3), 100 + 10 * number + turn), tokens=16)
        used = {action: served_by(cluster, action) for action in ACTIONS}
        assert sum(used.values()) == 24, used
        assert cluster.serve.metric("request_errors_total") == 0
    equal_alone(*talks)
