"""Named semaphores of a restored job: made anew under all of their names, and nobody else's are touched."""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from limosa.errors import FailedUndone, Refused
from limosa.image import ShmFile
from limosa.operation import shm
from limosa.operation.shm import Remade, in_the_way


@pytest.fixture
def one() -> Iterator[ShmFile]:
    """A semaphore with two names and a third that is gone; nothing of it is there."""
    start = f"/dev/shm/sem.{secrets.token_hex(8)}"
    names = [f"{start}-a", f"{start}-b"]
    yield ShmFile(
        names=names,
        lost=[f"{start}-c (deleted)"],
        content=b"value".hex(),
        bytes=5,
        mode=0o640,
        uid=os.geteuid(),
        gid=os.getegid(),
    )
    for path in Path("/dev/shm").glob(f"{Path(start).name}*"):
        path.unlink()


def there(one: ShmFile) -> list[bytes]:
    return [Path(name).read_bytes() for name in (*one.names, *one.lost) if os.path.lexists(name)]


def write(one: ShmFile, content: bytes = b"other", mode: int = 0o640) -> Path:
    path = Path(one.names[0])
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_it_has_its_names_and_the_lost_ones_for_criu(one):
    assert in_the_way([one]) == []
    remade = Remade([one])
    assert there(one) == []
    remade.put()
    assert there(one) == [b"value"] * 3
    assert len({os.stat(name).st_ino for name in (*one.names, *one.lost)}) == 1
    assert os.stat(one.names[0]).st_mode & 0o7777 == 0o640
    remade.done()
    assert there(one) == [b"value"] * 2
    assert not os.path.lexists(one.lost[0])


def test_whoever_has_it_mapped_then_has_lost_the_same_name_as_before(one):
    """However often it has been on disk."""
    remade = Remade([one])
    remade.put()
    with open(one.lost[0], "rb") as file, mmap.mmap(file.fileno(), 5, prot=mmap.PROT_READ):
        remade.done()
        assert os.readlink(f"/proc/self/fd/{file.fileno()}") == one.lost[0]
        assert one.lost[0] in Path("/proc/self/maps").read_text()


def test_undone_nothing_of_it_is_there(one):
    remade = Remade([one])
    remade.put()
    names = remade.names | remade.lost
    remade.undo()
    assert there(one) == []
    Path(one.names[0]).write_bytes(b"somebody's")
    shm.take_away(names)  # whoever recovers, later
    assert there(one) == [b"somebody's"]


def test_what_the_job_has_left_is_replaced(one):
    write(one)
    assert in_the_way([one]) == []
    remade = Remade([one])
    remade.put()
    remade.done()
    assert there(one) == [b"value"] * 2


@pytest.mark.parametrize("how", [{"content": b"longer than that"}, {"mode": 0o666}])
def test_another_file_is_in_the_way_and_stays(one, how):
    path = write(one, **how)
    before = path.read_bytes()
    (reason,) = in_the_way([one])
    assert (reason.id, reason.exit_code) == ("file-changed", 23)
    remade = Remade([one])
    with pytest.raises(FailedUndone):
        remade.put()  # somebody has made it since it was looked for
    remade.undo()
    assert path.read_bytes() == before
    assert there(one) == [before]


def test_one_that_somebody_uses_is_in_the_way(one):
    path = write(one)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 5, prot=mmap.PROT_READ):
        (reason,) = in_the_way([one])
        assert (reason.id, reason.exit_code, reason.pid) == ("shm-used", 23, os.getpid())
    assert in_the_way([one]) == []


def test_a_name_that_was_lost_is_given_back_and_taken_away(one):
    path = write(one)
    os.link(path, one.names[1])
    lost = {one.lost[0]: path.stat().st_ino, "/dev/shm/sem.nobodys (deleted)": 1}
    shm.give_back(lost)
    assert os.path.samefile(one.lost[0], path)
    (read,) = shm.read(lost)
    assert read == msgspec.structs.replace(one, content=b"other".hex())
    shm.take_away(lost)
    assert there(one) == [b"other"] * 2


def test_the_names_that_are_gone_are_seen_where_something_has_come(one):
    lost = shm.Lost()
    path = write(one)
    gone = Path(one.lost[0].removesuffix(" (deleted)"))
    os.link(path, gone)
    with gone.open("rb") as file, mmap.mmap(file.fileno(), 5, prot=mmap.PROT_READ):
        lost.look([os.getpid()])
        assert one.lost[0] not in lost.names
        gone.unlink()
        lost.look([os.getpid()])
        assert one.lost[0] not in lost.names, "nothing has come since"
        lost.look([os.getpid()], again=True)
        assert lost.names[one.lost[0]] == path.stat().st_ino
        path.unlink()
        lost.look([os.getpid()], again=True)
        assert one.lost[0] not in lost.names, "it has no name any more"


def test_what_is_large_is_no_semaphore(one):
    path = write(one, bytes(8192))
    gone = Path(one.lost[0].removesuffix(" (deleted)"))
    os.link(path, gone)
    with gone.open("rb") as file, mmap.mmap(file.fileno(), 5, prot=mmap.PROT_READ):
        gone.unlink()
        lost = shm.Lost()
        lost.look([os.getpid()])
        assert one.lost[0] not in lost.names


def test_what_is_really_called_so_is_not_lost(one):
    Path(one.lost[0]).write_bytes(b"value")
    with open(one.lost[0], "rb") as file, mmap.mmap(file.fileno(), 5, prot=mmap.PROT_READ):
        lost = shm.Lost()
        lost.look([os.getpid()])
        assert one.lost[0] not in lost.names
        inode = os.fstat(file.fileno()).st_ino
        shm.take_away(shm.give_back({one.lost[0]: inode}))
        assert there(one) == [b"value"], "it was not given, and is not taken"


def test_a_name_that_another_checkpoint_has_taken_away_is_in_the_image_all_the_same(one):
    inode = write(one).stat().st_ino
    (read,) = shm.read({one.lost[0]: inode})
    assert (read.names, read.lost) == ([one.names[0]], one.lost)


def test_one_that_has_grown_since_it_was_looked_at_is_no_part_of_an_image(one):
    with pytest.raises(FailedUndone, match="grown"):
        shm.read({one.lost[0]: write(one, bytes(8192)).stat().st_ino})


def test_somebody_elses_file_is_not_replaced_when_a_name_is_taken_away(one):
    before = Path(one.lost[0].removesuffix(" (deleted)"))
    os.link(write(one), one.lost[0])
    before.write_bytes(b"somebody's")
    shm.take_away({one.lost[0]: os.stat(one.lost[0]).st_ino})
    assert before.read_bytes() == b"somebody's"
    assert there(one) == [b"other"]


def test_one_that_somebody_has_begun_to_use_since_stays(one):
    path = write(one)
    assert in_the_way([one]) == []
    remade = Remade([one])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 5, prot=mmap.PROT_READ):
        with pytest.raises(Refused) as caught:
            remade.put()
        assert (caught.value.id, caught.value.exit_code) == ("shm-used", 23)
        remade.undo()
        assert os.path.samefile(path, f"/proc/self/fd/{file.fileno()}")


def test_every_bit_of_its_mode_is_kept(one):
    path = write(one, mode=0o1640)
    (read,) = shm.read({one.lost[0]: path.stat().st_ino})
    remade = Remade([read])
    remade.put()
    remade.done()
    assert stat.S_IMODE(os.stat(read.names[0]).st_mode) == 0o1640
    assert in_the_way([read]) == []


def test_a_journal_takes_names_that_are_no_text():
    made = {os.fsdecode(b"/dev/shm/sem.\xff\xc3\xa4"): 7}
    noted = shm.to_note(made)
    assert shm.of_note(msgspec.json.decode(msgspec.json.encode(noted))) == made


def test_a_name_that_cannot_be_is_told(one):
    (reason,) = in_the_way([msgspec.structs.replace(one, names=["/dev/shm/" + "x" * 300])])
    assert (reason.id, reason.exit_code) == ("file-changed", 23)


@pytest.mark.parametrize("name", ["/etc/passwd", "/dev/shm/a/b", "/dev/shm/"])
def test_an_image_names_files_in_that_folder_only(name):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"names": [name]}, ShmFile)
