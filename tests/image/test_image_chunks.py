"""Device memory in an image: each chunk once, named by its content; whatever is done to one is found."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from image_material import CHUNK, CONTENTS, MEMORY, UUID, fill, manifest, write_chunked, write_image

from limosa.errors import DamagedImage, FailedUndone, UsageError
from limosa.image import Chunks, DeviceMemory, DevicePiece, Draft, open_image, remove, verify
from limosa.image.chunks import chunk_path, name_of
from limosa.image.manifest import decode, digest_line, digest_of, encode

ZEROES = name_of(bytes(CHUNK))
REST = name_of(MEMORY[0][CHUNK:])


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_chunked(tmp_path / "image").close()
    return tmp_path / "image"


def problems(path: Path, **options: Any) -> dict[str, str]:
    with open_image(path) as image:
        result = verify(image, **options)
    assert result.ok is not bool(result.problems)
    return {p.path: p.problem for p in result.problems}


def test_equal_chunks_are_there_once_and_stale_ones_are_not(whole: Path) -> None:
    files = sorted(str(p.relative_to(whole)) for p in whole.glob("chunks/*/*"))
    assert files == sorted([chunk_path(ZEROES), chunk_path(REST)])
    with open_image(whole) as image:
        assert image.manifest.schema == 2
        assert image.manifest.chunk_sizes() == {ZEROES: CHUNK, REST: len(MEMORY[0]) - CHUNK}
        assert image.manifest.device_bytes == len(MEMORY[0]) + len(MEMORY[1])
        assert image.manifest.host_bytes == sum(map(len, CONTENTS.values()))
        assert image.manifest.bytes == image.manifest.host_bytes + len(MEMORY[0])
        result = verify(image)
    assert result.ok
    assert result.bytes == sum(map(len, CONTENTS.values())) + len(MEMORY[0])
    assert {f.path for f in result.files} >= set(files)
    assert {oct(p.stat().st_mode & 0o777) for p in whole.glob("chunks/*/*")} == {"0o600"}
    assert {oct(p.stat().st_mode & 0o777) for p in [whole / "chunks", *whole.glob("chunks/*")]} == {"0o700"}


def test_what_several_processes_have_is_counted_once() -> None:
    shared = DevicePiece(id=1, bytes=CHUNK, gpu=UUID, chunks=[ZEROES], share=1)
    own = DevicePiece(id=2, bytes=CHUNK, gpu=UUID, chunks=[ZEROES])
    tree = [msgspec.structs.replace(p, cuda=True, openable=[UUID]) for p in manifest().tree]
    device = [DeviceMemory(pid=41, pieces=[shared, own]), DeviceMemory(pid=42, pieces=[shared])]
    whole = manifest(tree=tree, chunk_bytes=CHUNK, device=device)
    assert whole.device_bytes == 2 * CHUNK
    assert [(pid, piece.id) for pid, piece in whole.own_pieces()] == [(41, 1), (41, 2)]
    encode(whole)


def test_an_image_without_device_memory_is_of_the_first_schema(tmp_path: Path) -> None:
    with write_image(tmp_path / "image") as image:
        assert image.chunks_fd == -1
    assert json.loads((tmp_path / "image/manifest.json").read_text())["schema"] == 1
    (tmp_path / "image/chunks").mkdir(mode=0o700)
    assert problems(tmp_path / "image") == {"chunks": "extra"}


def test_whatever_is_done_to_a_chunk_is_found(whole: Path) -> None:
    chunk, other = whole / chunk_path(ZEROES), whole / chunk_path(REST)
    content = chunk.read_bytes()

    def flip(at: int) -> None:
        with open(chunk, "r+b") as file:
            file.seek(at)
            file.write(b"\1")

    for at in (0, CHUNK // 2, CHUNK - 1):
        flip(at)
        assert problems(whole) == {chunk_path(ZEROES): "damaged"}
        assert problems(whole, read_chunks=False) == {}
        chunk.write_bytes(content)
    os.truncate(chunk, CHUNK - 1)
    assert problems(whole) == problems(whole, read_chunks=False) == {chunk_path(ZEROES): "truncated"}
    os.truncate(chunk, CHUNK + 1)
    assert problems(whole) == problems(whole, read_chunks=False) == {chunk_path(ZEROES): "damaged"}
    chunk.unlink()
    assert problems(whole) == problems(whole, read_chunks=False) == {chunk_path(ZEROES): "missing"}
    chunk.symlink_to(other)
    with open_image(whole, trust=False) as image:
        assert [p.problem for p in verify(image).problems] == ["damaged"]
    with pytest.raises(DamagedImage):
        open_image(whole)
    chunk.unlink()
    chunk.write_bytes(content)
    extra = [whole / "chunks/notes", chunk.with_name("0" * 64), whole / "chunks/zz", chunk.parent / REST]
    extra[0].touch()
    extra[1].touch()
    extra[2].mkdir(mode=0o700)
    extra[3].touch()
    assert problems(whole) == {str(path.relative_to(whole)): "extra" for path in extra}


def test_a_chunk_with_the_content_of_another(tmp_path: Path) -> None:
    memory = [os.urandom(500), os.urandom(500)]
    write_chunked(tmp_path / "image", memory=memory).close()
    first, second = (tmp_path / "image" / chunk_path(name_of(m)) for m in memory)
    first.write_bytes(memory[1])
    second.write_bytes(memory[0])
    assert set(problems(tmp_path / "image").values()) == {"swapped"}


def test_it_is_removed_whole_and_nothing_that_is_no_part_of_it(whole: Path) -> None:
    (whole / "chunks/ab/inner").mkdir(parents=True)
    with pytest.raises(UsageError, match="chunks/ab/inner"):
        remove(whole)
    (whole / "chunks/ab/inner").rmdir()
    (whole / "chunks/other").mkdir()
    with pytest.raises(UsageError, match="chunks/other"):
        remove(whole)
    (whole / "chunks/other").rmdir()
    assert remove(whole) > len(MEMORY[0])
    assert list(whole.parent.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_draft_whose_chunks_are_not_what_it_says_is_not_committed(tmp_path: Path, damage: str) -> None:
    name = name_of(b"here")
    piece = DevicePiece(id=1, bytes=CHUNK, gpu=UUID, chunks=[name])
    with Draft.create(tmp_path / "image") as draft:
        with Chunks(draft.make_chunks()) as chunks:
            if damage == "short":
                chunks.add(b"here")
        fill(draft)
        device = [DeviceMemory(pid=41, pieces=[piece])]
        with pytest.raises(FailedUndone, match="is missing" if damage == "missing" else "has not"):
            draft.commit(manifest(chunk_bytes=CHUNK, device=device))
    assert list(tmp_path.iterdir()) == []


def test_several_threads_write_equal_chunks_once(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    with Chunks(fd) as chunks:
        new: list[bool] = []
        threads = [
            threading.Thread(target=lambda n=n: new.append(chunks.add(bytes([n % 4]) * 9000)[1])) for n in range(32)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(new) == len(chunks.names()) == 4
    os.close(fd)


@pytest.mark.parametrize(
    "name", ["", "..", "../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n", "/" * 64, "a/" * 32]
)
def test_nothing_is_opened_by_a_name_of_another_form(tmp_path: Path, name: str) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    with Chunks(fd) as chunks, pytest.raises(ValueError, match="no chunk's name"):
        chunks.open(name)
    os.close(fd)


OTHER = [name_of(b"other"), REST]
PIECE = {"id": 1, "bytes": CHUNK + 1, "gpu": UUID, "chunks": [ZEROES, REST]}


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 1},
        {"device": []},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 20},
        {"chunk_bytes": 128 << 20},
        {"chunk_bytes": CHUNK + 1},
        {"device": [{"pid": 42, "pieces": [PIECE]}]},  # holds no CUDA state
        {"device": [{"pid": 99, "pieces": [PIECE]}]},
        {"device": [{"pid": 41, "pieces": [PIECE]}, {"pid": 41, "pieces": [PIECE]}]},
        {"device": [{"pid": 41, "pieces": [PIECE, PIECE]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "gpu": "GPU-elsewhere"}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "bytes": 0}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "bytes": 2**60}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "bytes": CHUNK}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "chunks": [ZEROES]}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "chunks": []}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "chunks": [ZEROES, ZEROES]}]}]},  # two lengths
        {"device": [{"pid": 41, "pieces": [{**PIECE, "chunks": ["../" * 21 + "x", REST]}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "chunks": [ZEROES.upper(), REST]}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "chunks": [ZEROES + "\n", REST]}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "id": -1}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "share": -1}]}]},
        {"device": [{"pid": 41, "pieces": [{**PIECE, "share": 1}, {**PIECE, "share": 1, "id": 2, "chunks": OTHER}]}]},
        {"device": [{"pid": 41, "saw": ["../GPU"], "pieces": [PIECE]}]},
    ],
)
def test_a_hostile_manifest_is_refused(change: dict[str, Any]) -> None:
    pieces = [DevicePiece(id=1, bytes=CHUNK + 1, gpu=UUID, chunks=[ZEROES, REST])]
    good = json.loads(encode(manifest(chunk_bytes=CHUNK, device=[DeviceMemory(pid=41, pieces=pieces)])))

    def read(fields: dict[str, Any]) -> None:
        data = msgspec.json.encode(fields)
        decode(data, digest_line(digest_of(data)), "/img")

    read(good)
    with pytest.raises(DamagedImage):
        read(good | change)
