"""Suites that run side by side choose different ports, also while the program that is to listen on a port still starts."""

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


def test_a_port_that_this_process_chose_is_not_chosen_again():
    (port,) = free_ports(1)
    assert not lock_port(port)
