"""Nothing that Limosa starts takes code from a folder or a variable that somebody else could have filled."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from support import let_in_by_a_list

import limosa
import limosa_softgpu
from limosa import start

SOURCE = Path(limosa.__file__).parents[1]
PACKAGES = ("limosa", "limosa_softgpu")
STRANGER = 4242
STARTERS = {
    "subprocess": {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"},
    "os": {"system", "popen", "posix_spawn", "posix_spawnp", "startfile"}
    | {f"{kind}{how}" for kind in ("exec", "spawn") for how in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")},
    "pty": {"spawn"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "multiprocessing": {"Process", "Pool", "get_context"},
    "runpy": {"run_path", "run_module"},
}
MAY = {
    "limosa/start.py": "the one place",
    "limosa/native/hash/make_ptx.py": "a tool of who works on Limosa: nvcc",
    "limosa/process/launch.py": "posix_spawn of the trampoline: -I -S, an absolute path, start.environment()",
    "limosa/process/trampoline.py": "becomes the job, with the environment and in the folder of who asked for it",
    "limosa/gpu/worker_main.py": "becomes what start.python() has written",
    "limosa/demo/train.py": "a job: its data workers",
    "limosa/demo/ranks.py": "a job: its ranks",
    "limosa/process/criu/lent_main.py": "becomes the CRIU that Limosa has lent to a container's runtime",
    "limosa_softgpu/node.py": "becomes the command that was asked for",
}
"""Who starts something without :mod:`limosa.start`, and why that is right."""


def starters(path: Path) -> list[str]:
    """The calls in a module that start a program, e.g. ``subprocess.run``."""
    found, names = [], {}
    tree = ast.parse(path.read_text())
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0]: alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in STARTERS:
            found += [f"{node.module}.{a.name}" for a in node.names if a.name in STARTERS[node.module]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id, "")
            if node.attr == "Popen" and id(node) not in called:
                continue  # a type
            if node.attr in STARTERS.get(module, ()):
                found.append(f"{module}.{node.attr}")
    return found


def test_every_program_is_started_in_the_one_place():
    modules = [path for package in PACKAGES for path in (SOURCE / package).rglob("*.py")]
    found = {str(path.relative_to(SOURCE)): calls for path in modules if (calls := starters(path))}
    assert set(found) == set(MAY), {name: calls for name, calls in found.items() if name not in MAY}


def test_the_scan_finds_what_it_should(tmp_path):
    for text in ("import subprocess as s\ns.run([])", "from os import execv", "import os\nos.posix_spawn(1, 2, 3)"):
        path = tmp_path / "module.py"
        path.write_text(text)
        assert starters(path), text


# --- Python --------------------------------------------------------------------------------------------------------


PROBE = """
def main(arguments):
    import limosa, limosa_softgpu, msgspec
    print(limosa.__file__, limosa_softgpu.__file__, msgspec.__file__)
    return 7
"""


def test_a_python_of_ours_loads_this_limosa_and_nothing_from_where_it_is(tmp_path, monkeypatch):
    for folder in ("here", "variable"):
        (tmp_path / folder).mkdir()
        for name in (*PACKAGES, "msgspec", "json", "sitecustomize", "usercustomize"):
            (tmp_path / folder / f"{name}.py").write_text("raise SystemExit('sprung')")
    (tmp_path / "probe_of_start.py").write_text(PROBE)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "variable"))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "here"), *sys.path, str(tmp_path)])  # as of `python -m limosa`
    done = start.run(start.python("probe_of_start"), capture_output=True, timeout=120)
    assert (done.stderr, done.returncode) == (b"", 7)
    assert done.stdout.decode().split() == [limosa.__file__, limosa_softgpu.__file__, msgspec.__file__]


def test_the_software_gpu_is_taken_from_beside_this_limosa_and_only_where_the_same_user_put_it(tmp_path):
    """Not from where Python finds one; and the folder around ours may be one where everybody makes folders."""
    for name in ("limosa", "elsewhere/limosa_softgpu", "limosa_softgpu"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "limosa" / "__init__.py").write_text("")
    (tmp_path / "limosa" / "boot.py").write_text((SOURCE / "limosa/boot.py").read_text())
    for place in ("elsewhere/", ""):
        (tmp_path / f"{place}limosa_softgpu" / "__init__.py").write_text("")
    (tmp_path / "limosa" / "probe.py").write_text(
        "def main(arguments):\n    import limosa_softgpu\n    print(limosa_softgpu.__file__)\n"
    )
    argv = [sys.executable, "-I", str(tmp_path / "limosa/boot.py"), str(tmp_path / "elsewhere"), "limosa.probe"]

    def said() -> str:
        done = start.run(argv, capture_output=True, timeout=120)
        return (done.stdout or done.stderr.splitlines()[-1]).decode().strip()

    beside = tmp_path / "limosa_softgpu"
    assert said() == str(beside / "__init__.py")
    if os.geteuid() == 0:
        os.chown(beside, STRANGER, STRANGER)
        assert said().startswith("ModuleNotFoundError")
    shutil.rmtree(beside)
    assert said().startswith("ModuleNotFoundError")


def test_the_software_gpu_beside_this_limosa_is_of_it_unless_another_user_put_it_there(tmp_path, monkeypatch):
    """Its libraries are found by LD_LIBRARY_PATH: a checkout's folder may be one that others can change."""
    beside = tmp_path / "open" / "limosa_softgpu"
    (beside / "native").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    assert not start.trusted(beside / "native")
    monkeypatch.setattr(start, "_SOFTGPU", beside)
    monkeypatch.setattr(start, "installer", os.geteuid)
    assert start.trusted(beside / "native")
    if os.geteuid() == 0:
        os.chown(beside, STRANGER, STRANGER)
        assert not start.trusted(beside / "native")


def test_dependencies_that_only_our_own_path_has_are_found(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def main(arguments):\n    print('found', arguments)\n    return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = start.run(start.python("only_here", "a", "b"), capture_output=True, timeout=120)
    assert (done.stdout, done.returncode) == (b"found ['a', 'b']\n", 7)


# --- environment ---------------------------------------------------------------------------------------------------

HOSTILE = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "LD_PRELOAD", "LD_AUDIT", "GCC_EXEC_PREFIX"),
    *("COMPILER_PATH", "CPATH", "LIBRARY_PATH", "BASH_ENV", "ENV", "APT_CONFIG", "CRIU_CONFIG_FILE", "CRIU_LIBS_DIR"),
    *("CUDA_INJECTION64_PATH", "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "IFS", "SHELLOPTS", "PERL5LIB", "GCONV_PATH"),
)


def test_the_environment_is_small(monkeypatch, tmp_path):
    for name in HOSTILE:
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", "/kept")
    made = start.environment({"MORE": "1"})
    assert not set(HOSTILE) & set(made)
    assert (made["LIMOSA_RUNTIME_DIR"], made["MORE"]) == ("/kept", "1")
    assert "HOME" not in start.environment(for_user=True)


def test_relative_folders_never_count(monkeypatch):
    for value in (":/usr/bin", ".:/usr/bin", "/usr/bin:", "bin:/usr/bin", "/usr/bin::/bin"):
        for name in ("PATH", "LD_LIBRARY_PATH"):
            monkeypatch.setenv(name, value)
            assert all(os.path.isabs(entry) for entry in start.environment()[name].split(":")), value


@pytest.fixture
def strange(tmp_path):
    """A folder of another user's, in which there are programs."""
    folder = tmp_path / "strange"
    folder.mkdir()
    for name in ("nft", "criu", "cc"):
        (folder / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / name).chmod(0o755)
    os.chown(folder, STRANGER, STRANGER)
    return folder


@pytest.mark.root
def test_root_takes_no_program_from_a_strangers_folder(strange, monkeypatch):
    monkeypatch.setenv("PATH", f"{strange}:.:/usr/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(strange))
    for name in ("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(strange))
    monkeypatch.chdir(strange)
    made = start.environment()
    assert str(strange) not in " ".join(made.values())
    assert start.program("nft") != str(strange / "nft")
    assert start.program(str(strange / "nft")) is None
    assert start.program("./nft") is None
    assert start.user_folder("XDG_DATA_HOME", ".local/share") == Path("/root/.local/share")


@pytest.mark.root
def test_what_a_stranger_can_change_is_not_trusted(tmp_path, strange):
    good = tmp_path / "good"
    good.mkdir(mode=0o755)
    program = good / "program"
    program.write_text("")
    program.chmod(0o755)
    assert start.trusted(program)
    assert not start.trusted(strange / "nft"), "root's file in a folder of another's"
    link = good / "link"
    link.symlink_to(strange / "nft")
    assert not start.trusted(link)
    middle = strange / "middle"
    middle.symlink_to(good)
    assert not start.trusted(middle / "program"), "over a link of another's folder"
    back = good / "back"
    back.symlink_to(middle)
    assert not start.trusted(back / "program"), "over a link to such a link"
    loop = good / "loop"
    loop.symlink_to(loop)
    assert not start.trusted(loop)
    program.chmod(0o757)
    assert not start.trusted(program)
    program.chmod(0o755)
    good.chmod(0o777)
    assert not start.trusted(program)
    good.chmod(0o1777)
    assert start.trusted(program), "nobody renames root's file in a sticky folder"
    for name in ("nope", "nope/below", "new/../nope"):
        assert start.untrusted_part(good / name) == str(good), "a stranger makes it a moment later"
    (gone := tmp_path / "gone").symlink_to(good / "nope")
    assert start.untrusted_part(gone) == str(good)
    good.chmod(0o755)
    assert start.trusted(good / "nope" / "below"), "only root makes it"
    assert start.trusted(gone)
    good.chmod(0o775)
    os.chown(good, 0, 1000)
    assert not start.trusted(program), "a group's folder"


@pytest.mark.root
@pytest.mark.parametrize("folder", [True, False])
def test_what_a_list_lets_a_stranger_change_is_not_trusted(tmp_path, folder):
    program = tmp_path / "program"
    program.write_text("")
    there = tmp_path if folder else program
    try:
        let_in_by_a_list(there, STRANGER)
    except OSError:
        pytest.skip("a file system without access control lists")
    assert not start.trusted(program)
    there.chmod(0o755)
    assert start.trusted(program), "the list grants no more than the group's bits"
