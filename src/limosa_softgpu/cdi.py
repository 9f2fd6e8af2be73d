"""A CDI spec of a node's GPUs: ``podman run --device limosa.dev/softgpu=0`` in the node gives a container that one.

A container gets what it would get of a real GPU, device nodes and the driver's libraries, and the node's folder, which
is what a kernel is otherwise.
"""

from __future__ import annotations

from pathlib import Path

from limosa.cdi.spec import Device, DeviceNode, Edits, Mount, Spec, read_only
from limosa_softgpu.build import LIBRARIES, SOFTGPU
from limosa_softgpu.node import MAJOR, ZERO
from limosa_softgpu.state import NODE_FOLDER, opened

KIND = "limosa.dev/softgpu"
_VERSION = "0.5.0"  # the first that lets names begin with a digit
FILE = Path("/etc/cdi/limosa.dev-softgpu.json")
ALL = "all"
# Every C library looks into one of these by itself, whatever an image's cache lists.
_FOLDERS = ("/usr/lib", "/usr/lib64")


def node_spec() -> Spec:
    """Return the spec of the node that this process is in.

    Raises:
        OSError: it is in none.
    """
    with opened() as state:
        gpus = range(state.n_gpus)
    numbers = {str(gpu): [gpu] for gpu in gpus} | {ALL: list(gpus)}
    return Spec(
        cdi_version=_VERSION,
        kind=KIND,
        devices=[
            Device(name=name, container_edits=Edits(device_nodes=[_node(f"nvidia{gpu}", MAJOR, gpu) for gpu in chosen]))
            for name, chosen in numbers.items()
        ],
        container_edits=Edits(
            device_nodes=[_node(name, *ZERO) for name in ("nvidiactl", "nvidia-uvm")],
            mounts=[
                Mount(host_path=NODE_FOLDER, container_path=NODE_FOLDER, options=["rbind", "rw", "nosuid"]),
                *(read_only(SOFTGPU / one, f"{folder}/{one}") for folder in _FOLDERS for one in LIBRARIES),
            ],
        ),
    )


def _node(name: str, major: int, minor: int) -> DeviceNode:
    """A device node that everybody in the container may open."""
    return DeviceNode(path=f"/dev/{name}", type="c", major=major, minor=minor, file_mode=0o666, permissions="rw")
