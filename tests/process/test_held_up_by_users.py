"""Root gets descriptors whose closing a user may hold up for ever, and goes on all the same.

Of his own file system (FUSE), and of sockets that linger. Both are real, and so is the user: what waits for his file
system waits in the kernel, where SIGKILL does not end it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import limosa
from limosa.ipc import packet
from limosa.process import belief, job_log
from limosa.process.criu import network

pytestmark = pytest.mark.root

USER = 4242
SERVER = Path(__file__).parents[1] / "fuse_server.py"

GIVES = """
import os, socket, sys
os.setgroups([]), os.setgid(int(sys.argv[3])), os.setuid(int(sys.argv[3]))
fd = os.open(sys.argv[2], os.O_RDWR)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [b"here"], [fd] * 3)
    connection.recv(1)
"""

TAKES = """
import os, socket, sys
from limosa.ipc import packet
from limosa.process.criu import network
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
    listening.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o777)
    listening.listen()
    print("LISTENS", flush=True)
    connection, _ = listening.accept()
if sys.argv[2] == "memory":
    try:
        packet.receive(connection, 100, 3, packet.Deadline(10), memory=True)
    except packet.Wrong as error:
        print(error, flush=True)
else:
    _, fds, _, _ = socket.recv_fds(connection, 100, 3)
    print([network._switch(fd, int(sys.argv[3]), False) for fd in fds], flush=True)
"""


@pytest.fixture(params=["", "all"], ids=["his alone", "allow_other"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The user's file system in a folder of his, with a file ``f``."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("this kernel has no FUSE")
    path = Path(tempfile.mkdtemp(prefix="limosa-test-"))
    os.chown(path, USER, USER)
    (path / "mount").mkdir()
    command = [sys.executable, SERVER, path / "mount", str(USER), request.param]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"READY\n"
        yield path
    finally:
        server.kill()  # whoever waits for it goes on
        server.wait(60)
        subprocess.run(["umount", "-l", path / "mount"], check=True, timeout=60)
        shutil.rmtree(path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("wanted", "said"), [("memory", "a descriptor of what is no memory"), ("sockets", "[False, False, False]")]
)
def test_root_closes_none_itself(folder: Path, wanted: str, said: str) -> None:
    connections = Path("/sys/fs/fuse/connections")
    if not list(connections.iterdir()):
        subprocess.run(["mount", "-t", "fusectl", "none", connections], check=True, timeout=60)
    env = {"PYTHONPATH": str(Path(limosa.__file__).parents[1]), "PATH": os.environ["PATH"]}
    socket_path = str(folder / "socket")
    takes = subprocess.Popen(
        [sys.executable, "-c", TAKES, socket_path, wanted, str(USER)], stdout=subprocess.PIPE, text=True, env=env
    )
    doomed = [takes]
    try:
        assert takes.stdout is not None
        assert takes.stdout.readline() == "LISTENS\n"
        doomed.append(
            subprocess.Popen([sys.executable, "-c", GIVES, socket_path, folder / "mount" / "f", str(USER)], text=True)
        )
        assert takes.stdout.readline() == f"{said}\n"
        takes.wait(60)  # it has ended: nobody waits for the file system
    finally:
        for one in doomed:
            one.kill()


@pytest.mark.timeout(300)
def test_roots_logs_opens_nothing_there(folder: Path) -> None:
    command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "sleep", "60"]
    job = subprocess.Popen(command)
    try:
        while belief.owners_of(job.pid) != {USER}:
            pass
        with pytest.raises(PermissionError):
            job_log.open_said(str(folder / "mount" / "f"), job.pid)
    finally:
        job.kill()
        job.wait(60)


LINGERS = """
import os, signal, socket, sys
def lingers():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        others.append(listening.accept()[0])  # and reads nothing
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\x01\\0\\0\\0\\x10\\x0e\\0\\0")  # for an hour
    theirs.setblocking(False)
    try:
        while theirs.send(bytes(1 << 16)):
            pass
    except BlockingIOError:
        return theirs
others, n = [], int(sys.argv[2])
sent = [[lingers() for _ in range(n)] for _ in range(2)]
os.setgroups([]), os.setgid(int(sys.argv[3])), os.setuid(int(sys.argv[3]))
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
for each in sent:
    socket.send_fds(connection, [b"here"], [one.fileno() for one in each])
sent.clear(), each.clear()  # what is under way is the last
print("SENT", flush=True)
signal.pause()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("sent", "wanted"), [(1, 0), (5, 3), (3, 3)])
def test_what_a_user_sends_may_linger_and_holds_nobody_up(sent: int, wanted: int) -> None:
    """The kernel closes what nobody wants, and what nobody has read, in the thread of whoever ends the connection."""
    place = Path(tempfile.mkdtemp(prefix="limosa-test-"))
    place.chmod(0o777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(place / "socket"))
        (place / "socket").chmod(0o777)
        listening.listen()
        listening.settimeout(60)
        command = [sys.executable, "-c", LINGERS, str(place / "socket"), str(sent), str(USER)]
        theirs = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            connection, _ = listening.accept()
            assert theirs.stdout is not None
            assert theirs.stdout.readline() == b"SENT\n"
            begun = time.monotonic()
            with pytest.raises(packet.Wrong):
                packet.receive(connection, 100, wanted, packet.Deadline(120), memory=True)
            packet.hang_up(connection)
            assert time.monotonic() - begun < 60, "it lingers for an hour"
        finally:
            theirs.kill()
            theirs.wait(60)
            shutil.rmtree(place)


@pytest.mark.timeout(300)
def test_a_socket_that_lingers_holds_nobody_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\x10\x0e\0\0")  # for an hour
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while theirs.send(bytes(1 << 16)):
                pass
        assert not network._switch(theirs.detach(), USER, False)  # the last descriptor of it
        ours.close()
