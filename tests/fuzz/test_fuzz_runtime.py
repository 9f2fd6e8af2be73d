"""What another user's files in the runtime folder say: whatever it is, it is believed within bounds or passed over."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fuzz.frame import Fuzz
from fuzz.mutate import mutated
from limosa.operation import claims, journal
from limosa.operation.claims import Claim
from limosa.operation.jobs import rfc3339
from limosa.operation.journal import Header, Member, Record
from limosa.process import device_nodes, places
from limosa.process.identity import Identity, boot_id
from limosa.process.records import EndedRecord, RunRecord, SuspendRecord

pytestmark = pytest.mark.root
EVE = 61002
UUID = "GPU-00000000-0000-0000-0000-000000000001"


@pytest.fixture
def hers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Identity]]:
    """A user's folder, in memory, and a process of hers."""
    base = Path(tempfile.mkdtemp(prefix="fuzz-runtime-", dir="/dev/shm"))
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(base / "run"))
    places.own_place()
    folder = base / "run" / "users" / f"limosa-{EVE}"
    for kind in ("", "jobs", "suspended", "ended", "claims", "journals", "sees"):
        (folder / kind).mkdir()
        os.chown(folder / kind, EVE, EVE)
    with subprocess.Popen(["sleep", "3600"], user=EVE, group=EVE, extra_groups=[]) as process:
        yield folder, Identity.of(process.pid)
        process.kill()
    shutil.rmtree(base)


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.chown(path, EVE, EVE)


def test_whatever_a_record_says_is_believed_within_bounds(fuzz: Fuzz, hers: tuple[Path, Identity]) -> None:
    folder, her = hers
    name = f"{her.pid}-{her.start_time}.json"
    suspended = SuspendRecord(
        root=her, by="eve", bytes={UUID: 1 << 30}, members=[her, Identity(1, 2)], moved={str(her.pid): {UUID: UUID}}
    )
    suspended.held = {str(her.pid): {UUID: 1 << 30}}
    sees = str(folder / "sees" / "0123456789abcdef")
    run = RunRecord(root=her, name="train", command=["python", "x"], log="/tmp/log", cwd="/", supervisor=her, sees=sees)
    samples = {
        "suspended": (SuspendRecord, msgspec.json.encode(suspended)),
        "jobs": (RunRecord, msgspec.json.encode(run)),
        "ended": (EndedRecord, msgspec.json.encode(EndedRecord(root=her, image="/image", image_id="x"))),
    }
    for case in fuzz.cases():
        kind = case.random.choice(list(samples))
        type_, sample = samples[kind]
        data = mutated(case.random, [sample])
        with case:
            put(folder / kind / name, data)
            for record in (*type_.all(), *filter(None, [type_.of(her)])):
                assert record.root == her
                assert rfc3339(record.since).endswith("Z")
                msgspec.json.encode(record)
                if isinstance(record, SuspendRecord):
                    assert set(record.members) <= {her}
                    assert all(0 <= size <= 1 << 50 for size in record.bytes.values())
                if isinstance(record, RunRecord):
                    assert record.name.isascii()
                    assert record.name.isprintable()
                    assert not record.sees or device_nodes.owner(record.sees) == EVE


def test_whatever_a_claim_says_is_of_her_processes_and_within_bounds(fuzz: Fuzz, hers: tuple[Path, Identity]) -> None:
    folder, her = hers
    claim = Claim(id="move-1-e", operation="move", holder=her, pids=[her], gpus={UUID: 1 << 30}, paths=["/image", "/x"])
    sample = msgspec.json.encode(claim)
    put(folder / "journals" / "move-1-e.jsonl", b"{}\n")
    for case in fuzz.cases():
        data = mutated(case.random, [sample])
        with case:
            put(folder / "claims" / "move-1-e.json", data)
            for found in claims.everybodys():
                assert set(found.pids) <= {her}
                assert (found.owner, found.id) == (EVE, "move-1-e")
                assert found.operation.isascii()
                assert found.operation.isprintable()
                assert found.alive or not (found.gpus or found.paths)
                msgspec.json.encode(found)
            assert claims.reserved(UUID, most=10) in (0, 10) or claims.reserved(UUID) < 10
            claims.in_the_way(claim, {"/image"})


def test_whatever_a_journal_says_is_told_in_a_sentence(fuzz: Fuzz, hers: tuple[Path, Identity]) -> None:
    folder, her = hers
    header = Header(
        id="move-1-e",
        operation="move",
        roots=[her],
        members=[Member(identity=her, held={UUID: 5})],
        controller=her,
        image="/image",
        boot=boot_id(),
    )
    lines = [{"header": header}, Record(step="lock", phase="done", pid=her.pid), Record(step="undo", phase="failed")]
    sample = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    for case in fuzz.cases():
        data = mutated(case.random, [sample])
        with case:
            put(folder / "journals" / "move-1-e.jsonl", data)
            for summary in journal.under_way():
                assert (summary.owner, summary.id) == (EVE, "move-1-e")
                assert len(summary.pids) <= 100
                assert len(summary.text) < 6000
                msgspec.json.encode(summary)


def test_whatever_a_file_says_of_gpus_it_is_numbers(fuzz: Fuzz, hers: tuple[Path, Identity]) -> None:
    path = hers[0] / "sees" / "0123456789abcdef"
    for case in fuzz.cases():
        data = mutated(case.random, [b"0,1,2,12"])
        with case:
            put(path, data)
            found = device_nodes.seen(str(path))
            assert found is None or all(0 <= number < 100_000 for number in found)
