"""A worker that remembers every byte it was sent, answers as it is told, and can break in the worst places."""

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Behaviour:
    """How POSTs are answered. `answer` replaces the plain chat completion."""

    answer: dict | None = None
    status: int = 200
    break_before_answer: bool = False
    break_after_events: int | None = None
    pause: float = 0.0
    events: int = 4


@dataclass
class Recorder:
    """Serves model `tiny` on a free port until it is stopped."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    seen: list[Seen] = field(default_factory=list)
    left: int = 0

    def __post_init__(self) -> None:
        recorder = self

        class Handler(_Handler):
            owner = recorder

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def posts(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == "POST"]

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def chunk(text: str, finish: str | None = None) -> dict:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"id": "chatcmpl-r", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [choice]}


def completion() -> dict:
    message = {"role": "assistant", "content": "recorded"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {"id": "chatcmpl-r", "object": "chat.completion", "created": 1, "model": "tiny", "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Recorder

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.note(b"")
        models = {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "test"}]}
        if self.path in ("/health", "/ping"):
            self.whole(200, b"", "text/plain")
        elif self.path == "/v1/models":
            self.whole(200, json.dumps(models).encode())
        elif self.path == "/metrics":
            self.whole(200, b"process_start_time_seconds 1.0\n", "text/plain")
        else:
            self.whole(404, b'{"error":{"message":"no"}}')

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.note(body)
        behaviour = self.owner.behaviour
        if behaviour.break_before_answer:
            self.close_connection = True
            self.connection.close()
            return
        try:
            streaming = b'"stream": true' in body or b'"stream":true' in body
            if streaming:
                self.stream(behaviour)
            else:
                time.sleep(behaviour.pause)
                answer = behaviour.answer if behaviour.answer is not None else completion()
                self.whole(behaviour.status, json.dumps(answer).encode())
        except OSError:
            self.owner.left += 1
            self.close_connection = True

    do_DELETE = do_PUT = do_POST

    def note(self, body: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.owner.seen.append(Seen(self.command, self.path, headers, body))

    def whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, behaviour: Behaviour) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number in range(behaviour.events):
            if number == behaviour.break_after_events:
                self.close_connection = True
                self.connection.close()
                return
            self.event(json.dumps(chunk(f"w{number} ")))
            time.sleep(behaviour.pause)
        self.event(json.dumps(chunk("", "stop")))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()
