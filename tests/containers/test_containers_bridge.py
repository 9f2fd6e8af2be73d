"""Containers on podman's bridge, which is what it gives where nobody asks for another network."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from containers.runtimes import Container, own_folders
from containers.test_containers_to_disk import (
    Desk,
    answers,
    as_undisturbed,
    begin,
    desk_of,
    is_frozen,
    one_of_two,
    recovered,
    started_by,
    until,
)
from support import own_network

from limosa.containers.published import Published
from limosa_softgpu import kernel

__all__ = ["desk_of"]  # a fixture
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]
BRIDGE = ["--network", "podman"]
WEB = ("/bin/busybox", "httpd", "-f", "-p", "80")
ECHO = ("/bin/busybox", "nc", "-ll", "-p", "80", "-e", "/bin/busybox", "cat")


@pytest.fixture
def bridged(desk_of: Callable[[str], Desk]) -> Iterator[Desk]:
    """podman in a network of the test's own, in which its bridge and its rules are."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    own_network()
    try:
        desk = desk_of("podman")
        own_folders(desk.node, "/run/containers")  # where podman notes which addresses it has given
        with contextlib.closing(desk.runtime):
            yield desk
    finally:
        kernel.setns(before, 0x40000000)  # CLONE_NEWNET
        os.close(before)


def address(desk: Desk, one: Container) -> str:
    (found,) = desk.runtime("container", "inspect", one.id).json
    return str(found["NetworkSettings"]["Networks"]["podman"]["IPAddress"])


@contextlib.contextmanager
def unreachable(desk: Desk, at: str) -> Iterator[None]:
    """Lets nothing from here reach an address."""
    rule = ["OUTPUT", "-d", at, "-j", "DROP"]
    desk.node.run([desk.runtime.engines["iptables"], "-I", *rule])
    yield
    desk.node.run([desk.runtime.engines["iptables"], "-D", *rule])


def echoed(client: socket.socket, words: bytes) -> bytes:
    """What comes back of what was sent, all at once."""
    client.sendall(words)
    return client.recv(100)


def echoes(desk: Desk) -> tuple[Container, str]:
    """A server that sends back what it gets, and its address."""
    one = desk.runtime.start(*ECHO, gpus=None, name=desk.name("echo"), options=BRIDGE)
    at = address(desk, one)
    until(lambda: answers(at, 80))
    return one, at


def serves(desk: Desk, name: str, port: int) -> Container:
    """A server that the machine's port leads to."""
    options = [*BRIDGE, "--publish", f"{port}:80"]
    one = desk.runtime.start(*WEB, gpus=None, name=desk.name(name), options=options)
    until(lambda: answers("127.0.0.1", port))
    return one


def test_a_clone_has_an_address_of_its_own_and_who_comes_back_has_the_old_one(bridged: Desk, rootfs: Path) -> None:
    one = bridged.job(options=BRIDGE)
    one.goes_on()
    had = address(bridged, one)
    bridged.checkpoint(one, "--leave-running")
    bridged.restore("--to", 1, name="clone")
    clone = bridged.back("clone")
    as_undisturbed(bridged, rootfs, clone)
    assert address(bridged, clone) != had
    assert address(bridged, one) == had
    one.remove()
    bridged.restore()
    again = bridged.back()
    as_undisturbed(bridged, rootfs, again)
    assert address(bridged, again) == had
    bridged.says(0, "move", bridged.called(again), "--to", 1)
    as_undisturbed(bridged, rootfs, again)


def test_a_published_port_is_one_containers_and_a_clone_may_have_another(bridged: Desk) -> None:
    one = serves(bridged, "web", 8080)
    had = address(bridged, one)
    bridged.checkpoint(one, "--leave-running", image="web")
    error = bridged.restore(image="web", name="clone", rc=23)["error"]
    assert error["id"] == "port-taken"
    assert "port 8080 of the machine" in error["message"]
    bridged.restore("--publish", "127.0.0.1:8081:80", image="web", name="clone")
    clone = address(bridged, bridged.back("clone"))
    assert all(answers(*at) for at in (("127.0.0.1", 8080), ("127.0.0.1", 8081), (had, 80), (clone, 80)))
    one.remove()
    bridged.restore(image="web")
    assert address(bridged, bridged.back("web")) == had
    assert all(answers("127.0.0.1", port) for port in (8080, 8081))


@pytest.mark.parametrize("address", ["", "127.0.0.1:"])
def test_of_two_clones_at_the_same_moment_one_gets_the_port(bridged: Desk, address: str) -> None:
    one = serves(bridged, "web", 8080)
    bridged.checkpoint(one, "--leave-running", image="web")
    both = [["--publish", f"{address}8081:80", "--name", bridged.name(word)] for word in ("a", "b")]
    won, error = one_of_two(bridged, *both, image="web")
    assert error["id"] in ("busy", "port-taken"), error
    assert "8081" in error["message"]
    assert sorted(bridged.runtime.names()) == sorted([one.name, bridged.name("ab"[won])])
    bridged.back("ab"[won])
    assert all(answers("127.0.0.1", port) for port in (8080, 8081))
    assert "nothing" in bridged.limosa("recover").stdout
    bridged.restore("--publish", "8082:80", image="web", name="ab"[1 - won])
    bridged.back("ab"[1 - won])
    assert answers("127.0.0.1", 8082)


@pytest.mark.parametrize(
    "words", ["80", "0:80", "8081:99999", "8081:80/icmp", "--privileged", "a:80", "999.999.9.9:8081:80"]
)
def test_what_is_no_port_is_refused_before_anything(bridged: Desk, words: str) -> None:
    one = serves(bridged, "web", 8080)
    bridged.checkpoint(one, "--leave-running", image="web")
    error = bridged.restore(f"--publish={words}", image="web", name="clone", rc=2)["error"]
    assert "--publish" in error["message"]


def test_ports_are_led_to_what_has_a_network_of_podmans(bridged: Desk, rootfs: Path) -> None:
    one = bridged.job()  # without a network
    bridged.checkpoint(one)
    assert bridged.restore("--publish", "8081:80", rc=2)["error"]["id"] == "container-option"


def test_a_connection_outlives_the_way_to_disk_and_back_while_its_peer_talks(bridged: Desk) -> None:
    """What the kernel of a frozen container took from a peer, and the image had not, would be lost for ever."""
    one, at = echoes(bridged)
    with socket.create_connection((at, 80), 60) as client:
        client.settimeout(60)
        sent, stop = [0], threading.Event()

        def talk() -> None:
            while not stop.wait(0.005):
                client.sendall(b"%06d " % sent[0])
                sent[0] += 1

        talker = threading.Thread(target=talk)
        talker.start()
        bridged.checkpoint(one, "--tcp-established", image="echo")
        assert not one.lives()
        with unreachable(bridged, at):  # there is a moment when the address is there, and the connection is not yet
            bridged.restore(image="echo")
        assert address(bridged, bridged.back("echo")) == at
        time.sleep(0.5)
        stop.set()
        talker.join()
        wanted = b"".join(b"%06d " % n for n in range(sent[0]))
        heard = b""
        while len(heard) < len(wanted):
            chunk = client.recv(1 << 16)
            assert chunk, "the connection has ended"
            heard += chunk
        assert heard == wanted


def test_a_checkpoint_that_fails_leaves_connections_as_they_were(bridged: Desk) -> None:
    one, at = echoes(bridged)
    with socket.create_connection((at, 80), 60) as client:
        client.settimeout(60)
        process = begin(bridged, "checkpoint", bridged.called(one), "--output", bridged.image(), "--tcp-established")
        until(lambda: is_frozen(one) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 22
        assert echoed(client, b"after") == b"after"
        assert answers(at, 80)


def test_a_server_with_clients_is_cloned_and_they_stay_with_the_original(bridged: Desk) -> None:
    options = [*BRIDGE, "--publish", "8080:80"]
    one = bridged.runtime.start(*ECHO, gpus=None, name=bridged.name("echo"), options=options)
    until(lambda: answers("127.0.0.1", 8080))
    with socket.create_connection(("127.0.0.1", 8080), 60) as client:
        client.settimeout(60)
        assert echoed(client, b"before") == b"before"
        assert bridged.checkpoint(one, "-R", rc=13)["error"]["id"] == "tcp-outside"
        bridged.checkpoint(one, "-R", "--tcp-close")
        bridged.restore("--publish", "8081:80", name="clone")
        assert echoed(client, b"after") == b"after"
        with socket.create_connection(("127.0.0.1", 8081), 60) as other:
            other.settimeout(60)
            assert echoed(other, b"of the clone") == b"of the clone"


@pytest.mark.parametrize("who", ["criu", "limosa"])
def test_whoever_is_killed_while_it_is_written_connections_go_on(bridged: Desk, who: str) -> None:
    """CRIU leaves a table in the container's network, and sockets in repair mode; so does Limosa."""
    one, at = echoes(bridged)
    with socket.create_connection((at, 80), 60) as client:
        client.settimeout(60)
        assert echoed(client, b"before") == b"before"
        limosa = begin(bridged, "checkpoint", bridged.called(one), "--output", bridged.image(), "--tcp-established")
        until(lambda: is_frozen(one) and started_by(bridged, limosa, "swrk"))
        if who == "limosa":
            limosa.kill()
        while limosa.poll() is None:  # runc starts CRIU more than once
            for pid in started_by(bridged, limosa, "swrk"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert limosa.wait(0) == (21 if who == "criu" else -signal.SIGKILL)
        recovered(bridged)
        assert echoed(client, b"after") == b"after"
        assert answers(at, 80)


def test_connections_with_the_machines_network_are_refused_where_the_container_ends(bridged: Desk) -> None:
    one = bridged.runtime.start(*ECHO, gpus=None, name=bridged.name("echo"), options=["--network", "host"])
    assert bridged.checkpoint(one, "--tcp-established", rc=2)["error"]["id"] == "container-option"
    assert one.lives()


def test_two_images_of_one_container_do_not_come_back_at_the_same_moment(bridged: Desk, rootfs: Path) -> None:
    """They would have one id, and what the loser takes away again would be the winner's."""
    one = bridged.job(options=BRIDGE)
    one.goes_on()
    bridged.checkpoint(one, "--leave-running", image="first")
    renamed = bridged.name("renamed")
    bridged.runtime("rename", one.id, renamed)
    bridged.says(0, "checkpoint", f"podman:{renamed}", "--output", bridged.image("second"))
    both = [begin(bridged, "restore", bridged.image(word)) for word in ("first", "second")]
    codes = sorted(process.wait(120) for process in both)
    assert codes[0] == 0
    assert codes[1] in (19, 23), codes
    (name,) = bridged.runtime.names()
    as_undisturbed(bridged, rootfs, bridged.runtime.known(name))


def test_a_port_of_one_address_is_not_taken_by_another_address(bridged: Desk) -> None:
    bridged.node.run(["sh", "-c", "ip addr add 127.0.0.2/8 dev lo 2>/dev/null || true"])
    for number in (1, 2):
        options = [*BRIDGE, "--publish", f"127.0.0.{number}:8080:80"]
        bridged.runtime.start(*WEB, gpus=None, name=bridged.name(f"web{number}"), options=options)
    first = bridged.back("web1")
    bridged.checkpoint(first)
    bridged.restore()
    assert all(answers(f"127.0.0.{number}", 8080) for number in (1, 2))


@pytest.mark.parametrize("port", ["127.0.0.1:8080:80", "8080:80/udp", "127.0.0.2:8080:80/udp"])
def test_a_port_of_one_address_or_of_udp_is_refused_by_name_where_it_is_taken(bridged: Desk, port: str) -> None:
    one = bridged.runtime.start(*WEB, gpus=None, name=bridged.name("web"), options=[*BRIDGE, "--publish", port])
    bridged.checkpoint(one, "--leave-running", image="web")
    where, _, inside = port.rpartition(":80")
    word = f"port {where}/{inside.strip('/') or 'tcp'} of the machine"

    def taken(*words: object) -> bool:
        error = bridged.restore(*words, image="web", name="clone", rc=23)["error"]
        return error["id"] == "port-taken" and word in error["message"]

    assert taken(), "by the original"
    bridged.restore("--publish", port.replace("8080", "8081"), image="web", name="clone")
    bridged.back("clone").remove()
    one.remove()
    kind = socket.SOCK_DGRAM if inside else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as other:
        other.bind(("127.0.0.2", 8080))
        if not inside:
            other.listen()
        if where != "127.0.0.1:8080":
            assert taken(), "by somebody else"
            assert taken("--publish", port)
            other.close()
        bridged.restore(image="web")
    bridged.back("web")


def test_an_address_that_is_not_there_is_refused_by_name(bridged: Desk) -> None:
    bridged.node.run(["ip", "addr", "add", "10.9.9.9/32", "dev", "lo"])
    options = [*BRIDGE, "--publish", "10.9.9.9:8080:80"]
    one = bridged.runtime.start(*WEB, gpus=None, name=bridged.name("web"), options=options)
    bridged.checkpoint(one, image="web")
    bridged.node.run(["ip", "addr", "del", "10.9.9.9/32", "dev", "lo"])
    error = bridged.restore(image="web", rc=23)["error"]
    assert (error["id"], "10.9.9.9:8080/tcp" in error["message"]) == ("address-missing", True)
    bridged.restore("--publish", "8080:80", image="web")
    bridged.back("web")
    assert answers("127.0.0.1", 8080)


def test_who_has_all_of_ipv6_may_have_ipv4_as_well(bridged: Desk) -> None:
    both, one = Published.of("127.0.0.1:8080/tcp"), Published.of("[::1]:8080/udp")
    assert both is not None
    assert one is not None
    assert [str(both), str(one)] == ["127.0.0.1:8080/tcp", "[::1]:8080/udp"]
    for alone in (True, False):
        with socket.create_server(("::", 8080), family=socket.AF_INET6, dualstack_ipv6=not alone):
            assert [both.against(), one.against()] == [0 if alone else errno.EADDRINUSE, 0]
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as other:
        other.bind(("::", 8080))
        assert one.against() == errno.EADDRINUSE


@pytest.mark.parametrize("word", ["80", "80/icmp", "0/tcp", "99999/tcp", "999.9.9.9:80/tcp", "::1:80/tcp", "a:80/tcp"])
def test_what_an_image_says_of_ports_may_be_nonsense(word: str) -> None:
    assert Published.of(word) is None


def test_an_original_that_runs_under_another_name_is_in_the_way_and_stays(bridged: Desk, rootfs: Path) -> None:
    """With its address comes its id, and what has that already is not what the restore has made."""
    one = bridged.job(options=BRIDGE)
    one.goes_on()
    bridged.checkpoint(one, "--leave-running")
    bridged.runtime("rename", one.id, bridged.name("renamed"))
    assert bridged.restore(rc=23)["error"]["id"] == "container-name"
    as_undisturbed(bridged, rootfs, one)


@pytest.mark.parametrize("after", [0.2, 0.5, 0.8, 1.1])
def test_a_killed_restore_leaves_it_running_or_nothing(bridged: Desk, rootfs: Path, after: float) -> None:
    one = bridged.job(options=BRIDGE)
    one.goes_on()
    had = address(bridged, one)
    bridged.checkpoint(one)
    process = begin(bridged, "restore", bridged.image())
    time.sleep(after)
    process.kill()
    process.wait(60)
    recovered(bridged)
    if not bridged.runtime.has(one.name):
        assert one.id not in bridged.runtime("ps", "--all", "--no-trunc", "--format", "{{.ID}}").stdout
        bridged.restore()
    again = bridged.back()
    assert address(bridged, again) == had
    as_undisturbed(bridged, rootfs, again)
