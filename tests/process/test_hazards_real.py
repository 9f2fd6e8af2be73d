"""Each hazard that a machine without a GPU can have, made for real and found; and ordinary jobs, where nothing is."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from softgpu.far import until

from limosa.errors import Reason
from limosa.process import hazards
from limosa.process.identity import read_stat
from limosa.process.observe import JobObservation, observe

libc = ctypes.CDLL(None, use_errno=True)


def reasons(obs: JobObservation, **options: object) -> list[Reason]:
    return [
        *hazards.common_hazards(obs),
        *hazards.cuda_hazards(obs),
        *hazards.checkpoint_hazards(obs, **options),  # type: ignore[arg-type]
    ]


def refusals(obs: JobObservation, **options: object) -> dict[str, Reason]:
    return {reason.id: reason for reason in reasons(obs, **options) if reason.refuses}


# What a program does to itself → the one refusal, and what its text has to name ({pid} is its own).
ALONE = {
    "io-uring": (
        "fd = libc.syscall(425, 8, ctypes.create_string_buffer(120)); assert fd >= 0",
        ["descriptor 3", "{pid}"],
    ),
    "sysv-ipc": (
        "i = libc.shmget(0, 4096, 0o1600); assert libc.shmat(i, None, 0); libc.shmctl(i, 0, None)",
        ["{pid}", "shared memory segment"],
    ),
    "message-queue": (
        "name = b'/limosa%d' % os.getpid(); fd = libc.mq_open(name, os.O_RDWR | os.O_CREAT, 0o600, None);"
        "assert fd >= 0; libc.mq_unlink(name)",
        ["descriptor 3", "/limosa{pid}"],
    ),
    "anonymous-inode": ("assert libc.syscall(323, 1) >= 0", ["descriptor 3", "userfaultfd"]),
    "device": ("os.open('/dev/net/tun', os.O_RDWR)", ["descriptor 3", "/dev/net/tun"]),
    "pidfd-outside": ("os.pidfd_open(os.getppid())", ["descriptor 3", "{parent}"]),
    "unmounted-file": (
        "os.mkdir(folder + '/m'); assert libc.mount(b'none', (folder + '/m').encode(), b'tmpfs', 0, None) == 0\n"
        "f = open(folder + '/m/f', 'w'); assert libc.umount2((folder + '/m').encode(), 2) == 0",
        ["descriptor 3"],
    ),
    "file-locks": ("f = open(folder + '/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)", ["/lock", "descriptor 3"]),
    "socket-kind": ("s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)", ["descriptor 3", "mptcp"]),
    "tcp-in-flight": (
        "l = socket.create_server(('127.0.0.1', 0)); s = socket.create_connection(l.getsockname())",
        ["descriptor 3", "1 connection that"],
    ),
    "proc-thread": (
        "t = threading.Thread(target=time.sleep, args=(60,), daemon=True); t.start()\n"
        "f = open(f'/proc/self/task/{t.native_id}/stat')",
        ["descriptor 3", "/proc/{pid}/task/"],
    ),
    "proc-outside": ("f = open(f'/proc/{os.getppid()}/stat')", ["descriptor 3", "/proc/{parent}/stat"]),
    "proc-folder": ("os.chdir('/proc/self')", ["working directory", "/proc/{pid},"]),
    "program-path": ("os.open('/proc/self/exe', os.O_PATH)", ["descriptor 3", "O_PATH"]),
    "main-thread-ended": ("threading.Timer(0.2, ready).start(); libc.pthread_exit(None)", ["{pid}"]),
    "nested-namespace": (
        "if os.fork() == 0:\n    assert libc.unshare(0x08000000) == 0\n    ready()\nwhile True: time.sleep(60)",
        ["another ipc namespace", "{pid}"],
    ),
}


@pytest.mark.parametrize("id_", ALONE)
def test_is_refused_by_name(job, id_):
    code, words = ALONE[id_]
    victim = job(code)
    if id_ == "main-thread-ended":
        until(lambda: read_stat(victim.pid).state == "Z")
    obs = observe(victim.identity)
    found = refusals(obs)
    assert set(found) == {id_}
    for word in words:
        assert word.format(pid=victim.pid, parent=os.getpid()) in found[id_].text


def test_system_v_shared_memory_in_an_ipc_namespace_of_its_own_is_fine(job):
    victim = job(f"assert libc.unshare(0x08000000) == 0; {ALONE['sysv-ipc'][0]}")
    assert refusals(observe(victim.identity)) == {}


def test_an_io_uring_whose_descriptor_is_closed_shows_in_the_mappings(job):
    victim = job(
        "fd = libc.syscall(425, 8, ctypes.create_string_buffer(120)); m = mmap.mmap(fd, 4096, offset=0x10000000);"
        "os.close(fd)"
    )
    assert set(refusals(observe(victim.identity))) == {"io-uring"}


def test_secret_memory_is_refused(job):
    victim = job("fd = libc.syscall(447, 0); assert fd >= 0; os.ftruncate(fd, 4096); m = mmap.mmap(fd, 4096)")
    assert set(refusals(observe(victim.identity))) == {"anonymous-inode"}


def test_file_locks_are_fine_with_the_option(job):
    victim = job("f = open(folder + '/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)")
    obs = observe(victim.identity)
    assert refusals(obs, file_locks=True) == {}
    assert hazards.checkpoint_needs(obs).file_locks


def test_what_tells_of_the_job_itself_in_proc_is_fine(job):
    victim = job(
        "child = os.fork()\nif child == 0: time.sleep(60)\ngone = os.fork()\nif gone == 0: os._exit(0)\n"
        "def tell(*names): return [os.open(f'/proc/{name}', os.O_RDONLY) for name in names]\n"
        "kept = tell('self/statm', 'self/mem', 'thread-self/stat', f'{child}/stat', f'{gone}/stat', 'self', '1/stat')\n"
        "os.chdir(f'/proc/{gone}'); os.waitpid(gone, 0)"
    )
    assert refusals(observe(victim.identity)) == {}


def test_shared_memory_without_a_name_may_be_open(job):
    victim = job(
        "m = mmap.mmap(-1, 4096)\n"
        "span = next(line.split()[0] for line in open('/proc/self/maps') if '/dev/zero (deleted)' in line)\n"
        "f = os.open(f'/proc/self/map_files/{span}', os.O_RDWR)"
    )
    obs = observe(victim.identity)
    assert refusals(obs) == {}
    fd = os.open(f"/proc/{victim.pid}/fd/3", os.O_RDWR)
    try:
        found = refusals(observe(victim.identity))
    finally:
        os.close(fd)
    assert set(found) == {"memory-shared"}
    assert f"process {os.getpid()}" in found["memory-shared"].text


def test_a_stopped_job_is_told_of_until_it_goes_on(job):
    victim = job("")
    os.kill(victim.pid, signal.SIGSTOP)
    os.waitpid(victim.pid, os.WUNTRACED)
    (found,) = reasons(observe(victim.identity))
    assert (found.id, found.exit_code, found.hint) == ("comes-back-stopped", 0, f"kill -CONT {victim.pid}")
    os.kill(victim.pid, signal.SIGCONT)
    os.waitpid(victim.pid, os.WCONTINUED)
    assert reasons(observe(victim.identity)) == []


def test_a_debugger_is_named(job):
    victim = job("")
    assert libc.ptrace(0x4206, victim.pid, None, None) == 0  # PTRACE_SEIZE: no stop
    found = refusals(observe(victim.identity))
    assert set(found) == {"debugger"}
    assert f"traced by process {os.getpid()}" in found["debugger"].text


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A frozen-able cgroup, v2 where it has a freezer, else v1."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        kind, point = line.split(" - ")[1].split(), line.split()[4]
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "freezer" in kind[-1]):
            folder = Path(point) / f"limosa-test-{os.getpid()}"
            with contextlib.suppress(OSError):
                folder.mkdir()
                break
    else:
        pytest.fail("no cgroup can be made here")
    try:
        yield folder
    finally:
        freeze(folder, False)
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        for _ in range(6000):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.01)


def freeze(folder: Path, on: bool) -> None:
    if (folder / "cgroup.freeze").exists():
        (folder / "cgroup.freeze").write_text("1" if on else "0")
    else:
        (folder / "freezer.state").write_text("FROZEN" if on else "THAWED")


def test_a_frozen_cgroup_is_named(job, freezer):
    victim = job("")
    (freezer / "cgroup.procs").write_text(str(victim.pid))
    assert refusals(observe(victim.identity)) == {}
    freeze(freezer, True)
    end = time.monotonic() + 60
    while not (found := refusals(observe(victim.identity))):
        assert time.monotonic() < end
    freeze(freezer, False)
    assert set(found) == {"frozen"}
    assert str(freezer) in found["frozen"].text


# --- with processes outside ------------------------------------------------------------------------------------


def test_a_pipe_is_told_with_its_reader(job):
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb") as end:
        victim = job("", stdout=end, stderr=end)
        found = refusals(observe(victim.identity))
    assert set(found) == {"pipe-outside"}
    assert f"descriptor 1, 2 of process {victim.pid}" in found["pipe-outside"].text
    assert f"read by process {os.getpid()}" in found["pipe-outside"].text


def test_an_inherited_socketpair_is_told_with_its_peer(job):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        victim = job("", stdin=theirs.fileno())
        theirs.close()
        found = refusals(observe(victim.identity))
    assert set(found) == {"socket-outside"}
    assert f"descriptor 0 of process {victim.pid}" in found["socket-outside"].text
    assert f"connected to process {os.getpid()}" in found["socket-outside"].text


def test_a_socketpair_that_criu_could_not_restore(job):
    """Where pids begin anew a child may have a lower one than its parent: CRIU 4.2.1 ends with "BUG at sk-unix.c"."""
    victim = job(
        "import socket\na, b = socket.socketpair()\nr, w = os.pipe()\n"
        "os.read(r, 1) if os.fork() else (a.close(), os.write(w, b'1'))"
    )
    obs = observe(victim.identity)
    assert "socket-pair" not in refusals(obs)
    (child,) = (p for p in obs.processes if p.pid != victim.pid)
    child.pid = victim.pid - 1
    found = refusals(obs)["socket-pair"]
    assert found.pid == victim.pid
    assert not found.forceable
    assert f"process {child.pid}, whose pid is lower" in found.text


def test_a_socket_that_somebody_else_holds_too(job):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        victim = job("", pass_fds=(listener.fileno(),))
        found = refusals(observe(victim.identity))
    assert set(found) == {"socket-shared"}
    assert f"also held by process {os.getpid()}" in found["socket-shared"].text


def test_a_unix_connection_to_a_named_socket_outside(job, tmp_path):
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        victim = job(f"s = socket.socket(socket.AF_UNIX); s.connect({path!r})")
        waiting = refusals(observe(victim.identity))
        accepted, _ = listener.accept()
        with accepted:
            found = refusals(observe(victim.identity))
    assert set(waiting) == set(found) == {"socket-outside"}
    assert path in found["socket-outside"].text
    assert f"process {os.getpid()}" in waiting["socket-outside"].text


def test_a_datagram_socket_to_a_name_outside_needs_an_option(job, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(f"{tmp_path}/log")
        to_name = job(f"s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect('{tmp_path}/log')")
        obs = observe(to_name.identity)
        assert set(refusals(obs)) == {"socket-outside"}
        assert "--ext-unix-sk" in refusals(obs)["socket-outside"].hint
        assert refusals(obs, ext_unix_sk=True) == {}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        unnamed = job("", stdin=theirs.fileno())
        theirs.close()
        assert set(refusals(observe(unnamed.identity), ext_unix_sk=True)) == {"socket-outside"}


@pytest.mark.parametrize(
    ("family", "protocol", "seen"),
    [
        (socket.AF_INET, 1, ("inet", "icmp")),
        (socket.AF_INET6, 58, ("inet6", "icmp")),
        (socket.AF_INET, 136, ("inet", "udplite")),
        (socket.AF_INET6, 136, ("inet6", "udplite")),
    ],
)
def test_a_socket_that_is_not_bound_is_told_by_its_protocol(job, family, protocol, seen):
    """ICMP's need the right of net.ipv4.ping_group_range, which is one network's."""
    victim = job(
        "open('/proc/sys/net/ipv4/ping_group_range', 'w').write('0 2147483647')\n"
        f"s = socket.socket({int(family)}, socket.SOCK_DGRAM, {protocol})",
        prefix=("unshare", "--net"),
    )
    obs = observe(victim.identity)
    (found,) = obs.processes[0].sockets
    assert (found.family, found.protocol) == seen
    assert refusals(obs) == {}


def test_somebody_outside_waits_at_the_jobs_unix_socket(job):
    victim = job("l = socket.socket(socket.AF_UNIX); l.bind(folder + '/s'); l.listen()")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(victim.folder / "s"))
        found = refusals(observe(victim.identity))
    assert set(found) == {"socket-outside"}
    assert f"process {os.getpid()}" in found["socket-outside"].text
    assert "waits to be accepted" in found["socket-outside"].text


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_tcp_connection_outside_needs_an_option_and_one_inside_none(job, family):
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        victim = job(
            f"s = socket.create_connection(({host!r}, {port}))\n"
            f"l = socket.create_server(({host!r}, 0), family={int(family)})\n"
            "c = socket.create_connection(l.getsockname()[:2]); a, _ = l.accept()\n"
        )
        accepted, _ = listener.accept()
        with accepted:
            obs = observe(victim.identity)
    found = refusals(obs)
    assert set(found) == {"tcp-outside"}
    text = next(r.text for r in reasons(obs) if r.id == "tcp-outside")
    assert f":{port} (process {os.getpid()}" in text
    assert len([r for r in reasons(obs) if r.id == "tcp-outside"]) == 1
    assert refusals(obs, tcp_established=True) == {}
    assert refusals(obs, tcp_close=True) == {}
    assert "tcp-close-inside" in {r.id for r in reasons(obs, tcp_close=True)}
    assert hazards.checkpoint_needs(obs).tcp_established


def test_shared_memory_with_the_parent(job):
    fd = os.memfd_create("both")
    os.ftruncate(fd, 4096)
    try:
        victim = job(f"m = mmap.mmap({fd}, 4096); os.close({fd})", pass_fds=(fd,))
        found = refusals(observe(victim.identity))
    finally:
        os.close(fd)
    assert set(found) == {"memory-shared"}
    assert "/memfd:both" in found["memory-shared"].text
    assert f"process {os.getpid()}" in found["memory-shared"].text


def test_a_named_semaphore_of_somebody_else_as_well(job):
    """The job has made it and lost the name that the C library gave it first; the other has it by its own."""
    name = f"/limosa-test-{os.getpid()}"
    use = (
        "import ctypes; libc = ctypes.CDLL(None); libc.sem_open.restype = ctypes.c_void_p\n"
        f"assert libc.sem_open({name.encode()!r}, os.O_CREAT, 0o600, 1)"
    )
    try:
        maker = job(use)
        assert refusals(observe(maker.identity)) == {}
        other = job(use)
        found = refusals(observe(maker.identity))
    finally:
        os.unlink(f"/dev/shm/sem.{name[1:]}")
    assert set(found) == {"memory-shared"}
    assert f"together with process {other.pid}" in found["memory-shared"].text


def test_anonymous_shared_memory_with_a_process_that_left_the_tree(job):
    code = (
        "m = mmap.mmap(-1, 4096)\n"
        "if os.fork() == 0:\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.setsid(); open(folder + '/other', 'w').write(str(os.getpid())); time.sleep(60)\n"
        "os.wait()\n"
        "while not (os.path.exists(folder + '/other') and open(folder + '/other').read()): time.sleep(0.01)\n"
    )
    victim = job(code)
    other = int((victim.folder / "other").read_text())
    try:
        found = refusals(observe(victim.identity))
    finally:
        os.kill(other, signal.SIGKILL)
    assert set(found) == {"memory-shared"}
    assert f"anonymous shared memory together with process {other}" in found["memory-shared"].text


def test_a_terminal_is_told_with_its_master(job):
    master, slave = pty.openpty()
    try:
        victim = job("", stdin=slave)
        obs = observe(victim.identity)
    finally:
        os.close(master)
        os.close(slave)
    found = refusals(obs)
    assert set(found) == {"terminal"}
    assert f"of process {os.getpid()}" in found["terminal"].text
    assert refusals(obs, shell_job=True) == {}


def test_a_terminal_of_the_jobs_own_is_none_of_somebody_else(job):
    """Also as /dev/tty, which is whatever the process was started from; the console is opened anew."""
    victim = job(
        "import pty, termios; m, s = pty.openpty(); fcntl.ioctl(s, termios.TIOCSCTTY, 0)\n"
        "t = os.open('/dev/tty', os.O_RDWR); os.mknod(folder + '/c', 0o20600, os.makedev(5, 1))\n"
        "c = os.open(folder + '/c', os.O_RDWR | os.O_NOCTTY)"
    )
    assert refusals(observe(victim.identity)) == {}


def test_a_terminal_that_was_hung_up_is_nobodys(job):
    """What a job that was left behind by nohup has in place of the login's."""
    master, slave = pty.openpty()
    victim = job("", stdin=slave, stdout=slave)
    os.close(slave)
    assert set(refusals(observe(victim.identity))) == {"terminal"}
    os.close(master)
    assert refusals(observe(victim.identity)) == {}


def test_a_terminal_of_the_job_that_somebody_outside_works_on(job):
    victim = job("import pty; m, s = pty.openpty(); open(folder + '/name', 'w').write(os.ttyname(s)); os.close(s)")
    slave = os.open((victim.folder / "name").read_text(), os.O_RDWR | os.O_NOCTTY)
    try:
        found = refusals(observe(victim.identity))
    finally:
        os.close(slave)
    assert set(found) == {"pty-outside"}
    assert f"process {os.getpid()}" in found["pty-outside"].text


def test_a_job_in_somebody_elses_session(job):
    # A session of the test's own, since the one that runs the tests may be led from another pid namespace.
    victim = job("", prefix=("setsid", "sh", "-c", '"$@" & wait', "sh"), inner=True, session=False)
    obs = observe(victim.identity)
    assert [(r.id, r.exit_code) for r in reasons(obs)] == [("session", 0)]
    assert reasons(obs, shell_job=True) == []
    assert hazards.checkpoint_needs(obs).shell_job


INSIDE = """
import subprocess, sys
from limosa.process.hazards import checkpoint_hazards
from limosa.process.identity import Identity
from limosa.process.observe import observe
with subprocess.Popen(["sleep", "60"]) as child:
    try:
        obs = observe(Identity.of(child.pid))
        print([(r.id, r.exit_code) for r in checkpoint_hazards(obs, shell_job=True) if r.exit_code])
    finally:
        child.kill()
"""


def test_a_session_led_from_outside_of_the_pid_namespace():
    seen = subprocess.run(
        ["unshare", "--fork", "--pid", "--mount-proc", sys.executable, "-c", INSIDE],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "('session-outside', 13)" in seen.stdout


@pytest.mark.parametrize(
    ("flags", "id_"),
    [
        (["--mount"], "mount-namespace"),
        (["--user", "--map-root-user"], "user-namespace"),
    ],
)
def test_a_namespace_that_criu_cannot_bring_back(job, flags, id_):
    victim = job("", prefix=("unshare", *flags))
    assert set(refusals(observe(victim.identity))) == {id_}


def test_a_pid_namespace_is_fine_for_its_first_process_and_for_nobody_else(job):
    first = job("os.setsid() if os.getsid(0) != os.getpid() else 0", prefix=("unshare", "--fork", "--pid"), inner=True)
    assert refusals(observe(first.identity)) == {}
    other = job("", prefix=("unshare", "--fork", "--pid", "sh", "-c", '"$@" & wait', "sh"), inner=True)
    assert "pid-namespace" in refusals(observe(other.identity))


def test_other_namespaces_are_fine(job):
    for flag in ("--ipc", "--uts", "--net"):
        assert refusals(observe(job("", prefix=("unshare", flag)).identity)) == {}


def test_a_big_deleted_file_is_measured_and_capped(job):
    victim = job(
        "f = open(folder + '/g', 'wb'); f.write(bytes(3 << 20)); f.flush(); os.unlink(folder + '/g')\n"
        "g = open(folder + '/h', 'wb+'); g.write(bytes(5 << 20)); g.flush(); m = mmap.mmap(g.fileno(), 5 << 20)\n"
        "os.unlink(folder + '/h'); g.close()"
    )
    obs = observe(victim.identity)
    assert refusals(obs) == {}
    assert hazards.checkpoint_needs(obs).ghost_limit >= 5 << 20
    capped = [r for r in reasons(obs, ghost_limit=4 << 20) if r.refuses]
    assert [(r.id, r.hint) for r in capped] == [("deleted-file", f"--ghost-limit {5 << 20}")]


LOST = "os.link(folder + '/g', folder + '/h'); os.unlink(folder + '/g')"


@pytest.mark.parametrize("have", ["", "m = mmap.mmap(f.fileno(), 32); f.close()"], ids=["open", "mapped"])
def test_a_file_that_lost_one_of_its_names(job, have):
    victim = job(f"f = open(folder + '/g', 'wb+'); f.write(bytes(32)); f.flush()\n{have}\n{LOST}")
    obs = observe(victim.identity)
    assert set(refusals(obs)) == {"link-remap"}
    assert refusals(obs, link_remap=True) == {}


def test_a_semaphore_is_none_of_these(job):
    code = "import multiprocessing; lock = multiprocessing.get_context('spawn').Lock()"
    victim = job(code)
    obs = observe(victim.identity)
    assert refusals(obs) == {}
    (name,) = [name for name in hazards.renamed_files(obs.process(obs.root)) if name.startswith("/dev/shm/sem.")]
    assert not os.path.lexists(name)


def test_limosas_own_ancestors_are_refused(job):
    code = (
        "import subprocess\n"
        "answer = subprocess.run([sys.executable, '-c', 'import os\\n"
        "from limosa.process.observe import observe\\nfrom limosa.process.identity import Identity\\n"
        "from limosa.process.hazards import common_hazards\\n"
        "print([r.id for r in common_hazards(observe(Identity.of(os.getppid())))])'], capture_output=True, text=True)\n"
        "open(folder + '/answer', 'w').write(answer.stdout + answer.stderr)\n"
    )
    victim = job(code)
    assert (victim.folder / "answer").read_text() == "['own-ancestor']\n"


# --- seen by somebody who may not see everything ---------------------------------------------------------------


NOBODY = """
os.chmod(folder, 0o777); own = os.open(folder, 0)
def ready():
    os.close(os.open("ready", os.O_CREAT | os.O_WRONLY, dir_fd=own)); time.sleep(60)
os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)
"""


def as_nobody(pid: int) -> dict[str, str]:
    """Looks at a process as an ordinary user and returns id → text of everything found."""
    code = (
        "import json, os, sys\n"
        "from limosa.process.observe import observe; from limosa.process.identity import Identity\n"
        "from limosa.process import hazards\n"
        "observe(Identity.of(os.getpid()))  # what is imported late is imported now\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "o = observe(Identity.of(int(sys.argv[1])))\n"
        "print(json.dumps({r.id: r.text for r in hazards.common_hazards(o) + hazards.checkpoint_hazards(o)}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(pid)], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return dict(json.loads(done.stdout))


def test_somebody_elses_job_is_refused_without_looking_further(job):
    assert os.getuid() == 0, "this test needs root to become somebody else"
    victim = job("")
    found = as_nobody(victim.pid)
    assert f"belongs to user 0, and limosa runs as {65534}" in found["wrong-user"]


def test_ones_own_job_that_may_not_be_looked_into(job):
    victim = job(NOBODY)  # not dumpable, as whoever has changed its user is
    found = as_nobody(victim.pid)
    assert "fd" in found["permission"]
    assert "maps" in found["permission"]


def test_what_an_ordinary_user_cannot_see_is_said(job):
    victim = job(NOBODY + "\nlibc.prctl(4, 1, 0, 0, 0); s = socket.socketpair()")
    found = as_nobody(victim.pid)
    assert "may not be looked into" in found["peers-hidden"]
    assert set(found) == {"peers-hidden"}


# --- ordinary jobs: nothing is refused ---------------------------------------------------------------------------

ORDINARY = {
    "plain": "",
    "descriptors": """
import select, tempfile
e = select.epoll(); r, w = os.pipe(); e.register(r); libc.eventfd(1, 0); libc.timerfd_create(1, 0)
libc.inotify_init(); os.memfd_create("x"); a, b = socket.socketpair(); socket.socket(); d = os.open("/tmp", os.O_PATH)
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 0)); n = os.open("/proc/self/ns/net", 0)
l = socket.create_server(("127.0.0.1", 0)); nl = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); nl.bind((0, 0))
z = os.open("/dev/zero", 2); mm = mmap.mmap(z, 4096); os.open("/dev/urandom", 0); t = tempfile.TemporaryFile()
pf = os.pidfd_open(os.getpid()); s = os.open("/proc/self/status", 0); libc.signalfd(-1, bytes(128), 0)
""",
    "tree": """
def inner(): time.sleep(60)
import multiprocessing as mp
mp.set_start_method("spawn" if False else "fork")
q = mp.Queue(); ev = mp.Event(); v = mp.Value("i", 3); bar = mp.Barrier(3)
def work(q):
    q.put(os.getpid()); time.sleep(60)
ps = [mp.Process(target=work, args=(q,), daemon=True) for _ in range(2)]
[p.start() for p in ps]; [q.get(timeout=120) for _ in ps]
pool = mp.get_context("fork").Pool(2); pool.map(abs, [1, 2]); m = mp.Manager(); shared = m.dict(a=1)
from multiprocessing import shared_memory
s = shared_memory.SharedMemory(create=True, size=4096); os.register_at_fork; s.unlink()
""",
    "a pty of its own": "import pty; m, s = pty.openpty(); p = os.fork()\nif p == 0: os.setsid(); time.sleep(60)",
    "zombie children": "p = os.fork()\nif p == 0: os._exit(0)",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_nothing_is_found_about_an_ordinary_job(job, name):
    obs = observe(job(ORDINARY[name]).identity)
    assert reasons(obs) == []


@pytest.mark.slow
def test_nothing_is_refused_of_torch_with_data_loader_workers(start):
    victim = start("train_torch", "--steps", 100000, limit=90)
    obs = observe(type_of(victim.pid))
    assert len(obs.processes) >= 2
    assert reasons(obs) == []


@pytest.mark.slow
def test_nothing_is_refused_of_two_gloo_ranks_in_one_tree(start, tmp_path):
    program = tmp_path / "gloo.py"
    program.write_text(
        "import os, sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def rank(r, port):\n"
        "    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=port)\n"
        "    store = dist.TCPStore('127.0.0.1', int(port), 2, r == 0, use_libuv=False)\n"
        "    dist.init_process_group('gloo', store=store, rank=r, world_size=2); t = torch.ones(4)\n"
        "    dist.all_reduce(t); print('READY' if r == 0 else 'there', flush=True)\n"
        "    while True: dist.all_reduce(t); time.sleep(0.05)\n"
        "if __name__ == '__main__':\n"
        "    import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); p = str(s.getsockname()[1]); s.close()\n"
        "    mp.spawn(rank, (p,), 2)\n"
    )
    victim = start([sys.executable, str(program)], limit=90)
    obs = observe(type_of(victim.pid))
    assert any(socket_.protocol == "tcp" and socket_.peer_pids for p in obs.processes for socket_ in p.sockets)
    assert {r.id: r.text for r in reasons(obs)} == {}
    assert hazards.checkpoint_needs(obs).tcp_established


def type_of(pid: int):
    from limosa.process.identity import Identity

    return Identity.of(pid)
