"""Jobs under the shim written to disk and brought back, device memory as chunks: on software GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from limosa.image.manifest import digest_line, digest_of
from limosa.parking import LIBRARY
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

pytestmark = pytest.mark.criu

MIB = 1 << 20
SMALL = ["--chunk", "4MiB"]


@pytest.fixture
def chunked(soft: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    return soft(gpus=2, memory="512MiB")


def start(node: Any, *arguments: object) -> Any:
    return node.job(*arguments, env={"LD_PRELOAD": str(LIBRARY)})


def pieces(job: Any) -> list[Any]:
    with Shim(Identity.of(job.pid)) as shim:
        return shim.memories()


def used(node: Any) -> list[int]:
    return [gpu["memory_used"] for gpu in node.limosa("gpus", "-o", "json").json["gpus"]]


def test_left_running_while_its_memory_changes(chunked: Any, tmp_path: Path) -> None:
    job = start(chunked, "--mib", 48)
    said = chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    assert said["way"] == "parked"
    assert said["device_bytes"] >= 48 * MIB
    assert [r["in_pause"] for r in said["rounds"]][-2:] == [False, True]
    job.goes_on(3)
    shown = chunked.says(0, "", "inspect", tmp_path / "image")
    assert shown["image_schema"] == 2
    assert chunked.says(0, "", "verify", tmp_path / "image")["ok"]
    job.finish()


def test_ended_and_restored_on_the_other_gpu(chunked: Any, tmp_path: Path) -> None:
    job = start(chunked, "--mib", 48)
    said = chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    assert said["state"] == "ended"
    assert max(used(chunked)) < 16 * MIB
    job.until_gone()
    said = chunked.says(0, "", "restore", tmp_path / "image", "--to", 1)
    assert said["way"] == "parked"
    assert said["device_bytes"] >= 48 * MIB
    job.goes_on(2)
    assert chunked.where(job) == [1]
    assert used(chunked)[0] < 32 * MIB
    assert all(m.imported and not m.away for m in pieces(job))
    assert chunked.says(0, "", "move", job.pid, "--to", 0)["way"] == "parked"
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("how", ["running", "suspended"])
def test_nothing_of_ours_is_in_the_job_while_criu_dumps(chunked: Any, tmp_path: Path, how: str) -> None:
    """No connection to its shim, no descriptor of memory, no arena: whoever looks while it is frozen sees none."""
    job = start(chunked, "--mib", 32)
    if how == "suspended":
        chunked.limosa("suspend", job.pid)
    writing = chunked.later("checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    seen, connections = set(), set()
    while writing.poll() is None:
        if frozen(job.pid):
            links, n = descriptors(job.pid), shim_sockets(job.pid)
            if frozen(job.pid):
                seen |= links
                connections.add(n)
    assert chunked.judge(chunked.ends(writing), 0, "")["way"] == "parked"
    assert connections == {1}, "the socket that it listens on, and no other"
    assert not [link for link in seen if "memfd:limosa" in link or "/memory/" in link]
    if how == "suspended":
        assert chunked.state(job) == "checkpointed"
        chunked.limosa("resume", job.pid)
    job.goes_on(2)
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
    return Path(f"/proc/{pid}/net/unix").read_text().count(f"@limosa/shim/{pid}\n")


def test_what_changes_is_copied_again_and_no_more(chunked: Any, tmp_path: Path) -> None:
    """Rounds as told; each but the first and those in the pause copies what the GPU's hash found changed."""
    job = start(chunked, "--mib", 48)
    for rounds in (0, 1, 2):
        path = tmp_path / f"image{rounds}"
        said = chunked.says(0, "", "checkpoint", job.pid, "--output", path, "-R", *SMALL, "--rounds", rounds)
        before = [r for r in said["rounds"] if not r["in_pause"]]
        assert len(before) <= rounds
        assert len(said["rounds"]) == len(before) + 1
        assert said["rounds"][0]["bytes"] == said["device_bytes"]
        assert chunked.says(0, "", "verify", path)["ok"]
        job.goes_on(2)
    job.finish()


def test_a_job_that_rests_is_copied_once(chunked: Any, tmp_path: Path) -> None:
    job = start(chunked, "--mib", 48)
    (job.folder / "rest").touch()
    job.wait_for("RESTS")
    said = chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    assert [r["bytes"] for r in said["rounds"]] == [said["device_bytes"], 0]
    (job.folder / "rest").unlink()
    job.goes_on(2)
    job.finish()


def test_the_rate_is_kept(chunked: Any, tmp_path: Path) -> None:
    job = start(chunked, "--mib", 48)
    options = ["--rate", "24MiB", "--rounds", 1, *SMALL]
    said = chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *options)
    assert 1.9 < said["timings"]["copy"] < 5, "no chunk is free"
    assert said["timings"]["pause_seconds"] < said["timings"]["copy"]
    job.goes_on(2)
    job.finish()


def test_equal_chunks_are_written_once(chunked: Any, tmp_path: Path) -> None:
    """Two processes with the same contents: replicas."""
    job = start(chunked, "--mib", 32, "--child", "--still")
    said = chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    assert said["device_bytes"] >= 64 * MIB
    shown = chunked.says(0, "", "inspect", tmp_path / "image")
    assert shown["device_bytes"] == said["device_bytes"]
    assert shown["distinct_bytes"] <= said["device_bytes"] // 2 + 4 * MIB
    assert len(list((tmp_path / "image/chunks").glob("*/*"))) == shown["chunks"]
    chunked.limosa("restore", tmp_path / "image", "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_job_that_was_moved_or_restored_is_written_again(chunked: Any, tmp_path: Path) -> None:
    """The driver could not bring back what came by the parked way: it goes the parked way again."""
    job = start(chunked, "--mib", 32)
    chunked.limosa("move", job.pid, "--to", 1)
    for n in range(2):
        chunked.limosa("checkpoint", job.pid, "--output", tmp_path / f"image{n}", *SMALL)
        job.until_gone()
        chunked.limosa("restore", tmp_path / f"image{n}", "--to", n)
        assert chunked.where(job) == [n]
        job.goes_on(2)
    chunked.limosa("suspend", job.pid)
    chunked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_a_job_that_saw_one_gpu_is_restored_on_another(chunked: Any, tmp_path: Path) -> None:
    """There it can import nothing: it makes its memory itself. Back on the first one it imports again."""
    job = chunked.job("--mib", 32, env={"LD_PRELOAD": str(LIBRARY), "CUDA_VISIBLE_DEVICES": "0"})
    for n, to in enumerate((1, 0, 1)):
        chunked.limosa("checkpoint", job.pid, "--output", tmp_path / f"image{n}", *SMALL)
        job.until_gone()
        assert chunked.says(0, "", "restore", tmp_path / f"image{n}", "--to", to)["way"] == "parked"
        assert chunked.where(job) == [to]
        assert all(m.imported is (to == 0) for m in pieces(job))
        job.goes_on(2)
    job.finish()


def test_a_process_without_the_shim_goes_the_drivers_way_beside(chunked: Any, tmp_path: Path) -> None:
    job = start(chunked, "--mib", 32, "--child", "--child-without", "LD_PRELOAD")
    said = chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    assert 32 * MIB <= said["device_bytes"] < 64 * MIB
    chunked.limosa("restore", tmp_path / "image", "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_suspended_job_is_written_from_its_arena(chunked: Any, tmp_path: Path) -> None:
    job = start(chunked, "--mib", 32)
    chunked.limosa("suspend", job.pid)
    said = chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "kept", "-R", *SMALL)
    assert (said["way"], said["state"]) == ("parked", "checkpointed")
    chunked.limosa("resume", job.pid, "--to", 1)
    job.goes_on(2)
    chunked.limosa("suspend", job.pid)
    said = chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    assert said["device_bytes"] >= 32 * MIB
    host = chunked.says(0, "", "inspect", tmp_path / "image")
    assert sum(f["size"] for f in host["files"]) < 32 * MIB, "it is not in CRIU's files besides"
    job.until_gone()
    chunked.limosa("restore", tmp_path / "image", "--to", 0)
    assert chunked.where(job) == [0]
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("damage", ["flip", "short", "missing", "link", "manifest"])
def test_a_damaged_chunk_is_no_job(chunked: Any, tmp_path: Path, damage: str) -> None:
    """Damage that shows without reading is found before anything starts; the rest before the job is opened."""
    job = start(chunked, "--mib", 32)
    image = tmp_path / "image"
    chunked.limosa("checkpoint", job.pid, "--output", image, *SMALL)
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
    error = chunked.says(16, "damaged-image", "restore", image)["error"]
    assert str(image) in error["message"]
    if damage in ("flip", "short", "missing"):
        error = chunked.says(16, "damaged-image", "restore", image, "--no-verify")["error"]
        assert str(image) in error["message"]
        assert "limosa verify" in error["hint"] or damage != "flip"
    assert not job.alive()
    assert max(used(chunked)) < 32 * MIB, "nothing is left on the GPUs"
    if damage in ("flip", "short", "missing"):
        assert [p["path"] for p in chunked.says(16, "", "verify", image)["problems"]] == [
            f"chunks/{chunk.name[:2]}/{chunk.name}"
        ]
        chunk.write_bytes(whole)
        chunk.chmod(0o600)
        chunked.limosa("restore", image)
        job.goes_on(2)
        job.finish()


def test_no_room_is_seen_before_anything_starts(chunked: Any, tmp_path: Path) -> None:
    job = start(chunked, "--mib", 64)
    chunked.limosa("checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    job.until_gone()
    with chunked.switches.fill(1, leave=32 * MIB):
        chunked.says(14, "gpu-room", "restore", tmp_path / "image", "--to", 1)
    plan = chunked.says(0, "", "plan", "restore", tmp_path / "image", "--to", 1)
    assert plan["way"] == "parked"
    with chunked.switches.fill(1, leave=160 * MIB):  # once, not twice
        chunked.limosa("restore", tmp_path / "image", "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_job_that_fills_its_gpu_is_left_running_and_restored(chunked: Any, tmp_path: Path) -> None:
    """What was taken out of it is still there: it needs no room a second time."""
    job = start(chunked, "--mib", 320)
    assert chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R")["way"] == "parked"
    job.goes_on(2)
    chunked.limosa("checkpoint", job.pid, "--output", tmp_path / "last")
    job.until_gone()
    chunked.limosa("restore", tmp_path / "last", "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_full_disk_leaves_the_job_running_and_nothing_else(soft: Any, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24M", "none", small], check=True)
    try:
        chunked = soft(gpus=2, memory="512MiB")
        job = start(chunked, "--mib", 48)
        said = chunked.says(15, "", "checkpoint", job.pid, "--output", small / "image", *SMALL, "--force=disk-room")
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
    chunked: Any, tmp_path: Path, rule: str, stays: bool
) -> None:
    job = start(chunked, "--mib", 32)
    chunked.switches.add(rule)
    options = ["-R"] if stays else []
    answer = chunked.limosa("checkpoint", job.pid, "--output", tmp_path / "image", *SMALL, *options, rc=None)
    assert answer.rc in (0, 18, 21), answer
    if answer.rc == 0 and not stays:
        job.until_gone()
        chunked.limosa("restore", tmp_path / "image", rc=None)
        if not job.alive():  # the fault was waiting for it
            chunked.limosa("restore", tmp_path / "image")
    job.goes_on(2)
    if answer.rc:
        assert list(tmp_path.glob(".image*")) == []
        chunked.limosa("checkpoint", job.pid, "--output", tmp_path / "again", "-R", *SMALL)
    job.goes_on(2)
    job.finish()


def test_a_mover_killed_under_a_job_that_came_the_parked_way_is_a_failure(chunked: Any, tmp_path: Path) -> None:
    """The way is open: 21 and another try, not 13."""
    job = start(chunked, "--mib", 32)
    chunked.limosa("move", job.pid, "--to", 1)
    chunked.switches.add("function=cuMemcpyDtoHAsync caller=limosa-mover crash=caller")
    said = chunked.says(21, "failed", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    assert "try again" in said["error"]["hint"]
    chunked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    job.goes_on(2)
    job.finish()


WHO = ("limosa", "limosa-mover", "limosa-vault")
MOMENTS = {
    "checkpoint": ("park begin", "lock done", "checkpoint done", "post-dump done", "commit begin"),
    "leave": ("park begin", "checkpoint begin", "post-dump done", "restore done", "unlock done"),
    "restore": ("criu-restore begin", "criu-restore done", "restore begin", "restore done", "unlock done"),
}
KILLS = [(who, verb, moment) for moment in range(5) for who in WHO for verb in MOMENTS]
SLOW = {
    "costs": [f"{step}=0.12" for step in ("lock", "checkpoint", "restore", "unlock")],
    "speeds": ["copy=200MiB/s", "peer=200MiB/s"],
}
"""A node on which the driver's steps and copies take long enough to be met."""


@pytest.mark.parametrize(
    ("who", "verb", "moment"),
    [
        pytest.param(*kill, id="-".join((kill[0], kill[1], MOMENTS[kill[1]][kill[2]].replace(" ", "-"))))
        for kill in (KILLS if "LIMOSA_LONG_TESTS" in os.environ else KILLS[::4])
    ],
)
def test_whoever_is_killed_the_job_or_its_image_is_there(
    soft: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, who: str, verb: str, moment: int
) -> None:
    """SIGKILL when a step has been journalled, while it is at work; then one recover: it runs, or has an image."""
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    chunked = soft(gpus=2, memory="512MiB", **SLOW)
    job = start(chunked, "--mib", 64)
    image = tmp_path / "image"
    if verb == "restore":
        chunked.limosa("checkpoint", job.pid, "--output", image, *SMALL)
        job.until_gone()
        working = chunked.later("restore", image)
    else:
        leave = ["-R"] if verb == "leave" else []
        working = chunked.later("checkpoint", job.pid, "--output", image, *leave, *SMALL)
    chunked.reaches(working, MOMENTS[verb][moment])
    chunked.kill(who, working)
    working.communicate(timeout=60)
    assert (working.returncode == -signal.SIGKILL) is (who == "limosa")
    chunked.limosa("recover", rc=None)
    assert list(tmp_path.glob(".image*")) == []
    if image.exists():
        assert chunked.says(0, "", "verify", image)["ok"]
    if not job.alive():
        assert verb != "leave"
        job.until_gone()
        chunked.limosa("restore", image)
    job.goes_on(3)
    on = [size > 48 * MIB for size in used(chunked)]
    assert sorted(on) == [False, True]
    assert chunked.limosa("move", job.pid, "--to", int(on[0]), "-o", "json").json["way"] == "parked"
    job.goes_on(2)
    job.finish()
