"""Ports of suites that run side by side. Other tests depend on it: an engine takes a minute to bind its port."""

import subprocess
import sys

from harness.processes import ROOT, free_ports, lock_port, until

CHOOSE = """
import sys
sys.path.insert(0, "tests/python")
from harness.processes import free_ports
print(free_ports(1)[0], flush=True)
sys.stdin.read()
"""


def test_a_port_that_another_process_chose_is_not_free_until_that_process_ends():
    with subprocess.Popen([sys.executable, "-c", CHOOSE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as chooser:
        port = int(chooser.stdout.readline())
        assert not lock_port(port)
        chooser.stdin.close()
        chooser.wait(10)
    until("the port is free again", lambda: lock_port(port))


def test_no_port_is_chosen_twice():
    ports = [*free_ports(50), *free_ports(50)]
    assert len(set(ports)) == 100
