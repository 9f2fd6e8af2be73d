"""Root calls every verb in a folder that another user has filled with traps, named by every variable there is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from soft_command import start

from limosa.native.build import compilers
from limosa_softgpu.build import LIBRARIES

STRANGER = 4242
LIMOSA = Path(sysconfig.get_path("scripts"), "limosa")
MODULES = (
    *("limosa", "limosa_softgpu", "msgspec", "click", "rich", "cuda", "pynvml"),
    *("json", "subprocess", "socket", "runpy", "importlib"),
)
CUSTOM = ("sitecustomize", "usercustomize")
PROGRAMS = (
    *("criu", "nft", "iptables-restore", "ip6tables-restore", "ip", "tar", "sh", "python", "python3", "env", "true"),
    *("cc", "gcc", "clang", "tcc", "as", "ld", "cc1", "apt-get", "dpkg-deb", "nvidia-smi"),
)
# The programs of the loader's and of Python's own variables would meet root's limosa before it can look: not here.
VARIABLES = (
    *("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "GCC_EXEC_PREFIX", "COMPILER_PATH"),
    *("CRIU_LIBS_DIR", "CUDA_HOME", "CUDA_PATH", "LIBRARY_PATH", "CPATH", "PYTHONUSERBASE"),
)


@pytest.fixture
def traps() -> Iterator[Path]:
    """A user's folder; what of it is loaded or started leaves a file in ``sprung``."""
    folder = Path(tempfile.mkdtemp(prefix="limosa-traps-"))
    sprung = folder / "sprung"
    sprung.mkdir()
    sprung.chmod(0o777)
    for name in MODULES + CUSTOM:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"open({str(sprung / name)!r}, 'w')\n")
    for name in PROGRAMS:
        (folder / name).write_text(f"#!/bin/sh\n: > {sprung / name}-program\nexit 1\n")
    (folder / "rc").write_text(f": > {sprung}/rc\n")
    (folder / ".criu").mkdir()
    (folder / ".criu" / "default.conf").write_text(f"action-script {folder}/criu\n")
    for place in (folder / ".config" / "limosa", folder / "limosa"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.toml").write_text(f'criu = "{folder}/criu"\n')
    source = folder / "trap.c"
    constructor = "{ creat(SPRUNG, 0666); }"
    source.write_text(f"#include <fcntl.h>\n__attribute__((constructor)) static void sprung(void) {constructor}\n")
    for name in (*LIBRARIES, "libcuda.so", "libnvidia-ml.so", "libnftables.so.1", "limosa_plugin.so"):
        told = f'-DSPRUNG="{sprung}/{name}"'
        argv = [*compilers()[0], "-shared", "-fPIC", told, "-o", str(folder / name), str(source)]
        subprocess.run(argv, check=True, timeout=60)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
        if path != sprung:
            path.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def hostile(folder: Path, libraries: str = "") -> dict[str, str]:
    """Variables that lead to the traps; what has colons has empty and relative parts, as careless scripts make them."""
    return {
        **dict.fromkeys(VARIABLES, str(folder)),
        "PATH": f"{folder}::.:{os.environ['PATH']}:",
        "LD_LIBRARY_PATH": f"{libraries}:{folder}::.",
        "ENV": str(folder / "rc"),
        "BASH_ENV": str(folder / "rc"),
        "CRIU_CONFIG_FILE": str(folder / ".criu" / "default.conf"),
        "APT_CONFIG": str(folder / "rc"),
        "CUDA_INJECTION64_PATH": str(folder / "libcuda.so.1"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def sprung(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "sprung"))


def test_the_traps_work(traps: Path) -> None:
    """Without this the other tests could not fail."""
    env = {**os.environ, **hostile(traps)}
    code = "import msgspec, ctypes; ctypes.CDLL('libcuda.so.1')"
    subprocess.run([sys.executable, "-c", code], cwd=traps, env=env, check=True, timeout=30)
    subprocess.run(["/bin/bash", "-c", "nft"], cwd=traps, env=env, check=False, timeout=30)
    assert {"msgspec", "libcuda.so.1", "nft-program", "rc"} <= set(sprung(traps))


@pytest.mark.criu
def test_a_job_without_a_gpu(traps: Path, tmp_path: Path) -> None:
    env = {**os.environ, **hostile(traps)}

    def limosa(*arguments: object, rc: int = 0) -> str:
        argv = [str(LIMOSA), *map(str, arguments)]
        done = subprocess.run(
            argv, cwd=traps, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=90, check=False
        )
        assert sprung(traps) == [], arguments
        assert done.returncode == rc, (arguments, done.stdout, done.stderr)
        return done.stdout.decode()

    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(300)"
    command = [sys.executable, "-I", "-c", code]
    limosa("run", "--detach", "--name", "trapped", "--log", tmp_path / "log", "--", *command)
    limosa("doctor")
    limosa("ps")
    limosa("checkpoint", "trapped", "--output", tmp_path / "image", "--tcp-established")
    limosa("verify", tmp_path / "image")
    limosa("restore", tmp_path / "image", "--tcp-established")
    limosa("recover", traps)
    limosa("rm", tmp_path / "image")
    limosa("softgpu", "--gpus", 2, "--memory", "64MiB", "--", LIMOSA, "gpus")
    assert "trapped" in limosa("ps")
    pid = limosa("ps", "-o", "json")
    subprocess.run(["/bin/kill", "-KILL", str(int(pid.split('"pid":')[1].split(",")[0]))], check=True)


def test_a_parked_job(traps: Path, soft: Any) -> None:
    """Worker, vault and mover, and the will of who was killed, are started there."""
    node = soft(gpus=2, memory="256MiB")
    job = start(node, "--mib", 40)
    own = node.environment()["LD_LIBRARY_PATH"].split(":")[0]

    def limosa(*arguments: object, **options: Any) -> Any:
        found = node.run([LIMOSA, *arguments], cwd=traps, env=hostile(traps, own), limit=120, **options)
        assert sprung(traps) == [], arguments
        return found

    limosa("gpus")
    limosa("move", job.pid, "--to", 1)
    limosa("suspend", job.pid)
    limosa("resume", job.pid)
    limosa("recover")
    limosa("doctor", rc=None)
    job.goes_on(2)
    job.finish()


@pytest.mark.slow
def test_the_demos_start(traps: Path, tmp_path: Path) -> None:
    """It tries each Python on PATH, makes a node and goes on there; what comes then is its own job."""
    env = {**os.environ, **hostile(traps), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [str(LIMOSA), "demo"],
        cwd=traps,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        watch = threading.Timer(90, process.kill)
        watch.start()
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "move there at step" in line:
                process.send_signal(signal.SIGTERM)
        watch.cancel()
    assert sprung(traps) == []
    assert any("move there at" in line for line in said), said
    assert process.returncode == 22, said
