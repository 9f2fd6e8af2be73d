"""Every refusal that a machine without a GPU can bring about, through the command line: exit code, id, and the job.

Whatever is refused or undone, the job is as it was: it ticks on, nothing of an image is left, nobody has claimed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import VICTIMS, quickest

from limosa import operation
from limosa.errors import FailedUndone, PidReused
from limosa.gpu.worker_process import Launched
from limosa.image import unfinished
from limosa.operation.jobs import Job
from limosa.process.identity import Identity

pytestmark = pytest.mark.criu


def untouched(runtime: Path, folder: Path) -> None:
    """Nothing of an image, no journal, no claim."""
    assert unfinished(folder) == []
    assert [p.name for kind in ("journals", "claims") for p in runtime.glob(f"*/{kind}/*")] == []


def believed_ended(runtime: Path, pid: int) -> bool:
    """Whether ``limosa run`` would take it that a checkpoint has ended the job."""
    return bool(list(runtime.glob(f"*/ended/{pid}-*")))


@pytest.fixture
def refused(limosa, runtime, tmp_path):
    """``refused(code, id, *arguments)``: the command fails so, in JSON and in words, and has touched nothing."""

    def go(code: int, id_: str, *arguments: object, **options: Any) -> dict[str, Any]:
        result = limosa(*arguments, "-o", "json", rc=code, **options)
        error: dict[str, Any] = result.json["error"]
        assert (error["exit_code"], error["id"]) == (code, id_), error
        assert result.json["schema"] == 1
        assert error["message"] in result.stderr
        untouched(runtime, tmp_path)
        return error

    return go


@pytest.fixture
def dump_refused(refused, runtime, tmp_path):
    """``dump_refused(victim, code, id, *options)``: a checkpoint is, and the job goes on."""

    def go(victim: Any, code: int, id_: str, *options: object, ticks: bool = True, **more: Any) -> dict[str, Any]:
        image = tmp_path / "refused"
        error: dict[str, Any] = refused(code, id_, "checkpoint", victim.pid, "--output", image, *options, **more)
        assert not image.exists()
        assert not believed_ended(runtime, victim.pid)
        if ticks:
            victim.goes_on(2)
        return error

    return go


@pytest.fixture
def inline(start, tmp_path):
    """A job of a few lines that then ticks as all do."""

    def go(code: str, *arguments: object) -> Any:
        program = tmp_path / "inline.py"
        program.write_text(
            f"import sys\nsys.path.insert(0, {str(VICTIMS)!r})\nfrom common import loop\n{code}\nloop()\n"
        )
        place = tmp_path / "inline"
        return start([sys.executable, str(program), str(place)], *arguments, folder=place)

    return go


# --- 2, 10, 11: who ----------------------------------------------------------------------------------------------


def test_2_what_limosa_was_started_from(refused, tmp_path) -> None:
    refused(2, "own-ancestor", "checkpoint", os.getpid(), "--output", tmp_path / "image")


def test_2_a_folder_that_is_nowhere(start, dump_refused, tmp_path) -> None:
    victim = start("counter")
    dump_refused(victim, 2, "usage", "--output", tmp_path / "no" / "image")


def test_10_no_process_a_zombie_and_a_thread(start, refused, tmp_path) -> None:
    image = tmp_path / "image"
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    try:
        refused(10, "zombie", "checkpoint", zombie.pid, "--output", image)
    finally:
        zombie.wait()
    refused(10, "no-such-process", "checkpoint", zombie.pid, "--output", image)
    refused(10, "no-such-process", "suspend", zombie.pid)
    victim = start("threads")
    thread = next(int(t) for t in os.listdir(f"/proc/{victim.pid}/task") if int(t) != victim.pid)
    assert str(victim.pid) in refused(10, "not-a-process", "checkpoint", thread, "--output", image)["hint"]
    victim.goes_on()


def test_11_another_users_job(start, limosa, tmp_path) -> None:
    """As nobody, who here may read all files (or he could not read this Python) and nothing else."""
    victim = start("counter")
    place = Path(tempfile.mkdtemp(prefix="limosa-test-"))  # tmp_path is root's alone
    os.chown(place, 65534, 65534)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    nobody += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", sys.executable, "-m", "limosa"]
    try:
        done = subprocess.run(
            [*nobody, "checkpoint", str(victim.pid), "--output", str(place / "image"), "-ojson"],
            env={**os.environ, "LIMOSA_RUNTIME_DIR": str(place / "run")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 11, (done.stdout, done.stderr)
        assert json.loads(done.stdout)["error"]["id"] == "wrong-user"
        assert not (place / "image").exists()
    finally:
        shutil.rmtree(place)
    victim.goes_on()


def test_11_an_image_that_others_could_have_written(start, limosa, refused, tmp_path) -> None:
    victim = start("counter")
    limosa("checkpoint", victim.pid, "--output", tmp_path / "image", rc=0)
    part = next((tmp_path / "image" / "criu").iterdir())
    os.chown(part, 65534, 65534)
    refused(11, "untrusted-image", "restore", tmp_path / "image")
    os.chown(part, 0, 0)
    os.chmod(part, 0o666)
    refused(11, "untrusted-image", "restore", tmp_path / "image")
    os.chmod(part, 0o600)
    assert not victim.alive()
    limosa("restore", tmp_path / "image", rc=0)
    victim.goes_on()
    victim.finish()


# --- 13: what cannot be dumped -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "id_"), [("io_uring", "io-uring"), ("sysv", "sysv-ipc"), ("posix_mq", "message-queue")]
)
def test_13_what_criu_cannot_dump(start, dump_refused, program, id_) -> None:
    victim = start(program)
    if program == "io_uring":
        assert "io_uring open" in victim.text() or "io_uring 3" in victim.text(), "the kernel opens none for us"
    dump_refused(victim, 13, id_)


def test_13_a_pipe_to_somebody_outside(start, dump_refused) -> None:
    ours, theirs = os.pipe()
    try:
        inherit = f'exec 9>/proc/{os.getpid()}/fd/{theirs}; exec "$0" "$@"'
        victim = start("counter", via=("sh", "-c", inherit, sys.executable))
        assert "descriptor 9" in dump_refused(victim, 13, "pipe-outside")["message"]
    finally:
        os.close(ours)
        os.close(theirs)


def test_13_sockets_to_somebody_outside(start, inline, dump_refused, tmp_path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock"))
        server.listen()
        victim = inline(f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({str(tmp_path / 'sock')!r})")
        connection, _ = server.accept()
        with connection:
            dump_refused(victim, 13, "socket-outside")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(64):
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        victim = start("tcp_client", server.getsockname()[1])
        assert "--tcp-close" in dump_refused(victim, 13, "tcp-outside")["hint"]
        victim.kill()


def test_13_a_file_lock_and_with_the_option_it_is_held_again(inline, limosa, dump_refused, tmp_path) -> None:
    lock = tmp_path / "lock"
    victim = inline(f"import fcntl\nlock = open({str(lock)!r}, 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)")
    dump_refused(victim, 13, "file-locks")
    limosa("checkpoint", victim.pid, "--output", tmp_path / "image", "--file-locks", rc=0)
    limosa("restore", tmp_path / "image", rc=0)
    victim.goes_on()
    assert subprocess.run(["flock", "-n", str(lock), "true"], check=False).returncode == 1
    victim.finish()


@pytest.mark.parametrize("verb", [["suspend"], ["resume"], ["toggle"]], ids=" ".join)
def test_13_a_job_without_cuda_state_cannot_be_moved(start, refused, verb) -> None:
    victim = start("counter")
    refused(13, "no-cuda-state", *verb, victim.pid)
    victim.goes_on()


# --- 15: room ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_15_no_room_is_seen_before_and_survived_if_forced(start, refused, limosa, tmp_path) -> None:
    victim = start("counter")
    with small_disk(tmp_path / "small", "2m") as place:
        refused(15, "disk-room", "checkpoint", victim.pid, "--output", place / "image")
        refused(15, "no-room-on-host", "checkpoint", victim.pid, "--output", place / "image", "--force=disk-room")
        assert list(place.iterdir()) == []
        victim.goes_on()
    limosa("checkpoint", victim.pid, "--output", tmp_path / "image", "--leave-running", rc=0)
    victim.finish()


def test_an_image_that_the_next_boot_removes_is_warned_of(start, limosa, tmp_path) -> None:
    victim = start("counter")
    with small_disk(tmp_path / "memory", "256m") as place:
        for folder, warned in ((place, True), (tmp_path, False)):
            said = limosa("checkpoint", victim.pid, "--output", folder / "image", "--leave-running", "-o", "json", rc=0)
            assert ("image-in-memory" in [one["id"] for one in said.json["warnings"]]) is warned


# --- 16, 17: images ----------------------------------------------------------------------------------------------


def test_16_what_is_no_whole_image_is_not_started(start, limosa, refused, tmp_path) -> None:
    victim, image = start("counter"), tmp_path / "image"
    refused(16, "no-such-image", "restore", image)
    limosa("checkpoint", victim.pid, "--output", image, rc=0)
    pages = next((image / "criu").glob("pages-*.img"))
    with open(pages, "r+b") as file:
        file.seek(pages.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert pages.name in refused(16, "damaged-image", "restore", image)["message"]
    assert not victim.alive()
    with open(pages, "r+b") as file:
        file.seek(pages.stat().st_size // 2)
        file.write(byte)
    limosa("restore", image, rc=0)
    victim.goes_on()
    victim.finish()


def test_17_a_destination_that_is_not_empty(start, dump_refused, limosa, tmp_path) -> None:
    victim, place = start("counter"), tmp_path / "place"
    place.mkdir()
    (place / "something").touch()
    dump_refused(victim, 17, "destination-exists", "--output", place)
    (place / "something").unlink()
    limosa("checkpoint", victim.pid, "--output", place, "--leave-running", rc=0)  # an empty folder is fine
    victim.finish()


# --- 18..22: time, others, undone --------------------------------------------------------------------------------


def test_18_no_time_and_no_pause(start, dump_refused) -> None:
    victim = start("counter")
    dump_refused(victim, 18, "timed-out", "--timeout", 0.001)
    dump_refused(victim, 18, "pause-too-long", "--leave-running", "--max-pause", 0.0001)


def test_18_out_of_time_in_the_middle(start, disturbed, tmp_path, runtime) -> None:
    victim = start("counter")
    hold = {"point": "before prepare of the draft", "late": 250.0}
    found = disturbed("checkpoint", victim.pid, tmp_path / "image", options={"timeout": 250.0}, hold=hold)
    assert (found["rc"], found["id"], found["at"]) == (18, "timed-out", "before prepare of the draft")
    victim.goes_on()
    assert not (tmp_path / "image").exists()
    untouched(runtime, tmp_path)


def test_19_a_job_that_is_worked_on(start, disturbed, limosa, tmp_path) -> None:
    victim = start("counter")
    results: list[dict[str, Any]] = []
    hold = {"point": "before prepare of the draft", "until": str(tmp_path / "go on")}
    worker = threading.Thread(
        target=lambda: results.append(
            disturbed("checkpoint", victim.pid, tmp_path / "first", options={"leave_running": True}, hold=hold)
        )
    )
    worker.start()
    while not list(tmp_path.glob(".first.*")):
        time.sleep(0.01)
    busy = limosa("checkpoint", victim.pid, "--output", tmp_path / "second", "-o", "json", rc=19).json["error"]
    assert busy["id"] == "busy"
    assert not (tmp_path / "second").exists()
    (tmp_path / "go on").touch()
    worker.join()
    assert results[0]["rc"] == 0
    victim.goes_on()
    limosa("checkpoint", victim.pid, "--output", tmp_path / "second", "--leave-running", rc=0)
    victim.finish()


def test_19_a_job_that_a_dead_operation_left_in_the_middle(start, disturbed, limosa, tmp_path) -> None:
    victim = start("counter")
    noted = disturbed("checkpoint", victim.pid, tmp_path / "image", options={"leave_running": True})["points"]
    point = next(n for n, (name, _) in enumerate(noted) if name == "before publish of the draft")
    kill = {"who": ["worker", "limosa"], "point": point}
    assert disturbed("checkpoint", victim.pid, tmp_path / "other", options={"leave_running": True}, kill=kill)["died"]
    disturbed.settle(victim.pid)
    error = limosa("checkpoint", victim.pid, "--output", tmp_path / "third", "-o", "json", rc=19).json["error"]
    assert (error["id"], error["hint"]) == ("busy", "limosa recover")
    shown = limosa("recover", "--dry-run", "-o", "json", rc=0).json["recovered"]
    assert [one["pid"] for one in shown if one["kind"] == "operation"] == [victim.pid]
    done = limosa("recover", "-o", "json", rc=0).json["recovered"]
    assert [one["state"] for one in done if one["kind"] == "operation"] == ["running"]
    assert unfinished(tmp_path) == []
    assert disturbed.litter() == []
    limosa("checkpoint", victim.pid, "--output", tmp_path / "third", "--leave-running", rc=0)
    victim.goes_on()
    victim.finish()


def test_20_a_pid_that_belongs_to_somebody_else_now(start, tmp_path, runtime) -> None:
    victim = start("counter")
    identity = Identity.of(victim.pid)
    before = Job(root=Identity(victim.pid, identity.start_time - 100), name="")
    with pytest.raises(PidReused) as caught:
        operation.checkpoint(before, tmp_path / "image")
    assert caught.value.exit_code == 20
    victim.goes_on()
    untouched(runtime, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_22_a_signal_in_the_middle_of_a_dump(inline, limosa, tmp_path, runtime, number) -> None:
    victim = inline("ballast = bytearray(b'x' * 4096) * (96 << 8)")  # 96 MiB: a dump that is not over at once
    image = tmp_path / "image"
    for _ in range(5):
        process = limosa("checkpoint", victim.pid, "--output", image, "-o", "json", wait=False)
        end = time.monotonic() + 90
        while not list(tmp_path.glob(".image.*/log/dump.log")):
            assert time.monotonic() < end
            if process.poll() is not None:
                break
            time.sleep(0.001)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
        if process.returncode != 0:
            break
        limosa("restore", image, rc=0)  # it was over, as this test was held up
        limosa("rm", image, rc=0)
    assert process.returncode == 22, (stdout, stderr)
    assert '"id":"cancelled"' in stdout
    assert f"{number.name}: undoing what was done" in stderr
    victim.goes_on()
    assert not image.exists()
    untouched(runtime, tmp_path)
    assert not believed_ended(runtime, victim.pid)
    victim.finish()


def test_1_a_second_ctrl_c_stops_at_once_and_what_lives_on_undoes(start, inline, disturbed, limosa, tmp_path) -> None:
    victim = inline("ballast = bytearray(b'x' * 4096) * (96 << 8)")
    process = limosa("checkpoint", victim.pid, "--output", tmp_path / "image", "-o", "json", wait=False)
    while not list(tmp_path.glob(".image.*/log/dump.log")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
        process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    stdout, stderr = process.communicate(timeout=120)
    if process.returncode == 1:
        assert '"id":"stopped"' in stdout
        assert "limosa recover" in stderr
    else:  # it was undone before the second signal came
        assert process.returncode == 22, (stdout, stderr)
    limosa("recover", "-o", "json", rc=0)
    disturbed.settle(victim.pid)
    assert disturbed.litter() == []
    assert unfinished(tmp_path) == []
    victim.goes_on()
    victim.finish()


# --- 23: what a restore needs ------------------------------------------------------------------------------------


def test_23_a_pid_that_is_taken(start, limosa, refused, tmp_path) -> None:
    victim = start("counter")
    limosa("checkpoint", victim.pid, "--output", tmp_path / "image", "--leave-running", rc=0)
    plan = limosa("restore", tmp_path / "image", "--dry-run", "-o", "json", rc=23).json
    assert plan["verdict"] == "refused"
    assert [r["id"] for r in plan["reasons"] if r["exit_code"]] == ["pid-taken"]
    # The ten seconds are for somebody else who has it, not for its own job.
    assert quickest(lambda: refused(23, "pid-taken", "restore", tmp_path / "image"), 9.5) < 9.5
    victim.goes_on()
    victim.finish()


def test_23_files_that_are_missing_or_changed(start, limosa, refused, tmp_path) -> None:
    victim, image = start("open_files"), tmp_path / "image"
    limosa("checkpoint", victim.pid, "--output", image, rc=0)
    output, source = victim.folder / "output", victim.folder / "input"

    source.rename(victim.folder / "away")
    assert str(source) in refused(23, "file-missing", "restore", image)["message"]
    (victim.folder / "away").rename(source)

    content = source.read_bytes()
    source.write_bytes(content[:-1])  # read only by the job, as a library is: not ours to mend
    refused(23, "file-changed", "restore", image)
    refused(23, "file-changed", "restore", image, "--rewind-files")
    source.write_bytes(content)

    written = output.read_bytes()
    output.write_bytes(written + b"TAIL")
    hint = refused(23, "file-changed", "restore", image)["hint"]
    assert "--rewind-files" in hint
    limosa("restore", image, "--rewind-files", rc=0)
    (kept,) = victim.folder.glob("output.after-*")
    assert kept.read_bytes() == b"TAIL"
    victim.goes_on()
    victim.finish()
    assert output.read_bytes().startswith(written)
    assert b"TAIL" not in output.read_bytes()


def test_23_what_else_than_files_is_missing_or_changed(inline, limosa, refused, tmp_path) -> None:
    """A folder, a pipe, a socket's folder: found by CRIU alone, and told in the same way."""
    place, image = tmp_path / "place", tmp_path / "image"
    for name in ("cwd", "sockets"):
        (place / name).mkdir(parents=True)
    os.mkfifo(place / "pipe")
    code = f"""
import os, socket
os.chdir({str(place / "cwd")!r})
kept = os.open("../pipe", os.O_RDWR), socket.socket(socket.AF_UNIX)
kept[1].bind({str(place / "sockets/s")!r})
kept[1].listen()"""
    victim = inline(code)
    limosa("checkpoint", victim.pid, "--output", image, rc=0)

    def away(name: str) -> None:
        (place / name).rename(tmp_path / "away")

    def back(name: str) -> None:
        (tmp_path / "away").rename(place / name)

    for name, said in (("pipe", "place/pipe"), ("sockets", "place/sockets")):
        away(name)
        assert said in refused(23, "file-missing", "restore", image)["message"]
        back(name)
    away("cwd")
    limosa("restore", image, rc=23)
    (place / "cwd").symlink_to(tmp_path / "away")
    error = refused(23, "file-changed", "restore", image)
    assert "leads through a symbolic link now" in error["message"]
    assert "again" not in error["hint"]
    (place / "cwd").unlink()
    back("cwd")
    (place / "sockets/s").unlink(missing_ok=True)
    (place / "sockets/s").touch()
    assert "is something else now" in refused(23, "file-changed", "restore", image)["message"]
    (place / "sockets/s").unlink()
    limosa("restore", image, rc=0)
    victim.goes_on()
    victim.finish()


# --- 24: CRIU ----------------------------------------------------------------------------------------------------


def test_24_a_criu_that_is_none(start, limosa, dump_refused, refused, tmp_path) -> None:
    victim = start("counter")
    dump_refused(victim, 24, "no-working-criu", "--criu", "/bin/false")
    limosa("checkpoint", victim.pid, "--output", tmp_path / "image", rc=0)
    refused(24, "no-working-criu", "restore", tmp_path / "image", "--criu", "/bin/false")
    assert not victim.alive()
    limosa("restore", tmp_path / "image", rc=0)
    victim.goes_on()
    victim.finish()


# --- a worker that cannot come up --------------------------------------------------------------------------------


def ends_at_once(waits_at: str = "") -> Launched:
    """A worker that says nothing."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["true"])
    return Launched(ours, process, os.memfd_create("words"))


def test_no_job_is_ended_while_nobody_could_finish_for_us(start, runtime, tmp_path, monkeypatch) -> None:
    victim = start("counter")
    monkeypatch.setattr("limosa.gpu.worker_process.launch", ends_at_once)
    with pytest.raises(FailedUndone, match="set_will"):
        operation.checkpoint(victim.pid, tmp_path / "image")
    untouched(runtime, tmp_path)
    assert not (tmp_path / "image").exists()
    victim.goes_on()
    victim.finish()


# --- run ---------------------------------------------------------------------------------------------------------


def test_75_a_checkpoint_ended_it_but_not_where_it_was_undone(limosa, adopt, disturbed, tmp_path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    command = [sys.executable, VICTIMS / "counter.py", folder]
    run = limosa("run", "--name", "job", "--log", folder / "log", "--", *command, wait=False)
    while not (folder / "log").exists() or "READY" not in (folder / "log").read_text():
        time.sleep(0.01)
    pid = next(j["pid"] for j in limosa("ps", "-o", "json", rc=0).json["jobs"] if j["name"] == "job")
    failed = disturbed("checkpoint", pid, tmp_path / "image", fail={"call": "image rename", "n": 0})
    assert (failed["rc"], failed["id"]) == (21, "failed")
    assert run.poll() is None
    limosa("checkpoint", "job", "--output", tmp_path / "image", rc=0)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 75
    assert str(tmp_path / "image") in stderr
    limosa("restore", tmp_path / "image", rc=0)
    victim = adopt(pid, folder)
    victim.goes_on()
    victim.finish()
