"""A link that brings damaged KV is found and barred; a sound one never is."""

import json
import time

import pytest
from harness.cluster import Cluster, Serve, SimWorker
from harness.operator import Operator, ctl
from harness.processes import until
from harness.talk import TEXT, Talk, busy, decisions, legs, prose, sealed_session

SIM = ("--speed-up", "4")
# Who serves a step is to think much of those whose answers it would slow down: long prompts are computed elsewhere.
SETTINGS = (TEXT, "planner.interference_weight=20")
OUTCOMES = ["match", "mismatch", "inconclusive", "not_comparable", "failed", "skipped"]


class Fleet:
    """A prefiller whose KV is damaged on its way, a sound one, and a decoder that answers others."""

    def __init__(self, fault: str, *settings: str):
        self.bad = SimWorker("prefill", *SIM, "--transfer-fault", fault)
        self.good, self.decoder = SimWorker("prefill", *SIM), SimWorker("decode", *SIM)
        self.workers = [worker.wait() for worker in (self.bad, self.good, self.decoder)]
        self.serve = Serve([f"{worker.url}#{worker.role}" for worker in self.workers], settings=(*SETTINGS, *settings)).wait()
        self.operator, self.asked = Operator(self.serve.operator), 0
        ids = {line["endpoint"]: line["id"] for line in self.operator.get("workers").ok()["workers"]}
        self.ids = {worker: ids[worker.url] for worker in self.workers}

    def stop(self) -> None:
        self.serve.stop()
        for worker in self.workers:
            worker.process.stop()

    def checks(self) -> dict[str, float]:
        return {outcome: self.serve.metric("transfer_checks_total", outcome=outcome) for outcome in OUTCOMES}

    def barred(self) -> list[tuple[str, str]]:
        return [(link["source"], link["target"]) for link in self.operator.get("transfer-checks").ok()["disabled_links"]]

    def step(self) -> str | None:
        """A new long prompt; who computed it for the decoder."""
        self.asked += 1
        Talk(self.serve.url, f"s-{self.asked}", prose(1500, 500 + self.asked)).say("What next?", tokens=2)
        newest = decisions(self.serve, 1)[0]
        assert newest["observed"]["outcome"] == "complete", newest
        plan = newest["decision"]["plan"]
        return legs(plan)[0]["worker"] if plan["action"] == "remote_prefill" else None


@pytest.fixture
def fleet(request):
    fleet = Fleet(*request.param)
    yield fleet
    fleet.stop()


@pytest.mark.parametrize("fleet", [("corrupt=1",), ("corrupt=3", "transfer_check.sample_every=1")], indirect=True)
def test_a_corrupting_link_is_barred_within_20_transfers_and_a_sound_one_never(fleet):
    bad, good, decoder = (fleet.ids[worker] for worker in fleet.workers)
    always = fleet.operator.get("transfer-checks").ok()["sample_every"] == 1
    over_bad, over_good = 0, 0
    with busy(fleet.decoder, clients=8, words=20):
        until("the decoder answers others", lambda: fleet.decoder.running() >= 8)

        def settled():
            return not always or sum(fleet.checks().values()) == over_bad + over_good

        while over_bad < 20 and not fleet.barred():
            assert fleet.asked < 60, (over_bad, over_good, fleet.checks())
            by = fleet.step()
            over_bad, over_good = over_bad + (by == bad), over_good + (by == good)
            until("its check is over", settled)
        until("the last one's check is over", fleet.barred)
        assert fleet.barred() == [(bad, decoder)], (over_bad, over_good, fleet.checks())
        assert fleet.serve.metric("transfer_links_disabled") == 1
        alarms = json.loads(ctl("-o", "json", "--endpoint", fleet.serve.operator, "alarms", "list").stdout)
        assert [alarm["alarm"] for alarm in alarms if "transfer_check" in alarm["alarm"]] == ["transfer_check_output_mismatch"], alarms

        after = [fleet.step() for _ in range(12)]
        # A check is due once enough has moved to make up for the last one.
        end = time.monotonic() + 60
        while fleet.checks()["match"] < 1:
            assert time.monotonic() < end, (len(after), fleet.checks())
            after.append(fleet.step())
        assert bad not in after and good in after, after
        assert fleet.barred() == [(bad, decoder)] and fleet.checks()["mismatch"] == 1, fleet.checks()
        assert fleet.checks()["inconclusive"] == 0, fleet.checks()

        cleared = ctl("-o", "json", "--endpoint", fleet.serve.operator, "link", "enable", fleet.bad.url, fleet.decoder.url)
        assert cleared.returncode == 0 and fleet.barred() == [], cleared
        again = ctl("--endpoint", fleet.serve.operator, "link", "enable", bad, decoder)
        assert again.returncode == 1, again
        assert bad in [fleet.step() for _ in range(12)], "it is used again"


def test_a_move_that_an_operator_orders_is_checked_like_any_other():
    with Cluster("hybrid", "hybrid", settings=(TEXT,), sim=(*SIM, "--transfer-fault", "corrupt=1")) as cluster:
        operator = Operator(cluster.serve.operator)
        Talk(cluster.url, "moved", prose(400, 3)).say("hello")
        line = sealed_session(cluster.serve, "moved")
        owner = line["owner"]["worker"]
        target = next(worker["id"] for worker in operator.get("workers").ok()["workers"] if worker["id"] != owner)
        tag = operator.get(f"sessions/{line['id']}").headers["etag"]
        done = operator.write("POST", f"sessions/{line['id']}/migrate", {"target": {"worker": target}}, tag).ok()
        assert done["transfer"]["target"] == target
        barred = until("its check is over", lambda: operator.get("transfer-checks").ok()["disabled_links"])
        assert [(link["source"], link["target"], link["action"]) for link in barred] == [(owner, target, "state_migration")]
