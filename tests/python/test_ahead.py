"""Between two steps: the prefix of a session whose owner has much to do is sent to where the next step would rather go."""

import pytest
from harness.cluster import Cluster, Serve, get_json
from harness.processes import BINARY, Process, until
from harness.talk import TEXT, Talk, asked_alone, busy, decisions, handoffs, legs, owner_of, prose

# Prompts take long, so that who owns a session may have seconds of others' to compute, and what it is asked to send waits for that.
PROFILE = "prefill_tokens_per_second = 5000.0\n"
SETTINGS = (TEXT, 'planner.disabled_actions=["remote_prefill","state_migration"]')


def sent(serve: Serve, outcome: str) -> float:
    return serve.metric("prefix_replications_total", outcome=outcome)


def test_a_prefix_is_sent_once_before_the_step_that_uses_it(tmp_path):
    (tmp_path / "slow.toml").write_text(PROFILE)
    sim = ("--profile", str(tmp_path / "slow.toml"))
    with Cluster("hybrid", "hybrid", settings=(*SETTINGS, "prefix_replication.enabled=true"), sim=sim) as cluster:
        talk = Talk(cluster.url, "ahead", prose(3000, 41))
        talk.say(prose(2500, 42), tokens=1)
        owner = owner_of(cluster, "ahead")
        other = next(worker for worker in cluster.workers if worker is not owner)
        with busy(owner, clients=16, words=1200):
            until("it is sent ahead", lambda: sent(cluster.serve, "sent") == 1)
            bytes_sent = cluster.serve.metric("prefix_replication_bytes_total")
            assert bytes_sent > 0 and owner_of(cluster, "ahead") is owner, "a copy"
            talk.say("What next?", tokens=1)
        receipt = decisions(cluster.serve, 1)[0]
        endpoints = {line["id"]: line["endpoint"] for line in get_json(f"{cluster.serve.operator}/ownerserve/v1/workers")["workers"]}
        assert endpoints[legs(receipt["decision"]["plan"])[-1]["worker"]] == other.url, receipt
        assert handoffs(receipt["decision"]["plan"]) == [] and receipt["observed"]["transferred_bytes"] == 0, "it was there already"
        assert receipt["observed"]["cached_tokens"] > 0.9 * receipt["lookup"]["prompt_tokens"], receipt["observed"]
        until("it was of use", lambda: sent(cluster.serve, "used") == 1)
        assert (sent(cluster.serve, "sent"), sent(cluster.serve, "failed"), sent(cluster.serve, "unused")) == (1, 0, 0)
        assert cluster.serve.metric("prefix_replication_bytes_total") == bytes_sent, "nothing is sent twice in a gap"
    pairs = asked_alone([talk], *sim)
    assert pairs and [here for here, _ in pairs] == [alone for _, alone in pairs]


@pytest.mark.parametrize("setting, problem", [
    ("prefix_replication.bandwidth=0B", "prefix_replication.bandwidth: accepted is 1MiB or more, in bytes per second"),
    ("prefix_replication.fast=true", "unknown field `fast`, expected `enabled` or `bandwidth`"),
])
def test_what_cannot_be_says_what_is_accepted(tmp_path, setting, problem):
    process = Process("refused", [str(BINARY), "serve", "--data-dir", str(tmp_path), "--set", setting], {})
    until("it ended", lambda: not process.alive())
    assert problem in process.last_lines(20)
