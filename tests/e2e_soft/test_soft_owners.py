"""Whose vault and mover serve whose jobs: each user's own, also where root does the work."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from soft_command import UNDER, start, waits_for
from soft_job import JOB, Job

from limosa.parking.resident import socket_path

USER = 4242
_CAP_SYS_RESOURCE = 24
# What root runs need not be readable for others (a Python in /root): all is imported before the user is changed.
_BECOME = f"""
import array, ctypes, os, sys
def become():
    os.setgroups([]); os.setresgid({USER}, {USER}, {USER}); os.setresuid({USER}, {USER}, {USER})
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
"""
_JOB = f"""{_BECOME}
sys.path.insert(0, {str(JOB.parent)!r})
import job
become()
job.main()
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user can get at, with the runtime folder in it."""
    found = Path(tempfile.mkdtemp(prefix="limosa-owners-"))
    found.chmod(0o1777)
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(found / "limosa"))
    monkeypatch.setenv("NOT_FOR_USERS", "root's own")
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture
def node(place: Path, soft: Any) -> Any:
    return soft(gpus=2, memory="256MiB")


def residents(node: Any) -> dict[tuple[str, int], int]:
    """Vaults and movers: name and uid → pid."""
    found = {}
    for pid in node.processes():
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name in ("limosa-vault", "limosa-mover"):
                status = Path(f"/proc/{pid}/status").read_text()
                uids = next(line.split()[1:] for line in status.splitlines() if line.startswith("Uid:"))
                assert len(set(uids)) == 1, "no way back to root"
                found[name, int(uids[0])] = pid
    return found


def users_job(node: Any, place: Path) -> Job:
    folder = place / "job"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    argv = [sys.executable, "-c", _JOB, str(folder), "--mib", "40"]
    job = Job(node, folder, argv, UNDER)
    node.reaper.watch(job.pid)
    job.wait_for("READY")
    job.goes_on(2)
    return job


def test_root_serves_a_user_with_that_users_vault_and_mover(node: Any, place: Path) -> None:
    job = users_job(node, place)
    node.limosa("suspend", job.pid)
    assert set(residents(node)) == {("limosa-vault", USER), ("limosa-mover", USER)}
    for pid in residents(node).values():
        assert b"NOT_FOR_USERS" not in Path(f"/proc/{pid}/environ").read_bytes()
        groups = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("Groups:"))
        assert groups.split()[1:] in ([], [str(USER)])
        capabilities = Path(f"/proc/{pid}/status").read_text().split("CapEff:")[1].split()[0]
        assert int(capabilities, 16) == 0
    own = start(node, "--mib", 40, "--gpu", 1)
    node.limosa("suspend", own.pid)
    assert set(residents(node)) == {(f"limosa-{kind}", uid) for kind in ("vault", "mover") for uid in (0, USER)}
    shown = node.limosa("doctor", "-o", "json", rc=None).json["checks"]
    text = next(check["detail"] for check in shown if check["name"] == "parking")
    for pid in residents(node).values():
        assert f"process {pid}" in text
    there = node.limosa("arena", "-o", "json").json
    (other,) = there["others"]
    assert (there["user"], there["held_by"]) == ("", {str(own.pid): 64 << 20})
    assert (other["user"], other["held_by"], other["mover"]) == (
        str(USER),
        {str(job.pid): 64 << 20},
        residents(node)["limosa-mover", USER],
    )
    assert f"user {USER}\n  arena: 64 MiB" in node.limosa("arena").stdout
    for one in (job, own):
        node.limosa("resume", one.pid)
        one.goes_on(2)
    for one in (job, own):
        one.finish()


@pytest.mark.criu
@pytest.mark.parametrize("how", ["running", "suspended"])
def test_root_writes_and_restores_a_users_job(node: Any, place: Path, how: str) -> None:
    """Root's mover works in root's folder; the vault that holds the job's memory meanwhile is the job's owner's."""
    job = users_job(node, place)
    small = ["--chunk", "4MiB"]
    if how == "suspended":
        node.limosa("suspend", job.pid)
    may = may_be_dumped()
    if not may:
        refused = node.limosa("checkpoint", "-o", "json", job.pid, "--output", place / "kept", rc=11)
        assert refused.json["error"]["id"] == "resource-limits"
        small.append("--force=resource-limits")
    said = node.limosa("checkpoint", "-o", "json", job.pid, "--output", place / "kept", "-R", *small, rc=None)
    there = residents(node)
    assert ("limosa-mover", 0) in there, "the chunks were written before CRIU was asked"
    assert ("limosa-vault", 0) not in there
    if how == "suspended":
        assert ("limosa-vault", USER) in there
        node.limosa("resume", job.pid)
    job.goes_on(2)
    if may:
        assert (said.rc, said.json["way"]) == (0, "parked")
        node.limosa("checkpoint", job.pid, "--output", place / "image", *small)
        job.until_gone()
        assert node.limosa("restore", "-o", "json", place / "image", "--to", 1).json["way"] == "parked"
        job.goes_on(2)
        assert os.stat(f"/proc/{job.pid}").st_uid == USER
    else:  # all but CRIU's own part, and the way back from there
        assert (said.rc, said.json["error"]["id"], "rlimit" in said.stderr) == (21, "criu-failed", True), said
    assert node.limosa("move", "-o", "json", job.pid, "--to", int(not may)).json["results"][0]["way"] == "parked"
    job.goes_on(2)
    assert ("limosa-vault", USER) in residents(node)
    assert ("limosa-vault", 0) not in residents(node)
    job.finish()


def may_be_dumped() -> bool:
    """Whether CRIU can ask for another user's limits here: root has that right, but not in every container."""
    capabilities = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
    return bool(int(capabilities, 16) >> _CAP_SYS_RESOURCE & 1)


_CALLS = f"""{_BECOME}
import socket
from limosa.ipc.messages import receive, send
if sys.argv[2:]:
    become()
one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
one.settimeout(5)
try:
    one.connect(sys.argv[1])
    send(one, {{"verb": "ping"}})
    print(receive(one).data)
except (PermissionError, ConnectionError, EOFError) as error:
    sys.exit(type(error).__name__)
"""


@pytest.mark.parametrize("kind", ["vault", "mover"])
def test_who_is_not_the_owner_is_not_let_in(node: Any, place: Path, kind: str) -> None:
    """Also where the file's mode would let him: who connects is asked for."""
    own = start(node, "--mib", 40)
    node.limosa("suspend", own.pid)
    (path,) = [p for p in (place / "limosa" / "0" / kind).iterdir() if p.is_socket()]
    node.run([sys.executable, "-c", _CALLS, path])
    kept_out = node.run([sys.executable, "-c", _CALLS, path, "as user"], rc=None)
    assert (kept_out.rc, "PermissionError" in kept_out.stderr) == (1, True)
    os.chmod(path, 0o777)
    kept_out = node.run([sys.executable, "-c", _CALLS, path, "as user"], rc=None)
    assert (kept_out.rc, kept_out.stdout) == (1, "")
    node.limosa("resume", own.pid)
    own.goes_on(2)
    own.finish()


def test_a_socket_that_is_another_users_is_not_believed(node: Any, place: Path) -> None:
    """Root is not led to hand a user's memory to somebody else's vault."""
    job = users_job(node, place)
    folder = place / "limosa" / "users" / f"limosa-{USER}"
    (folder / "vault").mkdir(parents=True, exist_ok=True)
    os.chown(folder, USER, USER)
    os.chown(folder / "vault", USER, USER)
    listen = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.bind(sys.argv[1]); s.listen(); time.sleep(60)"
    )
    path = socket_path("vault", USER)
    node.popen([sys.executable, "-c", listen, path])
    waits_for(node, path.exists)
    said = node.limosa("suspend", "-o", "json", job.pid, rc=None)
    assert said.rc == 0
    assert ("limosa-vault", USER) in residents(node), "his own has taken the place of root's socket"
    assert path.stat().st_uid == USER
    node.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


_CALLER = """
import os, sys, time
from cuda.bindings import driver as cu
cu.cuInit(0)
assert cu.cuDevicePrimaryCtxRetain(0)[0] == 0
from limosa import gpu, operation
operation.move(int(sys.argv[1]), to="1")
driver = gpu.Driver()
driver.available()
print("READY", flush=True)
sys.stdin.read()
"""


def test_a_job_that_calls_limosa_is_itself_alone(node: Any) -> None:
    """Vault and mover are nobody's children, and neither they nor its driver worker are told as a part of it."""
    job = start(node, "--mib", 24)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    caller = node.popen([sys.executable, "-c", _CALLER, job.pid], **pipes)
    assert caller.stdout.readline() == "READY\n"
    children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
    assert not set(map(int, children)) & set(residents(node).values())
    assert len(residents(node)) == 2
    shown = {j["pid"]: [p["pid"] for p in j["processes"]] for j in node.limosa("ps", "-o", "json").json["jobs"]}
    assert shown == {caller.pid: [caller.pid], job.pid: [job.pid]}
    caller.stdin.close()
    assert caller.wait(15) == 0
    job.goes_on(2)
    job.finish()
