"""What another user puts into a node's folder does not lead root anywhere: links, pipes, folders, numbers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from limosa.errors import UsageError
from limosa_softgpu import node as node_module
from limosa_softgpu.state import NODE_FOLDER, opened

AS_NOBODY = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
NVML = "import pynvml as n; n.nvmlInit(); n.nvmlShutdown()"
LIMOSA = [sys.executable, "-m", "limosa"]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of root's that nobody else may read or write."""
    path = tmp_path / "secret"
    path.write_text("root's own\n")
    path.chmod(0o600)
    return path


def untouched(path: Path) -> bool:
    return (path.read_text(), path.stat().st_mode & 0o777) == ("root's own\n", 0o600)


def nobody(node, code: str) -> None:
    node.python(AS_NOBODY + code)


def test_a_count_that_is_a_link_is_not_written_through(node, secret):
    node.switches.add("function=nvmlInit* every=1 delay=0")
    nobody(node, f"os.symlink({str(secret)!r}, '{NODE_FOLDER}/faults/000001.count')")
    node.python(NVML)  # as root
    assert untouched(secret)


def test_a_count_that_is_another_name_of_roots_file_is_not_written_to(node):
    """Where the kernel lets a user make such a name."""
    node.switches.add("function=nvmlInit* every=1 delay=0")
    file = Path(node.folder) / "ld.so.cache"
    before = file.read_bytes()
    os.link(file, f"{node.folder}/faults/000001.count")
    node.python(NVML)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (before, 0o644)


def test_a_rule_is_not_written_through_a_link(node, secret):
    nobody(node, f"os.symlink({str(secret)!r}, '{NODE_FOLDER}/faults/.000001')")
    node.limosa("softgpu", "--fault", "function=cuInit hang")
    assert untouched(secret)
    assert list(node.switches.rules()) == ["000001"]


def test_what_is_no_rule_is_neither_read_nor_in_the_way(node, secret):
    nobody(
        node,
        f"os.chdir('{NODE_FOLDER}/faults'); os.symlink({str(secret)!r}, '000007')\n"
        "os.mkfifo('000008'); os.mkdir('000009'); os.mkdir('000009.count'); os.symlink('/', 'x')\n"
        "open('\\xb2', 'w').close(); open('9' * 200, 'w').close()",
    )
    told = node.limosa("softgpu", "--fault", "function=cuInit hang", "-o", "json").json
    assert "root's own" not in str(told)
    assert {fault["name"] for fault in told["faults"]} == {"000001", "\xb2", "9" * 200}
    node.limosa("softgpu", "--lift", "all")
    assert node.switches.rules() == {}
    assert untouched(secret)


def test_a_pipe_among_the_blocks_holds_nobody_up(node):
    with node.switches.fill(0, 2 << 20):
        (block,) = node.blocks()
        nobody(
            node,
            f"os.chdir('{NODE_FOLDER}/memory'); os.rename('{block}', 'away'); os.mkfifo('{block}')",
        )
        assert node.limosa("gpus", "-o", "json").json["gpus"]
        assert node.switches.used(0) >= 2 << 20


def test_a_state_that_was_cut_off_is_said_in_words(node):
    nobody(node, f"os.truncate('{NODE_FOLDER}/state', 0)")
    told = node.limosa("softgpu", rc=None)
    assert "Traceback" not in told.stderr
    turned = node.limosa("softgpu", "--turn", "0:lost=on", rc=12)
    assert "state" in turned.stderr


def test_an_event_is_not_shared_through_a_link(node, secret):
    """Its file has a name that can be known before: root's is not emptied for it."""
    far = (
        "import os, sys; from cuda.bindings import driver as d\n"
        "os.symlink(sys.argv[1], f'/dev/shm/cuda.shm.0.{os.getpid():x}.1')\n"  # as another would have
        "def ok(r): assert int(r[0]) == 0, r; return r[1] if len(r) > 1 else None\n"
        "ok(d.cuInit(0)); c = ok(d.cuDevicePrimaryCtxRetain(0)); ok(d.cuCtxSetCurrent(c))\n"
        "e = ok(d.cuEventCreate(4 | 2)); ok(d.cuIpcGetEventHandle(e))\n"
    )
    node.python(far, secret)
    assert untouched(secret)


def test_the_log_is_not_behind_somebody_elses_link(secret, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    (theirs / "log").symlink_to(secret)
    (theirs / "folder").symlink_to(tmp_path)
    os.lchown(theirs / "log", 65534, 65534)
    os.lchown(theirs / "folder", 65534, 65534)
    os.mkfifo(theirs / "pipe")
    os.link(secret, theirs / "name")
    for log in (theirs / "log", theirs / "folder" / "secret", theirs / "pipe", theirs / "name"):
        ran = subprocess.run(
            [*LIMOSA, "softgpu", "--log", str(log), "--", "sh", "-c", f"echo x >> {NODE_FOLDER}/log"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
        assert (ran.returncode, f"--log {log}" in ran.stderr) == (2, True), ran.stderr
    assert untouched(secret)


def test_a_pipe_in_place_of_the_output_holds_nobody_up(tmp_path):
    """The output is opened again by its name, which its folder's owner may have given to something else."""
    out = tmp_path / "out"
    with open(out, "a", encoding="utf-8") as file, open(out, encoding="utf-8") as same:
        out.unlink()
        os.mkfifo(f"{out} (deleted)")  # what /proc calls it now
        ran = subprocess.run(
            [*LIMOSA, "softgpu", "--", "echo", "words"], stdout=file, stdin=subprocess.DEVNULL, timeout=120, check=False
        )
        assert (ran.returncode, same.read()) == (0, "words\n")


def test_roots_own_link_leads_to_the_log(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "log")
    script = f"echo words >> {NODE_FOLDER}/log"
    command = [*LIMOSA, "softgpu", "--log", str(tmp_path / "link"), "--", "sh", "-c", script]
    subprocess.run(command, stdin=subprocess.DEVNULL, timeout=120, check=True)
    assert (tmp_path / "log").read_text().endswith("words\n")


def test_a_log_whose_other_name_has_just_gone_is_not_opened(secret, tmp_path, monkeypatch):
    """Its user takes his name for root's file away between the opening and the look at how many it has."""
    (tmp_path / "theirs").mkdir()
    name = tmp_path / "theirs" / "log"
    os.link(secret, name)
    real = os.open

    def opened(path, flags, *more, **where):
        fd = real(path, flags, *more, **where)
        if path == "log":
            name.unlink()
        return fd

    monkeypatch.setattr(node_module.os, "open", opened)
    with pytest.raises(UsageError, match="another name"):
        node_module._open_log(str(name))
    monkeypatch.undo()
    assert untouched(secret)


def test_numbers_that_are_out_of_bounds_lead_no_process_out_of_the_state(node):
    """Everybody in the node may write there: root's processes looked at as many GPUs and blocks as it said."""
    for gpus, blocks in ((1 << 30, 1 << 30), (-1, -1)):
        with opened(node.folder) as state:
            before = state.n_gpus, state.n_blocks
            state.n_gpus, state.n_blocks = gpus, blocks
            del state
        try:
            node.python("import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())")
            node.python("import cuda.bindings.driver as d; d.cuInit(0); print(d.cuDevicePrimaryCtxRetain(0))")
        finally:
            with opened(node.folder) as state:
                state.n_gpus, state.n_blocks = before
                del state


@pytest.mark.parametrize("what", ["driver_version", "name"])
def test_a_name_that_is_no_text_is_said_in_words(node, what):
    """It ended as an internal error (1)."""
    with opened(node.folder) as state:
        setattr(state.gpus[0] if what == "name" else state, what, b"\xff\xfe")
        del state
    told = node.limosa("gpus", rc=12)
    assert "NVML answers with a name that is no text" in told.stderr


def test_a_folder_with_the_highest_number_is_in_no_rules_way(node):
    nobody(node, f"os.mkdir('{NODE_FOLDER}/faults/999999999')")
    assert node.switches.add("function=nvmlInit* every=1 delay=0") == "000001"


def test_root_does_not_join_what_a_user_calls_a_node():
    """In a user namespace of his own he lays what he likes over any program's name, and root would run it."""
    script = f"mount -t tmpfs none /dev && mkdir -p {NODE_FOLDER} && : > {NODE_FOLDER}/state && echo ready && read -r _"
    argv = ["setpriv", "--reuid=4242", "--regid=4242", "--clear-groups", "unshare", "-Urm", "sh", "-ec", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        command = [*LIMOSA, "softgpu", "--join", str(process.pid), "--", "id"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (11, "")
    assert "its mounts are a user's own" in ran.stderr


@contextlib.contextmanager
def process_that_is_ready(*argv: object):
    """A process that has said that it is ready; it goes on until the end."""
    with subprocess.Popen([str(word) for word in argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def joined(pid: int, *command: object, **options) -> subprocess.CompletedProcess[str]:
    argv = [*LIMOSA, "softgpu", "--join", str(pid), "--", *map(str, command)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, **options)


def test_root_joins_no_node_that_is_a_file_in_a_users_folder(tmp_path):
    """A user may make any folder his process's root folder; its mounts are the machine's, and the command ran there."""
    fake = tmp_path / "fake" / NODE_FOLDER.strip("/")
    fake.mkdir(parents=True)
    (fake / "state").touch()
    code = (
        "import ctypes, os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "assert ctypes.CDLL(None).unshare(0x10000000) == 0\n"  # CLONE_NEWUSER
        "os.chroot('fake'); print('ready', flush=True); sys.stdin.read()"
    )
    tmp_path.chmod(0o755)
    with process_that_is_ready("sh", "-c", f'cd {tmp_path} && exec "$0" -c "$1"', sys.executable, code) as process:
        ran = joined(process.pid, "id")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"process {process.pid} is in no node of software GPUs" in ran.stderr


@pytest.mark.parametrize("mount", [":", "mount -t tmpfs tmpfs", "mount -t tmpfs softgpu-node"])
def test_root_joins_nothing_that_only_looks_like_a_node(tmp_path, mount):
    """A container's root can make a file of that name; and where it is mounted rightly, "/" has other programs."""
    folder = NODE_FOLDER.removeprefix("/")
    script = f"cd {tmp_path}; mkdir new; mount -t tmpfs none new; cd new; mkdir -p old {folder}; {mount} {folder}\n"
    if "softgpu" in mount:
        script += f": > {folder}/state; pivot_root . old\n"
    else:
        script += f": > {folder}/state; mount --rbind dev /dev\n"
    with process_that_is_ready("unshare", "-m", "sh", "-ec", f"{script} echo ready; read -r _") as process:
        ran = joined(process.pid, "id")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"process {process.pid} is in no node of software GPUs" in ran.stderr


@pytest.mark.parametrize("by", ["a link", "nothing"])
def test_a_command_of_a_node_works_in_the_folder_that_root_was_in(node, tmp_path, monkeypatch, by):
    """Its name leads to another one by then: it ran there, wherever its user had his link lead."""
    theirs, elsewhere = tmp_path / "theirs", tmp_path / "elsewhere"
    (theirs / "deep").mkdir(parents=True)
    (elsewhere / "deep").mkdir(parents=True)
    monkeypatch.chdir(theirs / "deep")
    assert joined(node.pid, "pwd").stdout == f"{theirs}/deep\n"
    code = (
        "import os, sys\nfrom limosa.errors import UsageError\nfrom limosa_softgpu import kernel, node\n"
        "real, pid, new = kernel.setns, *sys.argv[1:]\n"
        "def setns(*what):\n"  # between the look at the name and its use
        "    kernel.setns = real\n"
        "    os.rename('../../theirs', '../../moved')\n"
        "    if new: os.symlink(new, '../../theirs')\n"
        "    real(*what)\n"
        "kernel.setns = setns\n"
        "try: node.join(int(pid))\n"
        "except UsageError as error: print(error)\n"
        "print(os.getcwd())\n"
    )
    argv = [sys.executable, "-c", code, str(node.pid), str(elsewhere) if by == "a link" else ""]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    said, where = ran.stdout.splitlines()
    assert f"{theirs}/deep is another folder in the node, or none" in said
    assert where == f"{tmp_path}/moved/deep"


def test_a_command_of_a_node_is_not_run_from_a_folder_that_is_gone(node, tmp_path):
    (tmp_path / "gone").mkdir()
    argv = [sys.executable, "-c", "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.argv[1], sys.argv[1:])", *LIMOSA]
    argv += ["softgpu", "--join", str(node.pid), "--", "pwd"]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path / "gone")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "has no name any more" in ran.stderr
