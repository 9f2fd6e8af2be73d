"""Run in a mount namespace of its own: makes stand-ins for NVIDIA devices; dumps, kills, restores their user.

Arguments: a folder, a loop device, "yes" or "no" for the plugin. Prints JSON: what the child said before and after, the
mappings of /dev/zero after, or the error. Other devices that CRIU cannot dump by itself take the place of NVIDIA's: a
loop device to map, which character devices of a virtual machine do not allow, and two of misc's to hold open.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from limosa.errors import CriuFailed
from limosa.process.criu.find import find
from limosa.process.criu.run import dump, restore

folder, loop, plugin = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "yes"
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # adopt what is restored


def make_devices() -> None:
    new = folder / "dev"
    number = os.stat(loop).st_rdev
    misc = dict(reversed(line.split()) for line in Path("/proc/misc").read_text().splitlines())
    minors = [int(misc[name]) for name in ("loop-control", "vga_arbiter", "userfaultfd", "fuse") if name in misc][:2]
    new.mkdir()
    script = f"""set -e
    mount --make-rprivate /
    mount -t tmpfs tmpfs {new}
    for name in null zero full random urandom tty; do cp -a /dev/$name {new}/; done
    mkdir {new}/pts {new}/shm {new}/nvidia-caps
    mount --bind /dev/pts {new}/pts
    mount --bind /dev/shm {new}/shm
    ln -s /proc/self/fd {new}/fd
    mknod {new}/nvidia0 b {os.major(number)} {os.minor(number)}
    mknod {new}/nvidiactl c 10 {minors[0]}
    mknod {new}/nvidia-caps/nvidia-cap1 c 10 {minors[1]}
    mount --move {new} /dev"""
    subprocess.run(["/bin/sh", "-c", script], check=True)


def last_of_child(after: int = 0) -> list:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        lines = (
            [json.loads(line) for line in (folder / "out").read_text().splitlines()]
            if (folder / "out").exists()
            else []
        )
        found = [line for line in lines if line[0] == "child" and line[1] > after]
        if found:
            return found[-1]
        time.sleep(0.02)
    raise AssertionError((folder / "errors").read_text())


def reap() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass


def main() -> dict:
    make_devices()
    criu = find()
    if not plugin:
        criu = msgspec.structs.replace(criu, plugin_dir=None)
    elif criu.plugin_dir is None:
        return {"error": "the plugin is not built"}
    for name in ("images", "work"):
        (folder / name).mkdir()
    images, work = (os.open(folder / name, os.O_RDONLY | os.O_DIRECTORY) for name in ("images", "work"))
    victim = Path(__file__).with_name("devices_victim.py")
    with open(folder / "errors", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", victim, folder / "out"],
            stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True,
        )  # fmt: skip
    try:
        before = last_of_child()
        try:
            dump(criu, process.pid, images, work)
        except CriuFailed as error:
            return {"error": error.fields["kind"], "goes_on": last_of_child(last_of_child()[1])[1] > before[1]}
        reap()
        before = last_of_child()
        again = []
        for _ in range(2):  # twice: nothing may pile up
            restore(criu, images, work)
            # Not the first line: the dump may have come between its reading of the descriptors and its writing.
            again.append(last_of_child(before[1] + 1))
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            zeroes = Path(f"/proc/{children[0]}/maps").read_text().count("/dev/zero")
            os.killpg(process.pid, signal.SIGKILL)
            reap()
        notes = sorted(path.read_text() for path in (folder / "images").glob("limosa-device-*.img"))
        return {"before": before, "after": again[-1], "zeroes": zeroes, "notes": notes}
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        reap()


print(json.dumps(main()))
