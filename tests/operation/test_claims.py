"""Two never both have a job: what a claim sees of others before it is written, and after."""

from __future__ import annotations

import os
import resource
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_double import GB, DriverDouble
from test_hostile_runtime import NOBODY, claim_of_nobody, folder_of_nobody, put

from limosa import operation
from limosa.errors import Busy, CannotBeMoved, NoRoomOnGpu
from limosa.operation import claims
from limosa.operation.claims import Claim
from limosa.operation.journal import Header, Journal
from limosa.process.identity import Identity

ME = Identity.of(os.getpid())
Start = Callable[..., object]


def mine(name: str = "mine", *pids: Identity) -> Claim:
    return Claim(id=name, operation="move", holder=ME, pids=list(pids))


@pytest.fixture
def theirs(start: Start) -> Identity:
    """A process of another user's: he may work on it, and so may root."""
    victim = start(["setpriv", f"--reuid={NOBODY}", "--clear-groups", "sleep", "60"], ready=None)
    pid: int = victim.pid  # type: ignore[attr-defined]
    victim.until(lambda: os.stat(f"/proc/{pid}").st_uid == NOBODY)  # type: ignore[attr-defined]
    return Identity.of(pid)


def test_a_claim_that_another_user_writes_at_the_same_moment_is_seen(
    own_runtime: Path, theirs: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked and seen nobody; then both write. No lock is between users: whoever wrote last looks again."""
    save = Claim.save

    def both(self: Claim) -> None:
        save(self)
        claim_of_nobody(own_runtime, Claim(id="his", operation="move", holder=theirs, pids=[theirs]))

    monkeypatch.setattr(Claim, "save", both)
    with pytest.raises(Busy, match="move by process"):
        claims.make(mine("mine", theirs))
    assert [claim.id for claim in claims.everybodys()] == ["his"]


def test_room_is_looked_at_when_others_can_see_the_claim(own_runtime: Path) -> None:
    """Looked at before, two would be given the same gigabytes. What has no room leaves no claim."""
    seen: list[list[str]] = []

    def look() -> None:
        seen.append([claim.id for claim in claims.everybodys()])
        raise NoRoomOnGpu(detail="none", hint="")

    with pytest.raises(NoRoomOnGpu):
        claims.make(mine("mine", ME), look)
    assert seen == [["mine"]]
    assert claims.everybodys() == []


def test_of_many_at_once_one_has_the_job(own_runtime: Path) -> None:
    """Among one user's own a lock is held from the first look to the last: one gets it at once, nobody gives way."""
    got: list[str] = []
    busy: list[str] = []
    begin = threading.Barrier(6)

    def one(name: str) -> None:
        begin.wait(60)
        try:
            claims.make(mine(name, ME))
            got.append(name)
        except Busy:
            busy.append(name)

    for _ in range(5):
        threads = [threading.Thread(target=one, args=(f"op{n}",)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert (len(got), len(busy)) == (1, 5)
        claims.released(got.pop())
        busy.clear()


def test_the_way_back_is_spoken_for_while_a_job_is_away(gpu_like: Callable[..., int], double: DriverDouble) -> None:
    """Else somebody takes its place while it is copied, and a move that fails cannot bring it home."""
    pid = gpu_like(on=0, size=6 * GB)
    promised: list[int] = []
    double.after_checkpoint = lambda: promised.append(claims.reserved(double.uuids[0]))
    operation.move(pid, to="1")
    assert promised[0] >= 6 * GB
    assert claims.reserved(double.uuids[0]) == 0


def test_a_user_speaks_for_no_process_but_his_own(own_runtime: Path, theirs: Identity) -> None:
    claim_of_nobody(own_runtime, Claim(id="his", operation="move", holder=theirs, pids=[ME, theirs]))
    assert [claim.pids for claim in claims.everybodys()] == [[theirs]]
    assert claims.make(mine("mine", ME)).id == "mine"
    with pytest.raises(Busy):
        claims.make(mine("both", theirs))


def test_what_a_dead_operation_left_in_the_middle_is_nobodys_before_it_is_recovered(own_runtime: Path) -> None:
    gone = Identity(1, 999)  # never alive: process 1 has another start time
    left = Journal.create(Header(id="dead", operation="move", roots=[ME], controller=gone))
    left.close()
    Claim(id="dead", operation="move", holder=gone, pids=[ME]).save()
    for _ in range(2):  # also the second time: the claim has not been removed
        with pytest.raises(Busy, match="died") as caught:
            claims.make(mine("mine", ME))
        assert caught.value.hint == "limosa recover"
    left.finish()
    assert claims.make(mine("mine", ME)).id == "mine"


def test_a_users_large_file_takes_no_memory(own_runtime: Path) -> None:
    large = put(folder_of_nobody(own_runtime, "claims") / "large.json", b"{")
    os.truncate(large, 64 << 20)
    tracemalloc.start()
    try:
        assert claims.everybodys() == []
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_claim_is_released_where_no_file_can_be_opened_any_more(own_runtime: Path) -> None:
    claim = claims.make(mine("mine", ME))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        claim.release()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert list(own_runtime.rglob("*.json")) == []


def of_image(name: str, path: Path, **more: object) -> Claim:
    return Claim(id=name, operation="restore", holder=ME, paths=[str(path)], **more)  # type: ignore[arg-type]


def test_an_image_is_shared_by_those_that_only_read_it(own_runtime: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        claims.make(of_image(name, tmp_path, shared=True, names=[f"container podman:{name}"], uses=["volume data"]))
    for one in (of_image("c", tmp_path), of_image("d", tmp_path / "." / "", shared=False)):
        with pytest.raises(Busy, match="is being worked on by restore"):
            claims.make(one)
    for taken in ("container podman:a", "volume data"):
        with pytest.raises(Busy, match=taken):
            claims.make(of_image("e", tmp_path, shared=True, names=[taken]))
    claims.released("a")
    claims.released("b")
    claims.make(of_image("f", tmp_path, names=["volume data"]))
    with pytest.raises(Busy, match="volume data"):
        claims.make(of_image("g", tmp_path / "other", shared=True, uses=["volume data"]))


@pytest.mark.parametrize("names", [["folder /" + 4090 * "x"], [f"folder /{n}" for n in range(5000)]])
def test_a_claim_that_others_could_not_read_is_not_made(own_runtime: Path, names: list[str]) -> None:
    """They would not have seen it: an image says what its container may change, and with it went the claim on a GPU."""
    me = Identity.of(os.getpid())
    with pytest.raises(CannotBeMoved, match="too long"):
        claims.make(Claim(id="long", operation="restore", holder=me, gpus={"GPU-1": GB}, names=names))
    assert claims.everybodys() == []


def test_another_user_takes_nobodys_names(own_runtime: Path, theirs: Identity) -> None:
    claim_of_nobody(own_runtime, Claim(id="his", operation="restore", holder=theirs, names=["port 80"]))
    assert claims.make(of_image("mine", own_runtime, names=["port 80"])).names == ["port 80"]
