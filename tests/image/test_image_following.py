"""Pages that CRIU writes are hashed meanwhile; what is committed is the hash of what is there in the end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import blake3
import pytest
from image_material import fill, manifest

from limosa.errors import DamagedImage
from limosa.image import Draft, open_image
from limosa.image.following import MOST_FILES, Following
from limosa.image.verify import verify

PART = 8 << 20
PAGES = random.Random(1).randbytes(3 * PART + 12345)


@pytest.fixture
def criu(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def followed(criu: int, name: str, enough: int) -> tuple[int, str]:
    """How far it comes within a second at most, and the hash of that."""
    following = Following(criu)
    end = time.monotonic() + 60
    while time.monotonic() < end and (name not in following._begun or following._begun[name].done < enough):
        time.sleep(0.01)
    begun = following.stop()[name]
    following.close()
    return begun.done, begun.hasher.hexdigest()


def test_whole_parts_are_hashed_while_the_file_grows(tmp_path: Path, criu: int) -> None:
    (tmp_path / "pages-1.img").write_bytes(PAGES)
    assert followed(criu, "pages-1.img", 3 * PART) == (3 * PART, blake3.blake3(PAGES[: 3 * PART]).hexdigest())


def test_what_is_small_or_of_another_name_is_left(tmp_path: Path, criu: int) -> None:
    for name in ("pages-1.img.x", "core-1.img", "pages-x.img"):
        (tmp_path / name).write_bytes(PAGES)
    (tmp_path / "pages-2.img").write_bytes(PAGES[: PART - 1])
    following = Following(criu)
    time.sleep(0.2)
    begun = following.stop()
    following.close()
    assert begun == {}


def test_of_many_files_a_few_are_followed(tmp_path: Path, criu: int) -> None:
    """A tree of a thousand processes has as many; each that is followed has a descriptor."""
    for n in range(3 * MOST_FILES):
        (tmp_path / f"pages-{n}.img").write_bytes(PAGES[: PART + n])
    threads = threading.active_count()
    following = Following(criu)
    end = time.monotonic() + 60
    while time.monotonic() < end and sum(one.done for one in list(following._begun.values())) < MOST_FILES * PART:
        time.sleep(0.01)
    assert threading.active_count() == threads + 1
    assert len(following.stop()) == MOST_FILES
    following.close()


def test_one_that_becomes_shorter_is_left(tmp_path: Path, criu: int) -> None:
    (tmp_path / "pages-1.img").write_bytes(PAGES)
    following = Following(criu)
    end = time.monotonic() + 60
    while time.monotonic() < end and not any(one.done for one in list(following._begun.values())):
        time.sleep(0.01)
    os.truncate(tmp_path / "pages-1.img", 0)
    while time.monotonic() < end and following._begun:
        time.sleep(0.01)
    (tmp_path / "pages-1.img").write_bytes(PAGES[::-1])
    time.sleep(0.2)
    assert following.stop() == {}
    following.close()


def test_a_commit_after_one_that_failed_is_right(tmp_path: Path) -> None:
    with Draft.create(tmp_path / "image", operation="op-1") as draft:
        draft.follow()
        fill(draft)
        (draft.path / "criu" / "pages-7.img").write_bytes(PAGES)
        time.sleep(0.3)
        draft.followed()
        (draft.path / "manifest.json").mkdir()
        with pytest.raises(OSError, match="exists"):
            draft.commit(manifest())
        (draft.path / "manifest.json").rmdir()
        draft.commit(manifest()).close()
    with open_image(tmp_path / "image") as image:
        verify(image).check()


def grown(path: Path) -> None:
    """Written in pieces, as CRIU does."""
    with open(path, "ab", buffering=0) as file:
        for at in range(0, len(PAGES), 3 << 20):
            file.write(PAGES[at : at + (3 << 20)])
            time.sleep(0.03)


def replaced(path: Path) -> None:
    grown(path)
    path.unlink()
    path.write_bytes(PAGES[::-1])


def cut_short(path: Path) -> None:
    grown(path)
    os.truncate(path, PART // 2)


@pytest.mark.parametrize("happens", [grown, replaced, cut_short], ids=lambda f: f.__name__)
def test_what_is_committed_is_the_hash_of_what_is_there(tmp_path: Path, happens) -> None:
    with Draft.create(tmp_path / "image", operation="op-1") as draft:
        draft.follow()
        fill(draft)
        path = draft.path / "criu" / "pages-7.img"
        happens(path)
        draft.commit(manifest()).close()
    with open_image(tmp_path / "image") as image:
        verify(image).check()


@pytest.mark.parametrize("after", ["follow", "empty", "discard"])
def test_nobody_follows_a_draft_that_is_given_up(tmp_path: Path, after: str) -> None:
    draft = Draft.create(tmp_path / "image", operation="op-1")
    draft.follow()
    (draft.path / "criu" / "pages-1.img").write_bytes(PAGES)
    thread = draft._following._thread if draft._following else None
    assert thread is not None
    assert thread.is_alive()
    if after == "follow":
        draft.follow()
    elif after == "empty":
        draft.empty_criu()
    draft.discard() if after == "discard" else None
    assert not thread.is_alive()
    draft.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "short", "missing"])
def test_pages_may_be_compared_by_themselves(tmp_path: Path, damage: str) -> None:
    """Whether they are there, and how long they are, is seen with the rest."""
    with Draft.create(tmp_path / "image", operation="op-1") as draft:
        fill(draft)
        (draft.path / "criu" / "pages-7.img").write_bytes(PAGES)
        draft.commit(manifest()).close()
    path = tmp_path / "image" / "criu" / "pages-7.img"
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        os.truncate(path, PART)
    else:
        with open(path, "r+b") as file:
            file.write(bytes([PAGES[0] ^ 1]))
    with open_image(tmp_path / "image") as image:
        rest, pages = (verify(image, part=part) for part in ("rest", "pages"))  # type: ignore[arg-type]
    assert rest.ok == (damage == "flip")
    assert {file.path for file in pages.files} == {"criu/pages-1.img", "criu/pages-7.img"}
    assert rest.bytes < PART
    with pytest.raises(DamagedImage, match="pages-7"):
        pages.check()
