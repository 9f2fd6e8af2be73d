"""What is compiled for a release fits older systems and says so; what cannot be compiled or loaded is told in words."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import native_build
from limosa.native import build, wheel_tag
from limosa.native.loads import load_problems
from limosa.operation import doctor
from limosa.version import VERSION
from limosa_softgpu.build import build_softgpu

ROOT = Path(native_build.__file__).parent
# The software GPU takes as long to compile as all others: a wheel is built with it once, below.
ALL = bool(os.environ.get("LIMOSA_LONG_TESTS"))
PARTS = [(make, names) for make, _, names, _ in native_build.PARTS if ALL or make is not build_softgpu]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The libraries, built as ``make wheel`` does."""
    folder = tmp_path_factory.mktemp("release")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIMOSA_RELEASE", "1")
        for make, _ in PARTS:
            assert make(folder) is None
    return [folder / name for _, libraries in PARTS for name in libraries]


@pytest.mark.slow
def test_a_release_needs_no_new_c_library(release: list[Path]) -> None:
    assert wheel_tag.too_new(release) == []
    assert wheel_tag.platform_tag(release).startswith("manylinux_2_")
    versions = [found[0] for library in release if (found := wheel_tag.needs(library)) is not None]
    assert len(versions) == len(release)
    assert max(versions) <= wheel_tag.NEWEST


@pytest.mark.slow
def test_a_release_can_be_loaded_here(release: list[Path]) -> None:
    assert load_problems([path for path in release if ".so" in path.name]) == {}
    (shim,) = (library for library in release if library.name == build.SHIM_LIBRARY)
    ran = subprocess.run(
        ["sh", "-c", "echo it runs"],
        env={"LD_PRELOAD": str(shim), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (ran.stdout, ran.stderr) == ("it runs\n", "")


@pytest.mark.slow
def test_functions_of_threads_are_looked_for_where_older_systems_have_them(release: list[Path]) -> None:
    """A loader before 2.34 looks into the library that the linker found them in: linked with libc, none loads there."""
    (shim,) = (library for library in release if library.name == build.SHIM_LIBRARY)
    told = subprocess.run(["objdump", "-T", shim], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "pthread_create" in told
    told = subprocess.run(["readelf", "-V", shim], capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.search(r"File: libpthread\.so\.0\s+Cnt: [1-9]", told)
    assert re.search(r"File: libdl\.so\.2\s+Cnt: [1-9]", told)


def test_what_needs_a_newer_one_is_no_release(tmp_path: Path) -> None:
    source = tmp_path / "new.c"
    source.write_text("#define _GNU_SOURCE\n#include <unistd.h>\nint tid(void) { return (int)gettid(); }\n")
    library = tmp_path / "new.so"
    subprocess.run([*build.compilers()[0], "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    assert wheel_tag.too_new([library]) == ["new.so needs the C library 2.30"]
    assert wheel_tag.platform_tag([library]).startswith("manylinux_2_30_")


def test_relocations_that_an_old_loader_cannot_read_are_counted(tmp_path: Path) -> None:
    """A linker that packs them by itself (as several systems' does) made wheels whose names promised too much."""
    source = tmp_path / "packed.c"
    source.write_text("static int x; int *many[64] = {&x, &x, &x}; int *get(int i) { return many[i]; }\n")
    library = tmp_path / "packed.so"
    argv = [*build.compilers()[0], "-shared", "-fPIC", "-Wl,-z,pack-relative-relocs", "-o", library, source]
    subprocess.run([*argv, "-lc"], check=True, timeout=60)
    assert wheel_tag.too_new([library]) == ["packed.so needs the C library 2.36"]


def test_what_is_built_beside_the_source_fits_old_systems_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Containers get these very files (limosa cdi), whatever C library their images have."""
    monkeypatch.delenv("LIMOSA_RELEASE", raising=False)
    monkeypatch.setenv("CC", f"{build.compilers()[0][0]} -Wl,-z,pack-relative-relocs")
    assert [build.build_shim(tmp_path), build.build_sight(tmp_path)] == [None, None]
    made = [tmp_path / build.SHIM_LIBRARY, tmp_path / build.SIGHT_LIBRARY]
    assert wheel_tag.too_new(made) == []


def test_a_library_that_does_not_load_is_named_and_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF of another machine" * 50)
    assert list(load_problems([build.HASH / build.HASH_LIBRARY, broken])) == [broken]

    monkeypatch.setattr(build, "HASH", tmp_path)
    monkeypatch.setattr(build, "HASH_LIBRARY", "broken.so")
    said = doctor._libraries(fix=False, log=print)
    assert said.status == "warn"
    assert "broken.so does not load here" in said.detail
    assert "doctor --fix" in said.fix

    def builds() -> str | None:
        assert not broken.exists()
        broken.write_bytes((native_build.native.SIGHT / native_build.native.SIGHT_LIBRARY).read_bytes())
        return None

    monkeypatch.setattr(build, "build_hash", builds)
    assert doctor._libraries(fix=True, log=print).status == "ok"


def test_one_that_may_not_be_replaced_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF of another machine" * 50)
    monkeypatch.setattr(build, "HASH", tmp_path)
    monkeypatch.setattr(build, "HASH_LIBRARY", "broken.so")

    def forbidden(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "unlink", forbidden)
    said = doctor._libraries(fix=True, log=print)
    assert said.status == "warn"
    assert "cannot be replaced (Permission denied)" in said.detail


def test_without_a_compiler_it_is_said_once_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/compiler")
    problem = build.build_shim(tmp_path)
    assert problem is not None
    told = native_build.without([f"jobs move at the driver's speed ({problem})", f"no GPUs ({problem})"])
    assert told.count("no C compiler") == 1
    assert "Limosa works, but: jobs move at the driver's speed; no GPUs. Install gcc" in told


def test_a_job_that_starts_without_the_library_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    import limosa.job

    monkeypatch.setattr(limosa.job, "LIBRARY", tmp_path / "none.so")
    job = limosa.run(["true"], cwd=tmp_path)
    assert [warning.id for warning in job.warnings] == ["no-library"]
    assert "doctor --fix" in job.warnings[0].hint


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(300)  # half a minute of compiling, on a machine that may be busy
def test_a_wheel_is_built_has_all_libraries_and_answers_when_it_is_installed(tmp_path: Path) -> None:
    """As ``make wheel`` does it, but for the man pages, in a copy; hatchling is fetched where it is not installed."""
    tree, made, installed = tmp_path / "tree", tmp_path / "dist", tmp_path / "installed"
    built = shutil.ignore_patterns("*.so", "*.so.*", build.PRELOAD_HOOK, "__pycache__")  # no release
    shutil.copytree(ROOT / "src", tree / "src", ignore=built)
    for name in ("pyproject.toml", "native_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

    def runs(*words: object, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            env={**clean, **more}, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        if "(from versions: none)" in done.stderr and "No matching distribution found for hatchling" in done.stderr:
            pytest.skip("hatchling is not installed, and pip cannot fetch it")
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    pip = ("-I", "-m", "pip", "-q", "--disable-pip-version-check", "--retries=1")
    alone = [] if importlib.util.find_spec("hatchling") is None else ["--no-build-isolation"]
    runs(*pip, "wheel", "--no-deps", *alone, "--wheel-dir", made, tree, LIMOSA_RELEASE="1")
    (wheel,) = made.iterdir()
    assert re.fullmatch(rf"limosa-{re.escape(VERSION)}-py3-none-manylinux_2_\d+_{os.uname().machine}\.whl", wheel.name)

    package = Path(build.CRIU).parents[2]  # where limosa/ is
    libraries = [
        str((folder / name).relative_to(package)) for _, folder, names, _ in native_build.PARTS for name in names
    ]
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert set(libraries) <= inside
    sources = {str(path.relative_to(tree / "src")) for path in (tree / "src").rglob("*.py")}
    assert sources <= inside

    runs(*pip, "install", "--no-deps", "--no-index", "--target", installed, wheel)
    assert load_problems([installed / name for name in libraries if ".so" in name]) == {}
    where = runs("-c", "import limosa; print(limosa.__file__)", PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)  # not what is tested otherwise
    assert runs(installed / "bin" / "limosa", "--version", PYTHONPATH=str(installed)) == f"limosa {VERSION}\n"
