from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import limosa
from limosa.cli.main import entry

SOURCE = str(Path(limosa.__file__).parent.parent)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment for a limosa of its own: its records are kept in a folder of the test's."""
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LIMOSA_TRACE")}
    env["PYTHONPATH"] = SOURCE
    env["LIMOSA_RUNTIME_DIR"] = str(tmp_path / "runtime")
    return env


Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def inside(
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Cli:
    """As ``cli``, in the tests' own process: for what neither acts nor depends on what a new process has loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", environment["LIMOSA_RUNTIME_DIR"])

    def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            entry(args)
        code = left.value.code
        return subprocess.CompletedProcess(args, code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Cli:
    """Runs limosa to its end, with stdout and stderr as pipes."""

    def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "limosa", *args],
            env={**environment, **(env or {})},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
