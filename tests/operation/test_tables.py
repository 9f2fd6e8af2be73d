"""``limosa rm`` removes the nftables table of that very image, and no other that a manifest may name."""

from __future__ import annotations

import importlib
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from limosa.process.criu import stats
from limosa.process.criu.run import DUMP_LOG

remove_image = importlib.import_module("limosa.operation.remove_image")  # the function has its name

RUN = "5c41aa3e-1234-4d3f-b111-222233334444"


def image(folder: Path, table: str | None, run: str = RUN, pid: int = 4711) -> Any:
    """An image with an inventory of that run."""
    told = b"\x6a" + bytes([len(run)]) + run.encode() if run else b"\x08\x01"
    (folder / "inventory.img").write_bytes(struct.pack("<III", stats._COMMON_MAGIC, 0, len(told)) + told)
    fd = os.open(folder, os.O_RDONLY)
    return SimpleNamespace(manifest=SimpleNamespace(nft_table=table, job=SimpleNamespace(pid=pid)), criu_fd=fd)


@pytest.mark.parametrize(
    ("table", "run", "removed"),
    [
        ("CRIU-5c41aa3e-1234-4d3f-b", RUN, True),
        ("CRIU-5c41aa3e-1234-4d3f-c", RUN, False),
        ("CRIU-5c41", RUN, False),
        ("CRIU-", RUN, False),
        ("filter", RUN, False),
        ("CRIU-4711", RUN, False),
        ("CRIU-4711", "", True),
        ("CRIU-471", "", False),
        ("CRIU-4712", "", False),
        (None, RUN, False),
    ],
)
def test_only_the_table_of_its_own_run(tmp_path: Path, table: str | None, run: str, removed: bool) -> None:
    opened = image(tmp_path, table, run)
    try:
        assert remove_image._table_of(opened) == ({table} if removed else set())
    finally:
        os.close(opened.criu_fd)


@pytest.mark.root
def test_a_log_that_another_user_wrote_names_no_table(tmp_path: Path) -> None:
    log = tmp_path / DUMP_LOG
    log.write_text("CRIU run id = 5c41aa3e-1234-4d3f-b111-222233334444\n")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert remove_image._is_own(fd)
        os.chown(log, 4242, 4242)
        assert not remove_image._is_own(fd)
        os.chown(log, 0, 0)
        log.chmod(0o666)
        assert not remove_image._is_own(fd)
    finally:
        os.close(fd)
