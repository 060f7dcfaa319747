"""Several routers as one. What must hold is asserted; how fast it was is printed, with the figure to aim at.

    tests/routers/run              everything
    tests/routers/run starting     one of: starting, placing, killed, without_quorum
"""

import json
import shutil
import sys
import time
import zlib

from fleet import Fleet, Routers
from harness.cluster import get_json, status_of
from harness.processes import ROOT, until
from harness.talk import decisions, legs, post, prose, sealed_session, seconds, served_at
from traffic import Agent, Doors, failed, mean, percentile, run

FIGURES: dict[str, float] = {}


def say(what: str, figure: float, unit: str, aim: str = "") -> None:
    FIGURES[what] = round(figure, 4)
    print(f"  {what:<58} {figure:>8.3f} {unit:<2} {f'(aim: {aim})' if aim else ''}", flush=True)


def exact(serve) -> int:
    return int(serve.metric("kv_index_state", state="exact"))


def agents(doors: Doors, label: str, count: int, plan: dict) -> list[Agent]:
    """Equal labels are equal traffic; others share no text."""
    return [Agent(doors, f"{label}-{number}", zlib.crc32(f"{label}-{number}".encode()), plan) for number in range(count)]


def starting() -> None:
    """A router that joins 64 workers which no longer tell what they hold copies it, and knows all within 10 seconds."""
    count = 64
    with Fleet(count, flags=("--kv-events-buffer", "2", "--speed-up", "50")) as fleet, Routers(fleet, 1) as routers:
        first = routers.all[0]
        until("the first router follows all workers", lambda: all(replays >= 2 for replays in asked(first, count)), 60)
        for number, url in enumerate(fleet.urls):
            for more in range(5):
                post(url, "/v1/completions", {"model": "tiny", "prompt": prose(200, 1000 * more + number), "max_tokens": 1})
        known = standing_still(first)
        assert exact(first) == count, f"the first router knows {exact(first)} workers exactly"
        begun = time.monotonic()
        second = routers.add()
        until("the second router knows all workers exactly", lambda: exact(second) == count, 30, pause=0.02)
        took = time.monotonic() - begun
        assert blocks(second) == known, f"{blocks(second)} blocks where the first router knows {known}"
        borrowed = second.metric("residency_snapshots_total", outcome="received")
        assert borrowed >= count, f"{borrowed} snapshots were taken over"
        say("process start to EXACT at 64 workers", took, "s", "10")
        open_for = until("it says so itself", lambda: second.metric("kv_index_warmup_seconds"))
        say("  since its ledger was open", open_for, "s")
        assert took <= 10


def asked(serve, count: int) -> list[int]:
    """How often each worker's publisher was asked what was missed: the second time its live stream is heard for sure."""
    workers = get_json(f"{serve.operator}/ownerserve/v1/workers?limit={count}")["workers"]
    assert len(workers) == count, len(workers)
    return [worker["kv_event_counts"]["replays"] for worker in workers]


def blocks(serve) -> int:
    return int(serve.metric("residency_distinct_blocks"))


def standing_still(serve) -> int:
    """The blocks that are known once nothing more comes."""

    def same():
        before = blocks(serve)
        time.sleep(0.5)
        return before if before == blocks(serve) > 0 else None

    return until("no more events come", same, 30)


PLACING = {"opening": 900, "more": 90, "tokens": 24, "steps": 7, "think": 0.35, "spread": 0.5}


def placing() -> None:
    """Four routers place as well as one: sessions whose every step may come through another router."""
    # Routers, and through how many of them steps come: four processes cost a small machine something of their own.
    ways = [(1, 1), (4, 4), (4, 1)]
    seen = {way: [] for way in ways}
    for turn in range(2):
        for count, doors in ways if turn == 0 else reversed(ways):
            with Fleet(8, prefill=1_200, flags=("--speed-up", "4")) as fleet, Routers(fleet, count) as routers:
                routers.hear_each_other()
                through = Doors([serve.port for serve in routers.all[:doors]])
                steps = run(agents(through, f"placing-{turn}", 24, PLACING))
                assert not failed(steps), failed(steps)[:3]
                seen[count, doors] += steps
                if doors == 4:
                    told = [decision["lookup"]["evidence"]["peer_routers"] for serve in routers.all for decision in decisions(serve, 50)]
                    # A router that the machine starves for a second is not counted meanwhile, and must not be.
                    assert told.count(3) >= 0.9 * len(told), f"steps counted {told} other routers"
    one, four, beside = (mean(seen[way]) for way in ways)
    say("first-token mean through one router", 1e3 * one, "ms")
    say("first-token mean through four routers", 1e3 * four, "ms")
    say("  through one of them, the others idle", 1e3 * beside, "ms")
    say("four routers / one router, first-token mean", four / one, "", "at most 1.05")
    say("  four routers / one of them", four / beside, "")


KILLED = {"opening": 500, "more": 60, "tokens": 48, "steps": 12, "think": 0.25, "spread": 0.5}
KEPT = 6


def killed() -> None:
    """kill -9 of a router under load: its clients go on through others, at their sessions' owners, and nothing fails."""
    with Fleet(6, flags=("--speed-up", "4")) as fleet, Routers(fleet, 4, voters=3) as routers:
        routers.hear_each_other()
        victim, others = routers.all[1], [routers.all[0], *routers.all[2:]]
        kept = agents(Doors([victim.port]), "kept", KEPT, {**KILLED, "steps": 2, "think": 0.1})
        assert not failed(run(kept))
        owners = {agent.session: sealed_session(others[0], agent.session)["owner"]["endpoint"] for agent in kept}
        doors = Doors([serve.port for serve in routers.all])

        def kill() -> None:
            until("the router is in the middle of streams", lambda: victim.metric("requests_in_flight") >= 3, 20, pause=0.01)
            victim.process.kill()

        steps = run(agents(doors, "killed", 24, KILLED), kill)
        assert not failed(steps), failed(steps)[:3]
        retried = [step for step in steps if step.tries > 1]
        assert retried, "nobody was hit: the load is too small to show anything"
        say("steps that were retried through another router", len(retried), "")
        say("steps that failed", len(failed(steps)), "", "0")
        at_owner = [at_its_owner(others, step.request) for step in retried]
        for where in ("owner", "elsewhere", "none"):
            say(f"  of those, {WHERE[where]}", at_owner.count(where), "")
        left = 0
        for agent in kept:
            agent.doors = Doors([serve.port for serve in others])
            step = agent.step(2, prose(60, 77))
            assert not step.error, step
            receipt = receipt_of(others, step.request)
            worker = receipt["lookup"]["owner"]["worker"]
            endpoint = get_json(f"{others[0].operator}/ownerserve/v1/workers/{worker}")["worker"]["endpoint"]
            assert endpoint == owners[agent.session], f"{agent.session} was {owners[agent.session]}'s and is {endpoint}'s"
            if served_at(receipt["attempts"][-1]) == worker:
                assert sealed_session(others[0], agent.session)["owner"]["endpoint"] == owners[agent.session]
            else:
                # Workers that the machine starves are slow, and then another one may be the cheaper.
                chosen, stay = price(receipt), price(receipt, at=worker)
                assert chosen < stay, f"{agent.session} left its owner for {chosen}, where staying cost {stay}: {receipt}"
                left += 1
        say("kept sessions that left their owner for a better price", left, "", "0")
        assert left < KEPT / 2, f"{left} of {KEPT} left their owners"


WHERE = {
    "owner": "served at their session's owner",
    "elsewhere": "served elsewhere, for a better price",
    "none": "of a session that had no owner yet",
}


def receipt_of(routers, request: str) -> dict:
    """What the router that served a step wrote down of it."""

    def receipt():
        for serve in routers:
            url = f"{serve.operator}/ownerserve/v1/decisions/{request}"
            if status_of(url) == 200:
                return get_json(url)
        return None

    # A receipt is kept once the stream has ended, which its client sees a moment earlier.
    return until(f"a router has a receipt of {request}", receipt)


def at_its_owner(routers, request: str) -> str:
    """Where a step was served: at its session's owner, elsewhere, or in a session that had none yet."""
    kept = receipt_of(routers, request)
    owner = kept["lookup"]["owner"]
    if owner is None:
        return "none"
    return "owner" if served_at(kept["attempts"][-1]) == owner["worker"] else "elsewhere"


def price(receipt: dict, at: str | None = None) -> float:
    """The lowest cost in seconds among the ways that were allowed, or among those that decode at one worker."""
    ways = [way for way in receipt["decision"]["candidates"] if not way["rejection"]]
    return min(seconds(way["total_cost"]) for way in ways if at is None or legs(way)[-1]["worker"] == at)


# An hour of agents that think for two minutes, on engines that run 180 times faster.
HOUR = {"opening": 700, "more": 90, "tokens": 24, "steps": 10_000, "think": 0.7, "spread": 0.7}
SPEED = 180
SECONDS = 20


def without_quorum() -> None:
    """An hour without quorum (time-scaled): every step is served, about as soon as sticky sessions would be."""
    with Fleet(6, prefill=150, flags=("--speed-up", str(SPEED))) as fleet, Routers(fleet, 4, voters=3) as routers:
        routers.hear_each_other()
        left, gone = routers.all[2:], routers.all[:2]
        for serve in gone:
            serve.process.kill()
        for serve in left:
            until("the loss of the quorum is noticed", lambda serve=serve: serve.metric("ledger_stale") == 1, 30)
            assert "no_quorum" in degraded(serve), degraded(serve)
        doors = Doors([serve.port for serve in left])
        seen = {}
        # Sticky sessions before and after, so that a machine that gets busier does not speak for one of them.
        for turn, (mode, seconds) in enumerate([("bypass", SECONDS / 2), ("active", SECONDS), ("bypass", SECONDS / 2)]):
            routers.set_mode(mode, left)
            plan = {**HOUR, "until": time.monotonic() + seconds}
            steps = run(agents(doors, f"{mode}-{turn}", 24, plan))
            assert not failed(steps), failed(steps)[:3]
            seen.setdefault(mode, []).extend(steps)
            if mode == "active":
                views = {decision["lookup"]["evidence"]["ledger_view"] for serve in left for decision in decisions(serve, 200)}
                assert views == {"stale"}, views
                assert sum(serve.metric("ledger_pending_commit_sessions") for serve in left) >= 24
        say("steps served without a quorum", len(seen["active"]), "")
        for mode in ("active", "bypass"):
            say(f"first-token p99, {mode}", 1e3 * percentile(seen[mode], 0.99), "ms")
        ratio = percentile(seen["active"], 0.99) / percentile(seen["bypass"], 0.99)
        say("without quorum / sticky sessions, first-token p99", ratio, "", "at most 1.1")
        without_a_folder(left[0], doors)


def without_a_folder(serve, doors: Doors) -> None:
    """The ledger's folder deleted on top of that: every step is served, and readiness says so."""
    shutil.rmtree(serve.data)
    until("the folder is missed", lambda: "data_dir_missing" in degraded(serve), 10)
    steps = run(agents(Doors([serve.port]), "no folder", 6, {**HOUR, "steps": 4, "think": 0.2}))
    assert not failed(steps), failed(steps)[:3]
    assert status_of(f"{serve.operator}/readyz") == 200
    say("steps served with the ledger's folder deleted", len(steps), "")


def degraded(serve) -> list[str]:
    """What its readiness says is wrong with the ledger, while it goes on serving."""
    ready = get_json(f"{serve.operator}/readyz")
    assert ready["ready"], ready
    return [trouble["reason"] for trouble in ready["degraded"] if trouble["component"] == "ledger"]


def main() -> None:
    shows = {show.__name__: show for show in (starting, placing, killed, without_quorum)}
    for name in sys.argv[1:] or list(shows):
        begun = time.monotonic()
        print(f"{name}: {shows[name].__doc__}", flush=True)
        shows[name]()
        print(f"  {time.monotonic() - begun:.0f} s\n", flush=True)
    report = ROOT / "target/test-logs/routers.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(FIGURES, indent=2))


if __name__ == "__main__":
    main()
