"""One tenant's agents, and whoever asks whether the process lives: what they wait, in a process of their own."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

AGENTS = 12
STEPS = 6
WORDS = "window refund airport morning confirm upgrade payment policy insurance itinerary return economy arrival".split()
# A probe comes on a connection of its own, as a kubelet's does.
PROBE_EVERY = 0.05
PATIENCE = 60.0


@dataclass
class Seen:
    """Seconds to first tokens and of probes, and what went wrong."""

    first_tokens: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    # Of an idle router on the same machine: what the machine's load alone costs a probe.
    control: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def measure(proxy: int, operators: tuple[int, int], key: str, label: str, seconds: float) -> Seen:
    """`operators` are the operator ports of the router in the storm and of the idle one."""
    return asyncio.run(_measure(proxy, operators, key, label, seconds))


async def _measure(proxy: int, operators: tuple[int, int], key: str, label: str, seconds: float) -> Seen:
    seen, until = Seen(), time.monotonic() + seconds
    probes = [_probe(port, until, seen, into) for port, into in zip(operators, (seen.probes, seen.control))]
    agents = [_agent(proxy, key, f"{label}-{number}", until, seen) for number in range(AGENTS)]
    await asyncio.gather(*probes, *agents)
    return seen


async def _agent(port: int, key: str, name: str, until: float, seen: Seen) -> None:
    """Sessions one after the other, each of some steps whose prompt grows."""
    chance, session = random.Random(name), 0
    while time.monotonic() < until:
        session += 1
        messages = [{"role": "system", "content": " ".join(chance.choices(WORDS, k=300))}]
        for _ in range(STEPS):
            if time.monotonic() >= until:
                return
            messages.append({"role": "user", "content": " ".join(chance.choices(WORDS, k=40))})
            try:
                async with asyncio.timeout(PATIENCE):
                    first, text = await _step(port, key, f"{name}-{session}", messages)
                seen.first_tokens.append(first)
                messages.append({"role": "assistant", "content": text})
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
                seen.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
            await asyncio.sleep(chance.uniform(0.05, 0.25))


async def _step(port: int, key: str, session: str, messages: list[dict]) -> tuple[float, str]:
    """Seconds to the first token, and the text."""
    body = json.dumps({"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nx-session-id: {session}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n").encode()
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head + body)
        await writer.drain()
        status = await reader.readline()
        if status.split()[1:2] != [b"200"]:
            raise ValueError(f"{status!r} {(await reader.read(600))[-300:]!r}")
        first, text = 0.0, []
        # A line of the chunked framing is no event, and is passed over like an empty one.
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            first = first or time.monotonic() - begun
            if line.startswith(b"data: [DONE]"):
                return first, "".join(text)
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"an error event: {event}")
            text += [choice["delta"].get("content") or "" for choice in event["choices"]]
        raise ValueError("the stream ended in silence")
    finally:
        writer.close()


async def _probe(port: int, until: float, seen: Seen, into: list[float]) -> None:
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                status = await reader.readline()
                writer.close()
            if status.split()[1:2] != [b"200"]:
                seen.errors.append(f"/livez: {status!r}")
        except (OSError, TimeoutError) as error:
            seen.errors.append(f"/livez: {type(error).__name__}: {error}")
        into.append(time.monotonic() - begun)
        await asyncio.sleep(PROBE_EVERY)
