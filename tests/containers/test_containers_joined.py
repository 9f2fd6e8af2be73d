"""Containers in a network that was there before them, where others are as well."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from containers.runtimes import bundle_config
from containers.test_containers_to_disk import Desk, desk_of, until

__all__ = ["desk_of"]  # a fixture
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]
ECHO = ("/bin/busybox", "nc", "-ll", "-p", "8080", "-e", "/bin/busybox", "cat")


def echoed(desk: Desk, pid: int, port: int) -> str:
    """What somebody in the network of a process gets back from a port there."""
    enter = ["nsenter", "--target", str(pid), "--net", "timeout", "3", desk.runtime.engines["busybox"]]
    argv = [*enter, "nc", "127.0.0.1", str(port)]
    return subprocess.run(argv, input="hello", text=True, capture_output=True, check=False).stdout


def test_who_else_is_in_a_network_is_not_cut_off(desk_of: Callable[[str], Desk]) -> None:
    desk = desk_of("runc")
    serve = f"ip link set lo up; exec {desk.runtime.engines['busybox']} nc -ll -p 8081 -e /bin/cat"
    neighbour = desk.node.popen(["unshare", "--net", "sh", "-c", serve], stdin=subprocess.DEVNULL)
    until(lambda: echoed(desk, neighbour.pid, 8081) == "hello")
    kinds = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
    network = {"type": "network", "path": f"/proc/{neighbour.pid}/ns/net"}
    name = desk.name("echo")
    linux = {**bundle_config(name, desk.runtime.parent, [], None)["linux"], "namespaces": [*kinds, network]}
    with open(os.devnull, "r+b") as null:
        one = desk.runtime.start(*ECHO, gpus=None, name=name, output=null.fileno(), linux=linux)
    until(lambda: echoed(desk, neighbour.pid, 8080) == "hello")
    assert desk.checkpoint(one, "--tcp-established", rc=2)["error"]["id"] == "container-option"
    desk.checkpoint(one)
    assert echoed(desk, neighbour.pid, 8081) == "hello"
    desk.restore()
    assert {echoed(desk, neighbour.pid, port) for port in (8080, 8081)} == {"hello"}
