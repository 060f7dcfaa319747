"""No answer waits for a delayed acknowledgement: 40 ms on Linux, where a socket with Nagle's algorithm writes twice."""

import http.client
import json
import statistics
import time
from urllib.parse import urlsplit

import pytest
from harness.recorder import Behaviour, Recorder

STALL = 0.040
# A connection's first segments are acknowledged at once, so that only later requests show it.
REQUESTS, LATER = 100, 40


def later_median(url: str, stream: bool) -> float:
    """The median time of the later answers over one kept connection."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "stream": stream})
    times = []
    for _ in range(REQUESTS):
        begun = time.monotonic()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        times.append(time.monotonic() - begun)
        assert answer.status == 200 and (b"[DONE]" in text) == stream, text
    connection.close()
    return statistics.median(times[-LATER:])


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_no_answer_takes_the_time_of_a_delayed_acknowledgement(cluster, stream):
    worker = next(worker for worker in cluster.workers if worker.role == "hybrid")
    direct, proxied = later_median(worker.url, stream), later_median(cluster.url, stream)
    seen = f"{proxied * 1e3:.1f} ms through the proxy, {direct * 1e3:.1f} ms without it"
    # A worker that stalls itself would hide what the proxy adds.
    assert direct < STALL, seen
    assert proxied - direct < STALL, seen


def test_a_server_that_writes_twice_with_nagles_algorithm_is_found_out():
    recorder = Recorder(Behaviour(events=3))
    try:
        assert later_median(recorder.url, stream=True) >= STALL
    finally:
        recorder.stop()
