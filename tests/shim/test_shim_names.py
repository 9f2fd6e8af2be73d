"""The control socket's name: taken by others, answered by others; and those who ask other processes by it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from soft_node import Node
from softgpu.far import Far

from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, ShimError
from limosa.process.identity import Identity

pytestmark = [pytest.mark.root, pytest.mark.timeout(90)]
HANDLE = "ctypes.string_at(ok(cu.cuIpcGetMemHandle(address)).getPtr(), 64).hex()"
OPENED = """
def opens(raw):
    handle = cu.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(raw), 64)
    code, address = cu.cuIpcOpenMemHandle(handle, 1)
    return word(code) if int(code) else int(address)
"""
# Whoever has connected and sent something gets a packet back that looks like the shim's, with a descriptor.
SQUATTER = """
import array, os, socket, struct, sys
os.setuid(int(sys.argv[2]))
name = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
name.bind("\\0limosa/shim/" + sys.argv[1])
name.listen(8)
print("has it", flush=True)
while True:
    client, _ = name.accept()
    asked = client.recv(1 << 16)
    if asked:
        print("asked", flush=True)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
        client.sendmsg([asked[:12] + bytes(36)], rights)
"""


def squat(node: Node, pid: int, user: int = 65534) -> subprocess.Popen[str]:
    """Somebody else has a process's name from now on."""
    other = node.popen(
        [sys.executable, "-c", SQUATTER, str(pid), str(user)], stdin=subprocess.DEVNULL, stdout=-1, text=True
    )
    assert other.stdout.readline() == "has it\n"
    return other


def test_a_name_that_somebody_has_is_taken_when_it_is_free(node: Node, library: Path) -> None:
    far = Far(node, env={"LD_PRELOAD": str(library)})
    other = squat(node, far.pid)
    far("start()")
    far("plain(4, 1)")
    with pytest.raises(ShimError, match="has its name"):
        Shim(Identity.of(far.pid), patience=0.5)
    other.kill()
    other.wait(10)
    with Shim(Identity.of(far.pid)) as shim:
        assert shim.hello().stand == Stand.OPEN
        assert len(shim.memories()) == 1
    assert far("intact()")


def test_only_the_process_itself_is_taken_for_it(start: Callable[..., Far]) -> None:
    """Nobody else of the same user either."""
    job = start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mine:
        bare = start(shim=False)
        mine.bind(f"\0limosa/shim/{bare.pid}")
        mine.listen(8)
        with pytest.raises(ShimError):
            Shim(Identity.of(bare.pid), patience=0.2)
    with Shim(Identity.of(job.pid)) as shim:
        assert shim.hello().stand == Stand.OPEN


def test_a_handle_is_not_opened_by_a_strangers_descriptor(node: Node, library: Path, start: Callable[..., Far]) -> None:
    """The exporter has ended, and another user has its name: he is not even asked."""
    importer = Far(node, env={"LD_PRELOAD": str(library)})
    exporter = start()
    importer("start()")
    importer(OPENED)
    exporter("address = large(4)")
    raw = exporter(HANDLE)
    exporter.process.kill()
    exporter.died()
    other = squat(node, exporter.pid)
    assert importer(f"opens({raw!r})") == "INVALID_HANDLE"
    other.kill()
    assert other.stdout.read() == ""


def test_a_handle_waits_for_as_long_as_somebody_works_on_its_process(
    node: Node, library: Path, start: Callable[..., Far], compiled: Callable[..., Path]
) -> None:
    """A save of a running job takes minutes, and its exporter serves one at a time."""
    impatient = compiled("impatient.c", "-shared", "-fPIC", "-ldl", name="impatient.so")
    exporter = start()
    importer = Far(node, env={"LD_PRELOAD": f"{library}:{impatient}"})
    importer("start()")
    importer(OPENED)
    exporter("address = filled(b'ours', 4 << 20)")
    raw = exporter(HANDLE)
    with Shim(Identity.of(exporter.pid)) as shim:
        shim.hello()
        pending = importer.send(f"(context(), get(opens({raw!r}), 4))[1]")
        with pytest.raises(TimeoutError):
            pending.value(1.5)  # more than twice the limit
        assert shim.hello().stand == Stand.OPEN
    assert pending.value() == b"ours".hex()


def test_so_many_that_there_is_no_room_to_wait(
    node: Node, library: Path, start: Callable[..., Far], compiled: Callable[..., Path]
) -> None:
    impatient = compiled("impatient.c", "-shared", "-fPIC", "-ldl", name="impatient.so")
    exporter = start()
    importer = Far(node, env={"LD_PRELOAD": f"{library}:{impatient}"})
    importer("start()")
    importer(OPENED)
    exporter("address = filled(b'ours', 4 << 20)")
    raw = exporter(HANDLE)
    waiting: list[socket.socket] = []
    with Shim(Identity.of(exporter.pid)) as shim:
        shim.hello()
        while True:
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
            try:
                waiting[-1].connect(f"\0limosa/shim/{exporter.pid}")
            except BlockingIOError:
                break
        assert len(waiting) > 32
        pending = importer.send(f"(context(), get(opens({raw!r}), 4))[1]")
        with pytest.raises(TimeoutError):
            pending.value(1.5)
    for one in waiting:
        one.close()
    assert pending.value() == b"ours".hex()


@pytest.mark.parametrize("way", ["", "off"])
def test_legacy_handles_without_it(node: Node, library: Path, way: str) -> None:
    """Where it takes nothing over the driver answers, as for everything else."""
    env = {"LD_PRELOAD": str(library), "LIMOSA_SHIM": way} if way else {}
    exporter, importer = Far(node, env=env), Far(node, env=env)
    for far in (exporter, importer):
        far("start()")
        far(OPENED)
    exporter("address = filled(b'ours', 4 << 20)")
    raw = exporter(HANDLE)
    assert importer(f"get(opens({raw!r}), 4)") == b"ours".hex()


FORKS = """
import resource
was = resource.getrlimit(resource.RLIMIT_NOFILE)
def held():
    found = 0
    for fd in os.listdir('/proc/self/fd'):
        try:
            found |= 'nvidia-soft/memory' in os.readlink('/proc/self/fd/' + fd)
        except OSError:
            pass
    return found | (2 if resource.getrlimit(resource.RLIMIT_NOFILE) != was else 0)
def forks(least):
    codes = []
    while working or len(codes) < least:
        pid = os.fork()
        if not pid:
            os._exit(held())
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        time.sleep(0.0005)
    return codes
def enough():
    global working
    working = False
"""


def test_children_that_are_forked_while_descriptors_are_in_flight(node: Node, library: Path) -> None:
    """They would hold the memory of the GPU that their parent has left, for as long as they live."""
    job = Far(node, env={"LD_PRELOAD": str(library)})
    job((Path(__file__).parent / "words.py").read_text())
    job("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))")
    job("start()")
    job(FORKS)
    for seed in range(60):
        job(f"plain(2, {seed})")
    with Shim(Identity.of(job.pid)) as shim:
        pending = job.send("forks(50)")
        ids = [memory.id for memory in shim.memories()]
        for _ in range(150):
            for fd in shim.export(ids):
                os.close(fd)
        for _ in range(8):
            shim.close_gate(5)
            fds = shim.export(ids)
            shim.keep(fds)
            shim.unmap()
            assert shim.map(ids, fds) == Stand.CLOSED
            shim.keep()
            shim.open_gate()
            for fd in fds:
                os.close(fd)
        job("enough()")
        codes = pending.value(30)
    print(f"{len(codes)} children")
    assert {code for code in codes if code} == set(), [codes.count(code) for code in (0, 1, 2, 3)]
    assert job("intact()")


def test_what_the_program_has_closed_is_not_taken_for_what_is_kept(node: Node, library: Path) -> None:
    """A suspended job's host threads run on; one that closes all that it does not know has other files there after."""
    job = Far(node, env={"LD_PRELOAD": str(library)})
    job((Path(__file__).parent / "words.py").read_text())
    job("start()")
    job("path = '/proc/self/fd/{}'.format")
    both = [os.memfd_create(name) for name in ("first", "second")]
    with Shim(Identity.of(job.pid)) as shim:
        shim.keep(both)
        for fd in (kept := shim.kept()):
            os.close(fd)
        assert len(kept) == 2
        there = job("[[n, os.readlink(path(n))] for n in os.listdir('/proc/self/fd') if os.path.lexists(path(n))]")
        first, second = (int(n) for name in ("first", "second") for n, link in there if f"memfd:{name}" in link)
        job(f"os.dup2(os.open('/dev/null', os.O_RDONLY), {first})")
        assert shim.kept() == [], "a part of it is of no use"
        job("def seen_by_a_child(n): os._exit(not os.path.lexists(path(n)))")
        assert job(f"os.waitpid(os.fork() or seen_by_a_child({first}), 0)[1]") == 0
        shim.keep()
        assert job(f"os.readlink(path({first}))") == "/dev/null"
        assert job(f"os.path.lexists(path({second}))") is False
    for fd in both:
        os.close(fd)
