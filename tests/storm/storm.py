"""Those who do harm: connections without a word, heads of a byte a second, readers that never read, bodies that explode.

Everyone comes from an address of his own below 127.0.0.0/8, as the machines of a botnet do. What the router closes is opened again.
"""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from dataclasses import dataclass, field

from bodies import accepted, worst

# Connections that come from one address.
PER_ADDRESS = 20
# Bodies on their way at once, from strangers and from the other tenant each.
BODIES_AT_ONCE = 8
# Between two tries to open what was closed.
PAUSE = 1.0
WINDOW = 4096
# TCP_CLOSE and TCP_CLOSE_WAIT of the kernel.
CLOSED = (7, 8)


@dataclass
class Storm:
    """What is sent against one port; `key` is the other tenant's."""

    port: int
    key: str
    idle: int
    readers: int
    heads: int
    open: Counter = field(default_factory=Counter)
    most: Counter = field(default_factory=Counter)
    answers: Counter = field(default_factory=Counter)
    # Names of the bodies that are no denser and no longer than may be.
    taken: set[str] = field(default_factory=set)

    def run(self, seconds: float) -> dict:
        asyncio.run(self._run(seconds))
        told = {str(kind): count for kind, count in sorted(self.answers.items())}
        taken = {kind: count for kind, count in self.answers.items() if kind[0] == "tenant B" and kind[1] in self.taken}
        refused = [f"{shape}: {status}" for (_, shape, status) in taken if status == "413"]
        # Neither cut off nor sent away for lack of room: such a body was read to its end.
        read = sorted({shape for (_, shape, status) in taken if status.isdigit() and status not in ("413", "429", "503")})
        return {"most open at once": dict(self.most), "answers": told, "refused": refused, "read": read, "taken": sorted(self.taken)}

    async def _run(self, seconds: float) -> None:
        taken = accepted()
        self.taken = set(taken)
        bodies = worst() | taken
        tasks = [self._again("idle", number, self._idle) for number in range(self.idle)]
        tasks += [self._again("slow heads", number, self._head) for number in range(self.heads)]
        tasks += [self._again("slow readers", number, self._reader) for number in range(self.readers)]
        for number in range(BODIES_AT_ONCE):
            tasks.append(self._bodies(number, bodies, {}))
            tasks.append(self._bodies(number, bodies, {"authorization": f"Bearer {self.key}"}))
        running = [asyncio.create_task(task) for task in tasks]
        await asyncio.sleep(seconds)
        # A connection that opens in the instant of its cancellation can swallow it, and is cancelled again.
        while running:
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=1)

    async def _again(self, kind: str, number: int, harm) -> None:
        # Not all in one instant: a listener's backlog is not what this is about.
        await asyncio.sleep(number % 100 / 50)
        while True:
            with contextlib.suppress(OSError):
                with self._socket(kind, number) as raw:
                    async with asyncio.timeout(10):
                        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
                    self.open[kind] += 1
                    self.most[kind] = max(self.most[kind], self.open[kind])
                    try:
                        await harm(raw)
                    finally:
                        self.open[kind] -= 1
            await asyncio.sleep(PAUSE)

    def _socket(self, kind: str, number: int) -> socket.socket:
        raw = socket.socket()
        raw.setblocking(False)
        if kind == "slow readers":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)
        # The other tenant has few addresses, strangers have many.
        net, place = {"idle": 1, "slow heads": 2, "slow readers": 3, "bodies": 4}[kind], number // PER_ADDRESS
        raw.bind((f"127.{net}.{place // 200}.{place % 200 + 1}", 0))
        return raw

    async def _idle(self, raw: socket.socket) -> None:
        await asyncio.get_running_loop().sock_recv(raw, 1)

    async def _head(self, raw: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for byte in b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: " + b"a" * 10_000:
            await loop.sock_sendall(raw, bytes([byte]))
            await asyncio.sleep(1)

    async def _reader(self, raw: socket.socket) -> None:
        """Asks for a long stream with log probabilities, so that a few events fill every buffer, and reads nothing of it."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "tell me all"}], "max_tokens": 4000, "stream": True,
                "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
        await asyncio.get_running_loop().sock_sendall(raw, self._request(json.dumps(body).encode(), {"authorization": f"Bearer {self.key}"}))
        # Reading would make room, so that only the kernel can say whether the router has closed it.
        while True:
            await asyncio.sleep(5)
            if raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in CLOSED:
                return

    async def _bodies(self, number: int, bodies: dict[str, tuple[bytes, dict[str, str]]], headers: dict[str, str]) -> None:
        who = "tenant B" if headers else "stranger"
        # Each begins with another one, so that a short storm has them all.
        shapes = list(bodies.items())
        shapes = shapes[number % len(shapes):] + shapes[:number % len(shapes)]
        while True:
            for shape, (body, encoded) in shapes:
                self.answers[who, shape, await self._body(number, body, headers | encoded)] += 1

    async def _body(self, number: int, body: bytes, headers: dict[str, str]) -> str:
        loop = asyncio.get_running_loop()
        try:
            with self._socket("bodies", number) as raw:
                async with asyncio.timeout(120):
                    await loop.sock_connect(raw, ("127.0.0.1", self.port))
                    with contextlib.suppress(ConnectionError):
                        # An answer may come before all is sent, and the rest is not taken any more.
                        await loop.sock_sendall(raw, self._request(body, headers))
                    return (await loop.sock_recv(raw, 4096))[9:12].decode() or "closed"
        except TimeoutError:
            return "late"
        except OSError:
            await asyncio.sleep(PAUSE)
            return "reset"

    @staticmethod
    def _request(body: bytes, headers: dict[str, str]) -> bytes:
        fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), "connection": "close", **headers}
        lines = ["POST /v1/chat/completions HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
