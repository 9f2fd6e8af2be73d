"""The control socket's name: taken by others, answered by others; and those who ask other processes by it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from soft_node import Node
from softgpu.far import Far

from limosa.parking.names import names_of
from limosa.parking.protocol import MAGIC, MESSAGE, OLD_VERSION, STAND_IN, Stand
from limosa.parking.shim import Shim, ShimError
from limosa.process.identity import Identity

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
HANDLE = "ctypes.string_at(ok(cu.cuIpcGetMemHandle(address)).getPtr(), 64).hex()"
OPENED = """
def opens(raw):
    handle = cu.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(raw), 64)
    code, address = cu.cuIpcOpenMemHandle(handle, 1)
    return word(code) if int(code) else int(address)
"""
# Has these names; whoever has connected and sent something gets a packet back that looks like the shim's.
SQUATTER = """
import array, os, re, resource, select, socket, struct, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
os.setuid(65534)
watches, names = sys.argv[1] == "all that it sees", {}
poll = select.poll()

def take(word):
    name = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        name.bind("\\0limosa/shim/" + word)
    except OSError:
        return
    name.listen(8)
    names[name.fileno()] = name
    poll.register(name, select.POLLIN)

for word in sys.argv[2:]:
    first, _, last = word.partition("-")
    for n in range(int(first), int(last) + 1) if last else [first]:
        take(str(n))
print("has them", len(names), flush=True)
while True:
    if watches:
        for line in open("/proc/net/unix"):
            if found := re.search("@limosa/shim/(.*)", line):
                take(found[1])
    for fd, _ in poll.poll(1 if watches else None):
        client, _ = names[fd].accept()
        asked = client.recv(1 << 16)
        if asked:
            print("asked", flush=True)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
            client.sendmsg([asked[:12] + bytes(36)], rights)
"""


def squat(node: Node, *names: object, watches: bool = False) -> subprocess.Popen[str]:
    """Somebody else has these names ("1-9": so many) from now on, and those that he sees, as soon as he can."""
    command = [sys.executable, "-c", SQUATTER, "all that it sees" if watches else "", *map(str, names)]
    other = node.popen(command, stdin=subprocess.DEVNULL, stdout=-1, text=True)
    ranges = [str(name).partition("-") for name in names]
    wanted = sum(int(last) - int(first) + 1 if last else 1 for first, _, last in ranges)
    assert other.stdout.readline() == f"has them {wanted}\n"
    return other


def name_of(pid: int) -> str:
    """What the socket of a process is called now."""
    (name,) = {name.address for name in names_of(pid)}
    return name


def called(job: Far, name: str) -> None:
    """The job has a thread of that name."""
    job("import threading; waits = threading.Event(); thread = threading.Thread(target=waits.wait, daemon=True)")
    job("thread.start()")
    job(f"open('/proc/self/task/%d/comm' % thread.native_id, 'w').write({name!r})")


def test_names_that_others_have_are_in_nobodys_way(node: Node, library: Path) -> None:
    """Two processes that had bound a name for each pid kept every new job of another user from being moved.

    A third one takes each name that it sees, and is there when a job's socket is gone for a moment.
    """
    far = Far(node, env={"LD_PRELOAD": str(library)})
    others = [squat(node, "1-16383"), squat(node, "16384-32767", *(f"{n:08x}" for n in range(500)))]
    others.append(squat(node, watches=True))
    far("start()")
    far("plain(4, 1)")
    job = Far(node, env={"LD_PRELOAD": str(library)})
    job("start()")
    for _ in range(20):
        for pid in (far.pid, job.pid):
            with Shim(Identity.of(pid), patience=0.5) as shim:
                assert shim.hello().stand == Stand.OPEN
                assert len(shim.memories()) == (pid == far.pid)
    for other in others:
        assert other.poll() is None
        other.kill()
        assert other.stdout.read() == "", "it is not even asked"
    assert far("intact()")


def test_a_name_tells_nothing_that_could_be_taken_before(start: Callable[..., Far]) -> None:
    names = {name_of(job.pid) for job in (start(), start(), start())}
    assert len(names) == 3
    assert not any(str(job) in name for name in names for job in range(100_000, 100_010))


def test_only_the_process_itself_is_taken_for_it(start: Callable[..., Far], node: Node) -> None:
    """Nobody else of the same user either; and not where it says that another's name is its own."""
    job, bare = start(), start(shim=False)
    name = name_of(job.pid).rpartition("/")[2]
    called(bare, f"limosa-{name}")
    with pytest.raises(ShimError, match="has its name"):
        Shim(Identity.of(bare.pid), patience=0.2)
    other = squat(node, "0badcafe")
    called(bare, "limosa-0badcafe")
    with pytest.raises(ShimError, match="has its name"):
        Shim(Identity.of(bare.pid), patience=0.2)
    other.kill()
    assert other.stdout.read() == "", "it is not even asked"
    with Shim(Identity.of(job.pid)) as shim:
        assert shim.hello().stand == Stand.OPEN


def test_a_socket_that_is_gone_is_made_anew(job: Far) -> None:
    """A program that closes everything; a restore that puts another in its place (``names.stand_ins``)."""
    before = name_of(job.pid)
    job("path = '/proc/self/fd/{}'.format")
    job("import socket, struct; found = [n for n in map(int, os.listdir('/proc/self/fd')) if n > 900]")
    job("links = {n: os.readlink(path(n)) for n in found if os.path.lexists(path(n))}")
    (fd,) = [int(n) for n, link in job("links").items() if link.startswith("socket:")]
    with Shim(Identity.of(job.pid)):
        pass
    job("one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)")
    job(f"one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('@ll', {STAND_IN}, 0))")
    job(f"os.dup2(one.fileno(), {fd}); one.close()")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wakes:
        wakes.connect(before)  # it waits for whoever connects to the one that is gone
    end = time.monotonic() + 60
    while name_of(job.pid) == before:
        assert time.monotonic() < end
        time.sleep(0.01)
    with Shim(Identity.of(job.pid)) as shim:
        assert shim.hello().stand == Stand.OPEN
    sockets = (
        "sum(n > 900 and os.path.realpath(path(n)).count('socket:') for n in map(int, os.listdir('/proc/self/fd')))"
    )
    end = time.monotonic() + 60
    while job(sockets) != 1:  # our connection is closed there a moment after it is closed here
        assert time.monotonic() < end, "what stood in for it is closed"
        time.sleep(0.01)


def test_a_job_of_the_version_before_is_asked_as_that_was() -> None:
    """Images that it wrote come back with its library in them."""
    said: list[bytes] = []

    def serve() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("limosa-shim")
        listens.set()
        client, _ = name.accept()
        with client:
            said.append(client.recv(1 << 16))
            _, version, verb, number, *_ = MESSAGE.unpack_from(said[0])
            client.send(MESSAGE.pack(MAGIC, version, verb, number, 0, 0, os.getpid(), 0, 0))

    listens = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as name:
        name.bind(f"\0limosa/shim/{os.getpid()}")
        name.listen(1)
        thread = threading.Thread(target=serve)
        thread.start()
        listens.wait(60)
        with Shim(Identity.of(os.getpid())) as shim:
            assert shim.hello().stand == Stand.OPEN
        thread.join(60)
    assert MESSAGE.unpack_from(said[0])[1] == OLD_VERSION


def test_a_handle_is_not_opened_by_a_strangers_descriptor(node: Node, library: Path, start: Callable[..., Far]) -> None:
    """The exporter has ended, and another user has its name: he is not even asked."""
    importer = Far(node, env={"LD_PRELOAD": str(library)})
    exporter = start()
    importer("start()")
    importer(OPENED)
    exporter("address = large(4)")
    raw, name = exporter(HANDLE), name_of(exporter.pid).rpartition("/")[2]
    exporter.process.kill()
    exporter.died()
    other = squat(node, name)
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
                waiting[-1].connect(name_of(exporter.pid))
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
            shim.close_gate(60)
            fds = shim.export(ids)
            shim.keep(fds)
            shim.unmap()
            assert shim.map(ids, fds) == Stand.CLOSED
            shim.keep()
            shim.open_gate()
            for fd in fds:
                os.close(fd)
        job("enough()")
        codes = pending.value(90)
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
