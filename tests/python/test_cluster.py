"""Clusters that people set up by hand: certificates that do not fit, two clusters for one, and what ctl says of them."""

import json
import shutil
import subprocess
import time

import pytest
from harness.cluster import Serve, SimWorker, get_json
from harness.operator import Operator, ctl
from harness.processes import BINARY, free_ports, until


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)


class Authority:
    """Signs certificates of nodes, as the README does."""

    def __init__(self, folder):
        self.folder = folder
        self.ca, self.key = folder / "ca.pem", folder / "ca.key"
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                "-subj", "/CN=ownerserve", "-keyout", str(self.key), "-out", str(self.ca))

    def node(self, name: str, san: str) -> str:
        """The setting of a node whose certificate names `san`."""
        made, key, request, extensions = (self.folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext"))
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                "-keyout", str(key), "-out", str(request))
        extensions.write_text(f"subjectAltName={san}\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", str(self.key), "-days", "2",
                "-out", str(made), "-extfile", str(extensions))
        return f'cluster.tls={{ca="{self.ca}", certificate="{made}", key="{key}"}}'


def log_of(serve) -> str:
    return serve.process.log.read_text(errors="replace")


def started_and_refused(tmp_path, *settings: str) -> subprocess.CompletedProcess:
    """A serve that is expected to end by itself."""
    words = [part for setting in settings for part in ("--set", setting)]
    client, operator = free_ports(2)
    return subprocess.run([str(BINARY), "serve", "--data-dir", str(tmp_path / "node"), "--listen", f"127.0.0.1:{client}",
                           "--operator-listen", f"127.0.0.1:{operator}", *words], capture_output=True, text=True, timeout=60)


def test_a_certificate_that_does_not_name_the_advertised_address_is_refused_at_start(tmp_path):
    authority = Authority(tmp_path)
    (port,) = free_ports(1)
    done = started_and_refused(tmp_path, f'cluster.listen="127.0.0.1:{port}"', f'cluster.advertise="router-1.internal:{port}"',
                               authority.node("router-1", "DNS:router-2.internal,IP:10.0.0.7"))
    assert done.returncode == 1, done.stderr
    for told in "router-1.pem", "router-2.internal, 10.0.0.7", "router-1.internal", "subjectAltName=DNS:router-1.internal":
        assert told in done.stderr, done.stderr
    assert not (tmp_path / "node/log").exists()


def test_a_member_whose_certificate_is_refused_is_named_with_the_cause_and_the_refused_are_counted(tmp_path):
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other")
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    first = Serve([], "--cluster-listen", addresses[0], settings=(authority.node("one", "IP:127.0.0.1"),))
    second = None
    try:
        first.process.wait_for_port(first.operator_port)
        second = Serve([], "--cluster-listen", addresses[1], "--join", addresses[0], settings=(authority.node("two", "IP:127.0.0.1"),))
        second.process.wait_for_port(second.operator_port)
        run = lambda *words: ctl("--endpoint", first.operator, *words)  # noqa: E731
        listed = until("both are members", lambda: len(json.loads(run("member", "list", "-o", "json").stdout)["members"]) == 2 and run("member", "list"))
        assert "LAST ERROR" in listed.stdout and "CLUSTER" in listed.stdout
        second.process.stop()
        # Now of another authority, and it trusts both itself.
        foreign = other.node("two", "IP:127.0.0.1")
        other.ca.write_text(other.ca.read_text() + authority.ca.read_text())
        second.flags = ["--cluster-listen", addresses[1], "--set", foreign]
        second.start()
        trouble = lambda: next(member["last_error"] for member in json.loads(run("member", "list", "-o", "json").stdout)["members"] if member["node_id"] == 2)  # noqa: E731
        until("the cause is named", lambda: "another authority" in (trouble() or ""))
        assert "another authority" in run("member", "list").stdout
        told = until("it is an alarm", lambda: "another authority" in (said := run("alarms", "list")).stdout and said)
        assert told.returncode == 5 and "member_" in told.stdout, told.stdout
        until("who knocks is counted", lambda: first.metric("ledger_tls_handshake_failures_total") > 0)
        assert "another node cannot be talked with" in log_of(first) and "a caller did not come in as another node" in log_of(first)
        assert log_of(first).count("a caller did not come in as another node") <= 20, "not a line for each try"
    finally:
        first.stop()
        if second:
            second.stop()


def test_the_clusters_certificates_are_read_anew_while_a_router_runs(tmp_path):
    (tmp_path / "after").mkdir()
    before, after = Authority(tmp_path), Authority(tmp_path / "after")
    ports = free_ports(2)
    first = Serve([], "--cluster-listen", f"127.0.0.1:{ports[0]}", settings=(before.node("one", "IP:127.0.0.1"),))
    second = None
    try:
        first.process.wait_for_port(first.operator_port)
        after.node("one", "IP:127.0.0.1")
        for name in "one.key", "one.pem", "ca.pem":
            (tmp_path / name).write_bytes((tmp_path / "after" / name).read_bytes())
        until("the new files are taken", lambda: "the cluster's certificates were read anew" in log_of(first))
        second = Serve([], "--cluster-listen", f"127.0.0.1:{ports[1]}", "--join", f"127.0.0.1:{ports[0]}",
                       settings=(after.node("two", "IP:127.0.0.1"),))
        second.process.wait_for_port(second.operator_port)
        members = lambda: json.loads(ctl("--endpoint", first.operator, "member", "list", "-o", "json").stdout)["members"]  # noqa: E731
        until("who has one of the new authority is a member", lambda: len(members()) == 2)
    finally:
        first.stop()
        if second:
            second.stop()


def founders(count: int) -> list[Serve]:
    """So many clusters of one node each."""
    found = [Serve([], "--cluster-listen", f"127.0.0.1:{port}") for port in free_ports(count)]
    for serve in found:
        serve.process.wait_for_port(serve.operator_port)
    return found


@pytest.fixture(scope="module")
def two_clusters():
    found = founders(2)
    yield found
    for serve in found:
        serve.stop()


def test_endpoints_of_two_clusters_are_told_apart(two_clusters):
    ids = [Operator(serve.operator).get("cluster").json["cluster_id"] for serve in two_clusters]
    both = [part for serve in two_clusters for part in ("--endpoint", serve.operator)]
    status = ctl(*both, "cluster", "status")
    assert status.returncode == 1 and "CLUSTER" in status.stdout and all(id in status.stdout for id in ids)
    assert all(id in status.stderr for id in ids) and "cluster_mismatch" in status.stderr
    members = ctl(*both, "member", "list")
    assert members.returncode == 1 and all(id in members.stdout for id in ids), (members.stdout, members.stderr)
    hashes = ctl(*both, "cluster", "verify")
    assert hashes.returncode == 1 and "cluster_mismatch" in hashes.stderr and "States differ" not in hashes.stderr
    alarms = ctl(*both, "alarms", "list", "-o", "json")
    found = [alarm for alarm in json.loads(alarms.stdout) if alarm["alarm"] == "cluster_mismatch"]
    assert alarms.returncode == 5 and {alarm["target"] for alarm in found} == {serve.operator for serve in two_clusters}
    one = ctl("--endpoint", two_clusters[0].operator, "cluster", "status")
    assert one.returncode == 0, one.stderr


def test_a_founder_says_loudly_that_it_founds_and_that_it_does_not_join(two_clusters):
    first, second = two_clusters
    assert "WARN" in log_of(first) and "a NEW cluster is founded here" in log_of(first)
    address = Operator(first.operator).get("cluster/members").json["members"][0]["address"]
    second.process.stop()
    second.flags += ["--join", address]
    second.start()
    second.process.wait_for_port(second.operator_port)
    until("it says that it has a cluster already", lambda: "NOT in the cluster that it was to join" in log_of(second))
    assert log_of(second).count("a NEW cluster is founded here") <= 1


def test_members_are_listed_by_the_first_endpoint_that_answers(two_clusters):
    first = two_clusters[0]
    listed = ctl("--endpoint", "http://127.0.0.1:9", "--endpoint", first.operator, "member", "list")
    assert listed.returncode == 0 and "voter" in listed.stdout and "127.0.0.1:9" in listed.stderr
    nobody = ctl("--endpoint", "http://127.0.0.1:9", "member", "list")
    assert nobody.returncode == 3 and nobody.stdout == ""


def test_a_drain_is_obeyed_by_every_router_before_its_next_probe():
    worker = SimWorker("hybrid", "--speed-up", "20").wait()
    ports = free_ports(2)
    routers = []
    try:
        for place, port in enumerate(ports):
            join = ("--join", f"127.0.0.1:{ports[0]}") if place else ()
            routers.append(Serve([worker.url], "--cluster-listen", f"127.0.0.1:{port}", *join).wait())
        first, second = (Operator(router.operator) for router in routers)
        waits = []
        for draining, health in [(True, "draining"), (False, "ready")] * 4:
            id = first.get("workers").json["workers"][0]["id"]
            first.write("PUT", f"workers/{id}/drain", {"draining": draining}).ok()
            since = time.monotonic()
            until("the other one obeys", lambda: second.get(f"workers/{id}").json["worker"]["health"] == health)
            waits.append(time.monotonic() - since)
        print(f"obeyed at the other router after {sorted(round(wait * 1000) for wait in waits)} ms")
        assert sorted(waits)[len(waits) // 2] < 0.5, "probes come once a second"
    finally:
        for router in routers:
            router.stop()
        worker.process.stop()


def test_nodes_without_certificates_listen_on_the_loopback_only_unless_that_is_asked_for(tmp_path):
    (port,) = free_ports(1)
    done = started_and_refused(tmp_path, f'cluster.listen="0.0.0.0:{port}"', f'cluster.advertise="127.0.0.1:{port}"')
    assert done.returncode == 1, done.stderr
    for told in "cluster.listen", "cluster.tls", "cluster.allow_plaintext = true":
        assert told in done.stderr, done.stderr


def test_who_listens_for_nodes_without_certificates_is_told_what_that_gives_away():
    (port,) = free_ports(1)
    settings = (f'cluster.advertise="127.0.0.1:{port}"', "cluster.allow_plaintext=true")
    serve = Serve([], "--cluster-listen", f"0.0.0.0:{port}", settings=settings)
    try:
        serve.process.wait_for_port(serve.operator_port)
        told = log_of(serve)
        assert "ANYBODY who reaches this address" in told and "token ids" in told and "plain text" in told
    finally:
        serve.stop()


@pytest.fixture
def voters():
    """Three nodes of one cluster, all of which vote, in front of one worker."""
    worker = SimWorker("hybrid", "--speed-up", "20").wait()
    ports = free_ports(3)
    nodes = []
    try:
        for port in ports:
            join = ("--join", f"127.0.0.1:{ports[0]}") if nodes else ()
            nodes.append(Serve([worker.url], "--cluster-listen", f"127.0.0.1:{port}", *join).wait())
        until("all three vote", lambda: ctl("--endpoint", nodes[0].operator, "member", "promote", "2", "3").returncode == 0)
        yield nodes
    finally:
        for started in nodes:
            started.stop()
        worker.process.stop()


def ready(node) -> dict:
    return get_json(f"{node.operator}/readyz")


def leader_of(nodes):
    """The one that leads, once the others know it too."""
    def agreed():
        known = [ready(node) for node in nodes]
        same = len({told["leader"] for told in known}) == 1 and known[0]["leader"] is not None
        return same and next((node for node, told in zip(nodes, known) if told["role"] == "leader"), None)

    return until("one leader that all know", agreed)


def test_a_lost_quorum_and_its_return_are_each_in_the_log_once_and_nobody_is_called_leader_meanwhile(voters):
    leader = leader_of(voters)
    lost = [node for node in voters if node is not leader]
    for node in lost:
        node.process.kill()
    until("the leader says that it has no quorum", lambda: "too few voters answer this leader" in log_of(leader))
    told = ready(leader)
    assert (told["role"], told["leader"], told["stale"]) == ("voter", None, True), told
    lost[0].start()
    until("it says that there is one again", lambda: "there is a quorum again" in log_of(leader))
    assert log_of(leader).count("too few voters answer this leader") == 1
    left = [leader, lost[0]]
    lost[0].process.wait_for_port(lost[0].operator_port)
    gone = leader_of(left)
    follower = next(node for node in left if node is not gone)
    gone.process.kill()
    until("the follower says that it hears no leader", lambda: "no leader is heard" in log_of(follower))
    gone.start()
    until("it hears one again", lambda: log_of(follower).rfind("there is a quorum again") > log_of(follower).rfind("no leader is heard"))
    assert log_of(follower).count("no leader is heard") == 1


def test_a_voter_whose_folder_is_moved_leaves_the_quorum_and_comes_back_as_it_is_told_to(voters, tmp_path):
    lost = leader_of(voters)
    left = [node for node in voters if node is not lost]
    old = ready(lost)["node_id"]
    shutil.move(lost.data, tmp_path / "moved")
    reasons = lambda: {told["reason"]: told["detail"] for told in ready(lost)["degraded"]}  # noqa: E731
    advice = until("it is missed", lambda: reasons().get("data_dir_missing"))
    assert "--join" in advice and "member replace OLD NEW" in advice and "second cluster" in advice
    leader = leader_of(left)
    run = lambda *words: ctl("--endpoint", leader.operator, *words)  # noqa: E731
    trouble = lambda: next(member["last_error"] for member in json.loads(run("member", "list", "-o", "json").stdout)["members"] if member["node_id"] == old)  # noqa: E731
    until("the leader knows why it does not answer", lambda: "is gone from the disk" in (trouble() or ""))
    assert "failed to send RaftMsg" not in log_of(lost)
    assert "ledger_data_dir_missing" in ctl("--endpoint", lost.operator, "alarms", "list").stdout
    address = next(member["address"] for member in json.loads(run("member", "list", "-o", "json").stdout)["members"] if member["node_id"] != old)
    lost.process.stop()
    lost.flags += ["--join", address]
    lost.start()
    lost.wait()
    new = ready(lost)["node_id"]
    assert new == 4 and "a NEW cluster is founded here" not in log_of(lost)
    until("it takes the old one's place", lambda: run("member", "replace", str(old), str(new)).returncode == 0)
    assert run("member", "remove", str(old)).returncode == 0
    assert ready(leader_of([*left, lost]))["degraded"] == []


def test_ctl_says_what_tls_wants_of_it(tmp_path):
    authority = Authority(tmp_path)
    shown = authority.node("router", "IP:127.0.0.1").replace("cluster.tls", "operator.tls").replace(f'ca="{authority.ca}", ', "")
    misnamed = authority.node("elsewhere", "DNS:elsewhere.internal").replace("cluster.tls", "operator.tls").replace(f'ca="{authority.ca}", ', "")
    (port,) = free_ports(1)
    serve = Serve([], "--cluster-listen", f"127.0.0.1:{port}", settings=(shown, authority.node("peer", "IP:127.0.0.1")))
    wrong, plain = Serve([], settings=(misnamed,)), Serve([])
    try:
        for started in serve, wrong, plain:
            started.process.wait_for_port(started.operator_port)
        https = lambda one: one.operator.replace("http:", "https:")  # noqa: E731
        trusting = ("--cacert", str(authority.ca))
        assert ctl("--endpoint", https(serve), *trusting, "cluster", "status").returncode == 0
        for words, told in [
            (("--endpoint", https(serve)), "--cacert FILE"),
            (("--endpoint", serve.operator), "https://HOST:PORT"),
            (("--endpoint", https(wrong), *trusting), "does not name this host"),
            (("--endpoint", https(plain), *trusting), "http://HOST:PORT"),
            (("--endpoint", f"https://127.0.0.1:{port}", *trusting), "cluster.listen"),
        ]:
            for verb in ("session", "list"), ("tenant", "set-quota", "a", "5"):
                done = ctl(*words, *verb)
                assert done.returncode == 3 and told in done.stderr, (words, verb, done.returncode, done.stderr)
    finally:
        for started in serve, wrong, plain:
            started.stop()
