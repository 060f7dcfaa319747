"""Child processes that never outlive the test run, and ports that are free."""

import atexit
import fcntl
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[3]
LOGS = ROOT / "target/test-logs/processes"


def _binary() -> Path:
    """Returns the program under test: OWNERSERVE_BIN, else the newer of a release build and one of the suites' profile."""
    if named := os.environ.get("OWNERSERVE_BIN"):
        return Path(named).absolute()
    usual = ROOT / "target/ci/ownerserve"
    built = [path for path in (usual, ROOT / "target/release/ownerserve") if path.exists()]
    return max(built, key=lambda path: path.stat().st_mtime, default=usual)


BINARY = _binary()

_running: list["Process"] = []


# First port that the system gives to a program which connects, or which asks for any port. An engine does so a hundred times
# while it starts.
FIRST_GIVEN = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
# One lock file per port. The process that chose the port holds the lock until it ends, so that suites that run side by side
# never choose the same port. A free port is not enough: vLLM takes a minute to bind the port that was chosen for it.
PORT_LOCKS = Path(tempfile.gettempdir()) / f"ownerserve-test-ports-{os.getuid()}"
_port_locks: list[IO] = []


def lock_port(port: int) -> bool:
    """Returns False if another process has locked the port, or if something listens there."""
    PORT_LOCKS.mkdir(exist_ok=True)
    lock = open(PORT_LOCKS / str(port), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        lock.close()
        return False
    _port_locks.append(lock)
    return True


def free_ports(count: int) -> list[int]:
    """Returns ports below FIRST_GIVEN that nothing listens on, locked for this process."""
    choice, ports = random.SystemRandom(), []
    for _ in range(1_000 * count):
        if len(ports) == count:
            return ports
        port = choice.randrange(min(10_000, FIRST_GIVEN // 2), FIRST_GIVEN)
        if lock_port(port):
            ports.append(port)
    raise AssertionError(f"no {count} free ports below {FIRST_GIVEN}")


def until(what: str, check, seconds: float = 20.0, pause: float = 0.05):
    """The first truthy answer of `check`; its exceptions count as "not yet"."""
    deadline = time.monotonic() + seconds
    last = None
    while time.monotonic() < deadline:
        try:
            answer = check()
            if answer:
                return answer
        except (OSError, AssertionError, KeyError, ValueError) as error:
            last = error
        time.sleep(pause)
    raise AssertionError(f"{what}: not within {seconds} s ({last!r})")


class Process:
    """One child. Its output goes to target/test-logs/processes/NAME.log."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str] | None = None):
        LOGS.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = LOGS / f"{name}-{time.monotonic_ns()}.log"
        with open(self.log, "wb") as out:
            self.child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})}, cwd=ROOT)
        _running.append(self)

    @property
    def pid(self) -> int:
        return self.child.pid

    def alive(self) -> bool:
        return self.child.poll() is None

    def last_lines(self, count: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def wait_for_port(self, port: int, seconds: float = 30.0) -> None:
        def connected():
            assert self.alive(), f"{self.name} ended with {self.child.returncode}:\n{self.last_lines()}"
            with closing(socket.create_connection(("127.0.0.1", port), timeout=1)):
                return True

        deadline = time.monotonic() + seconds
        while True:
            try:
                connected()
                return
            except OSError:
                assert time.monotonic() < deadline, f"{self.name} is not listening:\n{self.last_lines()}"
                time.sleep(0.05)

    def kill(self) -> None:
        """As kill -9 does: no farewell."""
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
        self.child.wait()
        self._forget()

    def stop(self, seconds: float = 10.0) -> int:
        """Asks it to end, insists if it does not, and returns its exit code."""
        if self.alive():
            self.child.terminate()
            try:
                self.child.wait(seconds)
            except subprocess.TimeoutExpired:
                self.child.kill()
        code = self.child.wait()
        self._forget()
        return code

    def _forget(self) -> None:
        if self in _running:
            _running.remove(self)


@atexit.register
def stop_all() -> None:
    for process in list(_running):
        process.kill()


def on_signal(number, _frame):
    stop_all()
    raise SystemExit(128 + number)


signal.signal(signal.SIGTERM, on_signal)
