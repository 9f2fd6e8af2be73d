"""The check "containers" of ``limosa doctor``: what real runtimes say of themselves, and what --fix does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers.engines import Engines
from containers.runtimes import own_folders
from soft_node import Node

from limosa.cdi import runtimes
from limosa.start import SYSTEM

RUNTIMES = ("podman", "dockerd", "containerd", "crio")
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(node: Node, engines: Engines, tmp_path: Path) -> Ask:
    """The check as doctor finds it, with only these of the runtimes' programs on the PATH."""
    own_folders(node, "/etc", "/usr/local/lib")
    for path in {os.path.realpath(f"{folder}/{name}") for folder in SYSTEM for name in RUNTIMES}:
        if os.path.isfile(path):
            node.run(["mount", "--bind", "/dev/null", path])  # this machine's own are none of the test's

    def go(*names: str, fix: bool = False) -> dict[str, Any]:
        programs = tmp_path / "-".join(names)
        programs.mkdir(exist_ok=True)
        for name in names:
            if not (programs / name).exists():
                (programs / name).symlink_to(engines[name])
        code = (
            "from limosa.operation.doctor_containers import containers; import msgspec, sys; "
            f"sys.stdout.buffer.write(msgspec.json.encode(containers(fix={fix}, log=lambda _: None)))"
        )
        told = node.python(code, env={"PATH": f"{programs}:/usr/bin:/bin"}).stdout
        return dict(json.loads(told))

    return go


def test_where_there_is_no_runtime_all_is_well(ask: Ask) -> None:
    assert ask()["status"] == "ok"


def test_without_a_spec_it_says_so_and_fix_writes_it(ask: Ask, node: Node) -> None:
    before = ask("podman", "containerd")
    assert before["status"] == "warn"
    assert "podman 4.3.1, containerd 2." in before["detail"]
    assert "no CDI spec of Limosa's" in before["detail"]
    assert "limosa doctor --fix" in before["fix"]
    after = ask("podman", "containerd", fix=True)
    assert after["status"] == "ok", after
    assert "limosa.dev/job=shim" in after["detail"]
    assert json.loads(node.run(["cat", "/etc/cdi/limosa.dev-job.json"]).stdout)["kind"] == "limosa.dev/job"
    assert ask("podman")["status"] == "ok"


def test_a_spec_of_another_limosa_is_told_and_mended(ask: Ask, node: Node) -> None:
    ask("podman", fix=True)
    node.run(["sed", "-i", "s/limosa.[0-9a-f]\\{16\\}/limosa\\/0123456789abcdef/", "/etc/cdi/limosa.dev-job.json"])
    assert "is of another Limosa" in ask("podman")["detail"]
    assert ask("podman", fix=True)["status"] == "ok"
    node.run(["sh", "-c", "rm -r /usr/local/lib/limosa/*"])
    assert "is not there" in ask("podman")["detail"]
    assert ask("podman", fix=True)["status"] == "ok"


def test_a_containerd_that_was_told_not_to_is_left_so(ask: Ask, node: Node) -> None:
    """Its file is its owner's: the way out is said, nothing is written."""
    node.run(["mkdir", "-p", "/etc/containerd"])
    text = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\n  enable_cdi = false\n"
    node.run(["sh", "-c", f'printf "{text}" > /etc/containerd/config.toml'.replace("\n", "\\n")])
    before = node.run(["cat", "/etc/containerd/config.toml"]).stdout
    found = ask("containerd", fix=True)
    assert found["status"] == "warn"
    assert "containerd: enable_cdi is off" in found["detail"]
    assert (
        "/etc/containerd/config.toml: enable_cdi = true below [plugins.'io.containerd.cri.v1.runtime']" in found["fix"]
    )
    assert node.run(["cat", "/etc/containerd/config.toml"]).stdout == before
    elsewhere = text.replace("enable_cdi = false", "cdi_spec_dirs = ['/opt/cdi']")
    node.run(["sh", "-c", f'printf "{elsewhere}" > /etc/containerd/config.toml'.replace("\n", "\\n")])
    assert "containerd: it does not look into /etc/cdi" in ask("containerd")["detail"]


def test_docker_itself_is_set_up_by_the_spec_alone(ask: Ask, node: Node) -> None:
    before = ask("dockerd")
    assert "Docker 28." in before["detail"]
    assert "no CDI spec of Limosa's" in before["detail"]
    assert ask("dockerd", fix=True)["status"] == "ok"
    node.run(["mkdir", "-p", "/etc/docker"])
    node.run(["sh", "-c", """echo '{"features": {"cdi": false}}' > /etc/docker/daemon.json"""])
    assert "its feature cdi is off" in ask("dockerd", fix=True)["detail"]


# CRI-O is in no package here, and of Docker there is one version: others are told by the words that they print.


@pytest.mark.parametrize(
    ("said", "config", "problem"),
    [
        ("Docker version 24.0.7, build afdd53b", None, "24.0.7 knows no CDI"),
        ("Docker version 27.1.1, build 6312585", None, "its feature cdi is off"),
        ("Docker version 27.1.1, build 6312585", '{"features": {"cdi": true}}', ""),
        ("Docker version 28.5.0, build 1", None, ""),
        ("Docker version 28.5.0, build 1", '{"features": {"cdi": false}}', "its feature cdi is off"),
        ("Docker version 28.5.0, build 1", '{"cdi-spec-dirs": ["/opt/cdi"]}', "it does not look into /etc/cdi"),
        ("Docker version 28.5.0, build 1", "{", "cannot be read as JSON"),
    ],
)
def test_docker(said: str, config: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_says", lambda *_: said)
    file = tmp_path / "daemon.json"
    if config is not None:
        file.write_text(config)
    found = runtimes._docker(file)
    assert found is not None
    assert problem in found.problem
    assert bool(problem) == bool(found.problem)
    assert bool(found.hint) == bool(found.problem)


def test_crio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_says", lambda *_: "crio version 1.30.2\nVersion: 1.30.2\n")
    folder = tmp_path / "crio.conf.d"
    folder.mkdir()
    found = runtimes._crio([tmp_path / "crio.conf", folder])
    assert found is not None
    assert (found.problem, found.version) == ("", "1.30.2")
    (folder / "10.conf").write_text('[crio.runtime]\n# cdi_spec_dirs = ["/x"]\ncdi_spec_dirs = [\n  "/opt/cdi",\n]\n')
    found = runtimes._crio([tmp_path / "crio.conf", folder])
    assert found is not None
    assert "/etc/cdi" in found.problem
