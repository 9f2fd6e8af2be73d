"""The relay between a runtime and CRIU: where what is bound in leads, and whether that is what was mounted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from limosa.process.criu import lent_main

pytestmark = pytest.mark.root


def request(place: bytes, path: bytes) -> bytes:
    """A restore that has one thing bound in."""
    bind = lent_main._field(1, place) + lent_main._field(2, path)
    return lent_main._varint(1 << 3) + lent_main._varint(2) + lent_main._field(2, lent_main._field(23, bind))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """What is bound in, and the root folder of the container."""
    theirs, root = tmp_path / "theirs/work/data", tmp_path / "root"
    theirs.mkdir(parents=True)
    (theirs / "file").touch()
    (root / "data").mkdir(parents=True)
    return theirs, root


def test_what_is_bound_in_is_named_by_where_it_leads(folders: tuple[Path, Path]) -> None:
    theirs, _ = folders
    (theirs.parent / "link").symlink_to("../work/data/")
    for path in (theirs, theirs.parent / "link", f"{theirs}/../link//./"):
        binds: dict[bytes, int] = {}
        changed = lent_main.adjusted(request(b"/data", os.fsencode(path)), "", binds=binds)
        assert changed == request(b"/data", os.fsencode(theirs))
        assert os.path.samestat(os.fstat(binds[b"/data"]), theirs.stat())


def test_the_machines_root_may_be_bound_in(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    for path in ("/", tmp_path / "link"):
        assert lent_main.adjusted(request(b"/host", os.fsencode(path)), "") == request(b"/host", b"/")


def test_no_link_of_another_user_leads_there_and_nothing_may_be_missing(folders: tuple[Path, Path]) -> None:
    theirs, _ = folders
    os.symlink(theirs, theirs.parent / "link")
    os.lchown(theirs.parent / "link", 1001, 1001)
    with pytest.raises(PermissionError, match="is a link of uid 1001"):
        lent_main.adjusted(request(b"/data", os.fsencode(theirs.parent / "link/file")), "")
    with pytest.raises(PermissionError, match="No such file"):
        lent_main.adjusted(request(b"/data", os.fsencode(theirs / "none")), "")
    with pytest.raises(PermissionError, match="Not a directory"):
        lent_main.adjusted(request(b"/data", os.fsencode(theirs / "file/x")), "")


def test_what_somebody_was_quick_to_exchange_is_noticed(folders: tuple[Path, Path]) -> None:
    """What was looked at is held open; CRIU has mounted what was there when it came."""
    theirs, root = folders
    binds: dict[bytes, int] = {}
    lent_main.adjusted(request(b"/data", os.fsencode(theirs)), "", binds=binds)
    assert "something else" in lent_main.exchanged(str(root), binds)
    (root / "data").rmdir()
    (root / "data").symlink_to(theirs)
    assert "cannot be looked at" in lent_main.exchanged(str(root), binds)
    (root / "data").unlink()
    theirs.rename(root / "data")  # as if it had been mounted there
    assert lent_main.exchanged(str(root), binds) == ""


def test_how_far_criu_says_that_it_is() -> None:
    notify = lent_main._field(1, b"post-setup-namespaces") + lent_main._varint(2 << 3) + lent_main._varint(4711)
    assert lent_main.notified(lent_main._field(5, notify)) == (b"post-setup-namespaces", 4711)
    for answer in (b"", b"\x2a", b"\x08\x02", lent_main._field(5, b"\xff"), lent_main._field(5, b"")):
        assert lent_main.notified(answer) == (b"", 0)
