"""Clients of all endpoints: answers as a whole and as streams, some given up in the middle, some asked for with bad input."""

import http.client
import json
import random
import threading
import time
from collections import Counter

from harness.talk import prose

# Conversations that come again and again, so that what is kept of each is kept once.
CONVERSATIONS = 150
STEPS = 5
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
BAD = (b"", b"{", b"[" * 50_000, b'{"model":"tiny"}', b'{"model":"nobody","messages":[]}', b"\x00\x01", b'{"a":' * 5_000)


def body_of(path: str, texts: list[str], stream: bool) -> dict:
    common = {"model": "tiny", "temperature": 0, "stream": stream}
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    if path == "/v1/completions":
        return {**common, "prompt": "\n".join(texts), "max_tokens": 24}
    if path == "/v1/responses":
        return {**common, "input": messages, "max_output_tokens": 24}
    return {**common, "messages": messages, "max_tokens": 24}


class Mixture:
    """`clients` threads that ask any of the routers until they are told to stop."""

    def __init__(self, ports: list[int], clients: int):
        self.ports, self.over, self.done = ports, threading.Event(), Counter()
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._client, args=(number,), daemon=True) for number in range(clients)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)

    def count(self) -> Counter:
        with self.lock:
            return Counter(self.done)

    def _client(self, number: int) -> None:
        chance = random.Random(number)
        while not self.over.is_set():
            conversation = chance.randrange(CONVERSATIONS)
            path = ENDPOINTS[conversation % len(ENDPOINTS)]
            texts = [prose(120, conversation)]
            for step in range(STEPS):
                if self.over.is_set():
                    return
                way = chance.choices(("whole", "stream", "given up", "bad"), (35, 40, 15, 10))[0]
                outcome = self._ask(chance, (path, f"soak-{conversation}", texts), way)
                with self.lock:
                    self.done[way, outcome] += 1
                texts = [*texts, f"answer {step}", prose(30, 1_000 * conversation + step)]
                time.sleep(chance.uniform(0.02, 0.2))

    def _ask(self, chance: random.Random, asked: tuple[str, str, list[str]], way: str) -> str:
        path, session, texts = asked
        body = chance.choice(BAD) if way == "bad" else json.dumps(body_of(path, texts, way != "whole")).encode()
        connection = http.client.HTTPConnection("127.0.0.1", chance.choice(self.ports), timeout=60)
        try:
            connection.request("POST", path, body, {"content-type": "application/json", "x-session-id": session})
            answer = connection.getresponse()
            if way == "given up":
                answer.read(chance.choice((1, 200, 2_000)))
                return str(answer.status)
            text = answer.read()
            broken = way == "stream" and answer.status == 200 and b'"error"' in text
            return "broken stream" if broken else str(answer.status)
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()
