"""A crash before and after every step of writing and removing an image leaves what docs/image-format.md says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from image_material import FailingFiles, NotingFiles, removal_step_of, step_of, write_chunked

from limosa.errors import DestinationExists, NoSuchImage, UnfinishedImage
from limosa.image import open_image, remove, sync, unfinished, verify

HERE = Path(__file__).parent
DOC = HERE.parents[1] / "docs" / "image-format.md"
UNFINISHED_NOBODYS = "unfinished, nobody's"
UNFINISHED_DEAD = "unfinished, its writer dead"
WHOLE = {"a whole image", "the image as it was"}


def documented() -> dict[str, dict[str, tuple[str, str]]]:
    """{"write" | "remove": {step: (left by a crash before, after)}} from the two tables."""
    tables: dict[str, dict[str, tuple[str, str]]] = {"write": {}, "remove": {}}
    table = None
    for line in DOC.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ("step", "step of removal"):
            table = tables["write" if cells[0] == "step" else "remove"]
        elif not line.startswith("|"):
            table = None
        elif table is not None and re.fullmatch(r"`\w+`", cells[0]):
            table[cells[0].strip("`")] = (cells[2], cells[3])
    return tables


TABLES = documented()
CASES = [(verb, step, when) for verb in TABLES for step in TABLES[verb] for when in ("before", "after")]


def noted(tmp_path: Path, verb: str) -> list[str]:
    """The changes of an undisturbed run."""
    files = NotingFiles()
    if verb == "write":
        write_chunked(tmp_path / "noted", files).close()
        remove(tmp_path / "noted")
    else:
        write_chunked(tmp_path / "noted").close()
        remove(tmp_path / "noted", files=files)
    return files.done


def crash(orders: list[dict]) -> list[int]:
    """Has each order carried out by a child that dies; how each ended."""
    done = subprocess.run(
        [sys.executable, str(HERE / "crash_child.py")],
        input="".join(json.dumps(order) + "\n" for order in orders),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return [int(line) for line in done.stdout.split()]


def what_is_left(folder: Path) -> str:
    """In the words of the tables; fails where it is anything that they do not know."""
    litter = unfinished(folder)
    dest = folder / "image"
    others = {p.name for p in folder.iterdir()} - {"image"} - {u.path.name for u in litter}
    assert not others
    if litter:
        assert not dest.exists()
        (one,) = litter
        assert one.state == "dead"  # nobody is alive to finish it
        with pytest.raises(UnfinishedImage):
            open_image(one.path)
        with pytest.raises(NoSuchImage):
            open_image(dest)
        if one.owner:
            assert (one.dest, one.operation) == (dest, "op-1")
        return UNFINISHED_DEAD if one.owner else UNFINISHED_NOBODYS
    if not dest.exists():
        return "nothing"
    with open_image(dest) as image:
        assert verify(image).ok
    return "a whole image"


def check_recovery(folder: Path, left: str) -> None:
    """Litter can be removed, and the same command without the crash succeeds."""
    for one in unfinished(folder):
        remove(one.path)
    if left in WHOLE:
        with pytest.raises(DestinationExists):
            write_chunked(folder / "image")
        assert remove(folder / "image") > 0
    assert list(folder.iterdir()) == []
    write_chunked(folder / "image").close()
    assert what_is_left(folder) == "a whole image"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], tuple[Path, int]]:
    """Every documented step crashed before and after it: the folder, and how the process ended."""
    base = tmp_path_factory.mktemp("crashed")
    steps = {"write": step_of, "remove": removal_step_of}
    counts = {verb: [steps[verb](label) for label in noted(base, verb)] for verb in steps}
    orders = []
    for verb, step, when in CASES:
        folder = base / f"{verb}-{step}-{when}"
        folder.mkdir()
        if verb == "remove":
            write_chunked(folder / "image").close()
        last = counts[verb].count(step)
        order = {"dest": str(folder / "image"), "verb": verb, "mode": "step", "step": step, "last": last, "when": when}
        orders.append(order)
    ends = crash(orders)
    return {case: (Path(order["dest"]).parent, end) for case, order, end in zip(CASES, orders, ends, strict=True)}


def test_the_tables_name_every_step_in_its_order(tmp_path: Path) -> None:
    for verb, names in (("write", step_of), ("remove", removal_step_of)):
        found = list(dict.fromkeys(names(label) for label in noted(tmp_path, verb)))
        if verb == "write":  # `chunks` is done beside the two rows above it
            assert found.index("store") < found.index("chunks") < found.index("manifest")
            found.remove("chunks")
            found.insert(found.index("manifest"), "chunks")
        assert found == list(TABLES[verb])


@pytest.mark.parametrize(("verb", "step", "when"), CASES)
def test_a_crash_leaves_what_the_table_says(crashed, verb: str, step: str, when: str) -> None:
    folder, end = crashed[verb, step, when]
    assert end == -9
    said = TABLES[verb][step][when == "after"]
    left = what_is_left(folder)
    assert left == said or (said in WHOLE and left == "a whole image")
    check_recovery(folder, said)


@pytest.mark.parametrize("verb", ["write", "remove"])
def test_a_crash_at_any_single_change_leaves_all_or_nothing(tmp_path: Path, verb: str) -> None:
    count = len(noted(tmp_path, verb))
    orders = []
    for n in range(count):
        for when in ("before", "after"):
            folder = tmp_path / f"{n}-{when}"
            folder.mkdir()
            if verb == "remove":
                write_chunked(folder / "image").close()
            orders.append({"dest": str(folder / "image"), "verb": verb, "mode": "n", "n": n, "when": when})
    for order, end in zip(orders, crash(orders), strict=True):
        assert end == -9
        folder = Path(order["dest"]).parent
        check_recovery(folder, what_is_left(folder))


def test_an_empty_folder_at_the_destination_survives_a_crash_before_the_rename(tmp_path: Path) -> None:
    dest = tmp_path / "image"
    dest.mkdir()
    order = {"dest": str(dest), "verb": "write", "mode": "step", "step": "image", "last": 1, "when": "before"}
    assert crash([order]) == [-9]
    assert list(dest.iterdir()) == []
    (litter,) = unfinished(tmp_path)
    remove(litter.path)
    write_chunked(dest).close()
    assert what_is_left(tmp_path) == "a whole image"


def test_many_files_are_put_on_disk_at_once_before_the_rename(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sync, "MANY", 3)
    files = NotingFiles()
    write_chunked(tmp_path / "image", files).close()
    labels = files.done
    (at,) = [i for i, label in enumerate(labels) if label.startswith("syncfs:")]
    assert labels[at].endswith("/criu")
    assert not [label for label in labels if label.startswith("fsync:") and "/criu/" in label]
    chmods = [i for i, label in enumerate(labels) if label.startswith("chmod:") and "/criu/" in label]
    names = next(i for i, label in enumerate(labels) if label.startswith("fsync:") and label.endswith("/criu"))
    assert max(chmods, default=-1) < at < names < next(i for i, x in enumerate(labels) if x.startswith("rename:"))
    with open_image(tmp_path / "image") as image:
        verify(image).check()


def test_a_disk_that_fails_for_many_files_at_once_commits_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sync, "MANY", 3)
    files = NotingFiles()
    write_chunked(tmp_path / "image", files).close()
    n = next(i for i, label in enumerate(files.done) if label.startswith("syncfs:"))
    with pytest.raises(OSError, match="Input/output error"):
        write_chunked(tmp_path / "other", FailingFiles(n))
    assert not (tmp_path / "other").exists()
    assert unfinished(tmp_path) == []


def test_all_is_on_disk_before_the_rename_and_the_rename_before_the_end(tmp_path: Path) -> None:
    """Power failure keeps only what was synced: so every file and folder is synced after its last change."""
    files = NotingFiles()
    write_chunked(tmp_path / "image", files).close()
    labels = files.done
    rename = next(i for i, label in enumerate(labels) if label.startswith("rename:"))
    partial = labels[rename].removeprefix("rename:").partition(">")[0]

    def synced(path: str) -> int:
        return max(i for i, label in enumerate(labels) if label == f"fsync:{tmp_path}/{partial}{path}")

    contents = [synced(f"/criu/{name}") for name in ("core-41.img", "core-42.img", "inventory.img", "pages-1.img")]
    assert max(contents) < synced("/manifest.json") < synced("/manifest.blake3") < synced("") < rename
    assert synced("/criu") < synced("/manifest.blake3")
    chunks = [f"/{path.relative_to(tmp_path / 'image')}" for path in (tmp_path / "image/chunks").rglob("*")]
    assert len(chunks) > 4
    assert max(map(synced, [*chunks, "/chunks"])) < synced("/manifest.json")
    assert not any(label.startswith("chmod:") for label in labels[max(contents) + 1 : rename])
    assert labels[rename + 1] == f"fsync:{tmp_path}"
