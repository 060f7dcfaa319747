"""Two hundred conversations of growing length in front of two and three real engines, served in every way there is: each answer is what one
engine alone tells, and what was moved is seen in the engines' own figures."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from engine import BLOCK, known_exactly, known_to_be_busy, known_to_be_full, known_to_be_idle
from harness.cluster import Serve, get_json
from harness.processes import until
from harness.talk import TEXT, busy, legs, prose, sealed_session
from streams import Stream, differences

BYTES_PER_TOKEN = 2 * 2 * 2 * 64 * 4  # layers, keys and values, heads, dimension, float32
AT_ONCE = 6
# Answers that an engine gives to others, so that a step had better leave it.
BUSY = 10
# The part of its KV cache from which on an owner is so full that its sessions leave it for good.
FULL = 0.01


@dataclass(frozen=True)
class Cell:
    """Conversations whose openings have so many words, the engines' roles, and settings: how much those count who would be slowed down,
    what is switched off, and from when on an owner is so full that its sessions leave it for good."""

    count: int
    words: int
    roles: tuple[str, ...]
    settings: tuple[str, ...]


CELLS = {
    "at_home": Cell(110, 400, ("hybrid", "hybrid"), ("planner.interference_weight=1",)),
    "handed_over": Cell(30, 700, ("prefill", "decode"), ("planner.interference_weight=50",)),
    "fetched": Cell(32, 700, ("hybrid", "hybrid"), ("planner.interference_weight=10", 'planner.disabled_actions=["remote_prefill","state_migration"]')),
    "moved": Cell(32, 700, ("hybrid", "hybrid"),
                  ("planner.interference_weight=10", 'planner.disabled_actions=["remote_prefill"]', f"planner.overload.max_kv_cache_usage={FULL}")),
    "together": Cell(24, 700, ("hybrid", "prefill", "decode"), ("planner.interference_weight=10",)),
}
ACTIONS = ("colocated_prefill", "decode_continuation", "remote_prefill", "artifact_fetch", "state_migration", "tail_recompute")


class Conversation:
    """Grows with every step: a chat, or a text that is gone on with."""

    def __init__(self, url: str, name: str, number: int, words: int):
        self.url, self.name, self.number = url, name, number
        opening = prose(words, 7000 + 31 * number)
        self.text = opening if number % 4 == 3 else None
        self.messages = [{"role": "system", "content": opening}]
        self.steps: list[Stream] = []

    def step(self) -> None:
        if self.text is None:
            said = prose(5 + 40 * (len(self.steps) % 2), 9000 + 31 * self.number + len(self.steps))
            self.messages.append({"role": "user", "content": said})
        stream = Stream(self.url, self.text or list(self.messages), 16, self.name)
        stream.run()
        self.steps.append(stream)
        answer = stream.told()["text"]
        if self.text is None:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.text += answer


@contextmanager
def serving(engines, roles: tuple[str, ...], settings: tuple[str, ...]):
    serve = Serve([f"{engine.url}#{role}" for engine, role in zip(engines, roles)], settings=(TEXT, *settings)).wait()
    try:
        known_exactly(serve)
        yield serve
    finally:
        serve.stop()


def all_step(conversations: list[Conversation]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(Conversation.step, conversations))


def converse(engines, name: str, cell: Cell, first: int, served: Counter) -> list[Stream]:
    """The conversations of one cell, which are numbered from `first`. Its transfers are held against what the engines say."""
    before = [engine.prompt_tokens_from("external_kv_transfer") for engine in engines]
    with serving(engines, cell.roles, cell.settings) as serve:
        all_of = [Conversation(serve.url, f"{name}-{number}", first + number, cell.words) for number in range(cell.count)]
        if name == "handed_over":
            with busy(engines[1], clients=BUSY, words=10):
                known_to_be_busy(serve, engines[1], BUSY)
                all_step(all_of)
        else:
            all_step(all_of)
        if name == "together":
            with busy(engines[0], clients=BUSY, words=10):
                known_to_be_busy(serve, engines[0], BUSY)
                all_step(all_of)
        if name in ("fetched", "moved"):
            owned = {one.name: sealed_session(serve, one.name)["owner"]["endpoint"] for one in all_of}
            for engine in engines:
                with busy(engine, clients=BUSY, words=10):
                    known_to_be_busy(serve, engine, BUSY)
                    if name == "moved":
                        known_to_be_full(serve, engine, FULL)
                        # A session leaves a full owner only for an engine that is not as full.
                        for other in engines:
                            if other is not engine:
                                known_to_be_idle(serve, other)
                    all_step([one for one in all_of if owned[one.name] == engine.url])
                until("nobody else is served", lambda engine=engine: engine.running() == 0, 60)
        all_step(all_of)
        if name == "at_home":
            all_step(all_of)
        streams = [stream for one in all_of for stream in one.steps]
        receipts = {stream.request: get_json(f"{serve.operator}/ownerserve/v1/decisions/{stream.request}") for stream in streams}
        moved = 0
        for one in all_of:
            for stream, following in zip(one.steps, [*one.steps[1:], None]):
                receipt = receipts[stream.request]
                plan = receipt["decision"]["plan"]
                assert [attempt["events"] for attempt in receipt["attempts"]] == [[]], receipt["attempts"]
                served[plan["action"]] += 1
                moved += max(receipt["observed"]["transferred_bytes"] // BYTES_PER_TOKEN - BLOCK, 0)
                if plan["action"] == "state_migration" and following:
                    assert receipts[following.request]["lookup"]["owner"]["worker"] == legs(plan)[-1]["worker"], "it has moved"
        pulled = sum(engine.prompt_tokens_from("external_kv_transfer") for engine in engines) - sum(before)
        assert pulled >= moved, "what receipts say was moved was pulled"
        at = Counter()
        for receipt in receipts.values():
            plan = receipt["decision"]["plan"]
            at.update({leg["worker"] for leg in legs(plan)})
        assert len(at) == len(engines), f"each engine has its part: {at}"
        print(f"{name}: {len(all_of)} conversations, {len(streams)} steps, {pulled} tokens pulled by the engines' own count")
    until("nobody is served", lambda: all(engine.running() == 0 for engine in engines), 60)
    return streams


def served_in_every_way(engines, cells: dict[str, Cell], least: int, capsys) -> None:
    """Asserts that conversations of these cells say what one engine alone says, each action serving at least so many steps."""
    served, noise, steps = Counter(), [], 0
    for place, (name, cell) in enumerate(cells.items()):
        streams = converse(engines[:len(cell.roles)], name, cell, 1000 * place, served)
        steps += len(streams)
        noise += differences(engines[0], streams)
    with capsys.disabled():
        print(f"\n{steps} steps: {dict(served)}; rounding: {noise or 'none'}")
    for action in ACTIONS:
        assert served[action] >= least, served


def test_two_hundred_conversations_served_in_every_way_say_what_one_engine_alone_says(engines, third, capsys):
    assert sum(cell.count for cell in CELLS.values()) >= 200
    served_in_every_way([*engines, third], CELLS, 5, capsys)
