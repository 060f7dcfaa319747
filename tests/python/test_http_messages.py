"""Where a message ends: the proxy beside what its engines read with (uvicorn) and what may stand before it (nginx).

Every odd message is followed by a plain request with a marker for its path. A reader that ends the message somewhere else sees
another number of requests, or other bodies: a smuggled request. What is asked of the proxy is that it refuses the odd message,
or hands on exactly what it read, as one message that both of uvicorn's parsers end at the same byte.
"""

import asyncio
import re
import shutil
import socket
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from harness.cluster import Serve
from harness.processes import Process, free_ports
from harness.wire import chat

BODY = chat()
MARKER = b"/v1/models/marker"
NEXT = b"GET " + MARKER + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
PARSERS = ("h11", "httptools")
CHAT = "/v1/chat/completions"
ANSWERS = {
    "/health": b"",
    "/metrics": b"process_start_time_seconds 1.0\n",
    "/v1/models": b'{"object":"list","data":[{"id":"tiny","object":"model","created":1,"owned_by":"test"}]}',
    CHAT: b'{"id":"c","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant",'
          b'"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}',
}


def post(*fields: bytes, body: bytes = b"", line: bytes = b"POST /v1/chat/completions HTTP/1.1", host: bytes = b"host: localhost") -> bytes:
    lines = [line, *([host] if host else []), b"content-type: application/json", *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end


LENGTH = b"content-length: %d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"
SIZE = b"%x" % len(BODY)

# What is to be understood is there to show that the harness tells one from the other.
PLAIN = {
    "length": post(LENGTH, body=BODY),
    "chunked": post(CHUNKED, body=chunked(BODY)),
    "two chunks": post(CHUNKED, body=chunked(BODY[:9], BODY[9:])),
    "chunk extension": post(CHUNKED, body=SIZE + b";name=value\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "trailers": post(CHUNKED, body=chunked(BODY, end=b"0\r\nx-trailer: 1\r\n\r\n")),
    "expect": post(LENGTH, b"expect: 100-continue", body=BODY),
    "absolute form": post(LENGTH, body=BODY, line=b"POST http://localhost/v1/chat/completions HTTP/1.1"),
    "upper case": post(b"TRANSFER-ENCODING: Chunked", body=chunked(BODY)),
}
ODD = {
    "length and chunked": post(LENGTH, CHUNKED, body=chunked(BODY)),
    "chunked and length": post(CHUNKED, b"content-length: 4", body=chunked(BODY)),
    "length of zero and chunked": post(b"content-length: 0", CHUNKED, body=chunked(BODY)),
    "two lengths that differ": post(LENGTH, b"content-length: 4", body=BODY),
    "two equal lengths": post(LENGTH, LENGTH, body=BODY),
    "a list of equal lengths": post(b"content-length: %d, %d" % (len(BODY), len(BODY)), body=BODY),
    "a list of lengths": post(b"content-length: %d, 4" % len(BODY), body=BODY),
    "length with a sign": post(b"content-length: +%d" % len(BODY), body=BODY),
    "length below zero": post(b"content-length: -1", body=BODY),
    "length in hex": post(b"content-length: 0x%x" % len(BODY), body=BODY),
    "length with a point": post(b"content-length: %d.0" % len(BODY), body=BODY),
    "length with a space inside": post(b"content-length: 1 0", body=BODY),
    "length with an underscore": post(b"content-length: 1_0", body=BODY),
    "empty length": post(b"content-length: ", body=BODY),
    "huge length": post(b"content-length: 99999999999999999999", body=BODY),
    "length beyond 64 bits": post(b"content-length: 18446744073709551617", body=BODY),
    "chunked twice": post(b"transfer-encoding: chunked, chunked", body=chunked(BODY)),
    "chunked in two fields": post(CHUNKED, CHUNKED, body=chunked(BODY)),
    "identity before chunked": post(b"transfer-encoding: identity, chunked", body=chunked(BODY)),
    "chunked before identity": post(b"transfer-encoding: chunked, identity", body=chunked(BODY)),
    "gzip before chunked": post(b"transfer-encoding: gzip, chunked", body=chunked(BODY)),
    "identity": post(b"transfer-encoding: identity", LENGTH, body=BODY),
    "xchunked": post(b"transfer-encoding: xchunked", LENGTH, body=BODY),
    "chunked in quotes": post(b'transfer-encoding: "chunked"', LENGTH, body=BODY),
    "chunked after a tab": post(b"transfer-encoding:\tchunked", body=chunked(BODY)),
    "chunked with a vertical tab": post(b"transfer-encoding: \x0bchunked", LENGTH, body=BODY),
    "chunked with a comma": post(b"transfer-encoding: chunked,", body=chunked(BODY)),
    "empty encoding": post(b"transfer-encoding:", LENGTH, body=BODY),
    "underscore for a hyphen": post(b"transfer_encoding: chunked", LENGTH, body=BODY),
    "space before the colon": post(b"transfer-encoding : chunked", LENGTH, body=BODY),
    "space before the colon of a length": post(b"content-length : %d" % len(BODY), body=BODY),
    "folded encoding": post(b"transfer-encoding:\r\n chunked", body=chunked(BODY)),
    "folded field": post(b"x-field: a\r\n content-length: 4", LENGTH, body=BODY),
    "folded first field": post(LENGTH, body=BODY, host=b" x-first: 1\r\nhost: localhost"),
    "nul in a value": post(b"x-field: a\x00b", LENGTH, body=BODY),
    "nul in an encoding": post(b"transfer-encoding: chunked\x00", LENGTH, body=BODY),
    "nul in a name": post(b"x\x00field: a", LENGTH, body=BODY),
    "bare cr in a value": post(b"x-field: a\rcontent-length: 4", LENGTH, body=BODY),
    "name without a colon": post(b"x-field", LENGTH, body=BODY),
    "empty name": post(b": a", LENGTH, body=BODY),
    "bare lf after a field": post(b"x-field: a\ncontent-length: 4", LENGTH, body=BODY),
    "bare lf everywhere": post(LENGTH).replace(b"\r\n", b"\n") + BODY,
    "bare lf after a chunk's size": post(CHUNKED, body=SIZE + b"\n" + BODY + b"\r\n0\r\n\r\n"),
    "bare lf after a chunk": post(CHUNKED, body=SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n"),
    "bare lf in an extension": post(CHUNKED, body=SIZE + b";a\nb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "bare cr after a chunk's size": post(CHUNKED, body=SIZE + b"\r" + BODY + b"\r\n0\r\n\r\n"),
    "chunk without its line end": post(CHUNKED, body=SIZE + b"\r\n" + BODY + b"0\r\n\r\n"),
    "chunk longer than it says": post(CHUNKED, body=b"4\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size beyond 64 bits": post(CHUNKED, body=b"1" + b"0" * 16 + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size with a sign": post(CHUNKED, body=b"+" + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size below zero": post(CHUNKED, body=b"-1\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size with 0x": post(CHUNKED, body=b"0x" + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size after a space": post(CHUNKED, body=b" " + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size before a space": post(CHUNKED, body=SIZE + b" \r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size that is missing": post(CHUNKED, body=b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size with zeros before it": post(CHUNKED, body=b"0000" + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "last chunk of two zeros": post(CHUNKED, body=chunked(BODY, end=b"00\r\n\r\n")),
    "extension in quotes with a line end": post(CHUNKED, body=SIZE + b';a="\r\n' + BODY + b"\r\n0\r\n\r\n"),
    "trailer that is a length": post(CHUNKED, body=chunked(BODY, end=b"0\r\ncontent-length: 4\r\n\r\n")),
    "trailer without a colon": post(CHUNKED, body=chunked(BODY, end=b"0\r\nx-trailer\r\n\r\n")),
    "chunked in HTTP/1.0": post(CHUNKED, body=chunked(BODY), line=b"POST /v1/chat/completions HTTP/1.0"),
    "chunked and length in HTTP/1.0": post(CHUNKED, LENGTH, body=BODY, line=b"POST /v1/chat/completions HTTP/1.0"),
    "version 1.2": post(LENGTH, body=BODY, line=b"POST /v1/chat/completions HTTP/1.2"),
    "version 9.9": post(LENGTH, body=BODY, line=b"POST /v1/chat/completions HTTP/9.9"),
    "no version": b"POST /v1/chat/completions\r\n\r\n" + BODY,
    "two spaces in the line": post(LENGTH, body=BODY, line=b"POST  /v1/chat/completions HTTP/1.1"),
    "tab in the line": post(LENGTH, body=BODY, line=b"POST\t/v1/chat/completions HTTP/1.1"),
    "space in the path": post(LENGTH, body=BODY, line=b"POST /v1/chat completions HTTP/1.1"),
    "empty lines before": b"\r\n\r\n" + post(LENGTH, body=BODY),
    "no host": post(LENGTH, body=BODY, host=b""),
    "two hosts": post(b"host: other", LENGTH, body=BODY),
    "absolute form of another host": post(LENGTH, body=BODY, line=b"POST http://other/v1/chat/completions HTTP/1.1"),
    "fragment": post(LENGTH, body=BODY, line=b"POST /v1/chat/completions#x HTTP/1.1"),
    "body of a get": post(LENGTH, body=BODY, line=b"GET /v1/models HTTP/1.1"),
    "chunked body of a get": post(CHUNKED, body=chunked(BODY), line=b"GET /v1/models HTTP/1.1"),
    "connection names the length": post(LENGTH, b"connection: content-length", body=BODY),
    "connection names the encoding": post(CHUNKED, b"connection: transfer-encoding", body=chunked(BODY)),
    "expect of something else": post(LENGTH, b"expect: 200-ok", body=BODY),
    "upgrade to h2c": post(LENGTH, b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABk", body=BODY),
    "request for a length that hides one": post(b"content-length: 0", b"content-length : %d" % len(NEXT)),
}
CORPUS = {**PLAIN, **ODD}
# An offer that is the hop's own: the proxy takes it out and hands on the body. httptools reads no body after one, and nothing else.
CONSUMED = {("upgrade to h2c", "httptools")}


@dataclass(frozen=True)
class Read:
    """One request as an application got it."""

    path: str
    body: bytes


class Engine:
    """A real uvicorn that notes what it read, and answers as a worker does."""

    def __init__(self, parser: str):
        (self.port,) = free_ports(1)
        self.seen: list[Read] = []
        config = uvicorn.Config(self._app, "127.0.0.1", self.port, http=parser, interface="asgi3", log_level="critical", lifespan="off", timeout_keep_alive=5)
        self.server = uvicorn.Server(config)
        # Signals are the test run's own.
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.port}"

    async def _app(self, scope, receive, send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.seen.append(Read(scope["path"], body))
        answer = ANSWERS.get(scope["path"])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer or b""))]
        await send({"type": "http.response.start", "status": 404 if answer is None else 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer or b""})

    def requests(self, since: int) -> list[Read]:
        """Clients' requests that were read since: probes have no body, and name what engines have."""
        return [read for read in self.seen[since:] if read.body or read.path in (CHAT, MARKER.decode())]

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module", params=PARSERS)
def pair(request):
    """The proxy before an engine, by each of uvicorn's parsers."""
    engine = Engine(request.param)
    serve = Serve([engine.url], settings=('proxy.header_timeout="1s"', 'proxy.body_idle_timeout="1s"')).wait()
    yield serve, engine
    serve.stop()
    engine.stop()


@pytest.fixture(scope="module")
def engines():
    started = [Engine(parser) for parser in PARSERS]
    yield started
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def nginx(engines):
    """The port of an nginx before the first engine."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    assert program, "nginx is missing: tests/scripts/setup packages"
    (port,) = free_ports(1)
    folder = tempfile.mkdtemp(prefix="ownerserve-nginx-")
    paths = "".join(f"{kind}_temp_path {folder}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config = Path(folder) / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; error_log stderr crit; pid {folder}/pid; events {{}}\n"
        f"http {{ access_log off; {paths} client_header_timeout 1s; client_body_timeout 1s; server {{ listen 127.0.0.1:{port};\n"
        f"location / {{ proxy_pass {engines[0].url}; proxy_http_version 1.1; }} }} }}\n")
    process = Process(f"nginx-{port}", [program, "-e", "stderr", "-p", folder, "-c", str(config)])
    process.wait_for_port(port)
    yield port
    process.stop()
    shutil.rmtree(folder, ignore_errors=True)


def statuses(answers: bytes) -> list[int]:
    """Of all final answers in what came back."""
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] ([2-9][0-9]{2}) ", answers)]


def tell(port: int, message: bytes) -> list[int]:
    """Sends the message and the marker on one connection, and reads until it is closed or silent."""
    got = b""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=3)) as raw:
        try:
            raw.sendall(message + NEXT)
            while data := raw.recv(65536):
                got += data
        except (TimeoutError, ConnectionError):
            pass
    return statuses(got)


def ends(engine: Engine, port: int, message: bytes) -> tuple[list[int], list[Read]]:
    since = len(engine.seen)
    told = tell(port, message)
    return told, engine.requests(since)


@pytest.mark.parametrize("name", CORPUS)
def test_what_the_proxy_hands_on_is_what_it_read(pair, name):
    serve, engine = pair
    told, read = ends(engine, serve.port, CORPUS[name])
    posts = [one for one in read if one.path != MARKER.decode()]
    assert len(told) <= 2, f"{len(told)} answers to two messages: {told}"
    # Whatever reached the engine was this one chat: no shorter, no longer, and nothing behind it.
    assert all(one == Read(CHAT, BODY) for one in posts), posts
    assert len(posts) <= 1
    if name in PLAIN:
        assert told[0] == 200 and len(posts) == 1, (told, posts)
    elif posts:
        assert told[0] == 200
    elif told and "a get" not in name:
        assert told[0] in (400, 403, 411, 413, 414, 417, 431, 501, 505), told
    # A message that is refused says nothing of where the next one begins: the connection is over.
    if told and told[0] == 400 and not posts:
        assert len(told) == 1, f"the connection went on after a refused message: {told}"


@pytest.mark.parametrize("name", ODD)
def test_no_two_readers_end_a_message_that_both_take_at_different_bytes(pair, engines, nginx, name):
    """What the proxy takes, others that take it must read alike, or a smuggled request could pass between them."""
    serve, behind = pair
    message = ODD[name]
    told, read = ends(behind, serve.port, message)
    if not read or told[:1] != [200]:
        return
    ours = [one.body for one in read if one.path != MARKER.decode()]
    others = {"nginx": ends(engines[0], nginx, message)}
    others.update({parser: ends(engine, engine.port, message) for parser, engine in zip(PARSERS, engines)})
    for who, (answers, seen) in others.items():
        theirs = [one.body for one in seen if one.path not in (MARKER.decode(), "/v1/models")]
        if answers[:1] == [200]:
            assert theirs[:1] == ours[:1] or (name, who) in CONSUMED, f"{who} read {theirs}, the proxy {ours}"
            smuggled = [one for one in seen if one.path not in (CHAT, MARKER.decode())]
            assert not smuggled, f"{who} also read {smuggled}"


def test_messages_one_after_the_other_are_answered_in_their_order(pair):
    serve, engine = pair
    since = len(engine.seen)
    told = tell(serve.port, PLAIN["length"] + PLAIN["two chunks"] + PLAIN["trailers"])
    assert told[:3] == [200, 200, 200] and len(told) == 4, told
    assert [one.body for one in engine.requests(since)][:3] == [BODY] * 3
