"""Jobs under the shim written to disk and brought back, device memory as chunks: on software GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from soft_command import child_of, pieces, start, used

from limosa.image.manifest import digest_line, digest_of
from limosa.parking.names import names_of
from limosa.parking.shim import Shim
from limosa.process.criu.find import find
from limosa.process.identity import Identity

pytestmark = pytest.mark.criu

MIB = 1 << 20
SMALL = ["--chunk", "4MiB"]


def test_left_running_while_its_memory_changes(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 48)
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    assert said["way"] == "parked"
    assert said["device_bytes"] >= 48 * MIB
    assert [r["in_pause"] for r in said["rounds"]][-2:] == [False, True]
    job.goes_on(3)
    shown = parked.says(0, "", "inspect", tmp_path / "image")
    assert shown["image_schema"] == 2
    checked = parked.says(0, "", "verify", tmp_path / "image")
    assert checked["ok"]
    assert len(checked["files"]) == len(shown["files"]) + shown["chunks"]
    job.finish()


def test_ended_and_restored_on_the_other_gpu(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 48)
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    assert said["state"] == "ended"
    assert max(used(parked)) < 16 * MIB
    job.until_gone()
    said = parked.says(0, "", "restore", tmp_path / "image", "--to", 1)
    assert said["way"] == "parked"
    assert said["device_bytes"] >= 48 * MIB
    job.goes_on(2)
    assert parked.where(job) == [1]
    assert used(parked)[0] < 32 * MIB
    assert all(m.imported and not m.away for m in pieces(job))
    assert parked.says(0, "", "move", job.pid, "--to", 0)["way"] == "parked"
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("how", ["running", "suspended"])
def test_nothing_of_ours_is_in_the_job_while_criu_dumps(parked: Any, tmp_path: Path, how: str) -> None:
    """No connection to its shim, no descriptor of memory, no arena: whoever looks while it is frozen sees none."""
    job = start(parked, "--mib", 32)
    if how == "suspended":
        parked.limosa("suspend", job.pid)
    writing = parked.later("checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    seen, connections = set(), set()
    while writing.poll() is None:
        if frozen(job.pid):
            links, n = descriptors(job.pid), shim_sockets(job.pid)
            if frozen(job.pid):
                seen |= links
                connections.add(n)
    assert parked.judge(parked.ends(writing), 0, "")["way"] == "parked"
    assert connections == {1}, "the socket that it listens on, and no other"
    assert not [link for link in seen if "memfd:limosa" in link or "/memory/" in link]
    if how == "suspended":
        assert parked.state(job) == "checkpointed"
        parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("more", [[], ["-R"]])
def test_what_was_suspended_was_not_copied_while_it_ran(parked: Any, tmp_path: Path, more: list[str]) -> None:
    job = start(parked, "--mib", 16)
    parked.limosa("suspend", job.pid)
    said = parked.limosa("checkpoint", job.pid, "--output", tmp_path / "image", *more).stdout
    assert "MiB of device memory" in said
    assert "while it ran" not in said
    if more:
        parked.limosa("resume", job.pid)
        job.finish()


def frozen(pid: int) -> bool:
    """Whether CRIU holds it: a tracer, and stopped."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    return values["TracerPid"].strip() != "0" and "t" in values["State"]


def descriptors(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def shim_sockets(pid: int) -> int:
    (name,) = {name.address for name in names_of(pid)}
    return Path(f"/proc/{pid}/net/unix").read_text().count(name.replace("\0", "@") + "\n")


def test_what_changes_is_copied_again_and_no_more(parked: Any, tmp_path: Path) -> None:
    """Rounds as told; each but the first and those in the pause copies what the GPU's hash found changed."""
    job = start(parked, "--mib", 48)
    for rounds in (0, 1, 2):
        path = tmp_path / f"image{rounds}"
        said = parked.says(0, "", "checkpoint", job.pid, "--output", path, "-R", *SMALL, "--rounds", rounds)
        before = [r for r in said["rounds"] if not r["in_pause"]]
        assert len(before) <= rounds
        assert len(said["rounds"]) == len(before) + 1
        assert said["rounds"][0]["bytes"] == said["device_bytes"]
        assert parked.says(0, "", "verify", path)["ok"]
        job.goes_on(2)
    job.finish()


def test_a_job_that_rests_is_copied_once(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 48)
    (job.folder / "rest").touch()
    job.wait_for("RESTS")
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    assert [r["bytes"] for r in said["rounds"]] == [said["device_bytes"], 0]
    (job.folder / "rest").unlink()
    job.goes_on(2)
    job.finish()


def test_the_rate_is_kept(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 48)
    options = ["--rate", "16MiB", "--rounds", 1, *SMALL]
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *options)
    assert 2.9 < said["timings"]["copy"] < 15, "no chunk is free"
    assert said["timings"]["pause_seconds"] < said["timings"]["copy"]
    job.goes_on(2)
    job.finish()


def test_equal_chunks_are_written_once(parked: Any, tmp_path: Path) -> None:
    """Two processes with the same contents: replicas."""
    job = start(parked, "--mib", 32, "--child", "--still")
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    assert said["device_bytes"] >= 64 * MIB
    shown = parked.says(0, "", "inspect", tmp_path / "image")
    assert shown["device_bytes"] == said["device_bytes"]
    assert shown["distinct_bytes"] <= said["device_bytes"] // 2 + 4 * MIB
    assert len(list((tmp_path / "image/chunks").glob("*/*"))) == shown["chunks"]
    parked.limosa("restore", tmp_path / "image", "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_job_that_was_moved_or_restored_is_written_again(parked: Any, tmp_path: Path) -> None:
    """The driver could not bring back what came by the parked way: it goes the parked way again."""
    job = start(parked, "--mib", 32)
    parked.limosa("move", job.pid, "--to", 1)
    for n in range(2):
        parked.limosa("checkpoint", job.pid, "--output", tmp_path / f"image{n}", *SMALL)
        job.until_gone()
        parked.limosa("restore", tmp_path / f"image{n}", "--to", n)
        assert parked.where(job) == [n]
        job.goes_on(2)
    parked.limosa("suspend", job.pid)
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_a_job_that_saw_one_gpu_is_restored_on_another(parked: Any, tmp_path: Path) -> None:
    """There it can import nothing: it makes its memory itself. Back on the first one it imports again."""
    job = start(parked, "--mib", 32, CUDA_VISIBLE_DEVICES="0")
    for n, to in enumerate((1, 0, 1)):
        parked.limosa("checkpoint", job.pid, "--output", tmp_path / f"image{n}", *SMALL)
        job.until_gone()
        assert parked.says(0, "", "restore", tmp_path / f"image{n}", "--to", to)["way"] == "parked"
        assert parked.where(job) == [to]
        assert all(m.imported is (to == 0) for m in pieces(job))
        job.goes_on(2)
    job.finish()


def test_a_process_without_the_shim_goes_the_drivers_way_beside(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 32, "--child", "--child-without", "LD_PRELOAD")
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    assert 32 * MIB <= said["device_bytes"] < 64 * MIB
    parked.limosa("restore", tmp_path / "image", "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_suspended_job_is_written_from_its_arena(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 32)
    parked.limosa("suspend", job.pid)
    steps = parked.says(0, "", "plan", "checkpoint", job.pid, "--output", tmp_path / "kept", "-R")["steps"]
    assert not [step for step in steps if "job runs" in step or "goes on" in step]
    shown = parked.limosa("checkpoint", job.pid, "--output", tmp_path / "shown", "-R", *SMALL).stdout
    assert "is suspended, as before" in shown
    assert "runs" not in shown
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "kept", "-R", *SMALL)
    assert (said["way"], said["state"]) == ("parked", "checkpointed")
    parked.limosa("resume", job.pid, "--to", 1)
    job.goes_on(2)
    parked.limosa("suspend", job.pid)
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    assert said["device_bytes"] >= 32 * MIB
    host = parked.says(0, "", "inspect", tmp_path / "image")
    assert sum(f["size"] for f in host["files"]) < 32 * MIB, "it is not in CRIU's files besides"
    job.until_gone()
    parked.limosa("restore", tmp_path / "image", "--to", 0)
    assert parked.where(job) == [0]
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("asleep", ["all of it", "its child"])
def test_an_arena_is_kept_where_the_job_has_let_go_of_it_and_everybody_is_killed(
    slow: Any, tmp_path: Path, asleep: str
) -> None:
    """CRIU may not meet it in the job; who holds it instead is not asked to forget it on the way back."""
    job = start(slow, "--mib", 32, "--child")
    child = child_of(job)
    slow.limosa("suspend", job.pid if asleep == "all of it" else child)
    working = slow.later("checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL, halts="dump begin")
    slow.reaches(working, "dump begin")
    slow.kill("limosa", working)
    slow.kill("limosa-vault")
    working.communicate(timeout=120)
    slow.limosa("recover")
    with Shim(Identity.of(child)) as shim:
        kept = shim.kept()
        assert kept
        for fd in kept:
            os.close(fd)
    slow.limosa("resume", job.pid if asleep == "all of it" else child)
    job.goes_on(3)
    job.finish()


@pytest.mark.parametrize("damage", ["flip", "short", "missing", "link", "manifest"])
def test_a_damaged_chunk_is_no_job(parked: Any, tmp_path: Path, damage: str) -> None:
    """Damage that shows without reading is found before anything starts; the rest before the job is opened."""
    job = start(parked, "--mib", 32)
    image = tmp_path / "image"
    parked.limosa("checkpoint", job.pid, "--output", image, *SMALL)
    job.until_gone()
    chunk = sorted(image.glob("chunks/*/*"))[0]
    whole = chunk.read_bytes()
    if damage == "flip":
        chunk.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "short":
        chunk.write_bytes(whole[:-1])
    elif damage == "manifest":
        manifest = image / "manifest.json"
        manifest.write_text(manifest.read_text().replace(chunk.name, "../" * 21 + "x"))
        data = manifest.read_bytes()
        (image / "manifest.blake3").write_bytes(digest_line(digest_of(data)))
    else:
        chunk.unlink()
        if damage == "link":
            chunk.symlink_to("/etc/passwd")
    error = parked.says(16, "damaged-image", "restore", image)["error"]
    assert str(image) in error["message"]
    if damage in ("flip", "short", "missing"):
        error = parked.says(16, "damaged-image", "restore", image, "--no-verify")["error"]
        assert str(image) in error["message"]
        assert "limosa verify" in error["hint"] or damage != "flip"
    assert not job.alive()
    assert max(used(parked)) < 32 * MIB, "nothing is left on the GPUs"
    if damage in ("flip", "short", "missing"):
        assert [p["path"] for p in parked.says(16, "", "verify", image)["problems"]] == [
            f"chunks/{chunk.name[:2]}/{chunk.name}"
        ]
        chunk.write_bytes(whole)
        chunk.chmod(0o600)
        parked.limosa("restore", image)
        job.goes_on(2)
        job.finish()


def test_no_room_is_seen_before_anything_starts(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 64)
    parked.limosa("checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    job.until_gone()
    with parked.switches.fill(1, leave=32 * MIB):
        parked.says(14, "gpu-room", "restore", tmp_path / "image", "--to", 1)
    plan = parked.says(0, "", "plan", "restore", tmp_path / "image", "--to", 1)
    assert plan["way"] == "parked"
    with parked.switches.fill(1, leave=160 * MIB):  # once, not twice
        parked.limosa("restore", tmp_path / "image", "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_job_that_fills_its_gpu_is_left_running_and_restored(parked: Any, tmp_path: Path) -> None:
    """What was taken out of it is still there: it needs no room a second time."""
    job = start(parked, "--mib", 320)
    assert parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R")["way"] == "parked"
    job.goes_on(2)
    parked.limosa("checkpoint", job.pid, "--output", tmp_path / "last")
    job.until_gone()
    parked.limosa("restore", tmp_path / "last", "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_full_disk_leaves_the_job_running_and_nothing_else(soft: Any, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24M", "none", small], check=True)
    try:
        parked = soft(gpus=2, memory="512MiB")
        job = start(parked, "--mib", 48)
        said = parked.says(15, "", "checkpoint", job.pid, "--output", small / "image", *SMALL, "--force=disk-room")
        assert said["error"]["id"] == "no-room-on-host"
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)
    job.goes_on(2)
    assert all(not m.away for m in pieces(job))
    job.finish()


@pytest.mark.parametrize(
    ("rule", "stays"),
    [
        ("function=cuMemImportFromShareableHandle caller=limosa-mover result=INVALID_VALUE", False),
        ("function=cuMemcpyDtoHAsync caller=limosa-mover nth=3 result=UNKNOWN", True),
        ("function=cuMemcpyDtoHAsync caller=limosa-mover crash=caller", False),
        ("function=cuLaunchKernel caller=limosa-mover result=UNKNOWN", True),
        ("function=cuLaunchKernel caller=limosa-mover nth=2 result=UNKNOWN", False),
        ("function=cuMemHostRegister caller=limosa-mover result=OUT_OF_MEMORY", True),
        ("function=cuMemUnmap caller=job.py result=UNKNOWN", False),
        ("function=cuCtxSynchronize caller=job.py result=UNKNOWN", True),
        ("function=cuCheckpointProcessCheckpoint result=UNKNOWN", False),
        ("function=cuCheckpointProcessRestore result=UNKNOWN", True),
        ("function=cuMemImportFromShareableHandle caller=job.py result=UNKNOWN", False),
    ],
)
def test_whatever_fails_once_the_job_runs_on_with_its_memory(
    parked: Any, tmp_path: Path, rule: str, stays: bool
) -> None:
    job = start(parked, "--mib", 32)
    parked.switches.add(rule)
    options = ["-R"] if stays else []
    answer = parked.limosa("checkpoint", job.pid, "--output", tmp_path / "image", *SMALL, *options, rc=None)
    assert answer.rc in (0, 18, 21), answer
    if answer.rc == 0 and not stays:
        job.until_gone()
        parked.limosa("restore", tmp_path / "image", rc=None)
        if not job.alive():  # the fault was waiting for it
            parked.limosa("restore", tmp_path / "image")
    job.goes_on(2)
    if answer.rc:
        assert list(tmp_path.glob(".image*")) == []
        parked.limosa("checkpoint", job.pid, "--output", tmp_path / "again", "-R", *SMALL)
    job.goes_on(2)
    job.finish()


def test_a_mover_killed_under_a_job_that_came_the_parked_way_is_a_failure(parked: Any, tmp_path: Path) -> None:
    """The way is open: 21 and another try, not 13."""
    job = start(parked, "--mib", 32)
    parked.limosa("move", job.pid, "--to", 1)
    parked.switches.add("function=cuMemcpyDtoHAsync caller=limosa-mover crash=caller")
    said = parked.says(21, "failed", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    assert "try again" in said["error"]["hint"]
    parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    job.goes_on(2)
    job.finish()


WHO = ("limosa", "limosa-mover", "limosa-vault")
MOMENTS = {
    "checkpoint": ("park begin", "lock done", "checkpoint done", "post-dump done", "commit begin"),
    "leave": ("park begin", "checkpoint begin", "post-dump done", "restore done", "unlock done"),
    "restore": ("criu-restore begin", "criu-restore done", "restore begin", "restore done", "unlock done"),
}
KILLS = [(who, verb, moment) for moment in range(5) for who in WHO for verb in MOMENTS]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("who", "verb", "moment"),
    [
        pytest.param(*kill, id="-".join((kill[0], kill[1], MOMENTS[kill[1]][kill[2]].replace(" ", "-"))))
        for kill in (KILLS if "LIMOSA_LONG_TESTS" in os.environ else KILLS[::4])
    ],
)
def test_whoever_is_killed_the_job_or_its_image_is_there(
    slow: Any, tmp_path: Path, who: str, verb: str, moment: int
) -> None:
    """SIGKILL when a step has been journalled, then one recover: it runs, or has an image."""
    job = start(slow, "--mib", 64)
    image = tmp_path / "image"
    if verb == "restore":
        slow.limosa("checkpoint", job.pid, "--output", image, *SMALL)
        job.until_gone()
        working = slow.later("restore", image, halts=MOMENTS[verb][moment])
    else:
        leave = ["-R"] if verb == "leave" else []
        working = slow.later("checkpoint", job.pid, "--output", image, *leave, *SMALL, halts=MOMENTS[verb][moment])
    slow.reaches(working, MOMENTS[verb][moment])
    if who == "limosa" or slow.has(who) or verb != "restore":  # at a restore's end they have nothing more to do
        slow.kill(who, working)
    slow.go_on(working)
    working.communicate(timeout=120)
    assert (working.returncode == -signal.SIGKILL) is (who == "limosa")
    slow.limosa("recover", rc=None)
    assert list(tmp_path.glob(".image*")) == []
    if image.exists():
        assert slow.says(0, "", "verify", image)["ok"]
    if not job.alive():
        assert verb != "leave"
        job.until_gone()
        slow.limosa("restore", image)
    job.goes_on(3)
    on = [size > 48 * MIB for size in used(slow)]
    assert sorted(on) == [False, True]
    assert slow.limosa("move", job.pid, "--to", int(on[0]), "-o", "json").json["way"] == "parked"
    job.goes_on(2)
    job.finish()


ASKS_MEANWHILE = """\
#!{python}
import os, socket, subprocess, sys, time
if "dump" in sys.argv and os.path.exists({times!r}):
    os.remove({times!r})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect({name!r})
        time.sleep(0.2)  # it is accepted
        sys.exit(subprocess.run([*{real!r}, *sys.argv[1:]], close_fds=False).returncode)
os.execv({real!r}[0], [*{real!r}, *sys.argv[1:]])
"""


@pytest.mark.parametrize("leave", [True, False])
def test_who_asks_the_shim_while_criu_looks_is_waited_for(parked: Any, tmp_path: Path, leave: bool) -> None:
    """A ``limosa ps`` at the wrong moment: to CRIU it is a socket to a process outside of the job."""
    job = start(parked, "--mib", 16)
    program, once = tmp_path / "criu-asked", tmp_path / "once"
    (name,) = names_of(job.pid)
    told = {"python": sys.executable, "times": str(once), "name": name.address, "real": list(find().argv)}
    program.write_text(ASKS_MEANWHILE.format(**told))
    program.chmod(0o755)
    parked.limosa("doctor", "--criu", program, rc=None)  # it is tried first
    once.touch()
    options = ["--output", tmp_path / "image", "--criu", program, *(["-R"] if leave else []), *SMALL]
    parked.says(0, "", "checkpoint", job.pid, *options)
    assert not once.exists()
    if not leave:
        job.until_gone()
        parked.says(0, "", "restore", tmp_path / "image")
    job.goes_on(2)
    parked.says(0, "", "verify", tmp_path / "image")
    job.finish()
