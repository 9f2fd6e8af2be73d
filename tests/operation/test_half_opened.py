"""What is not dropped, and who is not ended, where somebody may run already, or an arena is another time's."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from limosa.errors import FailedUndone, UndoFailed
from limosa.operation import recover_images
from limosa.operation.journal import Header, Journal, Member
from limosa.operation.parked import holders, recovering
from limosa.operation.parked.aside import Layout
from limosa.operation.parked.gates import Gates
from limosa.operation.parked.moving import Moving
from limosa.operation.parked.stranded import has_arena
from limosa.parking.protocol import Stand
from limosa.parking.segments import layout_file
from limosa.process.identity import Identity


def myself() -> Identity:
    return Identity.of(os.getpid())


def journal_of(operation: str, members: list[Member] | None = None) -> Journal:
    header = Header(id=f"{operation}-1-ab", operation=operation, roots=[], members=members or [], controller=myself())
    return Journal.create(header)


class Holder:
    """A vault or a mover that says what it holds, and does something else while it does."""

    def __init__(self, keys: dict[str, int], meanwhile: Any):
        self.keys, self.meanwhile = keys, meanwhile
        self.drop = self.unput = self.keys.pop
        self.uid = os.geteuid()

    def held(self) -> dict[str, int]:
        self.meanwhile()
        return dict(self.keys)

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_what_begins_while_the_finished_are_looked_for_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its journal is there before anything is held, and after the others' journals could have been listed."""
    keys = {"move-1-ab/source/1@1": 1, "move-7-cd/source/1@1": 1}
    begun: list[Journal] = []
    vault = Holder(keys, lambda: begun.append(journal_of("move")))
    monkeypatch.setattr(holders.Mover, "all", list)
    monkeypatch.setattr(holders.Vault, "all", lambda: [vault])
    holders.forget_finished()
    assert list(keys) == ["move-1-ab/source/1@1"]
    begun[0].finish()


@pytest.mark.parametrize("opened", [True, False])
def test_a_restored_tree_is_not_ended_once_a_gate_may_be_open(monkeypatch: pytest.MonkeyPatch, opened: bool) -> None:
    dead, ended = journal_of("restore"), []

    def fails(*_: object, **__: object) -> list[Member]:
        raise FailedUndone("a shim does not answer")

    monkeypatch.setattr(recover_images, "_restored_root", lambda _: myself())
    monkeypatch.setattr(recover_images, "_criu_was_done", lambda _: True)
    monkeypatch.setattr(recover_images, "still_an_image", lambda _: None)
    monkeypatch.setattr(recover_images, "finish", fails)
    monkeypatch.setattr(recover_images, "end_tree", lambda *_: ended.append(1))
    if opened:
        dead.note("open", "begin", os.getpid())
        with pytest.raises(UndoFailed):
            recover_images.recover_restore(dead, None, lambda _: None)  # type: ignore[arg-type]
    else:
        recover_images.recover_restore(dead, None, lambda _: None)  # type: ignore[arg-type]
    assert len(ended) == int(not opened)
    dead.finish()


class Keeper:
    """A shim that keeps an arena."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def kept(self) -> list[int]:
        return [layout_file(msgspec.json.encode(self.layout))]


def test_an_arena_of_another_time_is_none() -> None:
    shim: Any = Keeper(Layout([], operation="suspend-1-a"))
    assert has_arena(shim)
    assert has_arena(shim, "suspend-1-a")
    assert not has_arena(shim, "suspend-2-b")


def test_what_is_held_is_not_forgotten_while_somebody_has_not_got_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has come home in an undo does not run on the other side, and one that is away is not done with."""
    members = [Member(identity=myself(), was="running", home={}, map={}, held={})]
    dead, forgotten = journal_of("move", members), []
    dead.note("map", "begin", os.getpid())
    dead.note("undo", "begin", name="driver")
    monkeypatch.setattr(recovering, "under_shim", lambda _: True)
    monkeypatch.setattr(recovering, "stand_of", lambda _: Stand.OPEN)
    monkeypatch.setattr(recovering, "_leave", lambda *_: None)
    monkeypatch.setattr(recovering, "_give_back", lambda *_, **__: None)
    monkeypatch.setattr(recovering, "all_in_arenas", lambda *_: False)
    monkeypatch.setattr(recovering.holders, "forget", lambda id_, **_: forgotten.append(id_))
    assert recovering.go_on(dead) is False
    with pytest.raises(FailedUndone, match="still held"):
        recovering.go_back(dead, lambda: None)
    assert not forgotten
    monkeypatch.setattr(recovering, "all_in_arenas", lambda *_: True)
    assert recovering.go_on(dead) is False
    recovering.go_back(dead, lambda: None)
    assert forgotten == [dead.header.id]
    dead.finish()


def test_what_was_mapped_stays_once_a_gate_may_be_open() -> None:
    """The job may run on it."""

    class Library:
        unmapped = 0

        def hello(self) -> Any:
            return type("Hello", (), {"stand": Stand.CLOSED})

        def unmap(self) -> None:
            self.unmapped += 1

        def open_gate(self) -> None:
            raise FailedUndone("no answer")

    work: Any = type("Work", (), {"operation": "move", "try_note": lambda *_: None})()
    library: Any = Library()
    parts = [(Member(identity=myself()), library)]
    gates = Gates(work)
    gates.leave(parts)
    assert library.unmapped == 1
    with pytest.raises(UndoFailed, match="no answer"):
        gates.open(parts)
    with pytest.raises(UndoFailed):
        gates.leave(parts)
    assert library.unmapped == 1


def test_no_memory_goes_home_while_it_is_still_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy reads what the job would write again."""
    did: list[str] = []
    moving: Any = Moving.__new__(Moving)
    moving._parts = [type("Part", (), {"member": Member(identity=myself())})]
    moving._others = []
    moving._copying = type("Copying", (), {"settle": lambda _: did.append("settled")})()
    monkeypatch.setattr(Moving, "_home", lambda *_: did.append("home"))
    monkeypatch.setattr(Moving, "release", lambda _: did.append("let go"))
    moving.back()
    assert did == ["settled", "home", "let go"]
