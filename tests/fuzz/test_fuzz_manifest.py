"""Whatever an image says or holds, it is taken for damaged or read as what it is: no other error, nothing outside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from fuzz import frame
from fuzz.mutate import TEXTS, mutated, mutated_object
from limosa.errors import DamagedImage, LimosaError
from limosa.image import manifest as manifests
from limosa.image import open_image
from limosa.image.remove import remove
from limosa.image.verify import verify
from limosa.operation.rewind import changed_files
from limosa.process.criu.bound import bound_sockets
from limosa.process.criu.named import named
from limosa.process.criu.stats import run_id

sys.path.insert(0, str(Path(__file__).parents[1] / "image"))
from image_material import write_chunked, write_image


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """A small image, and one with device memory."""
    for name, write in (("plain", write_image), ("chunked", write_chunked)):
        write(tmp_path / name).close()
    return [tmp_path / "plain", tmp_path / "chunked"]


def digest(data: bytes) -> bytes:
    return manifests.digest_line(manifests.digest_of(data))


def seen(folder: Path) -> set[tuple[str, int, int]]:
    found = set()
    for path in folder.rglob("*"):
        info = path.lstat()
        found.add((str(path), info.st_mode, info.st_size if not path.is_dir() else 0))
    return found


# --- the text ------------------------------------------------------------------------------------------------------


def use(manifest: manifests.Manifest) -> None:
    """What is done with a manifest that was taken: sums, names, and a look at each file that it names."""
    assert min(manifest.bytes, manifest.device_bytes) >= 0
    for file in manifest.files:
        assert manifests.is_file_name(file.path.removeprefix("criu/")), file.path
    for name in manifest.chunk_sizes():
        assert len(name) == 64
        assert name.isalnum()
    reasons, cuts = changed_files(manifest, rewind=True)
    assert not cuts, "none of these files is there"
    assert all(reason.exit_code == 23 for reason in reasons)


def test_bytes_of_a_manifest(fuzz: frame.Fuzz, images: list[Path]) -> None:
    samples = [(path / "manifest.json").read_bytes() for path in images]
    for case in fuzz.cases():
        data = mutated(case.random, samples)
        line = digest(data) if case.random.random() < 0.9 else mutated(case.random, [digest(data)], 4096)
        with case, contextlib.suppress(DamagedImage):
            use(manifests.decode(data, line, "/image")[0])


def test_values_of_a_manifest(fuzz: frame.Fuzz, images: list[Path]) -> None:
    samples = [json.loads((path / "manifest.json").read_bytes()) for path in images]
    for case in fuzz.cases():
        made = mutated_object(case.random, case.random.choice(samples))
        try:
            data = json.dumps(made, allow_nan=True).encode()
        except (RecursionError, ValueError):
            continue
        with case, contextlib.suppress(DamagedImage):
            found, _ = manifests.decode(data, digest(data), "/image")
            use(found)
            again = manifests.encode(found)
            assert manifests.decode(again, digest(again), "/image")[0] == found


# --- the folder ----------------------------------------------------------------------------------------------------


def spoil(source: random.Random, image: Path) -> None:
    """One thing of an image's folder is another: a link, a pipe, a folder, gone, longer, under another name."""
    parts = sorted(path for path in image.rglob("*") if not path.is_symlink())
    path = source.choice(parts)
    kind = source.randrange(7)
    name = source.choice([text for text in TEXTS if "\0" not in text and len(os.fsencode(safe(text))) < 200])
    if kind < 3:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(OSError):
        if kind == 0:
            path.symlink_to(source.choice(["/etc/passwd", "../../outside", "/proc/self/root", path.name, "/dev/zero"]))
        elif kind == 1:
            os.mkfifo(path)
        elif kind == 2 and source.random() < 0.5:
            path.mkdir()
        elif kind == 3 and path.is_file():
            path.write_bytes(mutated(source, [path.read_bytes()[: 1 << 16]]))
        elif kind == 4:
            (path if path.is_dir() else path.parent).joinpath(safe(name) or "x").write_bytes(b"more")
        elif kind == 5:
            path.rename(path.with_name(safe(name).replace("/", "") or "x"))
        else:
            path.chmod(source.choice([0, 0o666, 0o7777]))


def safe(text: str) -> str:
    """A text as a name in a folder."""
    return "n" + os.fsdecode(text.encode(errors="surrogatepass")).replace("/", "_").replace("\0", "")


def test_folders_of_images(fuzz: frame.Fuzz, images: list[Path], tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("not the image's")
    place = tmp_path / "work"
    place.mkdir()
    rest = tmp_path / "outside"
    before, originals = seen(rest), [seen(path) for path in images]
    for case in fuzz.cases(limit=10.0, share=0.15):
        image = place / "image"
        shutil.copytree(images[0], image)  # chunks are the next test's: a copy of those takes longer than all else
        for _ in range(case.random.choice([1, 1, 2, 3])):
            spoil(case.random, image)
        if (image / "manifest.json").is_file() and not (image / "manifest.json").is_symlink():
            data = (image / "manifest.json").read_bytes()
            with contextlib.suppress(OSError):
                (image / "manifest.blake3").unlink()
                (image / "manifest.blake3").write_bytes(digest(data))
        with case:
            with contextlib.suppress(LimosaError), open_image(image) as opened:
                with contextlib.suppress(LimosaError):
                    verify(opened).check()
                bound_sockets(opened.criu_fd)
                run_id(opened.criu_fd)
                with contextlib.suppress(ValueError, OSError):
                    named(opened.criu_fd, [process.pid for process in opened.manifest.tree])
            with contextlib.suppress(LimosaError):
                remove(image)
        assert (seen(rest), [seen(path) for path in images]) == (before, originals)
        for left in place.iterdir():
            shutil.rmtree(left)


# --- what CRIU wrote -----------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    made = bytearray()
    while True:
        made.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(made)


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """A protobuf message."""
    made = b""
    for number, value in fields:
        if isinstance(value, int):
            made += varint(number << 3) + varint(value)
        else:
            made += varint(number << 3 | 2) + varint(len(value)) + value
    return made


def records(*messages: bytes) -> bytes:
    """A file of CRIU's."""
    return struct.pack("<II", 0x54564319, 0x56303138) + b"".join(struct.pack("<I", len(m)) + m for m in messages)


CRIU: dict[str, bytes] = {
    "files.img": records(
        message((1, 1), (2, 5), (3, message((1, 5), (2, 2), (6, b"/home/u/file"), (8, 77)))),
        message((1, 3), (2, 6), (17, message((1, 6), (2, 9), (3, 5)))),
        message((1, 4), (2, 7), (4, message((3, 2), (5, 6), (6, 10), (7, 8080), (11, 0)))),
    ),
    "ids-41.img": records(message((1, 2), (2, 2))),
    "fdinfo-2.img": records(message((1, 5), (3, 1), (4, 3)), message((1, 6), (3, 3), (4, 4))),
    "fs-41.img": records(message((1, 5), (2, 5))),
    "mm-41.img": records(message((12, 5), (14, message((1, 4096), (2, 8192), (4, 5), (7, 65))))),
    "remap-fpath.img": records(message((1, 5), (2, 5), (3, 0))),
}


def test_files_of_crius(fuzz: frame.Fuzz, tmp_path: Path) -> None:
    names = list(CRIU)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        for name, data in CRIU.items():
            (tmp_path / name).write_bytes(data)
        good = named(fd, [41])
        assert (good.names, good.processes[41].fds) == ({5: "/home/u/file"}, {3: 5, 4: 5})
        assert (good.processes[41].maps, good.processes[41].links) == ({4096: 5}, {"exe": 5, "cwd": 5, "root": 5})
        assert len(bound_sockets(fd)) == 1
        for case in fuzz.cases(share=0.5):
            name = case.random.choice(names)
            (tmp_path / name).write_bytes(mutated(case.random, list(CRIU.values()), 1 << 16))
            with case:
                bound_sockets(fd)
                with contextlib.suppress(ValueError, OSError):
                    found: Any = named(fd, [41, 42])
                    assert len(found.processes) == 2
            (tmp_path / name).write_bytes(CRIU[name])
    finally:
        os.close(fd)
