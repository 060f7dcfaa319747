"""A redis-server of the suite's own, which can be stopped, slowed and emptied, and asked by hand."""

import os
import signal
import socket

from .processes import Process, free_ports, until


class Redis:
    """On a free port, keeping nothing on disk."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        argv = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                "--daemonize", "no"]
        self.process = Process(f"redis-{self.port}", argv)
        self.process.wait_for_port(self.port)
        until("Redis answers", lambda: self.ask("PING") == b"PONG")

    def kill(self) -> None:
        self.process.kill()

    def pause(self) -> None:
        """It accepts what is sent, and says nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process.alive():
            self.go_on()
        self.process.stop()

    def ask(self, *words: str | bytes):
        """One command by hand; bytes, a number, a list of these, or None."""
        parts = [word if isinstance(word, bytes) else word.encode() for word in words]
        sent = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(sent)
            return self._answer(connection.makefile("rb"))

    def keys(self, pattern: str = "*") -> list[str]:
        return sorted(key.decode() for key in self.ask("KEYS", pattern))

    def _answer(self, stream):
        line = stream.readline().rstrip(b"\r\n")
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else stream.read(size + 2)[:-2]
        if kind == b"*":
            return [self._answer(stream) for _ in range(int(rest))]
        raise ValueError(f"Redis: {rest!r}")
