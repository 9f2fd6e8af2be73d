"""What Limosa compiles, root loads: it is nobody else's to change, whatever the umask was, and else is not loaded."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from limosa import parking
from limosa.errors import GpuUnavailable
from limosa.native import build, loads
from limosa.operation import doctor
from limosa.process.criu import program
from limosa_softgpu import node
from limosa_softgpu.build import LIBRARIES

job = importlib.import_module("limosa.job")

pytestmark = pytest.mark.root


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_is_compiled_has_one_mode_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        assert build.build_sight(tmp_path) is None
    finally:
        os.umask(before)
    assert (tmp_path / build.SIGHT_LIBRARY).stat().st_mode & 0o777 == 0o755
    (tmp_path / build.SIGHT_LIBRARY).chmod(0o777)  # as an older version left it
    assert build.build_sight(tmp_path) is None
    assert (tmp_path / build.SIGHT_LIBRARY).stat().st_mode & 0o777 == 0o755


@pytest.fixture(params=["library", "folder", "owner", "group"])
def changeable(request, tmp_path) -> Path:
    """A library that somebody else can change, each in another way."""
    folder = tmp_path / "native"
    folder.mkdir()
    library = folder / "liblimosa_shim.so"
    library.write_bytes(parking.LIBRARY.read_bytes())
    library.chmod(0o755)
    folder.chmod(0o755)
    if request.param == "owner":
        os.chown(library, 4242, 4242)
    elif request.param == "group":
        os.chown(folder, 0, 4242)
        folder.chmod(0o775)
    else:
        (library if request.param == "library" else folder).chmod(0o777)
    return library


def test_root_has_no_job_preload_what_others_can_change(changeable, tmp_path, monkeypatch):
    monkeypatch.setattr(parking, "LIBRARY", changeable)
    monkeypatch.setattr(job, "LIBRARY", changeable)
    assert "LD_PRELOAD" not in parking.preload({})
    started = job.run(["true"], log=tmp_path / "log", detach=False)
    os.waitpid(started.pid, 0)
    assert [w.id for w in started.warnings] == ["no-library"]


def test_root_preloads_its_own(tmp_path, monkeypatch):
    library = tmp_path / "liblimosa_shim.so"
    library.write_bytes(b"")
    library.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(parking, "LIBRARY", library)
    assert parking.preload({})["LD_PRELOAD"] == str(library)


def test_nccl_listens_for_nobody_where_that_is_not_wanted():
    """On a port that an image would need to be free."""
    asked = parking.preload({"NCCL_RAS_ENABLE": "1"})["NCCL_RAS_ENABLE"]
    assert (parking.preload({})["NCCL_RAS_ENABLE"], asked) == ("0", "1")
    assert "NCCL_RAS_ENABLE" not in parking.preload({}, without=["ranks"])


def test_roots_criu_gets_no_plugin_that_others_can_change(tmp_path, monkeypatch):
    plugin = tmp_path / "native" / "criu" / program.PLUGIN
    plugin.parent.mkdir(parents=True)
    plugin.write_bytes(b"")
    plugin.chmod(0o755)
    plugin.parent.chmod(0o755)
    monkeypatch.setattr(program, "__file__", str(tmp_path / "process" / "criu" / "program.py"))
    assert program.plugin_dir() == str(plugin.parent)
    plugin.chmod(0o777)
    assert program.plugin_dir() is None


def test_doctor_loads_nothing_that_others_can_change_and_says_so(changeable, monkeypatch):
    """Its constructors ran as root, and doctor said that all was well."""
    monkeypatch.setattr(loads.start, "run", lambda *_, **__: pytest.fail("it was loaded"))
    assert list(loads.load_problems([changeable])) == [changeable]
    check = doctor._unloadable("libraries", [changeable], {}, lambda _: None)
    assert check is not None
    assert (check.status, "others can change" in check.detail, "chmod go-w" in check.fix) == ("warn", True, True)


def test_doctor_fix_builds_anew_what_others_can_change(tmp_path):
    library = tmp_path / build.SIGHT_LIBRARY
    tmp_path.chmod(0o755)
    assert build.build_sight(tmp_path) is None
    library.chmod(0o777)
    os.chown(library, 4242, 4242)
    fixed = doctor._unloadable("libraries", [library], {library: lambda: build.build_sight(tmp_path)}, lambda _: None)
    assert fixed is None
    assert (library.stat().st_uid, library.stat().st_mode & 0o777) == (0, 0o755)


def test_no_program_of_roots_gets_a_driver_in_software_that_others_can_change(tmp_path):
    tmp_path.chmod(0o755)
    for name in LIBRARIES:
        (tmp_path / name).write_bytes(b"")
        (tmp_path / name).chmod(0o755)
    node.check_libraries(tmp_path)
    (tmp_path / LIBRARIES[0]).chmod(0o777)
    with pytest.raises(GpuUnavailable, match="others can change"):
        node.check_libraries(tmp_path)
