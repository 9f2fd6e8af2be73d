"""The guard of names (``native/criu/guard.c``), with Python in CRIU's place: what root does in a user's folder."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import let_in_by_a_list

from limosa.native.build import CRIU, PLUGIN, build_plugin, compilers

pytestmark = [pytest.mark.root]

USER = 4242

_PROGRAM = """
import errno, json, os, socket, sys
def meanwhile(*argv):
    pid = os.fork()  # the user
    if not pid:
        os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
        {"swap": lambda away, name, target: (os.rename(name, away), os.symlink(target, name)),
         "put": lambda name, other: os.rename(other, name)}[argv[0]](*argv[1:])
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
said = {}
try:
    exec(sys.argv[1])
    said["done"] = True
except OSError as error:
    said["error"] = errno.errorcode[error.errno]
print(json.dumps(said))
"""


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    """A folder of a user's, and one of root's beside it that he can go through and not change."""
    assert build_plugin() is None
    public = Path(tempfile.mkdtemp(prefix="limosa-guard-"))
    public.chmod(0o755)
    mine, roots = public / "mine", public / "roots"
    for folder in (mine, roots):
        folder.mkdir(mode=0o755)
    os.chown(mine, USER, USER)
    (roots / "file").write_text("root's own")
    (roots / "file").chmod(0o600)
    yield mine, roots
    shutil.rmtree(public)


@pytest.fixture
def guarded(places: tuple[Path, Path]) -> Callable[[str], dict]:
    mine, roots = places

    def go(code: str, preload: bool = True, guard: str = "0") -> dict:
        env = {"PATH": os.environ["PATH"], "M": str(mine), "R": str(roots)}
        if preload:
            env |= {"LIMOSA_GUARD": guard, "LD_PRELOAD": str(CRIU / PLUGIN)}
        head = "M, R = os.environ['M'], os.environ['R']\n"
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM, head + code],
            env=env, cwd="/", capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return go


_CALLS = {
    "open": "os.open(f'{M}/link/file', os.O_RDONLY)",
    "open last": "os.open(f'{M}/last', os.O_RDWR)",
    "make": "os.open(f'{M}/link/made', os.O_WRONLY | os.O_CREAT | os.O_EXCL)",
    "below /": "os.open(f'{M}/link/file'[1:], os.O_RDONLY, dir_fd=os.open('/', os.O_RDONLY))",
    "unlink": "os.unlink(f'{M}/link/file')",
    "rmdir": "os.rmdir(f'{M}/link/folder')",
    "mkdir": "os.mkdir(f'{M}/link/made')",
    "mknod": "os.mknod(f'{M}/link/made', 0o10600)",
    "symlink": "os.symlink('/', f'{M}/link/made')",
    "link": "os.link(f'{M}/link/file', f'{M}/made')",
    "link to": "os.link(f'{M}/own', f'{M}/link/made')",
    "rename": "os.rename(f'{M}/link/file', f'{M}/made')",
    "rename to": "os.rename(f'{M}/own', f'{M}/link/file')",
    "chdir": "os.chdir(f'{M}/link')",
    "chown": "os.chown(f'{M}/link/file', 4242, 4242)",
    "chown last": "os.chown(f'{M}/last', 4242, 4242)",
    "chmod": "os.chmod(f'{M}/link/file', 0o666)",
    "chmod last": "os.chmod(f'{M}/last', 0o666)",
    "bind": "socket.socket(socket.AF_UNIX).bind(f'{M}/link/made')",
    "connect": "socket.socket(socket.AF_UNIX).connect(f'{M}/link/socket')",
    "bind by ..": "socket.socket(socket.AF_UNIX).bind(f'/proc/..{M}/link/made')",
    "connect by ..": "socket.socket(socket.AF_UNIX).connect(f'/sys/..{M}/link/socket')",
    "bind by a process": "socket.socket(socket.AF_UNIX).bind(f'/proc/self/root{R}/made')",
    "unlink by ..": "os.unlink(f'/proc/..{M}/link/file')",
    "unlink by a process": "os.unlink(f'/proc/self/root{R}/file')",
    "unlink by a descriptor": "os.unlink('/proc/self/fd//%d/file' % os.open(R, os.O_RDONLY))",
    "chown by ..": "os.chown(f'proc/..{M}/link/file', 4242, 4242, dir_fd=os.open('/', os.O_RDONLY))",
    "unlink by .. in /proc": "os.chdir('/proc'); os.unlink(f'..{M}/link/file')",
}


@pytest.mark.parametrize("name", _CALLS)
def test_links_of_a_user_are_not_followed(places, guarded, name) -> None:
    mine, roots = places
    (roots / "folder").mkdir()
    (mine / "own").write_text("mine")
    (mine / "link").symlink_to(roots)
    (mine / "last").symlink_to(roots / "file")
    for path in (mine / "own", mine / "link", mine / "last"):
        os.lchown(path, USER, USER)
    with_socket = "import threading; s = socket.socket(socket.AF_UNIX); s.bind(R + '/socket'); s.listen(1)\n"
    said = guarded(with_socket + _CALLS[name])
    assert said.get("error") in ("ELOOP", "EPERM"), said
    assert sorted(os.listdir(roots)) == ["file", "folder", "socket"]
    info = (roots / "file").stat()
    assert (info.st_uid, stat.S_IMODE(info.st_mode), (roots / "file").read_text()) == (0, 0o600, "root's own")
    os.unlink(roots / "socket")
    assert guarded(with_socket + _CALLS[name], preload=False) == {"done": True}, "it would have been done"


_CHANGES = ["os.chown(name, 0, 0)", "os.chown(name, 4242, 4242)", "os.chmod(name, 0o666)"]
_MAKES = {
    "file": "os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))",
    "socket": "s = socket.socket(socket.AF_UNIX); s.bind(name)",
    "fifo": "os.mknod(name, 0o10600)",
    "folder": "os.mkdir(name)",
}


@pytest.mark.parametrize("change", _CHANGES)
@pytest.mark.parametrize("made", _MAKES)
def test_only_what_was_made_is_given_away(places, guarded, made, change) -> None:
    """And not what its user has put in its place meanwhile: a link to root's, or root's own that lies in his folder."""
    mine, roots = places
    make = f"name = M + '/made'\n{_MAKES[made]}\n"
    assert guarded(make + change) == {"done": True}
    (mine / "made").rmdir() if made == "folder" else (mine / "made").unlink()
    put = f"meanwhile('swap', M + '/away', name, R + '/file')\n{change}"
    assert guarded(make + put)["error"] == "EPERM"
    (mine / "made").unlink()
    (mine / "left").write_text("root's own, in a folder of the user's")
    (mine / "left").chmod(0o600)
    if made == "folder":
        (mine / "away").rmdir()
        os.rename(mine / "left", mine / "away")
        put = f"meanwhile('put', M + '/moved', name); meanwhile('put', name, M + '/away')\n{change}"
    else:
        put = f"meanwhile('put', name, M + '/left')\n{change}"
    assert guarded(make + put)["error"] == "EPERM"
    for path in (roots / "file", mine / "made"):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o600)


_MADE = "name = M + '/made'\nos.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o6755))\n"


@pytest.mark.parametrize(
    ("owner", "mode", "fine"),
    [
        (USER, 0o4755, True),
        (USER, 0o755, True),
        (0, 0o755, True),
        (0, 0o4755, False),
        (USER + 1, 0o4755, False),
        (USER, 0o2755, False),
    ],
)
def test_what_is_made_runs_with_nobodys_rights_before_it_is_its_owners(places, guarded, owner, mode, fine) -> None:
    """CRIU makes a deleted file with its mode, as root: its user took it away before it was his, and was root."""
    mine, _ = places
    assert guarded(_MADE) == {"done": True}
    info = (mine / "made").stat()
    assert (info.st_uid, stat.S_IMODE(info.st_mode) & 0o7000) == (0, 0)
    (mine / "made").unlink()
    said = guarded(f"{_MADE}os.chown(name, {owner}, {owner}); os.chmod(name, {mode})")
    assert said == ({"done": True} if fine else {"error": "EPERM"})
    assert stat.S_IMODE((mine / "made").stat().st_mode) == (mode if fine else 0o755)


def test_no_link_of_roots_and_no_device_is_made_in_a_users_folder(places, guarded) -> None:
    """A link of root's is followed, also here: CRIU makes a deleted one with the target that its user gave it."""
    mine, roots = places
    assert guarded("os.symlink('/etc', M + '/link')") == {"done": True}
    assert (mine / "link").lstat().st_uid == USER
    assert guarded("os.symlink('/etc', M + '/own'); os.lchown(M + '/own', 4242, 4242)") == {"done": True}
    assert guarded("os.symlink('/etc', M + '/roots'); os.lchown(M + '/roots', 0, 0)") == {"error": "EPERM"}
    assert guarded("os.mknod(M + '/disk', 0o60666, os.makedev(7, 0))") == {"error": "EPERM"}
    assert guarded("os.mknod(M + '/pipe', 0o14777)") == {"done": True}
    assert guarded("os.symlink('/etc', R + '/link')") == {"done": True}
    assert (roots / "link").lstat().st_uid == 0


def test_a_socket_is_bound_with_the_rights_of_the_folders_owner(places, guarded) -> None:
    mine, roots = places
    assert guarded("s = socket.socket(socket.AF_UNIX); s.bind(M + '/s'); os.chmod(M + '/s', 0o600)") == {"done": True}
    assert (mine / "s").stat().st_uid == USER
    assert guarded("s = socket.socket(socket.AF_UNIX); s.bind(R + '/s'); os.mkdir(M + '/root')") == {"done": True}
    assert (roots / "s").stat().st_uid == 0
    assert (mine / "root").stat().st_uid == 0, "all else is done as before"


def test_a_socket_in_a_users_folder_within_one_of_a_group(places, guarded) -> None:
    _, roots = places
    os.chown(roots, 0, USER + 1)
    roots.chmod(0o2775)
    (roots / "his").mkdir(mode=0o755)
    os.chown(roots / "his", USER, USER)
    assert guarded("s = socket.socket(socket.AF_UNIX); s.bind(R + '/his/s')") == {"done": True}
    assert (roots / "his" / "s").stat().st_uid == USER


def test_a_job_of_roots_has_its_socket_back_in_its_own_folder_within_a_users(places, guarded) -> None:
    mine, _ = places
    (mine / "made").mkdir(mode=0o755)
    bind = "s = socket.socket(socket.AF_UNIX); s.bind(M + '/made/s'); os.chown(M + '/made/s', 0, 0)"
    assert guarded(bind, guard=f"0:{USER},{USER}") == {"error": "EACCES"}, "a user's job has made none there"
    assert guarded(bind) == {"done": True}
    assert (mine / "made" / "s").stat().st_uid == 0


def test_a_socket_that_is_led_elsewhere_is_taken_away_again(places, guarded) -> None:
    """Its folder is exchanged for a link again and again while it is bound."""
    mine, roots = places
    (mine / "made").mkdir(mode=0o755)
    code = f"""
import ctypes, time
pid = os.fork()
if not pid:
    os.setgroups([]); os.setresgid({USER}, {USER}, {USER}); os.setresuid({USER}, {USER}, {USER})
    exchange, made, other = ctypes.CDLL(None).renameat2, (M + "/made").encode(), (M + "/other").encode()
    os.symlink(R, other)
    while True:
        exchange(-100, made, -100, other, 2)
said["ends"] = ends = dict()
until = time.monotonic() + 1
while time.monotonic() < until or (len(ends) < 2 and time.monotonic() < until + 30):
    s = socket.socket(socket.AF_UNIX)
    try:
        s.bind(M + "/made/s"); end = "bound"
    except OSError as error:
        end = errno.errorcode[error.errno]
    ends[end] = ends.get(end, 0) + 1
    s.close()
    for at in (M + "/made/s", M + "/other/s"):
        try: os.unlink(at)
        except OSError: pass
os.kill(pid, 9)
os.waitpid(pid, 0)
"""
    said = guarded(code)
    assert {"bound", "ELOOP"} <= said["ends"].keys(), said
    assert os.listdir(roots) == ["file"]


def test_in_a_groups_folder_a_socket_is_bound_with_the_rights_of_the_jobs_user(places, guarded) -> None:
    _, roots = places
    os.chown(roots, 0, USER + 1)
    roots.chmod(0o775)
    bind = "s = socket.socket(socket.AF_UNIX); s.bind(R + '/s')"
    assert guarded(bind, guard=f"0:{USER},{USER}") == {"error": "EACCES"}
    assert guarded(bind, guard=f"0:{USER},{USER},{USER + 1}") == {"done": True}
    assert (roots / "s").stat().st_uid == USER


def test_in_a_groups_folder_a_socket_of_a_job_of_roots_is_bound_with_the_groups_rights(places, guarded) -> None:
    mine, roots = places
    bind = "s = socket.socket(socket.AF_UNIX); s.bind(R + '/s'); os.chown(R + '/s', 0, 0)"
    os.chown(roots, 0, USER + 1)
    roots.chmod(0o2775)
    assert guarded(bind) == {"done": True}
    assert (roots / "s").stat().st_uid == 0
    (roots / "s").unlink()
    (mine / "within").mkdir(mode=0o775)  # where the group may write, and who can exchange names may not
    for folder, mode in ((mine, 0o777), (mine / "within", 0o775)):
        os.chown(folder, 0, USER + 1)
        folder.chmod(mode)
    assert guarded("s = socket.socket(socket.AF_UNIX); s.bind(M + '/within/s')") == {"error": "EACCES"}


def test_who_is_let_in_by_a_list_may_exchange_names_as_well(places, guarded) -> None:
    _, roots = places
    try:
        let_in_by_a_list(roots, USER)
    except OSError:
        pytest.skip("a file system without access control lists")
    (roots / "anothers").write_text("another's own")
    code = "name = R + '/made'\nos.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))\n"
    assert guarded(code + "os.chown(name, 4242, 4242); os.unlink(name)") == {"done": True}
    put = "meanwhile('put', name, R + '/anothers'); os.chown(name, 4242, 4242)"
    assert guarded(code + put) == {"error": "EPERM"}
    bind = "s = socket.socket(socket.AF_UNIX); s.bind(R + '/s')"
    assert guarded(bind, guard=f"0:{USER},{USER}") == {"done": True}
    assert (roots / "s").stat().st_uid == USER


def test_roots_own_links_are_followed_and_paths_are_what_they_were(places, guarded) -> None:
    mine, roots = places
    (roots / "there").symlink_to(mine)
    (roots / "relative").symlink_to("../mine/../roots/./file")
    code = (
        "import fcntl\n"
        "os.mkdir(R + '/there/folder'); os.chdir(R + '/there/folder/'); assert os.getcwd() == M + '/folder'\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('s'); s.listen(1); assert s.getsockname() == 's'\n"
        "c = socket.socket(socket.AF_UNIX); c.connect('s'); assert c.getpeername() == 's'\n"
        "fd = os.open(R + '/relative', os.O_RDONLY); assert os.read(fd, 4) == b'root'\n"
        "assert os.readlink(f'/proc/self/fd/{fd}') == R + '/file'\n"
        "assert not fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_NOFOLLOW | os.O_PATH)\n"
        "fd = os.open('/', os.O_RDONLY); os.open('//', os.O_RDONLY); os.open('.', os.O_RDONLY)\n"
        "fd = os.open(f'/proc/self/fd/{fd}', os.O_RDONLY); assert os.readlink(f'/proc/self/fd/{fd}') == '/'\n"
        "os.open('/dev/null', os.O_RDWR)"
    )
    assert guarded(code) == {"done": True}


def test_a_pipe_that_a_user_puts_there_holds_nobody_up(places, guarded) -> None:
    """Of a job's own pipe CRIU holds both ends before it opens one: that works, and the flags are the job's."""
    mine, _ = places
    os.mkfifo(mine / "pipe")
    assert guarded("os.open(M + '/pipe', os.O_WRONLY)")["error"] == "ENXIO"
    assert guarded("os.open(M + '/pipe', os.O_RDONLY)") == {"done": True}
    code = (
        "import fcntl\n"
        "both = os.open(M + '/pipe', os.O_RDWR)\n"
        "for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_NONBLOCK, os.O_RDONLY | os.O_APPEND):\n"
        "    fd = os.open(M + '/pipe', flags)\n"
        "    kept = os.O_ACCMODE | os.O_NONBLOCK | os.O_APPEND\n"
        "    assert fcntl.fcntl(fd, fcntl.F_GETFL) & kept == flags\n"
    )
    assert guarded(code) == {"done": True}


@pytest.fixture
def users_group() -> Iterator[Path]:
    """A control group that a user may put his processes into (as ``systemd --user`` has)."""
    with open("/proc/mounts") as mounts:
        found = [line.split()[1] for line in mounts if line.split()[2] == "cgroup2"]
    if not found or not found[0].startswith("/sys/") or not os.access(found[0], os.W_OK):
        pytest.skip("no cgroup2 below /sys that can be written to")
    group = Path(tempfile.mkdtemp(prefix="limosa-guard-", dir=found[0]))
    group.chmod(0o755)
    os.chown(group / "cgroup.procs", USER, USER)
    yield group
    group.rmdir()


def test_a_control_group_is_opened_by_the_jobs_user(guarded, users_group) -> None:
    """With what root has opened he could put anybody's process into his group, and stop it there."""
    take = f"""
group = os.open("{str(users_group).lstrip("/")}/cgroup.procs", os.O_WRONLY, dir_fd=os.open("/", os.O_RDONLY))
other = os.fork()
if not other:
    import time
    time.sleep(60)
pid = os.fork()
if not pid:
    os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
    try:
        os.write(group, str(other).encode())
    except OSError:
        os._exit(1)
    os._exit(0)
said["refused"] = bool(os.waitpid(pid, 0)[1])
os.kill(other, 9)
os.waitpid(other, 0)
said["ids"] = os.getresuid(), os.getresgid()
"""
    assert not guarded(take, preload=False)["refused"], "the danger is there"
    assert guarded(take, guard="0:4242,4242") == {"refused": True, "ids": [[0] * 3, [0] * 3], "done": True}
    os.chown(users_group / "cgroup.procs", 0, 0)
    assert guarded(take, guard="0:4242,4242") == {"error": "EACCES"}


@pytest.mark.parametrize(("guard", "shown"), [("0:4242,4242", False), ("0", True)], ids=["user's", "root's"])
def test_what_the_kernel_tells_root_alone_it_tells_no_job_of_a_users(guarded, guard, shown) -> None:
    read = "said['told'] = os.read(os.open('proc/kallsyms', os.O_RDONLY, dir_fd=os.open('/', 0)), 16).decode()"
    if not guarded(read, preload=False)["told"].strip("0"):
        pytest.skip("the kernel shows its addresses to nobody")
    assert bool(guarded(read, guard=guard)["told"].strip("0")) is shown


def test_what_is_roots_still_of_a_process_of_the_job_is_opened(guarded) -> None:
    """CRIU gives processes their user last: until then what tells of them is root's."""
    code = "os.read(os.open(f'proc/{os.getppid()}/environ', os.O_RDONLY, dir_fd=os.open('/', 0)), 1)"
    assert guarded(code, guard="0:4242,4242") == {"done": True}


def test_who_cannot_become_root_again_opens_nothing_more(tmp_path) -> None:
    """Not tried once more with whatever rights are left, and not as root: the kernel asks who has opened it."""
    program = tmp_path / "stuck"
    source = Path(__file__).with_name("guard_stuck.c")
    argv = [*compilers()[0], "-std=gnu11", "-O1", "-w", f"-I{CRIU}", "-o", program, source]
    subprocess.run([str(word) for word in argv], check=True, timeout=60)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "-1 1\n"


def test_a_folder_with_a_random_name_is_ones_own(guarded: Callable[[str], dict], places: tuple[Path, Path]) -> None:
    """CRIU makes one where everybody may make names, and gives it another mode afterwards."""
    code = """
import ctypes
named = ctypes.create_string_buffer(os.fsencode(M + "/made-XXXXXX"))
libc = ctypes.CDLL(None, use_errno=True)
if not libc.mkdtemp(named):
    raise OSError(ctypes.get_errno(), "mkdtemp")
os.chmod(named.value, 0o711)
said["name"] = os.path.basename(os.fsdecode(named.value))
if libc.mkdtemp(ctypes.create_string_buffer(os.fsencode(M + "/made"))):
    raise OSError(errno.EEXIST, "made")
"""
    said = guarded(code)
    assert said["done"]
    assert stat.S_IMODE((places[0] / said["name"]).stat().st_mode) == 0o711
    link = "os.symlink(R, M + '/to'); os.lchown(M + '/to', 4242, 4242)\n"
    through = link + code.replace("/made-XXXXXX", "/to/made-XXXXXX")
    assert guarded(through) == {"error": "ELOOP"}
    assert os.listdir(places[1]) == ["file"]


_EMPTY_PROC = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
mounts = (b"none", b"/", None, 0x44000, None), (b"t", b"/proc", b"tmpfs", 0, None)
if libc.unshare(0x20000) or any(libc.mount(*one) for one in mounts):
    raise OSError(ctypes.get_errno(), "mount")
"""


def test_names_are_found_where_there_is_no_proc(guarded: Callable[[str], dict]) -> None:
    """While the mounts of a container are put together."""
    code = (
        _EMPTY_PROC
        + """
for flags in (os.O_PATH, os.O_RDONLY):
    assert os.path.samestat(os.fstat(os.open(R + "/file", flags)), os.stat(R + "/file"))
os.open(R, os.O_RDONLY | os.O_DIRECTORY)
os.open(R + "/none", os.O_RDONLY)
"""
    )
    assert guarded(code) == {"error": "ENOENT"}
    link = "os.symlink(R, M + '/to'); os.lchown(M + '/to', 4242, 4242)\n"
    assert guarded(link + code.replace('R + "/file", flags', "M + '/to/file', flags")) == {"error": "ELOOP"}


def test_what_a_container_has_at_proc_leads_nowhere_else(guarded: Callable[[str], dict]) -> None:
    """A folder of links to one of root's files, under every descriptor's name."""
    code = (
        _EMPTY_PROC
        + """
with open(M + "/own", "w") as file:
    file.write("own")
os.makedirs("/proc/self/fd")
for number in range(64):
    os.symlink(R + "/file", f"/proc/self/fd/{number}")
with open(M + "/own") as file:
    assert file.read() == "own"
os.close(os.open(M + "/made", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
os.chmod(M + "/made", 0o666)
"""
    )
    assert guarded(code) == {"error": "ENOENT"}


def test_nothing_stays_open(guarded: Callable[[str], dict]) -> None:
    """A job that comes back would have it."""
    code = """
listens = socket.socket(socket.AF_UNIX)
listens.bind(M + "/socket")
listens.listen()
asks = socket.socket(socket.AF_UNIX)
with open(M + "/own", "w"):
    pass
before = os.listdir("/proc/self/fd")
asks.connect(M + "/socket")
os.close(os.open(M + "/own", os.O_RDONLY))
os.chmod(M + "/own", 0o644)
said["more"] = len(os.listdir("/proc/self/fd")) - len(before)
"""
    assert guarded(code) == {"more": 0, "done": True}
