"""Real engines that are stopped, restarted and killed in the midst of a hundred streams: while they compute prompts, hand them
over, and answer. Each client gets what one engine alone tells.

The last of these suites: it leaves one engine dead.
"""

import signal
import statistics
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
from engine import Engine, known_exactly, listed
from harness.cluster import Serve, metric
from harness.processes import until
from harness.talk import TEXT, busy, decisions, prose
from streams import Stream, differences

# In all nine of the cells together, a hundred and some.
STREAMS = {"prefill": 12, "transfer": 10, "decode": 14}
FAULTS = ["stopped", "restarted", "killed"]
# Words of a prompt and tokens of an answer: what takes the time is what is to be broken.
SHAPES = {"prefill": (1800, 24), "transfer": (1800, 24), "decode": (80, 400)}
# Answers that the engine gives to others which takes over what the other one computed.
BUSY = 6


def stream_of(url: str, phase: str, number: int) -> Stream:
    words, tokens = SHAPES[phase]
    text = prose(words, number)
    return Stream(url, text if number % 2 else [{"role": "user", "content": text}], tokens)


@contextmanager
def serving(engines, phase: str):
    roles = ("prefill", "decode") if phase == "transfer" else ("hybrid", "hybrid")
    # Who would be slowed down counts much where a prompt is to be computed away from who answers.
    settings = (TEXT, "planner.interference_weight=50") if phase == "transfer" else (TEXT,)
    serve = Serve([f"{engine.url}#{role}" for engine, role in zip(engines, roles)], settings=settings).wait()
    try:
        yield serve
    finally:
        serve.stop()


def hit_when(phase: str, engines, victim) -> None:
    """Waits for the victim to be in the midst of what is to be broken."""
    if phase == "prefill":
        until("it computes prompts", lambda: victim.running() >= 2, 60, 0.01)
    elif phase == "transfer":
        other = next(engine for engine in engines if engine is not victim)
        before = other.prompt_tokens_from("external_kv_transfer")
        until("it hands over", lambda: other.prompt_tokens_from("external_kv_transfer") > before and victim.running() >= 1, 60, 0.01)
    else:
        until("it answers some", lambda: victim.running() >= 3, 60)
        before = metric(victim.metrics(), "vllm:generation_tokens_total")
        until("it is in their midst", lambda: metric(victim.metrics(), "vllm:generation_tokens_total") > before + 100, 60)


def hit(fault: str, victim) -> float:
    since = time.monotonic()
    victim.signal(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
    if fault == "restarted":
        victim.process.child.wait()
        victim.start()
    return since


def mend(fault: str, engines, victim, serve) -> None:
    """The victim is there again, and the router takes it back as what it is: the same process, or another one."""
    if fault == "stopped":
        victim.signal(signal.SIGCONT)
    elif fault == "killed":
        victim.process.child.wait()
        victim.start()
    victim.wait()
    until("it is taken back", lambda: all(line["health"] == "ready" for line in listed(serve)), 60)
    until("nobody is served", lambda: all(engine.running() == 0 for engine in engines), 60)


def was_broken(phase: str, receipt: dict, victim: str) -> bool:
    """Whether the victim was of this step when it was broken in its phase."""
    for attempt in receipt["attempts"]:
        at = [leg["worker"] for leg in attempt["legs"]]
        at_victim = victim in at
        if phase == "transfer" and at[0] == victim != at[-1] and attempt["events"]:
            return True
        if phase == "prefill" and at_victim and {"decode_failed", "decode_lost", "decode_unreachable"} & set(attempt["events"]):
            return True
        if phase == "decode" and at_victim and {"stream_interrupted", "stream_lost"} & set(attempt["events"]):
            return True
    return False


@dataclass
class Loss:
    """An engine that is lost in the midst of streams, and the one that is left."""

    phase: str
    fault: str
    victim: Engine
    other: Engine


def lose(loss: Loss, serve, first: int, count: int) -> tuple[list[Stream], list[float]]:
    """All streams, which are numbered from `first` and have ended, and how long those paused that the loss broke."""
    phase, victim, other = loss.phase, loss.victim, loss.other
    known_exactly(serve)
    id = next(line["id"] for line in listed(serve) if line["endpoint"] == victim.url)
    streams = [stream_of(serve.url, phase, first + number) for number in range(count)]
    with busy(other, clients=BUSY, words=10) if phase == "transfer" else nullcontext():
        if phase == "transfer":
            until("the load is known", lambda: sum(line["load"]["running"] for line in listed(serve)) >= BUSY, 60)
        for stream in streams:
            stream.start()
        hit_when(phase, (victim, other), victim)
        since = hit(loss.fault, victim)
        for stream in streams:
            stream.join(150)
        assert not any(stream.is_alive() for stream in streams), "a client hangs"
    receipts = {line["request_id"]: line for line in decisions(serve, count)}
    broken = [stream for stream in streams if was_broken(phase, receipts[stream.request], id)]
    assert broken, [receipts[stream.request]["attempts"] for stream in streams]
    paused = [stream.paused(since) for stream in broken]
    print(f"{phase} {loss.fault}: {len(broken)} of {count} streams were broken, the longest pause {max(paused):.2f} s")
    return streams, paused


@pytest.mark.parametrize("phase", STREAMS)
def test_an_engine_is_lost_in_the_midst_of_streams_and_not_missed(engines, phase, capsys):
    victim = engines[0] if phase == "transfer" else engines[1]
    other = next(engine for engine in engines if engine is not victim)
    took, noise = [], []
    with serving(engines, phase) as serve:
        for cell, fault in enumerate(FAULTS):
            first = 1000 * (1 + list(STREAMS).index(phase)) + 100 * cell
            streams, paused = lose(Loss(phase, fault, victim, other), serve, first, STREAMS[phase])
            took += paused
            mend(fault, engines, victim, serve)
            noise += differences(other, streams)
    percentile = statistics.quantiles(took, n=100, method="inclusive") if len(took) > 1 else took * 99
    with capsys.disabled():
        print(f"\n{phase}: {len(took)} streams went on: p50 {percentile[49]:.2f} s, p99 {percentile[98]:.2f} s; rounding: {noise or 'none'}")
