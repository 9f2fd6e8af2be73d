"""``limosa inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from limosa.cli import words
from limosa.cli.options import IMAGE
from limosa.cli.output import Report, plain
from limosa.cli.table import table
from limosa.cli.verb import verb
from limosa.cli.verify import doubtful

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from limosa.image import Image
    from limosa.image.manifest import TreeProcess


@verb(
    IMAGE,
)
def command(report: Report, *, image: Path) -> None:
    """Show what is in an image: its job, processes, GPUs and files.

    Only the manifest is read; limosa verify reads every byte.
    """
    from limosa.image import open_image

    with open_image(image, trust=False) as opened:
        doubtful(report, opened, image)
        facts = dict(plain(opened.manifest))
        facts["image_schema"] = facts.pop("schema")  # "schema" at the top is the JSON contract's own
        sizes = opened.manifest.chunk_sizes()
        value = {
            "image": str(opened.path),
            "id": opened.id,
            "bytes": opened.manifest.bytes,
            "device_bytes": opened.manifest.device_bytes,
            "distinct_bytes": sum(sizes.values()),
            "chunks": len(sizes),
            **facts,
        }
        report.result(value, lambda console: _draw(console, opened, report.verbose))


def _draw(console: Console, image: Image, verbose: int) -> None:
    """Facts, then the processes as a tree."""
    from rich.text import Text
    from rich.tree import Tree

    manifest, job = image.manifest, image.manifest.job
    sizes = manifest.chunk_sizes()
    facts = [
        ("image", image.path),
        ("id", image.id),
        ("created", f"{manifest.created} on {manifest.hostname or '?'}"),
        ("by", f"limosa {manifest.limosa}, CRIU {manifest.criu}, kernel {manifest.kernel}"),
        ("size", f"{words.size(manifest.bytes)} in {len(manifest.files) + len(sizes)} files"),
        ("job", f"{job.name or '-'} (process {job.pid}, uid {job.uid}) in {job.cwd}"),
        ("log", job.log or "-"),
        ("open files", f"{len(manifest.open_files)}, with those that are mapped"),
    ]
    if (box := manifest.container) is not None:
        facts.append(
            ("container", f"{box.runtime}:{box.name} ({box.id[:12]}) of image {box.image or '-'}; pids inside of it")
        )
    if manifest.device:
        distinct = f"{words.size(sum(sizes.values()))} of it distinct, in {len(sizes)} chunks"
        facts.append(("device memory", f"{words.size(manifest.device_bytes)}, {distinct}"))
    for gpu in manifest.gpus:
        facts.append((f"GPU {gpu.index}", f"{gpu.name}, {words.size(gpu.bytes)}, driver {gpu.driver}, {gpu.uuid}"))
    if manifest.software_gpu:
        facts.append(("note", "taken on a software GPU (the driver in software, not a real one)"))
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        console.print(Text(f"{name:<{width}}  {words.clean(text)}"), soft_wrap=True)
    nodes: dict[int, Tree] = {}
    for process in manifest.tree:
        parent = nodes.get(process.ppid)
        label = Text(_label(process))
        nodes[process.pid] = Tree(label) if parent is None else parent.add(label)
    console.print(nodes[job.pid])
    if verbose:
        rows = [(f.pid, "mapped" if f.fd is None else f.fd, words.size(f.size), f.path) for f in manifest.open_files]
        table(console, ("PID", "FD", "SIZE", "PATH"), rows, right=("PID", "FD", "SIZE"), text=("PATH",))


def _label(process: TreeProcess) -> str:
    held = sum(process.held.values())
    notes = [f"{len(process.threads) + 1} threads"] if process.threads else []
    if process.cuda:
        notes.append(f"CUDA, {words.size(held)}")
    return f"{process.pid} {words.command_line(process.command)}{' [' + ', '.join(notes) + ']' if notes else ''}"
