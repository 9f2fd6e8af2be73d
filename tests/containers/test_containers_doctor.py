"""The check "containers" of ``limosa doctor``: what real runtimes say of themselves, and what --fix does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers.engines import Engines
from containers.runtimes import own_folders
from soft_node import Node
from test_containers_to_disk import until

from limosa.cdi import runtimes, switch
from limosa.native.build import compilers
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

    def go(*names: str, fix: bool = False, path: Path | None = None, **scripts: str) -> dict[str, Any]:
        """``scripts``: programs that are not fetched here, by what they print; ``path``: a folder of programs."""
        programs = path or tmp_path / "-".join([*names, *scripts])
        programs.mkdir(exist_ok=True)
        for name in names:
            if not (programs / name).exists():
                (programs / name).symlink_to(engines[name])
        for name, script in scripts.items():
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
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


def test_docker_itself_is_set_up(ask: Ask, node: Node) -> None:
    before = ask("dockerd")
    found = re.search(r"Docker (\d+)\.", before["detail"])
    assert found
    assert int(found[1]) >= 25
    assert "no CDI spec of Limosa's" in before["detail"]
    ask("dockerd", fix=True)
    assert ask("dockerd")["status"] == "ok"
    node.run(["mkdir", "-p", "/etc/docker"])
    node.run(["sh", "-c", """echo '{"features": {"cdi": false}}' > /etc/docker/daemon.json"""])
    assert "its feature cdi is off" in ask("dockerd", fix=True)["detail"]


DOCKER_27 = "echo Docker version 27.1.1, build 6312585"
DAEMON = "/etc/docker/daemon.json"


def test_dockers_feature_is_switched_on_where_nothing_is_said_of_it(ask: Ask, node: Node) -> None:
    before = ask(dockerd=DOCKER_27)
    assert "its feature cdi is off" in before["detail"]
    assert "limosa doctor --fix, or /etc/docker/daemon.json: " in before["fix"]
    told = ask(dockerd=DOCKER_27, fix=True)
    assert (told["status"], "from its next start on" in told["detail"]) == ("warn", True)
    assert "systemctl restart docker" in told["fix"]
    assert json.loads(node.run(["cat", DAEMON]).stdout) == {"features": {"cdi": True}}
    assert node.run(["stat", "-c", "%a %u", DAEMON]).stdout == "644 0\n"
    assert ask(dockerd=DOCKER_27)["status"] == "ok"
    had = {"debug": True, "features": {"x": False}, "labels": ["größe=1"], "shutdown-timeout": 15}
    node.run(["sh", "-c", f"echo '{json.dumps(had)}' > {DAEMON}; chown 0:7 {DAEMON}; chmod 640 {DAEMON}"])
    assert "from its next start on" in ask(dockerd=DOCKER_27, fix=True)["detail"]
    text = node.run(["cat", DAEMON]).stdout
    now = json.loads(text)
    assert now == {**had, "features": {"x": False, "cdi": True}}
    assert list(now) == list(had)
    assert "größe" in text
    assert node.run(["stat", "-c", "%a %u %g", DAEMON]).stdout == "640 0 7\n"
    assert node.run(["ls", "-A", "/etc/docker"]).stdout == "daemon.json\n"


@pytest.mark.parametrize(
    "there",
    [
        """echo '{"features": {"cdi": false}}' >""",
        """echo '{"debug": true, "debug": false}' >""",
        """echo '{"x": 1e999}' >""",
        """echo '{"features": []}' >""",
        "echo '{' >",
        "echo '{}' > /etc/docker/other; ln -s other",
        "echo '{}' > /etc/docker/other; ln /etc/docker/other",
        "chown 1000 /etc/docker; echo '{}' >",
    ],
)
def test_what_its_owner_has_said_to_docker_stays(ask: Ask, node: Node, there: str) -> None:
    node.run(["sh", "-c", f"mkdir -p /etc/docker; {there} {DAEMON}"])
    before = node.run(["sh", "-c", f"ls -lA /etc/docker; cat {DAEMON}"]).stdout
    found = ask(dockerd=DOCKER_27, fix=True)
    assert (found["status"], DAEMON in found["fix"]) == ("warn", True)
    assert node.run(["sh", "-c", f"ls -lA /etc/docker; cat {DAEMON}"]).stdout == before


DOCKERD = """
#include <stdio.h>
#include <unistd.h>

int main(int n, char **words)
{
    puts("Docker version 27.1.1, build 6312585");
    return n > 2 && words[2][0] ? pause() : 0;
}
"""


@pytest.mark.parametrize("word", ["--feature=cdi=true", "--config-file=/opt/daemon.json"])
def test_a_docker_that_has_it_said_elsewhere_is_left_alone(ask: Ask, node: Node, tmp_path: Path, word: str) -> None:
    """With features by words and in the file it would not start again. Who only calls himself so has no say."""
    node.run(["rm", "-rf", "/etc/docker"])
    program = tmp_path / "real" / "dockerd"
    program.parent.mkdir()
    compiler = [*compilers()[0], "-xc", "-", "-o", str(program)]
    subprocess.run(compiler, input=DOCKERD, text=True, check=True)
    running = node.popen([str(program), word, "-D"], stdout=subprocess.DEVNULL)
    until(lambda: Path(f"/proc/{running.pid}/exe").readlink() == program)
    found = ask(path=program.parent, fix=True)
    assert f"its feature cdi is off, and process {running.pid} has a configuration of its own" in found["detail"]
    assert "doctor --fix, or /etc/docker" not in found["fix"]
    node.run(["ls", "/etc/docker"], rc=2)
    running.kill()
    running.wait(60)
    another = node.popen(["bash", "-c", f'exec -a dockerd sh -c "sleep 1000; :" {word}'])
    until(lambda: Path(f"/proc/{another.pid}/cmdline").read_bytes().startswith(b"dockerd"))
    assert "from its next start on" in ask(path=program.parent, fix=True)["detail"]
    another.kill()
    another.wait(60)


TOML = "/etc/containerd/config.toml"
CONTAINERD_17 = f"""\
if [ "$1" = --version ]; then echo containerd github.com/containerd/containerd 1.7.24; else cat {TOML}; fi"""


def test_a_containerd_without_a_configuration_gets_one(ask: Ask, node: Node) -> None:
    """1.7 cannot print its own where there is none. One that does not heed it keeps none."""
    node.run(["rm", "-rf", "/etc/containerd"])
    assert "enable_cdi is off" in ask(containerd=CONTAINERD_17)["detail"]
    unheeding = CONTAINERD_17.replace(f"cat {TOML}", "echo enable_cdi = false")
    assert "enable_cdi is off" in ask(containerd=unheeding, fix=True)["detail"]
    node.run(["ls", TOML], rc=2)
    told = ask(containerd=CONTAINERD_17, fix=True)
    assert "from its next start on" in told["detail"]
    assert "systemctl restart containerd" in told["fix"]
    assert ask(containerd=CONTAINERD_17)["status"] == "ok"
    node.run(["sh", "-c", f"echo version = 2 > {TOML}"])
    assert f"{TOML}: enable_cdi = true below" in ask(containerd=CONTAINERD_17, fix=True)["fix"]
    assert node.run(["cat", TOML]).stdout == "version = 2\n"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> runtimes.Runtime:
    """One that says nothing of CDI in a file of the test's."""
    monkeypatch.setattr(switch, "trusted", lambda _: True)
    return runtimes.Runtime("Docker", "27.1.1", "its feature cdi is off", unsaid=tmp_path / "daemon.json")


def test_a_configuration_that_somebody_writes_meanwhile_is_his(
    docker: runtimes.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sync = docker.unsaid, os.fsync
    assert path is not None

    def meanwhile(fd: int) -> None:
        sync(fd)
        path.write_text('{"data-root": "/srv"}')

    for before in ("", "{}"):
        path.unlink(missing_ok=True)
        if before:
            path.write_text(before)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", meanwhile)
            with pytest.raises(OSError, match=r"exists|meanwhile"):
                switch.switch_on(docker)
        assert path.read_text() == '{"data-root": "/srv"}'
        assert os.listdir(path.parent) == [path.name]


def test_one_that_is_not_heeded_is_taken_back_unless_it_is_somebody_elses_by_now(
    docker: runtimes.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = docker.unsaid
    assert path is not None
    monkeypatch.setattr(switch, "looked_at", lambda _: docker)
    assert not switch.switch_on(docker)
    assert not path.exists()
    monkeypatch.setattr(switch, "looked_at", lambda _: path.write_text("{ }") and docker)
    assert not switch.switch_on(docker)
    assert path.read_text() == "{ }"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"x": "\\ud800"}', '{"x": "\\udc80"}', '{"x": "' + "y" * (1 << 20) + '"}']
)
def test_what_is_no_plain_json_stays_and_ends_nothing(docker: runtimes.Runtime, text: str) -> None:
    path = docker.unsaid
    assert path is not None
    path.write_text(text)
    with contextlib.suppress(OSError):
        assert not switch.switch_on(docker)
    assert path.read_text() == text


# CRI-O is in no package here, and of Docker there is one version: others are told by the words that they print.


@pytest.mark.parametrize(
    ("said", "config", "problem"),
    [
        ("Docker version 24.0.7, build afdd53b", None, "24.0.7 knows no CDI"),
        ("Docker version 27.1.1, build 6312585", "[" * 100_000, "cannot be read as JSON"),
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
