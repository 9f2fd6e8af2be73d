"""Whatever is done to an image is found: nothing that was changed is opened and verified as whole."""

from __future__ import annotations

import os
import random
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from image_material import CONTENTS, fill, manifest, write_image

from limosa.errors import CancelledUndone, DamagedImage, NoSuchImage, NotAnImage, UnfinishedImage
from limosa.image import Draft, VerifyResult, open_image, verify
from limosa.progress import Progress


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A whole image."""
    write_image(tmp_path / "image").close()
    return tmp_path / "image"


def look(path: Path, **options: object) -> VerifyResult:
    with open_image(path) as image:
        return verify(image, **options)  # type: ignore[arg-type]


def problems(path: Path) -> dict[str, str]:
    """{path of a file: what is wrong with it}, and that the answer is a no with exit code 16."""
    result = look(path)
    assert not result.ok
    with pytest.raises(DamagedImage) as e:
        result.check()
    assert e.value.exit_code == 16
    named = {p.path: p.problem for p in result.problems}
    assert all(p.path in p.text for p in result.problems)
    assert {f.path for f in result.files if not f.ok} == {path for path, problem in named.items() if problem != "extra"}
    return named


def test_a_whole_image_is_whole(whole: Path) -> None:
    steps: list[Progress] = []
    result = look(whole, progress=steps.append)
    assert result.ok
    result.check()
    assert result.problems == []
    assert {f.path: f.size for f in result.files} == {f"criu/{name}": len(c) for name, c in CONTENTS.items()}
    assert result.bytes == sum(map(len, CONTENTS.values()))
    assert (steps[-1].step, steps[-1].done, steps[-1].total) == ("verify", result.bytes, result.bytes)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.blake3"])
@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_each_byte_of_manifest_and_hash_flipped_is_refused(whole: Path, name: str, flip: int) -> None:
    file = whole / name
    good = file.read_bytes()
    with file.open("r+b", buffering=0) as f:
        for at in range(len(good)):
            os.pwrite(f.fileno(), bytes([good[at] ^ flip]), at)
            with pytest.raises(DamagedImage) as e:
                open_image(whole)
            assert e.value.exit_code == 16
            os.pwrite(f.fileno(), good[at : at + 1], at)
    assert look(whole).ok


@pytest.mark.parametrize("name", ["manifest.json", "manifest.blake3"])
def test_a_manifest_or_hash_cut_short_grown_or_gone_is_refused(whole: Path, name: str) -> None:
    file = whole / name
    good = file.read_bytes()
    for bad in [good[:n] for n in range(0, len(good), 7)] + [good + b"\n", good + good, b"\0" * len(good)]:
        file.write_bytes(bad)
        with pytest.raises(DamagedImage):
            open_image(whole)
    file.unlink()
    with pytest.raises(DamagedImage, match="missing"):
        open_image(whole)


def test_an_enormous_manifest_is_refused_unread(whole: Path) -> None:
    os.truncate(whole / "manifest.json", 1 << 40)
    with pytest.raises(DamagedImage, match="longer than"):
        open_image(whole)


@pytest.mark.parametrize("name", CONTENTS)
def test_each_byte_changed_or_cut_or_added_is_named(whole: Path, name: str) -> None:
    file = whole / "criu" / name
    good = file.read_bytes()
    for at in (0, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert problems(whole) == {f"criu/{name}": "damaged"}
    for size in (0, 1, len(good) - 1):
        file.write_bytes(good[:size])
        assert problems(whole) == {f"criu/{name}": "truncated"}
    file.write_bytes(good + b"\0")
    assert problems(whole) == {f"criu/{name}": "damaged"}
    file.unlink()
    assert problems(whole) == {f"criu/{name}": "missing"}
    file.write_bytes(good)
    assert look(whole).ok


def test_two_files_swapped_are_named_as_such(whole: Path) -> None:
    criu = whole / "criu"
    names = sorted(CONTENTS)
    for a in names:
        for b in names:
            if a < b:
                for first in (True, False):  # the second time puts them back
                    (criu / a).rename(criu / "x")
                    (criu / b).rename(criu / a)
                    (criu / "x").rename(criu / b)
                    if first:
                        assert problems(whole) == {f"criu/{a}": "swapped", f"criu/{b}": "swapped"}
                        text = " ".join(p.text for p in look(whole).problems)
                        assert f"criu/{a} has the content of criu/{b}" in text
    assert look(whole).ok


def test_a_copy_of_another_file_is_damage_that_says_of_which(whole: Path) -> None:
    shutil.copyfile(whole / "criu/core-41.img", whole / "criu/core-42.img")
    assert problems(whole) == {"criu/core-42.img": "damaged"}
    assert look(whole).problems[0].text == "criu/core-42.img has the content of criu/core-41.img"


def test_files_with_equal_content_are_not_confused(tmp_path: Path) -> None:
    with Draft.create(tmp_path / "image") as draft:
        fill(draft, {"a.img": b"same", "b.img": b"same", "c.img": b"", "d.img": b""})
        draft.commit(manifest()).close()
    assert look(tmp_path / "image").ok
    (tmp_path / "image/criu/a.img").write_bytes(b"")
    assert problems(tmp_path / "image") == {"criu/a.img": "damaged"}


@pytest.mark.parametrize(
    "extra", ["criu/core-99.img", "criu/.hidden", "criu/folder/", "note.txt", "gpu/", "criu/\udcff"]
)
def test_what_is_not_in_the_manifest_is_named(whole: Path, extra: str) -> None:
    path = whole / extra
    path.mkdir() if extra.endswith("/") else path.touch()
    shown = extra.rstrip("/").replace("\udcff", "\\xff")
    assert problems(whole) == {shown: "extra"}


def test_logs_are_nobodys_business(whole: Path) -> None:
    (whole / "log/restore.log").write_text("written later")
    assert look(whole).ok


@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "folder", "socket"])
@pytest.mark.parametrize("name", ["criu/pages-1.img", "manifest.json", "manifest.blake3"])
def test_anything_but_a_file_in_a_files_place_is_refused_at_once(whole: Path, kind: str, name: str) -> None:
    """Also a symlink to the very content that is wanted, and a FIFO must not block."""
    place = whole / name
    elsewhere = whole.parent / "elsewhere"
    place.rename(elsewhere)
    if kind == "symlink":
        place.symlink_to(elsewhere)
    elif kind == "dangling":
        place.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(os.path.relpath(place))
    with pytest.raises(DamagedImage):
        look(whole).check()
    if name.startswith("criu/"):  # also for those who only look
        with open_image(whole, trust=False) as image:
            assert [p.problem for p in verify(image).problems] == ["damaged"]
    else:
        with pytest.raises(DamagedImage):
            open_image(whole, trust=False)


@pytest.mark.parametrize("name", ["criu", "log"])
def test_a_folder_that_is_a_symlink_is_refused(whole: Path, name: str) -> None:
    (whole / name).rename(whole.parent / "elsewhere")
    (whole / name).symlink_to(whole.parent / "elsewhere")
    with pytest.raises(DamagedImage):
        open_image(whole)


def test_no_image_at_all(tmp_path: Path) -> None:
    with pytest.raises(NoSuchImage) as e:
        open_image(tmp_path / "image")
    assert e.value.exit_code == 16
    (tmp_path / "image").mkdir()
    with pytest.raises(NotAnImage, match="empty folder"):
        open_image(tmp_path / "image")
    (tmp_path / "image" / "photo.jpg").touch()
    with pytest.raises(NotAnImage, match="other things are in it"):
        open_image(tmp_path / "image")
    (tmp_path / "file").touch()
    with pytest.raises(NotAnImage, match="an image is a folder"):
        open_image(tmp_path / "file")
    with pytest.raises(NotAnImage):
        open_image(tmp_path / "file" / "image")


@pytest.mark.parametrize("left", ["manifest.json", "manifest.blake3", "criu"])
def test_whatever_is_left_of_an_image_makes_it_a_damaged_one(whole: Path, left: str) -> None:
    for part in {"manifest.json", "manifest.blake3", "criu"} - {left}:
        shutil.rmtree(whole / part) if (whole / part).is_dir() else (whole / part).unlink()
    with pytest.raises(DamagedImage) as caught:
        open_image(whole)
    assert caught.value.id == "damaged-image"


def test_an_unfinished_folder_is_none_under_any_name(whole: Path) -> None:
    """Renamed by hand, its marker still tells; whole but under a temporary name, its name does."""
    digest = (whole / "manifest.blake3").read_bytes()
    (whole / "unfinished.json").write_text("{}")
    (whole / "manifest.blake3").unlink()
    with pytest.raises(UnfinishedImage):
        open_image(whole)
    (whole / "manifest.blake3").write_bytes(digest)
    assert look(whole).ok  # a crash right after the commit point leaves the marker
    partial = whole.rename(whole.with_name(".image.limosa-partial-0123456789abcdef"))
    (partial / "unfinished.json").unlink()
    with pytest.raises(UnfinishedImage) as e:
        open_image(partial)
    assert (e.value.exit_code, e.value.hint) == (16, f"limosa rm {partial}")
    link = whole.with_name("link")
    link.symlink_to(partial)
    with pytest.raises(UnfinishedImage):
        open_image(link)


def test_verify_can_be_cancelled(whole: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledUndone):
        look(whole, cancel=cancel)


def spoil_byte(dice: random.Random, image: Path) -> None:
    file = any_file(dice, image)
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data))] ^= dice.randint(1, 255)
    file.write_bytes(data)


def spoil_length(dice: random.Random, image: Path) -> None:
    file = any_file(dice, image)
    size = file.stat().st_size
    os.truncate(file, dice.choice([n for n in (0, 1, size // 2, size - 1, size + 1, 2 * size) if n != size]))


def spoil_part(dice: random.Random, image: Path) -> None:
    """A stretch of bytes is cut out, doubled or overwritten."""
    file = any_file(dice, image)
    data = file.read_bytes()
    at, length = dice.randrange(len(data)), dice.randint(1, 64)
    bad = dice.choice([data[:at] + data[at + length :], data[:at] + data[at : at + length] + data[at:]])
    file.write_bytes(bad if bad != data else data + b"!")


def spoil_swap(dice: random.Random, image: Path) -> None:
    a, b = dice.sample(all_files(image), 2)
    a.rename(image / "x")
    b.rename(a)
    (image / "x").rename(b)


def spoil_remove(dice: random.Random, image: Path) -> None:
    any_file(dice, image).unlink()


def spoil_rename(dice: random.Random, image: Path) -> None:
    file = any_file(dice, image)
    file.rename(file.with_name(f"{file.name}{dice.choice('~x1')}"))


def spoil_add(dice: random.Random, image: Path) -> None:
    (image / dice.choice(["", "criu"]) / f"core-{dice.randrange(100, 999)}.img").write_bytes(dice.randbytes(9))


def spoil_kind(dice: random.Random, image: Path) -> None:
    """A file becomes a folder, a FIFO or a symlink."""
    file = any_file(dice, image)
    file.unlink()
    dice.choice([Path.mkdir, os.mkfifo, lambda path: path.symlink_to(dice.choice(all_files(image)))])(file)


def all_files(image: Path) -> list[Path]:
    return sorted(p for p in [*image.iterdir(), *(image / "criu").iterdir()] if p.is_file())


def any_file(dice: random.Random, image: Path) -> Path:
    return dice.choice(all_files(image))


SPOILERS: list[Callable[[random.Random, Path], None]] = [
    spoil_byte, spoil_byte, spoil_length, spoil_part, spoil_swap, spoil_remove, spoil_rename, spoil_add, spoil_kind,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_500_random_mutations_are_all_refused(whole: Path, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    spoiled = tmp_path / "spoiled"
    for _ in range(100):
        shutil.copytree(whole, spoiled)
        spoiler = dice.choice(SPOILERS)
        spoiler(dice, spoiled)
        with pytest.raises(DamagedImage) as e:
            look(spoiled).check()
        assert e.value.exit_code == 16, spoiler.__name__
        shutil.rmtree(spoiled)
    shutil.copytree(whole, spoiled)
    assert look(spoiled).ok  # a copy that nobody spoiled is not refused
