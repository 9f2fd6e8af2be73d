"""The forty are skipped where CRIU's source cannot be fetched, and for nothing else that goes wrong on the way."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from limosa.errors import NoWorkingCriu
from limosa.process.criu import fetch
from zdtm import source

NO_NETWORK = "apt-get update: E: Failed to fetch http://deb.debian.org/…  Temporary failure resolving 'deb.debian.org'"
FORGED = "apt-get update: W: GPG error: … NO_PUBKEY 78DBA3BC47EF2265; E: Some index files failed to download"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "folder", lambda: tmp_path / "zdtm")
    monkeypatch.setattr(source, "find", lambda: SimpleNamespace(version="4.2"))
    monkeypatch.setattr(source.start, "program", lambda name: f"/usr/bin/{name}")


def raises(detail: str) -> Any:
    def failed(*_: object, **__: object) -> None:
        raise NoWorkingCriu(detail=detail)

    return failed


class Archive:
    """An apt that fetches a file of that content."""

    def __init__(self, content: bytes):
        self.content = content

    def run(self, *_: str, cwd: Path) -> None:
        (cwd / "criu_4.2.orig.tar.gz").write_bytes(self.content)


def test_without_a_network_there_is_no_source_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "signed_lists", raises(NO_NETWORK))
    with pytest.raises(source.NoSource, match=r"cannot be fetched: .*Temporary failure resolving"):
        source.suite()


def test_where_the_mirror_does_not_have_it_there_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    apt = SimpleNamespace(run=raises("apt-get source: E: Unable to find a source package for criu"))
    monkeypatch.setattr(fetch, "signed_lists", lambda *_, **__: apt)
    with pytest.raises(source.NoSource, match="Unable to find a source package"):
        source.suite()


def test_where_there_is_no_apt_there_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.start, "program", lambda name: None)
    with pytest.raises(source.NoSource, match="no apt-get"):
        source.suite()


def test_what_is_not_signed_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "signed_lists", raises(FORGED))
    with pytest.raises(NoWorkingCriu) as caught:
        source.suite()
    assert type(caught.value) is NoWorkingCriu


def test_where_no_criu_works_it_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find", raises("none is installed"))
    with pytest.raises(NoWorkingCriu) as caught:
        source.suite()
    assert type(caught.value) is NoWorkingCriu


def test_what_cannot_be_unpacked_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "signed_lists", lambda *_, **__: Archive(b"no archive"))
    with pytest.raises(subprocess.CalledProcessError):
        source.suite()
