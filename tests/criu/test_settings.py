"""The settings files: whose values win, and what is said of broken ones."""

from __future__ import annotations

import pytest

from limosa.errors import UsageError
from limosa.process import settings


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(settings, "SYSTEM_FILE", tmp_path / "system.toml")
    (tmp_path / "limosa").mkdir()
    return tmp_path / "system.toml", tmp_path / "limosa/config.toml"


def test_the_user_s_value_wins_over_the_machine_s(files):
    assert settings.text("criu") is None
    files[0].write_text('# for all\ncriu = "/opt/criu"\ndebian_mirror = "http://mirror.example/"\n')
    assert settings.text("criu") == "/opt/criu"
    files[1].write_text("criu = '/home/me/criu' # mine\n")
    assert settings.text("criu") == "/home/me/criu"
    assert settings.text("debian_mirror") == "http://mirror.example/"


def test_broken_files_and_values_are_usage_errors(files):
    files[1].write_text("criu = \n")
    with pytest.raises(UsageError, match=r"config\.toml") as caught:
        settings.text("criu")
    assert caught.value.hint == "mend that file, or remove it"
    files[1].write_text("criu = 3\n")
    with pytest.raises(UsageError):
        settings.text("criu")


def test_without_tomllib_lines_are_read_alike(files):
    raw = '# comment\n[section]\ncriu = "/opt/a \\"b\\""\nother = \'x\' # y\n\n'
    assert settings._read_lines(files[0], raw) == {"criu": '/opt/a "b"', "other": "x"}
    with pytest.raises(UsageError, match="line 1"):
        settings._read_lines(files[0], "criu: 3\n")
