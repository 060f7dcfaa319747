"""The operator API as a program speaks to it, and `ownerserve ctl` as a person does."""

import json
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from .processes import BINARY


@dataclass
class Got:
    """An answer, whole."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self):
        return json.loads(self.body)

    def ok(self):
        assert self.status == 200, (self.status, self.body)
        return self.json


class Operator:
    def __init__(self, url: str, token: str | None = None):
        self.url = url
        self.token = token

    def get(self, path: str, **headers: str) -> Got:
        return self._send("GET", path, None, headers)

    def write(self, method: str, path: str, body: dict | None = None, fence: str | None = None, **headers: str) -> Got:
        given = {"content-type": "application/json", **({"If-Match": fence} if fence else {}), **headers}
        return self._send(method, path, json.dumps(body or {}).encode(), given)

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Got:
        bearer = {"authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(f"{self.url}/ownerserve/v1/{path}", body, {**headers, **bearer}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Got(answer.status, _lower(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            return Got(error.code, _lower(error.headers), error.read())


def _lower(headers) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def ctl(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Runs `ownerserve ctl WORDS`; its environment is only what is given."""
    return subprocess.run(
        [str(BINARY), "ctl", *words], capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin", **(env or {})})
