"""Agents that talk through any of several routers, and go to another one when theirs fails."""

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field

from harness.cluster import MODEL
from harness.talk import prose

# Tries of one step, each at another router where there is one.
MOST_TRIES = 5
# How long a client keeps away from a router that failed.
AVOIDED = 2.0


class Broken(Exception):
    """The answer did not come, or not to its end."""


@dataclass
class Step:
    """One step as its client saw it."""

    session: str
    number: int
    first_token: float = 0.0
    tries: int = 0
    port: int = 0
    request: str = ""
    error: str = ""


@dataclass
class Doors:
    """The routers' ports, and which ones failed lately."""

    ports: list[int]
    failed: dict[int, float] = field(default_factory=dict)

    def pick(self, chance: random.Random, tried: list[int]) -> int:
        now = time.monotonic()
        healthy = [port for port in self.ports if now - self.failed.get(port, -AVOIDED) >= AVOIDED and port not in tried]
        return chance.choice(healthy or self.ports)


def stream(port: int, session: str, messages: list[dict], tokens: int) -> tuple[float, str, str]:
    """Time to the first token, the text, and the request's id."""
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    headers = {"content-type": "application/json", "x-session-id": session}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        begun = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise Broken(f"status {answer.status}: {answer.read(300)!r}")
        first, text, finished = 0.0, [], False
        for line in answer:
            if not line.startswith(b"data: "):
                if line.startswith(b"event: error"):
                    raise Broken("an error event")
                continue
            first = first or time.monotonic() - begun
            if line.startswith(b"data: [DONE]"):
                finished = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                raise Broken(f"an error event: {event}")
            text += [choice["delta"].get("content") or "" for choice in event["choices"]]
        if not finished:
            raise Broken("the stream ended in silence")
        return first, "".join(text), answer.getheader("x-request-id") or ""
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Broken(repr(error)) from error
    finally:
        connection.close()


class Agent(threading.Thread):
    """One session: an opening, then steps with time to think between them."""

    def __init__(self, doors: Doors, name: str, seed: int, plan: dict):
        super().__init__(daemon=True)
        self.doors, self.session, self.plan = doors, name, plan
        self.chance = random.Random(seed)
        self.messages = [{"role": "system", "content": prose(plan["opening"], seed)}]
        self.steps: list[Step] = []

    def run(self) -> None:
        plan, until = self.plan, self.plan.get("until")
        time.sleep(self.chance.random() * plan["spread"])
        for number in range(plan["steps"]):
            if until and time.monotonic() >= until:
                return
            self.step(number, prose(plan["more"], self.chance.randrange(1 << 30)))
            time.sleep(self.chance.expovariate(1 / plan["think"]))

    def step(self, number: int, text: str) -> Step:
        """Says it, through another router when the first one fails."""
        step = Step(self.session, number)
        self.steps.append(step)
        self.messages.append({"role": "user", "content": text})
        tried: list[int] = []
        while step.tries < MOST_TRIES:
            step.tries += 1
            step.port = self.doors.pick(self.chance, tried)
            try:
                step.first_token, said, step.request = stream(step.port, self.session, self.messages, self.plan["tokens"])
                step.error = ""
                self.messages.append({"role": "assistant", "content": said})
                return step
            except Broken as error:
                step.error = str(error)
                self.doors.failed[step.port] = time.monotonic()
                tried.append(step.port)
        return step


def run(agents: list[Agent], meanwhile=None) -> list[Step]:
    """All of them at once; `meanwhile` is called when they have started."""
    for agent in agents:
        agent.start()
    if meanwhile:
        meanwhile()
    for agent in agents:
        agent.join(150)
        assert not agent.is_alive(), f"{agent.session} never came to its end"
    return [step for agent in agents for step in agent.steps]


def failed(steps: list[Step]) -> list[Step]:
    return [step for step in steps if step.error]


def mean(steps: list[Step]) -> float:
    return sum(step.first_token for step in steps) / len(steps)


def percentile(steps: list[Step], share: float) -> float:
    ordered = sorted(step.first_token for step in steps)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
