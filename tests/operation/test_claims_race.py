"""Claims: two never both have a job, and nobody waits for another user. Real users, as root, without a GPU."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import as_user, meanwhile

from limosa.errors import Busy, NoRoomOnGpu
from limosa.operation import claims
from limosa.operation.claims import Claim
from limosa.process import places, runtime
from limosa.process.identity import Identity

pytestmark = pytest.mark.root
ADA, EVE = 61001, 61002
ROUNDS = int(os.environ.get("LIMOSA_RACE", "150"))
"""Of each user; thousands with ``LIMOSA_RACE=5000``."""


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder that users can get at, in memory: what is measured are races, not disks."""
    path = Path(tempfile.mkdtemp(prefix="test-claims-", dir="/dev/shm"))
    path.chmod(0o755)
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(path / "run"))
    places.own_place()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def adas() -> Iterator[Identity]:
    """A process of ada's."""
    with subprocess.Popen(["sleep", "100"], user=ADA, group=ADA, extra_groups=[]) as process:
        yield Identity.of(process.pid)
        process.kill()


def claim_on(*jobs: Identity, name: str = "move-1", **more: object) -> Claim:
    return Claim(id=name, operation="move", holder=Identity.of(os.getpid()), pids=list(jobs), **more)  # type: ignore[arg-type]


def side(uid: int, call: Callable[[], None]) -> int:
    """A child of another user's that calls that and ends with 0, or with 1 where it raised."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            call()
            code = 0
        os._exit(code)
    return child


def race(uids: tuple[int, int], claim: Callable[[], Claim]) -> tuple[int, list[int]]:
    """Two users claim, hold for a moment and release, again and again; how often both had it, how often each had it.

    Who is done goes on until the other has had it, too: on a busy machine the other may not have begun.
    """
    page = mmap.mmap(-1, 4096)
    end = time.monotonic() + 60

    def run(me: int) -> None:
        n = 0
        while n < ROUNDS or (not page[8 + 2 * (1 - me)] and time.monotonic() < end):
            n += 1
            mine = claim()
            mine.id = f"move-{me}-{n}"
            try:
                claims.make(mine)
            except Busy:
                continue
            page[me] = 1
            both = page[1 - me]
            time.sleep(0.0005)
            both |= page[1 - me]
            page[2] |= both
            page[8 + 2 * me] = min(250, page[8 + 2 * me] + 1)
            page[me] = 0
            mine.release()

    children = [side(uid, lambda me=me: run(me)) for me, uid in enumerate(uids)]  # type: ignore[misc]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0]
    return page[2], [page[8], page[10]]


def test_root_and_a_user_never_both_have_his_job(adas: Identity) -> None:
    both, each = race((0, ADA), lambda: claim_on(adas))
    assert both == 0
    assert min(each) > 0


def test_two_processes_of_one_user_never_both_have_a_job(adas: Identity) -> None:
    both, each = race((ADA, ADA), lambda: claim_on(adas))
    assert both == 0
    assert min(each) > 0


def test_two_users_never_both_have_a_folder_that_both_could_make(shared: Path) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(0o1777)
    both, each = race((EVE, ADA), lambda: claim_on(paths=[str(shared / "open" / "image")]))
    assert both == 0
    assert min(each) > 0


def test_of_room_that_one_of_two_users_can_have_no_more_is_given_away(adas: Identity) -> None:
    """Each looks when its own claim can be seen by the other."""
    page = mmap.mmap(-1, 4096)

    def run(me: int) -> None:
        def there_is_room() -> None:
            if claims.reserved("GPU-0", but=mine.id) + 6 > 10:
                raise NoRoomOnGpu(detail="no")

        end = time.monotonic() + 60
        for n in itertools.count():  # as above: the other may be held up while it has the room
            if n >= ROUNDS // 2 and (page[8 + me] or time.monotonic() > end):
                return
            mine = claim_on(name=f"move-{me}-{n}", gpus={"GPU-0": 6})
            with contextlib.suppress(NoRoomOnGpu):
                claims.make(mine, there_is_room)
                page[me] = 1
                page[2] |= page[1 - me]
                time.sleep(0.0005)
                page[2] |= page[1 - me]
                page[me] = 0
                mine.release()
                page[8 + me] = 1

    children = [side(uid, lambda me=me: run(me)) for me, uid in enumerate((EVE, ADA))]  # type: ignore[misc]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert (page[2], page[8], page[9]) == (0, 1, 1)


def test_claims_of_one_user_are_made_one_after_the_other(adas: Identity) -> None:
    made = threading.Event()

    def make() -> None:
        claims.make(claim_on(adas))
        made.set()

    with runtime.lock("claims"):
        thread = threading.Thread(target=make)
        thread.start()
        assert not made.wait(0.3)
    assert made.wait(60)
    thread.join()


def test_nobody_waits_for_a_lock_of_another_users(adas: Identity, shared: Path) -> None:
    """Whatever he locks: roots files he cannot open, and his own nobody else takes."""

    def lock_all() -> None:
        held = []
        for path in [*(shared / "run").rglob("*"), shared / "run"]:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(str(path))
        (shared / "open" / "locked").write_text("\n".join(held))
        time.sleep(300)

    claims.make(claim_on(name="move-0")).release()
    as_user(EVE, lambda: claims.make(claim_on(name="move-1")).release())
    (shared / "open").mkdir()
    (shared / "open").chmod(0o777)
    with meanwhile(EVE, lock_all):
        while not ((shared / "open" / "locked").exists() and (shared / "open" / "locked").read_text()):
            time.sleep(0.01)
        begun = time.monotonic()
        claims.make(claim_on(adas)).release()
        as_user(ADA, lambda: claims.make(claim_on(adas, name="move-2")).release())
        assert time.monotonic() - begun < 60
        assert not any("/0/claims.lock" in line for line in (shared / "open/locked").read_text().splitlines())


def test_a_busy_job_is_named_and_a_dead_claim_without_a_journal_is_nobodys(adas: Identity) -> None:
    claims.make(claim_on(adas))
    with pytest.raises(Busy, match=f"move by process {os.getpid()}"):
        claims.make(claim_on(adas, name="move-2"))
    with pytest.raises(AssertionError, match="Busy"):
        as_user(ADA, lambda: claims.make(claim_on(adas, name="move-3")).release())
    claims.released("move-1")
    as_user(ADA, lambda: claims.make(claim_on(adas, name="move-4")) and None)  # its holder has ended then
    claims.make(claim_on(adas, name="move-5"))


def test_a_user_claims_no_process_of_anothers(adas: Identity) -> None:
    """Not even one that lives claims it, whoever it works for."""
    with subprocess.Popen(["sleep", "100"], user=EVE, group=EVE, extra_groups=[]) as holder:
        claim = Claim(id="move-9", operation="move", holder=Identity.of(holder.pid), pids=[adas, Identity.of(1)])
        as_user(EVE, claim.save)
        assert claims.on([adas, Identity.of(1)]) is None
        assert claims.being_worked_on() == set()
        as_user(ADA, lambda: claims.make(claim_on(adas)).release())
        holder.kill()


def test_thousands_of_claims_of_one_user_cost_the_others_moments(adas: Identity) -> None:
    def flood() -> None:
        folder = places.own_folder("claims")
        pids = ",".join(f'{{"pid":{n + 100},"start_time":{n}}}' for n in range(20_000))
        holder = f'{{"pid":{os.getpid()},"start_time":1}}'
        for n in range(3_000):
            more = pids if n % 30 == 0 else ""
            text = f'{{"id":"move-{n}","operation":"move","holder":{holder},"pids":[{more}],"gpus":{{"G":{1 << 49}}}}}'
            (folder / f"move-{n}.json").write_text(text)

    as_user(EVE, flood)
    begun = time.process_time()  # what it has to do, whoever else has the machine
    claims.make(claim_on(adas)).release()
    assert claims.reserved("G") == 0
    assert time.process_time() - begun < 2.5
