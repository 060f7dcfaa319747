"""No answer waits for a delayed acknowledgement: 40 ms on Linux, where a socket with Nagle's algorithm writes twice."""

import http.client
import json
import time
from urllib.parse import urlsplit

from harness.recorder import Behaviour, Recorder

STALL = 0.040
# A connection's first segments are acknowledged at once, so that only later requests show it.
REQUESTS, LATER = 100, 40


def fastest_later(url: str) -> float:
    """The shortest of the later streamed answers over one kept connection: a stall would be in each of them."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "stream": True})
    times = []
    for _ in range(REQUESTS):
        begun = time.monotonic()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        times.append(time.monotonic() - begun)
        assert answer.status == 200 and b"[DONE]" in text, text
    connection.close()
    return min(times[-LATER:])


def test_no_streamed_answer_takes_the_time_of_a_delayed_acknowledgement(cluster):
    worker = next(worker for worker in cluster.workers if worker.role == "hybrid")
    direct, proxied = fastest_later(worker.url), fastest_later(cluster.url)
    assert proxied - direct < STALL, f"{proxied * 1e3:.1f} ms through the proxy, {direct * 1e3:.1f} ms without it"


def test_a_server_that_writes_twice_with_nagles_algorithm_is_found_out():
    recorder = Recorder(Behaviour(events=3))
    try:
        assert fastest_later(recorder.url) >= STALL
    finally:
        recorder.stop()
