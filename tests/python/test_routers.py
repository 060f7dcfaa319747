"""Two and three routers of one cluster as a person meets them: whichever is asked, the answer is the same."""

import signal
import time

import pytest
from harness.cluster import Serve, SimWorker
from harness.operator import Operator
from harness.processes import free_ports, until
from harness.talk import TEXT, Talk, prose, sealed_session


def nodes_of(workers, count: int) -> list[Serve]:
    """So many routers, one cluster; three of them vote, of two only the first."""
    ports = free_ports(count)
    urls = [worker.url for worker in workers]
    routers = []
    for place, port in enumerate(ports):
        join = ("--join", f"127.0.0.1:{ports[0]}") if place else ()
        routers.append(Serve(urls, "--cluster-listen", f"127.0.0.1:{port}", *join, settings=(TEXT,)).wait())
    first = Operator(routers[0].operator)
    if count == 3:
        until("the learners may vote", lambda: first.write("POST", "cluster/members/promote", {"nodes": [2, 3]}).status == 200)
    return routers


@pytest.fixture(scope="module")
def workers():
    workers = [SimWorker("hybrid", "--speed-up", "20").wait() for _ in range(3)]
    yield workers
    for worker in workers:
        worker.process.stop()


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def routers(request, workers):
    routers = nodes_of(workers, request.param)
    yield routers
    for router in routers:
        router.stop()


def served(router, key: str, seed: int) -> dict:
    Talk(router.url, key, prose(400, seed)).say("hello")
    return sealed_session(router, key)


def elsewhere(router, line: dict) -> list[str]:
    workers = Operator(router.operator).get("workers").json["workers"]
    return [worker["id"] for worker in workers if worker["endpoint"] != line["owner"]["endpoint"]]


def test_any_router_moves_and_copies_what_another_one_served(routers):
    for number, server in enumerate(routers):
        line = served(server, f"moved-{number}", 100 + number)
        session, head = line["id"], line["heads"][-1]
        others = [router for router in routers if router is not server]
        targets = elsewhere(server, line)
        for router, target in zip(others, targets):
            asked = Operator(router.operator)
            done = asked.write("POST", f"sessions/{session}/migrate", {"target": {"worker": target}}, "*").ok()
            assert done["transfer"]["blocks"] == head["blocks"] and done["transfer"]["target"] == target
            assert asked.get(f"sessions/{session}").json["session"]["owner"]["worker"] == target
            copy = {"target": {"worker": line["owner"]["worker"]}}
            made = asked.write("POST", f"artifacts/{head['artifact']}/replicas", copy)
            assert made.status == 200, made.body
        assert sum(router.metric("peer_prompt_transfers_total", outcome="received") for router in others) >= len(others)


def test_what_no_router_knows_any_more_is_refused_alike_and_says_what_helps(workers):
    routers = nodes_of(workers, 2)
    one, other = routers
    try:
        line = served(one, "forgotten", 200)
        one.process.stop()
        one.start()
        one.wait()
        until("the other one hears it", lambda: Operator(other.operator).get("cluster").json["stale"] is False)
        target = elsewhere(one, line)[0]
        told = [Operator(router.operator).write("POST", f"sessions/{line['id']}/migrate", {"target": {"worker": target}}, "*")
                for router in routers]
        assert [(got.status, got.json["reason"]) for got in told] == [(409, "transfer_not_possible")] * 2
        assert told[0].json["detail"] == told[1].json["detail"] and "after a step of the session" in told[0].json["detail"]
        Talk(other.url, "forgotten", prose(400, 200)).say("hello")
        sealed_session(other, "forgotten")
        again = Operator(one.operator).write("POST", f"sessions/{line['id']}/migrate", {"target": {"worker": target}}, "*")
        assert again.status == 200, again.body
    finally:
        for router in routers:
            router.stop()


def test_routers_that_are_asked_to_end_at_once_end_cleanly(workers):
    routers = nodes_of(workers, 3)
    try:
        for number, router in enumerate(routers):
            served(router, f"last-{number}", 300 + number)
        since = time.monotonic()
        for router in routers:
            router.process.child.send_signal(signal.SIGTERM)
        codes = [router.process.child.wait(30) for router in routers]
        took = time.monotonic() - since
        logs = [router.process.log.read_text(errors="replace") for router in routers]
        assert codes == [0, 0, 0], [log[-1500:] for log in logs]
        assert took < 30, "the drain time"
        assert not any("ERROR" in log or "panicked" in log for log in logs), [log[-1500:] for log in logs]
    finally:
        for router in routers:
            router.stop()
