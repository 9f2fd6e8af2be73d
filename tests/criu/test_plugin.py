"""The plugin: a child that inherited mappings and descriptors of /dev/nvidia* is dumped, killed and restored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from limosa import start
from limosa.native.build import build_plugin
from limosa.process.criu.program import plugin_dir


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "disk"
    file.write_bytes(b"\x5a" * (1 << 20))
    name = subprocess.run(
        ["losetup", "--find", "--show", file], capture_output=True, text=True, check=True
    ).stdout.strip()
    yield name
    subprocess.run(["losetup", "--detach", name], check=True)


def run_trial(folder: Path, loop: str, plugin: str) -> dict:
    program = Path(__file__).with_name("devices_trial.py")
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, program, folder, loop, plugin],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.criu
def test_a_child_with_inherited_devices_is_restored_with_the_same_descriptors(tmp_path, loop):
    assert plugin_dir() is not None or build_plugin() is None
    result = run_trial(tmp_path, loop, "yes")
    assert result.get("error") is None
    (_, number, first, files), (_, later, content, restored) = result["before"], result["after"]
    assert later > number
    assert first == "5a5a5a5a"  # it did map the device
    assert content == "00000000"  # and has zeroes there now
    assert result["zeroes"] == 4
    name = {fd: path for fd, path in files.items() if path.startswith("/dev/nvidia")}
    assert sorted(name.values()) == ["/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia0", "/dev/nvidiactl"]
    # The stand-in that is no character device is not opened again; all else is, and no descriptor was added.
    assert restored == {fd: "/dev/null" if path == "/dev/nvidia0" else path for fd, path in files.items()}
    flags = [f"{os.O_RDONLY:08x} /dev/nvidia-caps/nvidia-cap1\n", f"{os.O_RDWR:08x} /dev/nvidia0\n"]
    flags += [f"{os.O_RDWR | os.O_NONBLOCK:08x} /dev/nvidiactl\n"]
    assert result["notes"] == sorted(flags)


@pytest.mark.criu
def test_without_the_plugin_criu_refuses_and_the_job_runs_on(tmp_path, loop):
    assert run_trial(tmp_path, loop, "no") == {"error": "device-mapping", "goes_on": True}


def test_without_a_compiler_the_build_says_so_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(start, "SYSTEM", ())
    assert "no C compiler" in (build_plugin(tmp_path) or "")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "false")
    assert (build_plugin(tmp_path) or "").startswith("/usr/bin/false: ")
    assert not list(tmp_path.iterdir())


def test_a_source_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("limosa.native.build.CRIU", tmp_path)
    assert f"{tmp_path}/limosa_plugin.c" in (build_plugin(tmp_path) or "")


def test_the_plugin_compiles_without_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "cc -Werror")
    assert build_plugin(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["limosa_plugin.so"]
    assert (tmp_path / "limosa_plugin.so").read_bytes()[:4] == b"\x7fELF"
