"""What a hostile container puts at a path, in a socket's name or in a reply gets it nothing that is not its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers.runtimes import bundle_config

from limosa.parking import LIBRARY

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
_HERE = Path(__file__).parent
INSIDE = f"/lib/{LIBRARY.name}"


@pytest.fixture
def hostile(runc: Any, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """runc, whose notes Limosa finds."""
    monkeypatch.setenv("LIMOSA_CONTAINER_STATE", str(runc.place / "state"))
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    return runc


def name() -> str:
    return f"hostile-{secrets.token_hex(3)}"


def numbers(node: Any) -> dict[str, int]:
    """The machine's own GPU nodes."""
    return {one: os.stat(f"/proc/{node.pid}/root/dev/{one}").st_rdev for one in ("nvidia0", "nvidia1")}


def in_its_mounts(one: Any, script: str) -> None:
    """Does in a container's mount namespace what its root can do who may mount."""
    subprocess.run(["nsenter", "-t", str(one.pid), "--mount", "--root", "--wd", "/bin/sh", "-c", script], check=True)


# What may stand where a container's /dev is; its own stays reachable as /own.
_MOVED = "busybox mkdir /own && busybox mount --move /dev /own && "
DEV = {
    "link-to-its-own": f"{_MOVED} busybox rmdir /dev && busybox ln -s /own /dev",
    "link-to-proc": f"{_MOVED} busybox rmdir /dev && busybox ln -s /proc/1/root/own /dev",
    "link-up": f"{_MOVED} busybox rmdir /dev && busybox ln -s ../../../../dev /dev",
    "folder-of-its-root": f"{_MOVED} for one in /own/*; do busybox ln -s $one /dev/${{one##*/}}; done",
    "file": f"{_MOVED} busybox rmdir /dev && echo x > /dev",
    "nothing": f"{_MOVED} busybox rmdir /dev",
}
CHANGE = """
import sys
from limosa.containers import devices
from limosa.process.identity import Identity
pid = int(sys.argv[1])
print(bool(devices.refusal(pid, [1])))
for change in (lambda who: devices.add(who, [1]), lambda who: devices.leave(who, [1], [0, 1])):
    try:
        change(Identity.of(pid))
        print("done")
    except OSError as error:
        print("refused")
"""


@pytest.mark.parametrize("what", DEV)
def test_a_dev_that_is_none_is_not_changed(hostile: Any, what: str) -> None:
    before = numbers(hostile.node)
    one = hostile.start("/bin/sleep", 1000, gpus=(0,), name=name())
    assert hostile.node.python(CHANGE.partition("for")[0], one.pid).stdout.split() == ["False"]
    in_its_mounts(one, f"set -e; PATH=/bin; {DEV[what]}")
    assert hostile.node.python(CHANGE, one.pid).stdout.split() == ["True", "refused", "refused"]
    assert numbers(hostile.node) == before
    own = os.listdir(f"/proc/{one.pid}/root/own")
    assert "nvidia0" in own
    assert "nvidia1" not in own


def test_what_changes_all_the_time_ends_one_way_or_the_other(hostile: Any) -> None:
    """A program in the container puts something else at the node's place, again and again, while the job is moved."""
    before = numbers(hostile.node)
    one = hostile.start("/job", 16, 20, name=name())
    one.goes_on()
    loop = "while :; do for n in 0 1; do rm -rf /dev/nvidia$n; busybox ln -s /etc/passwd /dev/nvidia$n; "
    loop += "rm -f /dev/nvidia$n; mkdir /dev/nvidia$n; busybox rmdir /dev/nvidia$n; echo x > /dev/nvidia$n; done; done"
    argv = [*hostile.exec_words(one), "/bin/sh", "-c", loop]
    racing = hostile.node.popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=hostile.environment())
    try:
        for to in (1, 0, 1, 0):
            said = hostile.node.limosa("move", "-o", "json", "--force=all", one.pid, "--to", to, rc=None)
            assert said.rc in (0, 2, 13, 21, 40), said
            assert numbers(hostile.node) == before
            if said.rc == 40:
                break
    finally:
        racing.kill()
        with contextlib.suppress(Exception):
            one.run("/bin/sh", "-c", "kill -9 -1; :", rc=None)
    assert (Path("/etc/passwd")).is_file()


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("liar") / "liar.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", made, _HERE / "liar.c"], check=True)
    return made


@pytest.mark.parametrize("mode", ["squat", "garbage", "silent", "gift"])
def test_a_liar_in_the_shims_place_is_given_nothing(hostile: Any, liar: Path, mode: str) -> None:
    called = name()
    config = bundle_config(called, hostile.parent, ["/job", "16", "20"], (0,))
    for source, target in ((LIBRARY, INSIDE), (liar, "/lib/liar.so")):
        bind = {"destination": target, "type": "bind", "source": str(source), "options": ["bind", "ro"]}
        config["mounts"].append(bind)
    config["process"]["env"] += [f"LD_PRELOAD={INSIDE}:/lib/liar.so", f"LIAR={mode}"]
    one = hostile.start("/job", 16, 20, name=called, mounts=config["mounts"], process=config["process"])
    one.goes_on()
    begun = time.monotonic()
    hostile.node.limosa("ps", "-o", "json")
    for to in (1, 0):
        said = hostile.node.limosa("move", "-o", "json", one.pid, "--to", to, rc=None, limit=120)
        assert said.rc in (0, 2, 13, 21), said
    assert time.monotonic() - begun < 150
    one.goes_on()
    told = hostile.place / called / "up" / "liar"
    given = [line.split() for line in told.read_text().splitlines()] if told.exists() else []
    assert all(fds == "0" for _, fds in given), given
    if mode == "squat":
        assert given == []
    else:
        assert given, "it was asked, or this test shows nothing"
