"""An image for the tests, made of this machine's C library and a static busybox in a second, without a network.

It holds ``/job`` (job.c) and what that loads, but the driver: a container gets that as on a real node, bound in.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from containers.engines import ROOT, Engines

NAME = "localhost/limosa-test:1"  # a name with a host that nobody can pull from
OTHER = "/usr/lib/other.so"  # a library that an image may preload by itself
_HERE = Path(__file__).parent
_FOLDERS = ("bin", "dev", "etc", "lib64", "proc", "root", "run", "sys", "tmp", "usr", "usr/bin", "usr/lib", "var")
_APPLETS = [
    "sh",
    "cat",
    "echo",
    "env",
    "hostname",
    "id",
    "kill",
    "ls",
    "mkdir",
    "ps",
    "readlink",
    "rm",
    "sleep",
    "touch",
]


def libraries_of(*programs: Path) -> set[str]:
    """Where this machine's loader finds what programs load, itself among it."""
    told = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(/\S+) \(0x", told))


def library_folder() -> str:
    """The folder in which the image's loader looks by itself: that of this machine's C library."""
    return next(str(Path(path).parent) for path in libraries_of(Path("/bin/sh")) if "/libc.so" in path)


def make_rootfs(folder: Path, engines: Engines, driver: Path) -> Path:
    """Make the image's root folder.

    Args:
        folder: where; must not be there.
        engines: whose busybox is taken.
        driver: a libcuda whose own libraries have to be there.
    """
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    job = folder / "job"
    subprocess.run(["cc", "-O1", "-w", "-o", job, _HERE / "job.c", "-ldl"], check=True)
    for library in libraries_of(job, driver, Path("/bin/sh")):
        inside = folder / library.lstrip("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, inside)
        inside.chmod(0o755)
    shutil.copy(ROOT / "src" / "limosa" / "demo" / "kernels.ptx", folder / "job.ptx")
    shutil.copy(engines["busybox"], folder / "bin/busybox")
    for applet in _APPLETS:
        (folder / "bin" / applet).symlink_to("busybox")
    subprocess.run(["cc", "-shared", "-o", folder / OTHER.lstrip("/"), "-x", "c", "/dev/null"], check=True)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    return folder


def make_musl_rootfs(folder: Path, engines: Engines) -> Path:
    """Make the root folder of an image whose only C library is musl, as Alpine's images are.

    Args:
        folder: where; must not be there.
        engines: whose musl is taken.
    """
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True)
    machine = os.uname().machine
    headers, libraries = (engines.root / f"usr/{kind}/{machine}-linux-musl" for kind in ("include", "lib"))
    loader = f"ld-musl-{machine}.so.1"
    (folder / "lib").mkdir()
    libc = engines.root / f"lib/{machine}-linux-musl/libc.so"
    shutil.copyfile(libc, folder / "lib" / loader)
    (folder / "lib" / loader).chmod(0o755)
    shutil.copy(engines["busybox"], folder / "bin/busybox")
    for applet in _APPLETS:
        (folder / "bin" / applet).symlink_to("busybox")
    starts = [libraries / name for name in ("crt1.o", "crti.o", "crtn.o")]
    words = ["cc", "-w", "-nostdinc", "-isystem", headers, "-nostdlib", "-no-pie", "-o", folder / "job", *starts[:2]]
    words += [_HERE / "job.c", f"-L{libc.parent}", "-lc", starts[2], f"-Wl,--dynamic-linker,/lib/{loader}"]
    subprocess.run(words, check=True)
    return folder


def make_old_rootfs(folder: Path, engines: Engines, c_library: Path) -> Path:
    """Make the root folder of an image of an older system: its C library, and the same job.

    Args:
        folder: where; must not be there.
        engines: whose busybox is taken.
        c_library: the root folder of a package libc6.
    """
    shutil.copytree(c_library, folder, symlinks=True)
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    native = ROOT / "src" / "limosa" / "native"
    words = ["-w", "-O1", "-fPIE", "-pie", "-nostartfiles", '-DLIMOSA_OWN_START="GLIBC_2.2.5"', "-D_GNU_SOURCE"]
    words += [word for name in ("old_glibc.h", "own_start.h") for word in ("-include", str(native / name))]
    links = ["-Wl,-z,nopack-relative-relocs", "-Wl,--no-as-needed", "-l:libdl.so.2"]
    subprocess.run(["cc", *words, "-o", folder / "job", _HERE / "job.c", *links], check=True)
    shutil.copy(ROOT / "src" / "limosa" / "demo" / "kernels.ptx", folder / "job.ptx")
    shutil.copy(engines["busybox"], folder / "bin/busybox")
    for applet in _APPLETS:
        (folder / "bin" / applet).symlink_to("busybox")
    return folder


def make_image(
    archive: Path,
    rootfs: Path,
    name: str = NAME,
    env: tuple[str, ...] = (),
    annotations: dict[str, str] | None = None,
    command: tuple[str, ...] = ("/job",),
) -> Path:
    """Write a root folder as an OCI archive that podman and containerd load.

    Args:
        archive: the file to write.
        rootfs: what is in it.
        name: what the image is called.
        env: more of its environment, "NAME=value".
        annotations: of its manifest.
        command: what a container of it runs.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for entry in sorted(os.listdir(rootfs)):
            layer.add(rootfs / entry, entry)
    data = buffer.getvalue()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    config = _json(
        architecture=machine,
        os="linux",
        config={"Cmd": list(command), "Env": ["PATH=/bin:/usr/bin", *env], "WorkingDir": "/"},
        rootfs={"type": "layers", "diff_ids": [_digest(data)]},
        history=[{"created": "2020-01-01T00:00:00Z"}],
    )
    kinds = "application/vnd.oci.image."
    manifest = _json(
        schemaVersion=2,
        mediaType=f"{kinds}manifest.v1+json",
        config=_described(f"{kinds}config.v1+json", config),
        layers=[_described(f"{kinds}layer.v1.tar", data)],
        annotations=annotations or {},
    )
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    described = {**_described(f"{kinds}manifest.v1+json", manifest), "annotations": names}
    with tarfile.open(archive, "w") as out:
        _add(out, "oci-layout", _json(imageLayoutVersion="1.0.0"))
        _add(out, "index.json", _json(schemaVersion=2, manifests=[described]))
        for blob in (config, manifest, data):
            _add(out, f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}", blob)
    return archive


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _described(kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}


def _add(out: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    out.addfile(info, io.BytesIO(data))
