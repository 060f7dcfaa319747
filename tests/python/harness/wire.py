"""HTTP by hand, for what a well-behaved client cannot say."""

import json
import socket
from dataclasses import dataclass, field


@dataclass
class Answer:
    """What came back on a connection, as far as it came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self):
        return json.loads(self.body)


def connect(port: int, seconds: float = 20.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=seconds)


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def read_answer(connection: socket.socket) -> Answer:
    """One whole answer, by its length, its chunks or the end of the connection."""
    stream = connection.makefile("rb")
    first = stream.readline()
    if not first:
        return Answer()
    answer = Answer(status=int(first.split()[1]))
    while (line := stream.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        answer.headers[name.strip().lower()] = value.strip()
    if "content-length" in answer.headers:
        answer.body = stream.read(int(answer.headers["content-length"]))
    elif answer.headers.get("transfer-encoding") == "chunked":
        while (size := int(stream.readline() or b"0", 16)) > 0:
            answer.body += stream.read(size)
            stream.readline()
        stream.readline()
    else:
        answer.body = stream.read()
    return answer


def exchange(port: int, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> Answer:
    """POSTs bytes as they are."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    fields.update({name.replace("_", "-"): value for name, value in headers.items()})
    with connect(port) as connection:
        connection.sendall(head("POST", path, fields) + body)
        return read_answer(connection)


def ask(port: int, method: str, path: str) -> Answer:
    with connect(port) as connection:
        connection.sendall(head(method, path, {"connection": "close"}))
        return read_answer(connection)


def chat(text: str = "hello", model: str = "tiny", **fields) -> bytes:
    message = {"role": "user", "content": text}
    return json.dumps({"model": model, "messages": [message], "max_tokens": 4, "temperature": 0, **fields}).encode()


def events(body: bytes) -> list:
    """The payloads of a stream; `[DONE]` stays text."""
    lines = [line[len(b"data:"):].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]
