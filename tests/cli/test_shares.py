"""Three shares one after the other are all variants, and each has every test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FILE = """
import pytest

@pytest.mark.parametrize("n", range({n}))
def test_variants(n):
    pass

def test_alone():
    pass

@pytest.mark.whole
@pytest.mark.parametrize("n", range(4))
def test_whole(n):
    pass
"""
CONFTEST = """
import os
from shares import Shares

def pytest_configure(config):
    config.addinivalue_line("markers", "whole: all variants")
    config.pluginmanager.register(Shares(os.environ["LIMOSA_SHARE"]))
"""


def collected(place: Path, share: str) -> set[str]:
    argv = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", str(place)]
    env = {**os.environ, "LIMOSA_SHARE": share, "PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(argv, env=env, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return set(re.findall(r"test_\w+(?:\[\d+\])?$", ran.stdout, re.M))


def test_every_share_has_every_test_and_three_have_all_variants(tmp_path: Path) -> None:
    for n in (1, 2, 3, 7):
        place = tmp_path / str(n)
        place.mkdir()
        (place / "test_some.py").write_text(FILE.format(n=n))
        (place / "conftest.py").write_text(CONFTEST)
        shares = [collected(place, f"{share}/3") for share in (1, 2, 3)]
        every = {f"test_variants[{i}]" for i in range(n)}
        whole = {"test_alone", *(f"test_whole[{i}]" for i in range(4))}
        assert set().union(*shares) == every | whole
        for share in shares:
            assert whole <= share
            assert max(1, n // 3) <= len(share & every) <= max(1, -(-n // 3))


def test_what_is_no_share_is_refused(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pytest", "--collect-only", str(Path(__file__).parents[1] / "hash")]
    for share in ("4/3", "1", "x/3"):
        env = {**os.environ, "LIMOSA_SHARE": share}
        ran = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 4
        assert "a share is 1/4, say" in ran.stderr
