"""A router that is killed or upgraded in the midst of a hundred streams: whoever asks again has the whole answer, and pays once."""

import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.cluster import Serve, SimWorker, get_json
from harness.operator import Operator
from harness.processes import free_ports, until
from harness.redis import Redis
from harness.talk import TEXT, prose
from harness.wire import Answer, chat, connect, events, exchange, head

STREAMS = 100
# So many tokens that a stream takes some seconds, longer than all streams take to begin on a busy machine.
TOKENS = 160


@pytest.fixture(scope="module")
def workers():
    workers = [SimWorker("hybrid").wait() for _ in range(3)]
    yield workers
    for worker in workers:
        worker.process.stop()


@pytest.fixture
def routers(request, workers):
    """Three routers of one cluster, which share soft state; with the settings that a test adds."""
    redis, ports, routers = Redis(), free_ports(3), []
    settings = (TEXT, f'shared_cache.redis_url="{redis.url}"', "shared_cache.encryption_secret=0123456789abcdef", 'shared_cache.timeout="1s"',
                "tenants.default.requests_per_minute=100000", "tenants.default.tokens_per_minute=1000000000",
                *getattr(request, "param", ()))
    try:
        for place, port in enumerate(ports):
            join = ("--join", f"127.0.0.1:{ports[0]}") if place else ()
            routers.append(Serve([worker.url for worker in workers], "--cluster-listen", f"127.0.0.1:{port}", *join, settings=settings).wait())
        first = Operator(routers[0].operator)
        until("the learners may vote", lambda: first.write("POST", "cluster/members/promote", {"nodes": [2, 3]}).status == 200)
        for router in routers:
            until("all are counted", lambda router=router: router.metric("shared_cache_routers") == 3)
        yield routers
    finally:
        for router in routers:
            router.stop()
        redis.stop()


class Client(threading.Thread):
    """Streams one answer; where its router goes away it asks the next one, under the same key."""

    def __init__(self, number: int, ports: list[int]):
        super().__init__(daemon=True)
        self.number, self.ports = number, ports
        self.key, self.tries, self.began = uuid.uuid4().hex, 0, threading.Event()
        self.body = chat(prose(120, 1000 + number), stream=True, max_tokens=TOKENS, ignore_eos=True,
                         stream_options={"include_usage": True})
        self.answer = Answer()

    def run(self) -> None:
        for port in self.ports:
            self.tries += 1
            try:
                self.answer = self.stream(port)
            except OSError:
                continue
            if self.answer.status == 200 and self.answer.body.endswith(b"data: [DONE]\n\n"):
                return

    def stream(self, port: int) -> Answer:
        fields = {"content-type": "application/json", "content-length": str(len(self.body)), "connection": "close",
                  "idempotency-key": self.key, "x-session-id": f"client-{self.number}"}
        with connect(port, seconds=120) as connection:
            connection.sendall(head("POST", "/v1/chat/completions", fields) + self.body)
            answer, stream = Answer(), connection.makefile("rb")
            answer.status = int((stream.readline() or b"x 0").split()[1])
            while stream.readline() not in (b"\r\n", b""):
                pass
            while (size := int(stream.readline() or b"0", 16)) > 0:
                answer.body += stream.read(size)
                stream.readline()
                self.began.set()
            return answer

    def whole(self) -> tuple[str, int]:
        """Its text, and the tokens that it was told to have used."""
        self.join(120)
        assert not self.is_alive(), "it hangs"
        got = events(self.answer.body)
        assert got and got[-1] == "[DONE]" and not any("error" in event for event in got[:-1]), (self.answer.status, got[-2:])
        text = "".join(choice["delta"].get("content") or "" for event in got[:-1] for choice in event["choices"])
        (usage,) = [event["usage"] for event in got[:-1] if event.get("usage")]
        return text, usage["total_tokens"]


def started(routers: list[Serve], order: list[int]) -> list[Client]:
    clients = [Client(number, [routers[place].port for place in order]) for number in range(STREAMS)]
    for client in clients:
        client.start()
    for client in clients:
        assert client.began.wait(60), "its stream does not begin"
    return clients


def total(routers: list[Serve], name: str, **labels: str) -> float:
    return sum(router.metric(name, **labels) for router in routers)


def undisturbed(worker: SimWorker, clients: list[Client]) -> list[str]:
    """What the worker answers each of them without a router."""
    def text(client: Client) -> str:
        got = events(exchange(worker.port, client.body).body)
        return "".join(choice["delta"].get("content") or "" for event in got[:-1] for choice in event["choices"])

    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(text, clients))


def test_a_router_is_killed_in_the_midst_of_streams_and_each_request_is_charged_once(routers, workers):
    victim, others = routers[1], [routers[0], routers[2]]
    clients = started(routers, [1, 2, 0])
    victim.process.kill()
    answers = [client.whole() for client in clients]
    broken = [client for client in clients if client.tries > 1]
    assert len(broken) > STREAMS / 2, "the kill came in the midst of them"
    assert [text for text, _ in answers] == undisturbed(workers[0], clients)
    used = sum(tokens for client, (_, tokens) in zip(clients, answers) if client.tries > 1)
    until("all are settled", lambda: total(others, "tenant_tokens_total", tenant="default") == used)
    assert total(others, "quota_idempotent_retries_total") == len(broken), "none of them was charged again"
    receipts = [line for router in others for line in get_json(f"{router.operator}/ownerserve/v1/decisions?limit=500")["decisions"]]
    repeated = [line for line in receipts if line["observed"].get("idempotent_retry")]
    assert len(repeated) == len(broken) and all(line["observed"]["outcome"] == "complete" for line in repeated)


def test_a_router_is_upgraded_in_the_midst_of_streams_and_none_breaks(routers, workers):
    victim = routers[2]
    clients = started(routers, [2, 0, 1])
    victim.process.child.send_signal(signal.SIGTERM)
    answers = [client.whole() for client in clients]
    assert victim.process.child.wait(60) == 0
    assert [client.number for client in clients if client.tries > 1] == [], "what it had begun it brought to its end"
    assert [text for text, _ in answers] == undisturbed(workers[0], clients)
    victim.start()
    victim.wait()
    until("it is of the cluster again", lambda: victim.metric("shared_cache_routers") == 3)
    late = Client(STREAMS, [victim.port])
    late.start()
    assert [late.whole()[0]] == undisturbed(workers[0], [late]) and late.tries == 1


@pytest.mark.parametrize("routers", [('proxy.drain_timeout="300ms"',)], indirect=True, ids=["impatient"])
def test_what_an_upgraded_router_cuts_off_is_not_charged_again(routers, workers):
    victim, others = routers[2], routers[:2]
    clients = started(routers, [2, 0, 1])
    victim.process.child.send_signal(signal.SIGTERM)
    answers = [client.whole() for client in clients]
    broken = [client for client in clients if client.tries > 1]
    assert len(broken) > STREAMS / 2, "it had no time to end them"
    assert [text for text, _ in answers] == undisturbed(workers[0], clients)
    assert total(others, "quota_idempotent_retries_total") == len(broken), "none of them was charged again"


def test_an_answer_that_was_delivered_is_charged_again_and_so_is_another_body(routers):
    one, other = routers[0], routers[1]

    def saved() -> float:
        return total([one, other], "shared_cache_writes_total", kind="quota_charge", outcome="stored")

    def ask(router: Serve, text: str, key: str) -> int:
        before = saved()
        answer = exchange(router.port, chat(text), idempotency_key=key)
        assert answer.status == 200
        # What was charged, and that the answer was delivered, is written behind it.
        until("the others can know that it was delivered", lambda: saved() >= before + 2)
        return answer.json()["usage"]["total_tokens"]

    used = sum(ask(router, "hello", "one-key") for router in (one, other, one))
    until("each is charged", lambda: total(routers, "tenant_tokens_total", tenant="default") == used)
    assert total(routers, "quota_idempotent_retries_total") == 0
    # A stream that never ends well: its router dies, and what comes under its key is something else.
    client = Client(7, [routers[2].port])
    client.start()
    assert client.began.wait(60)
    routers[2].process.kill()
    client.join(60)
    used += ask(one, "something else", client.key)
    until("it is charged", lambda: total([one, other], "tenant_tokens_total", tenant="default") == used)
    assert total([one, other], "quota_idempotent_retries_total") == 0


def test_a_key_is_free_to_be_repeated_only_so_often(routers):
    """Three tries at three routers while the first one still runs, then a fourth: what its prompt costs is paid twice."""
    clients = [Client(9, [router.port]) for router in [*routers, routers[0]]]
    for client in clients:
        client.key, client.body = clients[0].key, clients[0].body
        client.start()
        assert client.began.wait(60)
    for client in clients:
        client.whole()
    assert total(routers, "quota_idempotent_retries_total") == 2
