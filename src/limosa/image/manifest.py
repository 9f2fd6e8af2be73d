"""What an image says about itself: the records of ``manifest.json`` and how they are read and written.

The bytes of a manifest are hostile input. They are compared with ``manifest.blake3`` first, then decoded into typed
records whose every number and length has a bound; names of files have one fixed form (``criu/NAME``), so that nothing
is ever opened by a path that an image made up. Fields that this version does not know are ignored; a schema number it
does not know is refused.

Text from the kernel (paths, command lines) need not be UTF-8, which JSON must be. A byte that is not is held in
memory as Python's ``surrogateescape`` has it and written as NUL and its two hexadecimal digits: NUL itself can be in
no path and no command line, so nothing is lost either way (``docs/image-format.md``).
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Iterator
from typing import Annotated, Any

import blake3
import msgspec

from limosa.errors import DamagedImage
from limosa.image.chunks import LEAST_CHUNK, MOST_CHUNK
from limosa.structs import ready
from limosa.version import VERSION

SCHEMA, SCHEMA_CHUNKS, SCHEMA_CONTAINER = 1, 2, 3
"""The schema numbers that this version writes and reads: the second where the image holds device memory as chunks, the
third where it is a container's.

Whoever knows the first alone would restore such an image without its device memory, or CRIU's part of a container under
pids of the machine."""

MANIFEST_NAME = "manifest.json"
DIGEST_NAME = "manifest.blake3"
CRIU_NAME = "criu"
LOG_NAME = "log"

MANIFEST_LIMIT = 64 << 20
"""Most bytes a manifest may have; looked at before it is read."""

_FILE_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}"
_FILE_PATH = rf"^{CRIU_NAME}/{_FILE_NAME}\Z"
_FILE_PATH_RE = re.compile(_FILE_PATH)
_PAGES_RE = re.compile(r"pages-[0-9]+\.img\Z")

Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Pid = Annotated[int, msgspec.Meta(ge=1, le=2**22)]
Fd = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Uid = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Flags = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**16)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
PathText = Annotated[str, msgspec.Meta(max_length=8192)]
Argument = Annotated[str, msgspec.Meta(max_length=4 << 20)]
Uuid = Annotated[str, msgspec.Meta(max_length=96, pattern=r"^[A-Za-z0-9][A-Za-z0-9/-]*\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
FilePath = Annotated[str, msgspec.Meta(max_length=256, pattern=_FILE_PATH)]
ShmName = Annotated[str, msgspec.Meta(max_length=1600, pattern=r"^/dev/shm/[^/]+\Z")]
Rfc3339 = Annotated[
    str,
    msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)\Z", max_length=40),
]
ContainerName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,254}\Z")]
Option = bool | int | float | str | list[str] | None


class ImageFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of ``criu/``.

    Attributes:
        path: ``criu/NAME``, nothing else.
        size: bytes.
        blake3: 64 hexadecimal digits over the whole content.
    """

    path: FilePath
    size: Size
    blake3: Digest


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the job as a whole.

    Attributes:
        pid: of its root process.
        name: the name given to ``limosa run``, else the program's.
        cwd: the root's working folder.
        log: the file that ``limosa run`` writes its output to, or None.
        run: whether ``limosa run`` started it.
        uid, gid: whom it ran as.
        cgroup: its cgroup (v2 path) when it was checkpointed, or "".
        sees: the file that said which GPUs it sees, where ``limosa run --gpus`` hid others from it, else "".
        seen: the uuids of these.
    """

    pid: Pid
    name: Text = ""
    cwd: PathText = "/"
    log: PathText | None = None
    run: bool = False
    uid: Uid = 0
    gid: Uid = 0
    cgroup: PathText = ""
    sees: PathText = ""
    seen: Annotated[list[Uuid], msgspec.Meta(max_length=1024)] = []


class TreeProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the job tree; the root comes first, each parent before its children.

    Attributes:
        pid, ppid: as they were, and as a restore makes them again (the root's parent changes).
        start_time: field 22 of ``/proc/PID/stat``, clock ticks since boot.
        command: its arguments.
        cuda: whether it held CUDA state.
        threads: ids of its other threads; a restore needs these free too.
        openable: uuids of the GPUs whose device nodes it could open: the left sides of every map for it.
        held: bytes it held on each GPU, by uuid.
        rank_to_come: whether it was a rank that had not begun to use a GPU, where others had.
    """

    pid: Pid
    ppid: Annotated[int, msgspec.Meta(ge=0, le=2**22)]
    start_time: Size
    command: Annotated[list[Argument], msgspec.Meta(max_length=1_000_000)] = []
    cuda: bool = False
    threads: Annotated[list[Pid], msgspec.Meta(max_length=1_000_000)] = []
    openable: Annotated[list[Uuid], msgspec.Meta(max_length=1024)] = []
    held: Annotated[dict[Uuid, Size], msgspec.Meta(max_length=1024)] = {}
    rank_to_come: bool = False


class GpuRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU on which the job held state, or that it could open.

    Attributes:
        index, uuid, name: as NVML has them; ``name`` is the chip that a restore compares.
        bytes: device memory that the job held on it.
        memory_total: bytes it has.
        driver: version of the NVIDIA driver.
        pci_bus_id: its address when the image was taken.
    """

    index: Index
    uuid: Uuid
    name: Text
    bytes: Size = 0
    memory_total: Size = 0
    driver: Text = ""
    pci_bus_id: Text = ""


class OpenFile(msgspec.Struct, frozen=True, kw_only=True):
    """One regular file that the job had open or mapped; CRIU compares its size at restore.

    Attributes:
        path: as the job had it.
        size: bytes when the job was checkpointed.
        pid: who had it.
        fd: the descriptor, or None where it was only mapped.
        flags: of ``open(2)``, 0 where it was only mapped.
        position: offset in bytes where it was open for writing, else None.
        mapped: whether it was mapped.
        deleted: whether it had no name any more (then it is inside the image).
        inode: number of its inode, 0 where it was not looked at.
        mode: its ``st_mode``, which CRIU compares as well; 0 where it was not looked at.
    """

    path: PathText
    size: Size
    pid: Pid
    fd: Fd | None = None
    flags: Flags = 0
    position: Size | None = None
    mapped: bool = False
    deleted: bool = False
    inode: Annotated[int, msgspec.Meta(ge=0)] = 0
    mode: Annotated[int, msgspec.Meta(ge=0)] = 0


class ShmFile(msgspec.Struct, frozen=True, kw_only=True):
    """Named shared memory, or a named semaphore: a file in /dev/shm that the job writes into.

    Attributes:
        names: its names.
        lost: the names that are gone by which processes have a semaphore mapped, as /proc has them (``… (deleted)``);
            they are there only while CRIU is at work.
        content: what is in it, hexadecimal, where that is little.
        file: one of ``files`` that has it, else.
        bytes: its size.
        mode, uid, gid: of ``stat(2)``; of ``mode`` the permissions.
    """

    names: Annotated[list[ShmName], msgspec.Meta(max_length=1000)] = []
    lost: Annotated[list[ShmName], msgspec.Meta(max_length=1000)] = []
    content: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2}){0,4096}\Z")] = ""
    file: Annotated[str, msgspec.Meta(max_length=256, pattern=rf"^({CRIU_NAME}/{_FILE_NAME})?\Z")] = ""
    bytes: Size = 0
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)] = 0
    uid: Uid = 0
    gid: Uid = 0


class LockedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A descriptor of a file that the job had locked.

    Attributes:
        pid, fd: who had it, and as what.
        path: as /proc has it.
        locks: kind, type, first and last byte of each, as in fdinfo: "POSIX WRITE 120 120", "FLOCK WRITE 0 EOF".
        modified: when the file was last written to, nanoseconds since the epoch; 0 for what is no regular file with a
            name.
    """

    pid: Pid
    fd: Fd
    path: PathText
    locks: Annotated[
        list[Annotated[str, msgspec.Meta(pattern=r"^[A-Z]{1,16} [A-Z]{1,16} \d{1,20} (\d{1,20}|EOF)\Z")]],
        msgspec.Meta(max_length=1_000_000),
    ]
    modified: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0  # before 1970 is less than 0


class DevicePiece(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of device memory of a process that runs under the shim.

    Attributes:
        id: its number in that process.
        bytes: its size.
        gpu: the uuid of the GPU that it was on.
        chunks: the names of its chunks, in their order; all but the last one have ``Manifest.chunk_bytes``.
        share: a number, within the image, under which several processes have the same memory; 0: this one alone.
    """

    id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    bytes: Annotated[int, msgspec.Meta(ge=1, le=2**50)]
    gpu: Uuid
    chunks: Annotated[list[Digest], msgspec.Meta(min_length=1, max_length=1_000_000)]
    share: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The device memory of one process that is in the image as chunks.

    Attributes:
        pid: the process.
        saw: uuids of the GPUs that it saw when it initialised the driver: on others it must make memory itself.
        pieces: in the order in which it was read.
    """

    pid: Pid
    saw: Annotated[list[Uuid], msgspec.Meta(max_length=1024)] = []
    pieces: Annotated[list[DevicePiece], msgspec.Meta(max_length=1_000_000)]


class ContainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The container that the job ran in, whose runtime has written its host side into ``criu/``.

    Attributes:
        runtime: which: "podman" (``criu/container.tar`` is its archive), "runc" (``criu/`` has CRIU's own files) or
            "containerd" (those, ``rootfs-diff.tar`` and ``containerd.json``).
        id, name: as the runtime called it.
        image, image_id: the image that it was made of, by name and by id (for containerd: the snapshot that its root
            file system began as); "" where the runtime knows none.
        bundle: its OCI bundle.
        folder: where the runtime kept its state, for runc.
        network: "host", "none", "private", or "joined" (one that was there before).
        ports: TCP ports of the machine that it listened on, where its network was the machine's, else those that its
            runtime led to it.
        published: other ports of the machine that its runtime led to it: "127.0.0.1:8080/tcp", "5353/udp".
        volumes: its named volumes.
        log: the file that its output went to.
        namespace, snapshotter: of containerd's.
        pod: the pod that it was of, "NAMESPACE/POD".
        writes: what of the machine it could change: "volume NAME", "folder PATH", "file PATH".
        origin: the id of the container that the first image was made of, of which it is a clone; "" for its own.
    """

    runtime: Annotated[str, msgspec.Meta(pattern=r"^(podman|runc|containerd)\Z")]
    id: ContainerName
    name: ContainerName
    image: Text = ""
    image_id: Text = ""
    bundle: PathText = ""
    folder: PathText = ""
    network: Text = ""
    ports: Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=65535)]], msgspec.Meta(max_length=65536)] = []
    published: Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=65536)] = []
    volumes: Annotated[list[ContainerName], msgspec.Meta(max_length=1000)] = []
    log: PathText = ""
    namespace: Text = ""
    snapshotter: Text = ""
    pod: Text = ""
    writes: Annotated[list[PathText], msgspec.Meta(max_length=4096)] = []
    origin: Annotated[str, msgspec.Meta(max_length=256)] = ""  # as a record of it has it


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``manifest.json`` says; the table in ``docs/image-format.md`` is the same list.

    Attributes:
        created: when, RFC 3339 with a time zone.
        limosa, python: versions that wrote it.
        criu, kernel, machine, driver: versions and architecture it was taken with; ``driver`` is "" without a GPU.
        hostname: where.
        job: the job as a whole.
        tree: its processes.
        options: what the checkpoint was asked to do, and with what CRIU was run.
        gpus: GPUs it held state on or could open.
        files: every file of ``criu/``; filled in by ``Draft.commit``.
        open_files: regular files it had open or mapped.
        shm: named shared memory and semaphores, with what is in them.
        locks: the locks that it held on files.
        descriptors: the limit of open files that CRIU needs to restore it; 0 where that is less than any limit.
        nft_table: the name of the nftables table CRIU left for connected sockets, or None.
        software_gpu: whether the driver was the one in software.
        chunk_bytes: size of a chunk of device memory; 0 where there is none.
        device: device memory that is in the image as chunks, by process.
        container: the container that it is, or None. Pids are those inside of it then.
        schema: see SCHEMA.
    """

    created: Rfc3339
    criu: Text
    kernel: Text
    job: JobRecord
    tree: Annotated[list[TreeProcess], msgspec.Meta(min_length=1, max_length=1_000_000)]
    limosa: Text = VERSION
    python: Text = platform.python_version()
    machine: Text = ""
    driver: Text = ""
    hostname: Text = ""
    options: Annotated[dict[Text, Option], msgspec.Meta(max_length=1000)] = {}
    gpus: Annotated[list[GpuRecord], msgspec.Meta(max_length=1024)] = []
    files: Annotated[list[ImageFile], msgspec.Meta(max_length=100_000)] = []
    open_files: Annotated[list[OpenFile], msgspec.Meta(max_length=1_000_000)] = []
    shm: Annotated[list[ShmFile], msgspec.Meta(max_length=100_000)] = []
    locks: Annotated[list[LockedFile], msgspec.Meta(max_length=1_000_000)] = []
    descriptors: Size = 0
    nft_table: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}\Z")] | None = None
    software_gpu: bool = False
    chunk_bytes: Size = 0
    device: Annotated[list[DeviceMemory], msgspec.Meta(max_length=1_000_000)] = []
    container: ContainerRecord | None = None
    schema: int = SCHEMA

    @property
    def bytes(self) -> int:
        """Bytes of all files of ``criu/`` and of ``chunks/``."""
        return self.host_bytes + sum(self.chunk_sizes().values())

    @property
    def host_bytes(self) -> int:
        """Bytes of all files of ``criu/``: about what its processes will have in host memory."""
        return sum(f.size for f in self.files)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that are in the image as chunks, equal ones counted each time."""
        return sum(piece.bytes for _, piece in self.own_pieces())

    def own_pieces(self) -> Iterator[tuple[int, DevicePiece]]:
        """Every piece with its process; what several processes have, with the first of them."""
        seen = set()
        for process in self.device:
            for piece in process.pieces:
                if not piece.share or piece.share not in seen:
                    seen.add(piece.share)
                    yield process.pid, piece

    def chunk_sizes(self) -> dict[str, int]:
        """Every distinct chunk and the bytes that it must have, in the order in which they are first needed."""
        sizes: dict[str, int] = {}
        for process in self.device:
            for piece in process.pieces:
                last = piece.bytes - (len(piece.chunks) - 1) * self.chunk_bytes
                sizes.update(dict.fromkeys(piece.chunks[:-1], self.chunk_bytes))
                sizes[piece.chunks[-1]] = last
        return sizes


def now() -> str:
    """The time as ``Manifest.created`` has it: RFC 3339, UTC, seconds."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_file_name(name: str) -> bool:
    """Whether ``name`` may stand behind ``criu/`` in an image."""
    return _FILE_PATH_RE.match(f"{CRIU_NAME}/{name}") is not None


def is_pages(name: str) -> bool:
    """Whether a file of ``criu/`` has pages of memory, and nothing else: CRIU's largest, and no word to CRIU itself."""
    return _PAGES_RE.match(name) is not None


def encode(manifest: Manifest) -> bytes:
    """The exact bytes of ``manifest.json``.

    Raises:
        ValueError: if a field is out of its bounds: what would not be read must not be written.
    """
    schema = SCHEMA_CONTAINER if manifest.container is not None else SCHEMA_CHUNKS if manifest.device else SCHEMA
    manifest = msgspec.structs.replace(manifest, schema=schema)
    plain = {"schema": manifest.schema} | _each_text(msgspec.to_builtins(manifest), _to_json_text)
    if manifest.container is None:
        del plain["container"]
    data = msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"
    if len(data) > MANIFEST_LIMIT:
        raise ValueError(f"the manifest would have {len(data)} bytes, more than {MANIFEST_LIMIT}")
    _parse(data)
    return data


def decode(data: bytes, digest: bytes, path: str | os.PathLike[str]) -> tuple[Manifest, str]:
    """Read a manifest: its hash first, then its text.

    Args:
        data: bytes of ``manifest.json``.
        digest: bytes of ``manifest.blake3``: 64 hexadecimal digits and a newline.
        path: the image's, for messages.

    Returns:
        The manifest and the image's id (the hash, 64 hexadecimal digits).

    Raises:
        DamagedImage: the two disagree, or the text is not a manifest of a schema known here.
    """
    found = digest_of(data)
    if digest != digest_line(found):
        raise DamagedImage(path=path, detail=f"{MANIFEST_NAME} and {DIGEST_NAME} do not belong together")
    try:
        return _parse(data), found
    except ValueError as e:  # msgspec.DecodeError and ValidationError are ValueErrors
        raise DamagedImage(path=path, detail=f"{MANIFEST_NAME}: {e}") from e
    except RecursionError as e:
        raise DamagedImage(path=path, detail=f"{MANIFEST_NAME} is nested too deep") from e


def digest_of(data: bytes) -> str:
    """BLAKE3 of ``data``, 64 hexadecimal digits."""
    return blake3.blake3(data).hexdigest()


def digest_line(digest: str) -> bytes:
    """The exact content of ``manifest.blake3``."""
    return digest.encode("ascii") + b"\n"


# --- inside --------------------------------------------------------------------------------------------------


class _SchemaOnly(msgspec.Struct):
    schema: int


_SCHEMA_DECODER = msgspec.json.Decoder(ready(_SchemaOnly))
_DECODER = msgspec.json.Decoder(ready(Manifest))


def _parse(data: bytes) -> Manifest:
    """Bytes to a checked manifest; ValueError says what is wrong."""
    schema = _SCHEMA_DECODER.decode(data).schema
    if not SCHEMA <= schema <= SCHEMA_CONTAINER:
        newer = "a newer Limosa wrote it; " if schema > SCHEMA_CONTAINER else ""
        raise ValueError(f"{newer}schema {schema} is not known here (only {SCHEMA} to {SCHEMA_CONTAINER})")
    manifest = _DECODER.decode(data)
    if rb"\u0000" in data:  # the only way a NUL can stand in JSON
        manifest = msgspec.convert(_each_text(msgspec.to_builtins(manifest), _from_json_text), ready(Manifest))
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """What the types cannot say."""
    paths = [f.path for f in manifest.files]
    if len(set(paths)) != len(paths):
        raise ValueError("a file is named twice")
    pids = [p.pid for p in manifest.tree]
    if len(set(pids)) != len(pids):
        raise ValueError("a process is named twice")
    if pids[0] != manifest.job.pid:
        raise ValueError("the first process of the tree is not the job's root")
    for shared in manifest.shm:
        if shared.bytes != len(shared.content) // 2 if not shared.file else shared.file not in paths:
            raise ValueError("what is in shared memory is not there")
        for name in (*shared.names, *shared.lost):
            if "\0" in name or len(os.fsencode(name)) > len("/dev/shm/") + 255:  # noqa: S108
                raise ValueError("a name of shared memory is none")
    seen: set[int] = set()
    for process in manifest.tree:
        if seen and process.ppid not in seen:
            raise ValueError(f"process {process.pid} comes before its parent {process.ppid}")
        seen.add(process.pid)
    if (manifest.container is not None) != (manifest.schema == SCHEMA_CONTAINER):
        raise ValueError(f"a container is what schema {SCHEMA_CONTAINER} is for")
    if manifest.container is None and bool(manifest.device) != (manifest.schema == SCHEMA_CHUNKS):
        raise ValueError(f"device memory as chunks is what schema {SCHEMA_CHUNKS} is for")
    if manifest.device:
        _check_device(manifest)


def _check_device(manifest: Manifest) -> None:
    """Whether every chunk belongs to one place in a process of the tree, and each has one size."""
    size = manifest.chunk_bytes
    if not LEAST_CHUNK <= size <= MOST_CHUNK or size % (2 << 20):
        raise ValueError(f"chunks of {size} bytes")
    openable = {p.pid: set(p.openable) for p in manifest.tree if p.cuda}
    pids = [process.pid for process in manifest.device]
    if len(set(pids)) != len(pids) or not set(pids) <= set(openable):
        raise ValueError("device memory of a process that has none, or named twice")
    lengths: dict[str, int] = {}
    shared: dict[int, DevicePiece] = {}
    for process in manifest.device:
        ids = [piece.id for piece in process.pieces]
        if len(set(ids)) != len(ids):
            raise ValueError(f"process {process.pid}: a piece of memory is named twice")
        for piece in process.pieces:
            if piece.gpu not in openable[process.pid]:
                raise ValueError(f"process {process.pid} had memory on a GPU that it could not open")
            if len(piece.chunks) != -(-piece.bytes // size):
                raise ValueError(f"process {process.pid}: {len(piece.chunks)} chunks for {piece.bytes} bytes")
            same = shared.setdefault(piece.share, piece) if piece.share else piece
            if (same.bytes, same.gpu, same.chunks) != (piece.bytes, piece.gpu, piece.chunks):
                raise ValueError(f"process {process.pid}: memory that it shares is not the same everywhere")
            last = piece.bytes - (len(piece.chunks) - 1) * size
            for n, name in enumerate(piece.chunks, 1):
                length = last if n == len(piece.chunks) else size
                if lengths.setdefault(name, length) != length:
                    raise ValueError(f"chunk {name} has two sizes")


def _each_text(value: Any, change: Any) -> Any:
    """``value`` with ``change`` applied to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(v, change) for v in value]
    if isinstance(value, dict):
        return {_each_text(k, change): _each_text(v, change) for k, v in value.items()}
    return value


def _to_json_text(text: str) -> str:
    """``surrogateescape``d bytes as NUL and two digits."""
    if text.isascii() and "\0" not in text:
        return text
    if "\0" in text:
        raise ValueError("a NUL in a text")
    return re.sub("[\udc80-\udcff]", lambda m: f"\0{ord(m[0]) - 0xDC00:02x}", text)


def _from_json_text(text: str) -> str:
    """The reverse; any other NUL is refused."""
    plain = re.sub("\0([89a-f][0-9a-f])", lambda m: chr(0xDC00 + int(m[1], 16)), text)
    if "\0" in plain:
        raise ValueError("a NUL in a text")
    return plain
