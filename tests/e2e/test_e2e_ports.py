"""Ports that a job listened on: kept by its own closed connections, by somebody else, on an address that is gone.

The victim listens without SO_REUSEADDR, as NCCL does, and has closed connections there. Each test has a network of its
own, so that no remains of another one are met.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import own_network

from limosa.errors import Refused, TimedOutUndone
from limosa.operation import ports as operation_ports
from limosa.operation import restore
from limosa.operation.work import Work
from limosa.process import ports
from limosa.process.criu.bound import Bound, bound_sockets
from limosa.progress import Progress

pytestmark = pytest.mark.criu

KINDS = {"one": ["127.0.0.1"], "all": ["0.0.0.0"], "v6": ["::1"], "both": ["::"], "two": ["127.0.0.1", "::1"]}


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    """A network of this test's own, with a loopback device and no more."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    own_network()
    Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6").write_text("0")
    yield
    ctypes.CDLL(None).setns(before, 0x40000000)
    os.close(before)


def remains() -> list[str]:
    """Local addresses of what closed connections have left."""
    lines = [
        line for name in ("tcp", "tcp6") for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()
    ]
    return [line.split()[1] for line in lines if line.split()[3] == "06"]


@pytest.fixture
def ended(start, limosa, tmp_path) -> Any:
    """``ended(addresses)``: such a job, written to disk and ended, and its ports; its connections are still there."""

    def go(addresses: list[str]) -> tuple[Any, Path, list[int]]:
        victim = start("closing", *addresses)
        limosa("checkpoint", victim.pid, "--output", tmp_path / "image", rc=0)
        found = next(line.split()[1:] for line in victim.text().splitlines() if line.startswith("ports"))
        return victim, tmp_path / "image", [int(port) for port in found]

    return go


def comes_back(victim: Any) -> None:
    (victim.folder / "visit").touch()
    victim.goes_on()
    victim.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_comes_back_to_a_port_that_its_own_closed_connections_keep(ended, limosa, kind) -> None:
    victim, image, found = ended(KINDS[kind])
    assert len(remains()) >= len(found)
    assert limosa("plan", "restore", image, "-o", "json", rc=0).json["reasons"][0]["id"] == "port-remains"
    done = limosa("restore", image, "-o", "json", rc=0)
    assert done.seconds < 40  # they would have stayed for a minute
    assert done.json["warnings"] == []
    comes_back(victim)


def test_remains_on_other_ports_are_left_alone(ended, limosa) -> None:
    victim, image, (port,) = ended(["127.0.0.1"])
    other = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(other.getsockname())
    accepted, _ = other.accept()
    accepted.close()
    assert client.recv(1) == b""
    client.close()
    limosa("restore", image, rc=0)
    left = {int(name.rpartition(":")[2], 16) for name in remains()}
    assert other.getsockname()[1] in left
    assert port not in left
    other.close()
    comes_back(victim)


def test_what_cannot_be_taken_away_is_waited_for_and_told(ended, monkeypatch) -> None:
    """A kernel without SOCK_DESTROY: it says how long it will be, and goes on as soon as the kernel has forgotten."""
    began = time.monotonic()
    victim, image, (port,) = ended(["127.0.0.1"])
    destroy, asked = ports.destroy, list[float]()

    def from_later_on(found: list[ports.User]) -> bool:
        asked.append(time.monotonic())
        return time.monotonic() > asked[0] + 3 and destroy(found)

    monkeypatch.setattr(operation_ports.ports, "destroy", from_later_on)
    said: list[Progress] = []
    result = restore(image, progress=said.append)
    told = [p.message for p in said if p.step == "ports"]
    assert told
    assert f"127.0.0.1:{port}" in told[0]
    assert "a closed connection is still there, for" in told[0]
    assert 59 - (asked[0] - began) <= int(told[0].split()[-3]) <= 60
    assert result.timings["ports"] > 1
    comes_back(victim)


def test_waiting_for_remains_obeys_the_time_limit(ended, limosa, monkeypatch) -> None:
    _, image, _ = ended(["127.0.0.1"])
    monkeypatch.setattr(operation_ports.ports, "destroy", lambda found: False)
    with pytest.raises(TimedOutUndone):
        restore(image, timeout=1.0)
    monkeypatch.undo()
    limosa("restore", image, rc=0)


def test_a_process_that_has_the_port_is_named_and_nothing_is_started(ended, limosa) -> None:
    victim, image, (port,) = ended(["127.0.0.1"])
    limosa("restore", image, rc=0)
    limosa("checkpoint", victim.pid, "--output", image.with_name("again"), rc=0)
    code = f"import socket; s = socket.create_server(('127.0.0.1', {port})); print(1, flush=True); s.accept()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline()
            error = limosa("restore", image.with_name("again"), "-o", "json", rc=23).json["error"]
            assert (error["id"], error["exit_code"]) == ("port-taken", 23)
            assert f"the job listened on tcp 127.0.0.1:{port}: process {holder.pid} (" in error["message"]
            assert "listens there" in error["message"]
            assert not victim.alive()
            refused = limosa("plan", "restore", image, "-o", "json", rc=23).json["reasons"]
            assert [reason["pid"] for reason in refused if reason["id"] == "port-taken"] == [holder.pid]
        finally:
            holder.kill()
    limosa("restore", image.with_name("again"), rc=0)
    comes_back(victim)


def test_a_port_that_is_taken_while_criu_works_is_told_the_same_way(ended, monkeypatch) -> None:
    _, image, (port,) = ended(["127.0.0.1"])
    free = operation_ports.free
    held = []

    def then_taken(work: Any, images_fd: int) -> None:
        free(work, images_fd)
        held.append(socket.create_server(("127.0.0.1", port)))

    monkeypatch.setattr(operation_ports, "free", then_taken)
    with pytest.raises(Refused) as caught:
        restore(image)
    held[0].close()
    assert (caught.value.id, caught.value.exit_code) == ("port-taken", 23)
    assert f"process {os.getpid()}" in str(caught.value)


def test_who_has_gone_while_it_was_asked_who_he_is_is_nobody(monkeypatch) -> None:
    """A closed connection that the kernel forgets between the try and the look."""
    tries = [errno.EADDRINUSE, 0]
    monkeypatch.setattr(ports, "try_bind", lambda bound: tries.pop(0))
    monkeypatch.setattr(ports, "users", lambda bound: [])
    bound = Bound(family=socket.AF_INET, protocol="tcp", address="127.0.0.1", port=4711, listening=True)
    monkeypatch.setattr(operation_ports, "bound_sockets", lambda fd: [bound])
    assert operation_ports.in_the_way(-1) == []
    tries[:] = [errno.EADDRINUSE, 0]
    with Work("restore") as work:
        operation_ports.free(work, -1)
    assert tries == []
    tries[:] = [errno.EADDRINUSE] * 4
    (reason,) = operation_ports.in_the_way(-1)
    assert (reason.id, reason.exit_code) == ("port-taken", 23)
    with Work("restore") as work, pytest.raises(Refused):
        operation_ports.free(work, -1)


def test_an_address_that_is_gone_is_told_before(ended, limosa) -> None:
    subprocess.run(["ip", "address", "add", "10.77.0.1/32", "dev", "lo"], check=True)
    victim, image, (port,) = ended(["10.77.0.1"])
    subprocess.run(["ip", "address", "del", "10.77.0.1/32", "dev", "lo"], check=True)
    error = limosa("restore", image, "-o", "json", rc=23).json["error"]
    assert (error["id"], f"10.77.0.1:{port}" in error["message"]) == ("address-missing", True)
    subprocess.run(["ip", "address", "add", "10.77.0.1/32", "dev", "lo"], check=True)
    limosa("restore", image, rc=0)
    comes_back(victim)


def test_the_ports_of_an_image_are_read_from_criu_s_own_files(start, limosa, tmp_path) -> None:
    victim = start("sockets")
    limosa("checkpoint", victim.pid, "--output", tmp_path / "image", "--leave-running", rc=0)
    fd = os.open(tmp_path / "image" / "criu", os.O_RDONLY)
    found = bound_sockets(fd)
    assert sorted((b.protocol, b.address, b.listening) for b in found) == [
        ("tcp", "127.0.0.1", True),
        ("udp", "0.0.0.0", False),
        ("udp", "127.0.0.1", False),
    ]
    (tmp_path / "image" / "criu" / "files.img").write_bytes(b"\x19\x43\x56\x54\x38\x31\x30\x56\xff\xff\xff\xff")
    assert bound_sockets(fd) == []
    os.close(fd)
    victim.finish()


def test_a_connection_whose_other_side_stays_open_is_among_the_remains() -> None:
    """FIN-WAIT-2: a client that keeps its side of a connection that the job has closed."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    bound = Bound(family=socket.AF_INET, protocol="tcp", address="127.0.0.1", port=server.getsockname()[1])
    with socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        accepted.close()
        server.close()
        assert ports.try_bind(bound)
        end = time.monotonic() + 60
        while (found := ports.users(bound)[0]).state == "fin-wait-1":  # until the client's side has acknowledged it
            assert not found.is_remains
            assert time.monotonic() < end
            time.sleep(0.01)
        remote = f"127.0.0.1:{client.getsockname()[1]}"
        assert (found.state, found.is_remains, found.remote) == ("fin-wait-2", True, remote)
        assert 0 < found.seconds <= 60
        assert ports.destroy([found])
        assert not ports.try_bind(bound)


def test_who_has_a_udp_port() -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as held:
        held.bind(("::", 0))
        bound = Bound(family=socket.AF_INET, protocol="udp", address="127.0.0.1", port=held.getsockname()[1])
        assert ports.try_bind(bound)
        (found,) = ports.users(bound)
        assert not found.is_remains
        assert ports.owners([found.inode])[found.inode][0] == os.getpid()


def test_addresses_that_are_in_each_others_way() -> None:
    v4 = Bound(family=socket.AF_INET, protocol="tcp", address="127.0.0.1", port=1)
    both = Bound(family=socket.AF_INET6, protocol="tcp", address="::", port=1)
    alone = Bound(family=socket.AF_INET6, protocol="tcp", address="::", port=1, v6only=True)
    assert ports.overlap(v4, "0.0.0.0")
    assert ports.overlap(v4, "::")
    assert not ports.overlap(v4, "127.0.0.2")
    assert not ports.overlap(v4, "::1")
    assert ports.overlap(both, "127.0.0.1")
    assert not ports.overlap(alone, "127.0.0.1")
    assert ports.overlap(alone, "::1")
