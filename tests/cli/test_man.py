"""The man pages: every verb has one, they say what the help says, and man can read them."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from limosa.cli.main import VERBS

PAGES = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "man.py"))["pages"]()


def test_every_verb_has_one():
    assert set(PAGES) == {"limosa.1", *(f"limosa-{name}.1" for name in VERBS)}
    assert all(f"limosa\\-{name}" in PAGES["limosa.1"] for name in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_it_has_the_options_of_the_help(inside, verb):
    options = [word for word in inside(verb, "--help").stdout.split() if word.startswith("--")]
    text = PAGES[f"limosa-{verb}.1"].replace("\\-", "-")
    assert all(option.rstrip(",.;:)") in text for option in options)


def test_troff_finds_nothing_to_complain_of(tmp_path):
    groff = shutil.which("groff")
    assert groff is not None or not shutil.which("man"), "man without groff"
    for name, text in PAGES.items() if groff else ():
        (tmp_path / name).write_text(text)
        ran = subprocess.run(
            [groff, "-man", "-Tutf8", "-ww", name], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        assert not ran.stderr, ran.stderr
        assert "LIMOSA" in ran.stdout
