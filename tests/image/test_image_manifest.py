"""A manifest comes back as it was written, and a hostile one is refused with DamagedImage and nothing else."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_material import manifest

from limosa.errors import DamagedImage
from limosa.image.manifest import (
    MANIFEST_LIMIT,
    ContainerRecord,
    GpuRecord,
    ImageFile,
    JobRecord,
    Manifest,
    OpenFile,
    ShmFile,
    TreeProcess,
    decode,
    digest_line,
    digest_of,
    encode,
    is_file_name,
    now,
)

HASH = "0" * 64

# What os.fsdecode makes of any bytes without NUL: paths and arguments need not be UTF-8.
kernel_text = st.binary(max_size=20).map(lambda raw: raw.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
pids = st.integers(1, 2**22)
sizes = st.integers(0, 2**63 - 1)
uuids = st.from_regex(r"GPU-[0-9a-f]{8}", fullmatch=True)
open_files = st.builds(
    OpenFile,
    path=kernel_text,
    size=sizes,
    pid=pids,
    fd=st.none() | st.integers(0, 2**31 - 1),
    flags=st.integers(0, 2**32 - 1),
    position=st.none() | sizes,
    mapped=st.booleans(),
    deleted=st.booleans(),
    inode=st.integers(0, 2**64 - 1),
)
shm_names = kernel_text.map(lambda text: "/dev/shm/sem." + text.replace("/", "_"))
shm_files = st.builds(
    lambda content, **more: ShmFile(content=content.hex(), bytes=len(content), **more),
    content=st.binary(max_size=40),
    names=st.lists(shm_names, max_size=2),
    lost=st.lists(shm_names, max_size=2),
    mode=st.integers(0, 0o7777),
)
gpus = st.builds(GpuRecord, index=st.integers(0, 64), uuid=uuids, name=kernel_text, bytes=sizes, memory_total=sizes)
files = st.lists(
    st.builds(
        ImageFile,
        path=st.from_regex(r"criu/[a-z][a-z0-9-]{0,9}\.img", fullmatch=True),
        size=sizes,
        blake3=st.just(HASH),
    ),
    unique_by=lambda file: file.path,
    max_size=4,
)
values = st.none() | st.booleans() | st.integers(-9, 9) | kernel_text


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    chosen = draw(st.lists(pids, min_size=1, max_size=4, unique=True))
    tree = [
        TreeProcess(
            pid=pid,
            ppid=chosen[draw(st.integers(0, n - 1))] if n else 1,
            start_time=draw(sizes),
            command=draw(st.lists(kernel_text, max_size=3)),
            cuda=draw(st.booleans()),
            openable=draw(st.lists(uuids, max_size=2)),
            held=draw(st.dictionaries(uuids, sizes, max_size=2)),
            rank_to_come=draw(st.booleans()),
        )
        for n, pid in enumerate(chosen)
    ]
    return manifest(
        job=JobRecord(pid=chosen[0], name=draw(kernel_text), cwd=draw(kernel_text), log=draw(st.none() | kernel_text)),
        tree=tree,
        gpus=draw(st.lists(gpus, max_size=2)),
        files=draw(files),
        open_files=draw(st.lists(open_files, max_size=3)),
        shm=draw(st.lists(shm_files, max_size=2)),
        options=draw(st.dictionaries(st.text("abc_", min_size=1), values, max_size=3)),
        software_gpu=draw(st.booleans()),
    )


def read(data: bytes) -> Manifest:
    """As if whoever changed the manifest had made a hash that belongs to it."""
    return decode(data, digest_line(digest_of(data)), "/img")[0]


def changed(**fields: object) -> bytes:
    """A manifest's bytes with fields replaced by whatever is wanted."""
    return msgspec.json.encode(json.loads(encode(manifest())) | fields)


@settings(max_examples=80, deadline=None)
@given(manifests())
def test_what_is_written_is_what_is_read(one: Manifest) -> None:
    data = encode(one)
    data.decode("utf-8")  # whatever the paths were
    assert read(data) == one


def test_the_id_is_the_hash_of_the_exact_bytes() -> None:
    data = encode(manifest())
    one, image_id = decode(data, digest_line(digest_of(data)), "/img")
    assert (one, image_id) == (manifest(), digest_of(data))
    respaced = msgspec.json.format(data, indent=0)
    assert read(respaced) == one  # the same facts in other bytes: another id
    with pytest.raises(DamagedImage):
        decode(respaced, digest_line(image_id), "/img")


@pytest.mark.parametrize("line", [b"", b"{0}", b"{0}\n\n", b" {0}\n", b"{0}\r\n", b"{0}\0"])
def test_the_hash_has_one_form(line: bytes) -> None:
    data = encode(manifest())
    with pytest.raises(DamagedImage):
        decode(data, line.replace(b"{0}", digest_of(data).encode()), "/img")
    with pytest.raises(DamagedImage):
        decode(data, digest_line(digest_of(data)).upper(), "/img")


def test_a_containers_image_has_a_schema_of_its_own() -> None:
    box = {"runtime": "podman", "id": "ab" * 32, "name": "train"}
    found = read(changed(schema=3, container=box))
    assert found.container == ContainerRecord(runtime="podman", id="ab" * 32, name="train")
    assert read(encode(found)) == found
    assert b"container" not in encode(manifest())
    for schema, wrong in (
        (1, box),
        (3, None),
        (3, {**box, "runtime": "../x"}),
        (3, {**box, "name": "-x"}),
        (3, {**box, "id": "a/b"}),
        (3, {**box, "volumes": ["--all"]}),
        (3, {**box, "ports": [0]}),
        (3, {**box, "published": ["1" * 65]}),
    ):
        with pytest.raises(DamagedImage):
            read(changed(schema=schema, container=wrong))


def test_unknown_fields_are_ignored_and_unknown_schemas_refused() -> None:
    assert read(changed(weather="fine")) == manifest()
    with pytest.raises(DamagedImage, match="newer Limosa"):
        read(changed(schema=4))
    for schema in (0, -1, "1", None, 1.5, True):
        with pytest.raises(DamagedImage):
            read(changed(schema=schema))


@pytest.mark.parametrize(
    "path",
    [
        "criu/../../etc/shadow", "criu/..", "criu/.", "criu/", "criu", "/criu/a", "../criu/a", "criu/a/b", "criu//a",
        "criu/a\0", "criu/a\n", "criu/-a", "criu/.a", "log/a", "a", "", "criu/" + "a" * 201, "criu/ä", "CRIU/a",
        "criu/a b",
    ],
)  # fmt: skip
def test_names_of_files_have_one_form(path: str) -> None:
    with pytest.raises(DamagedImage):
        read(changed(files=[{"path": path, "size": 0, "blake3": HASH}]))
    assert not is_file_name(path.removeprefix("criu/")) or not path.startswith("criu/")


@pytest.mark.parametrize("name", ["inventory.img", "pages-1.img", "tmpfs-dev-28.tar.gz.img", "a" * 200, "_x+y.img"])
def test_names_that_criu_uses_are_taken(name: str) -> None:
    one = read(changed(files=[{"path": f"criu/{name}", "size": 1, "blake3": HASH}]))
    assert one.files == [ImageFile(path=f"criu/{name}", size=1, blake3=HASH)]
    assert is_file_name(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"files": [{"path": "criu/a", "size": -1, "blake3": HASH}]},
        {"files": [{"path": "criu/a", "size": 2**63, "blake3": HASH}]},
        {"files": [{"path": "criu/a", "size": 1.5, "blake3": HASH}]},
        {"files": [{"path": "criu/a", "size": 1, "blake3": "0" * 63}]},
        {"files": [{"path": "criu/a", "size": 1, "blake3": HASH + "\n"}]},
        {"files": [{"path": "criu/a", "size": 1, "blake3": HASH}] * 2},
        {"tree": []},
        {"tree": [{"pid": 0, "ppid": 0, "start_time": 1}]},
        {"tree": [{"pid": 41, "ppid": 1, "start_time": -1}]},
        {"tree": [{"pid": 2**22 + 1, "ppid": 1, "start_time": 1}]},
        {"tree": [{"pid": 40, "ppid": 1, "start_time": 1}]},  # not the job's root
        {"tree": [{"pid": 41, "ppid": 1, "start_time": 1}] * 2},
        {"tree": [{"pid": 41, "ppid": 1, "start_time": 1}, {"pid": 9, "ppid": 8, "start_time": 1}]},
        {"created": "yesterday"},
        {"created": "2026-11-20T10:11:12"},
        {"nft_table": "x; flush ruleset"},
        {"nft_table": "CRIU-1\n"},
        {"gpus": [{"index": 0, "uuid": "../x", "name": "H200"}]},
        {"options": {"a": {"b": 1}}},
        {"hostname": "x" * 1025},
        {"hostname": "a\0b"},
        {"hostname": "a\0" + "0f"},  # a byte that needs no escape
        {"software_gpu": 1},
        {"job": None},
        {"shm": [{"names": ["/dev/shm/a/b"]}]},
        {"shm": [{"lost": ["/dev/shm/a\0" + "2f" + "b"]}]},
        {"shm": [{"names": ["/dev/shm/" + "x" * 256]}]},
        {"shm": [{"mode": 0o10000}]},
        {"shm": [{"content": "00", "bytes": 2}]},
        {"shm": [{"file": "criu/another.img", "bytes": 9}]},
    ],
)
def test_what_is_out_of_bounds_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(DamagedImage):
        read(changed(**fields))


@pytest.mark.parametrize("fields", [{"created": "now"}, {"hostname": "a\0b"}, {"tree": []}, {"hostname": "\ud800"}])
def test_what_could_not_be_read_is_not_written(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        encode(manifest(**fields))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"schema":1}', b"\xff\xfe", b"{" * 9])
def test_what_is_no_manifest_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedImage):
        read(data)


def test_random_changes_with_a_hash_that_belongs_to_them_raise_nothing_else() -> None:
    """Whoever can write the manifest can write its hash: what is left is that it parses, or is refused."""
    dice = random.Random(20261120)
    data = encode(manifest(files=[ImageFile(path="criu/a", size=1, blake3=HASH)]))
    pieces = [b'"', b"{", b"]", b"-", b"9" * 30, b"1e999", b"\\u0000", b"null", b"\\"]
    refused = 0
    for _ in range(3000):
        spoiled = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(spoiled))
            match dice.randrange(4):
                case 0:
                    spoiled[at] = dice.randrange(256)
                case 1:
                    del spoiled[at : at + dice.randint(1, 40)]
                case 2:
                    spoiled[at:at] = dice.choice(pieces)
                case _:
                    spoiled[at : at + 1] = spoiled[at : at + dice.randint(1, 200)]
        try:
            read(bytes(spoiled))
        except DamagedImage:
            refused += 1
    assert 1000 < refused < 3000


def test_a_manifest_has_a_largest_size() -> None:
    with pytest.raises(ValueError, match="more than"):
        encode(manifest(open_files=[OpenFile(path="x" * 8000, size=1, pid=1)] * (MANIFEST_LIMIT // 8000 + 1)))


def test_now_is_what_created_takes() -> None:
    assert read(encode(manifest(created=now()))).created.endswith("Z")


def test_the_document_names_every_field() -> None:
    document = (Path(__file__).parents[2] / "docs" / "image-format.md").read_text()
    table = document.partition("## manifest.json")[2].partition("## How it is written")[0]
    for record in (Manifest, JobRecord, TreeProcess, GpuRecord, ImageFile, OpenFile, ShmFile):
        for field in msgspec.structs.fields(record):
            assert re.search(rf"`(\w+(\[\])?)?\.?{field.encode_name}(\[\])?[`.]", table), (record.__name__, field.name)
