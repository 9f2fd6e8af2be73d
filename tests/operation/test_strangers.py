"""The table of docs/security.md, row by row, with every hostile form: two real users, and root.

eve writes what she wants into her folder. Then root and ada list jobs, look for records, claim, recover and remove:
none of it fails or takes long, and nothing of root's has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from driver_double import DriverDouble
from support import as_user, end_marked, meanwhile, quickest

from limosa import operation
from limosa.ipc.messages import VERSION, receive, send
from limosa.operation import claims, jobs, journal, recover_users
from limosa.operation.journal import Header
from limosa.operation.parked import gates
from limosa.parking.mover import Mover
from limosa.parking.resident import socket_name
from limosa.parking.vault import Vault
from limosa.process import belief, device_nodes, places
from limosa.process.belief import MOST_BYTES
from limosa.process.identity import Identity
from limosa.process.records import ClonedRecord, EndedRecord, RunRecord, SuspendRecord

pytestmark = pytest.mark.root
ADA, EVE = 61001, 61002
WORDS = ("eves", "hers", "adas", "roots")
"""One is in each sample: what somebody says is told by it from what others say, and hostile words take its place."""
PAGE = Path(__file__).parents[2] / "docs/security.md"
SECONDS = 2.0
"""By which a round of root's or of ada's may take longer than without eve, however busy the machine is."""


class Eve:
    """Her processes and her folder."""

    def __init__(self, base: Path, pid: int):
        self.base, self.folder = base, base / "run" / "users" / f"limosa-{EVE}"
        self.process = Identity.of(pid)
        self.secret = base / "run" / "0" / "secret"
        self.listening: list[int] = []
        """Processes that listen at a socket, for the end of the test."""

    def file(self, kind: str, word: str = WORDS[0]) -> tuple[str, bytes]:
        """A good file of that kind: what it is called, and what it says, that word in it."""
        root = self.process
        record = f"{root.pid}-{root.start_time}.json"
        header = Header(id="move-1-e", operation=word, roots=[root], controller=Identity(1, 999), boot="another")
        good: dict[str, tuple[str, Any]] = {
            "jobs": (record, RunRecord(root=root, name=word, command=["x"], log=str(self.secret), cwd="/")),
            "suspended": (record, SuspendRecord(root=root, by=word, members=[root, Identity.of(1)])),
            "cloned": (record, ClonedRecord(root=root, origin=word)),
            "ended": (record, EndedRecord(root=root, image=str(self.base), image_id=word)),
            "claims": (
                "move-1-e.json",
                claims.Claim(id="move-1-e", operation=word, holder=root, pids=[root], gpus={"GPU": 5}, paths=["/x"]),
            ),
            "journals": ("move-1-e.jsonl", {"header": header}),
            "sees": ("0123456789abcdef", f"{WORDS.index(word)},{word}"),
            "logs": ("move-1-e.log", f"a log of {word}"),
            "vault": (socket_name("vault"), f"no socket of {word}"),
            "mover": (socket_name("mover"), f"no socket of {word}"),
        }
        name, what = good[kind]
        return name, what.encode() if isinstance(what, str) else msgspec.json.encode(what)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, double: DriverDouble) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="test-strangers-"))
    path.chmod(0o755)
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(path / "run"))
    monkeypatch.setattr(recover_users, "SECONDS", 1.0)
    for module in (jobs, gates):  # a look at the maps of all processes here is no part of this
        monkeypatch.setattr(module, "candidates", list)
    for kind in KINDS:
        places.own_folder(kind)
        as_user(ADA, lambda kind=kind: places.own_folder(kind))  # type: ignore[misc]
        as_user(EVE, lambda kind=kind: places.own_folder(kind))  # type: ignore[misc]
    for name in ("secret", "claims/move-1-e.json", "suspended/1-1.json"):
        (path / "run" / "0" / name).write_bytes(b"root's own")
        (path / "run" / "0" / name).chmod(0o600)
    yield path
    end_marked(f"LIMOSA_RUNTIME_DIR={path / 'run'}")  # what root has a user do, where a test failed in the middle
    shutil.rmtree(path)


@pytest.fixture
def eve(base: Path) -> Iterator[Eve]:
    with subprocess.Popen(["sleep", "300"], user=EVE, group=EVE, extra_groups=[]) as process:
        made = Eve(base, process.pid)
        try:
            yield made
        finally:
            process.kill()
            for pid in made.listening:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def roots_things(base: Path) -> dict[str, tuple[Any, ...]]:
    """All that is root's there, but for what root's own rounds write."""
    found = {}
    for path in sorted((base / "run" / "0").rglob("*")):
        info = path.lstat()
        if path.suffix != ".lock" and not path.is_dir():
            said = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
            found[str(path)] = (info.st_mode, info.st_uid, info.st_size, said)
    return found


# -- what stands in the table ------------------------------------------------------------------------------------

KINDS = ("jobs", "suspended", "cloned", "ended", "claims", "journals", "sees", "logs", "vault", "mover")
ROWS = {  # the first column → what of it is attacked here, or which test does
    "`/run/limosa/0`": ("tests/process/test_places.py", "test_roots_folder_is_closed"),
    "`/tmp/limosa-UID`, `/tmp/limosa-UID.RANDOM`": ("tests/process/test_places.py", "test_a_user_whose_name_is_taken"),
    "`jobs/PID-START.json`": ("jobs",),
    "`suspended/PID-START.json`": ("suspended",),
    "`cloned/PID-START.json`": ("cloned",),
    "`ended/PID-START.json`": ("ended",),
    "`claims/ID.json`": ("claims",),
    "`journals/ID.jsonl` (0600)": ("journals",),
    "`sees/NAME`": ("sees",),
    "`sees/NAME` in a container": (
        "tests/containers/test_containers_moved.py",
        "test_what_a_job_sees_is_not_written_to_something_else",
    ),
    "`logs/ID.log` (0600)": ("logs",),
    "`driver/…`": ("tests/gpu_room/test_gpu_worker_idle.py", "test_who_stands_elsewhere_does_not_get_it"),
    "`vault/socket-*`, `mover/socket-*` (0600)": ("vault", "mover"),
    "`claims.lock`, `jobs.lock`, `vault/*.lock`, `mover/*.lock` (0600)": (
        "tests/operation/test_claims_race.py",
        "test_nobody_waits_for_a_lock",
    ),
}


def test_every_row_of_the_table_is_gone_through() -> None:
    table = PAGE.read_text().partition("| what | who writes it |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    assert rows == list(ROWS)
    attacked = [kind for row in ROWS.values() if len(row) == 1 or row[0] == "vault" for kind in row]
    assert sorted(attacked) == sorted(KINDS)
    for row in ROWS.values():
        if row[0].startswith("tests/"):
            assert row[1] in (PAGE.parents[1] / row[0]).read_text()


# -- hostile forms -----------------------------------------------------------------------------------------------


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _listen(path: Path, *, answers: bool = False) -> int:
    """A process that listens there, and says what a vault or a mover says first, or nothing; its pid."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(path.name)
        made.listen()
        if child := os.fork():
            return child
        os.closerange(3, made.fileno())  # among them what as_user waits for the end of
        os.closerange(made.fileno() + 1, 1 << 16)
        signal.alarm(290)  # where the test is killed
        made.listen()  # whose socket it is the kernel says by this call
        while True:
            if not answers:
                signal.pause()
            with contextlib.suppress(Exception), made.accept()[0] as asks:
                receive(asks, 2.0)
                send(asks, {"version": VERSION})
                receive(asks, 2.0)


def _huge(path: Path, good: bytes) -> None:
    path.write_bytes(good)
    os.truncate(path, 1 << 40)


FORMS: dict[str, Callable[[Path, bytes, Eve], object]] = {
    "link": lambda path, good, eve: path.symlink_to(eve.secret),
    "link to itself": lambda path, good, eve: path.symlink_to(path),
    "pipe": lambda path, good, eve: os.mkfifo(path),
    "folder": lambda path, good, eve: path.mkdir(),
    "socket": lambda path, good, eve: _listen(path),
    "huge": lambda path, good, eve: _huge(path, good),
    "larger than is read": lambda path, good, eve: _write(path, good + b" " * MOST_BYTES),
    "empty": lambda path, good, eve: _write(path, b""),
    "truncated": lambda path, good, eve: _write(path, good[: len(good) // 2]),
    "not UTF-8": lambda path, good, eve: _write(path, good.replace(b"eves", b"e\xffe")),
    "deep": lambda path, good, eve: _write(path, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no JSON": lambda path, good, eve: _write(path, bytes(range(256)) * 40),
    "another type": lambda path, good, eve: _write(path, b'{"root":[1],"id":{},"holder":"x","header":7}'),
    "no year": lambda path, good, eve: _write(path, re.sub(rb'"since":[0-9.e+]+', b'"since":1e300', good)),
    "no pid": lambda path, good, eve: _write(path, re.sub(rb'"pid":\d+', b'"pid":-1', good)),
    "words for a terminal": lambda path, good, eve: _write(
        path, good.replace(b'"eves"', rb'"\u001b]0;x\u0007\u001b[2J"').replace(b"eves", b"\x1b]0;x\x07\x1b[2J")
    ),
}
NOTHING_OF = {"no year": b'"since"', "no pid": b'"pid"'}
"""Of forms: what they change. Kinds that have none of it do not have that form."""


def rounds(base: Path, *, root: bool) -> list[str]:
    """What somebody does who has nothing to do with eve; what there was of hers in it."""
    listed = operation.ps()
    for record in (RunRecord, SuspendRecord, EndedRecord):
        record.all()
    mine = Identity.of(os.getpid())
    claims.make(claims.Claim(id="move-2-a", operation="move", holder=mine, pids=[mine], paths=["/x"])).release()
    claims.reserved("GPU", most=10)
    device_nodes.seen(str(base / f"run/users/limosa-{EVE}/sees/0123456789abcdef"))
    found = operation.recover()
    assert root or not found
    for one in (*Vault.all(), *Mover.all()):
        with one:
            pass
    json.dumps([msgspec.to_builtins(one) for one in (*listed, *found)]).encode()
    return [job.name for job in listed]


def goes_on(base: Path, allowed: float = SECONDS) -> None:
    """Root and ada do what they do, and nothing of root's changes."""
    before = roots_things(base)
    for who, call, most in (("root", root, allowed), ("ada", ada, SECONDS)):
        took = quickest(lambda call=call: call(base), most + 3 * QUIET[who])  # type: ignore[misc]
        assert took < most + 3 * QUIET[who], f"{who}: {took:.1f} s, {QUIET[who]:.1f} s without eve"
    assert roots_things(base) == before


def root(base: Path) -> list[str]:
    return rounds(base, root=True)


def ada(base: Path) -> Any:
    return as_user(ADA, lambda: rounds(base, root=False))


ASKS = 4
"""How often root waits for all vaults or movers of others in a round: when it lists, recovers, and at the end of it."""
QUIET: dict[str, float] = {}


@pytest.fixture(autouse=True)
def quiet(base: Path) -> None:
    """How long a round takes before eve has written anything."""
    for who, call in (("root", root), ("ada", ada)):
        begun = time.monotonic()
        call(base)
        QUIET[who] = time.monotonic() - begun


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_user_writes_stops_nobody_else(base: Path, eve: Eve, kind: str) -> None:
    name, good = eve.file(kind)
    path = eve.folder / kind / name
    for form, make in FORMS.items():
        if NOTHING_OF.get(form, b"") not in good:
            assert kind in ("sees", "logs", "vault", "mover")  # no JSON
            continue

        def put(make: Callable[[Path, bytes, Eve], object] = make) -> object:
            os.chdir(path.parent)
            return make(path, good, eve)

        made = as_user(EVE, put)
        try:
            there = path.lstat()
            assert not stat.S_ISREG(there.st_mode) or there.st_size != len(good) or path.read_bytes() != good
            waits = 1.0 if kind == "journals" else 0.0  # for her own limosa
            if form == "socket":
                eve.listening.append(made)
                waits += ASKS * SECONDS if kind in ("vault", "mover") else 0.0
            goes_on(base, SECONDS + waits)
        except BaseException as error:
            error.add_note(f"{kind}, {form}")
            raise
        as_user(EVE, lambda: path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True))


@pytest.mark.parametrize("form", ["link", "pipe", "file", "everybody's"])
def test_whatever_stands_for_a_users_folder_stops_nobody_else(base: Path, eve: Eve, form: str) -> None:
    def put() -> None:
        for kind in KINDS:
            path = eve.folder / kind
            shutil.rmtree(path)
            if form == "link":
                path.symlink_to(base / "run" / "0" / kind)
            elif form == "pipe":
                os.mkfifo(path)
            elif form == "file":
                path.write_text("")
            else:
                path.mkdir()
                path.chmod(0o777)

    as_user(EVE, put)
    goes_on(base)


def test_root_removes_nothing_of_its_own_for_a_user_who_exchanges_his_folders(base: Path, eve: Eve) -> None:
    """While root forgets records and lets go of claims, her folders are links to root's at times."""

    def exchange() -> None:
        os.chdir(eve.folder)
        for kind in ("suspended", "claims", "sees", "journals"):
            os.symlink(base / "run" / "0" / kind, f"{kind}.link")
        while True:
            for kind in ("suspended", "claims", "sees", "journals"):
                with contextlib.suppress(OSError):
                    os.rename(kind, f"{kind}.real")
                    os.rename(f"{kind}.link", kind)
                    os.rename(kind, f"{kind}.link")
                    os.rename(f"{kind}.real", kind)

    with meanwhile(EVE, exchange):
        before = roots_things(base)
        end = time.monotonic() + 2
        n = 0
        while time.monotonic() < end or n <= 10:
            for folder in ("suspended", "claims"):
                with places.folders(folder, EVE):
                    pass
            with contextlib.suppress(OSError):
                device_nodes.show(str(eve.folder / "sees" / "0123456789abcdef"), [n % 7])
            belief.remove("suspended", "1-1.json", EVE)
            belief.remove("claims", "move-1-e.json", EVE)
            belief.read("claims")
            n += 1
        assert roots_things(base) == before


def said_by(kind: str, eve: Eve) -> set[str]:
    """The words that root believes of what lies in eve's folder, by all who read that kind."""
    if kind in ("jobs", "suspended", "ended"):
        type_ = {"jobs": RunRecord, "suspended": SuspendRecord, "ended": EndedRecord}[kind]
        found = [*type_.all(), *filter(None, [type_.of(eve.process)])]
        assert all(record.members == [eve.process] for record in found if isinstance(record, SuspendRecord))
        field = {"jobs": "name", "suspended": "by", "ended": "image_id"}[kind]
        return {getattr(record, field) for record in found}
    if kind == "claims":
        found_claims = [claim for claim in claims.everybodys() if claim.owner != 0]
        assert all((claim.owner, claim.pids) == (EVE, [eve.process]) for claim in found_claims)
        assert claims.reserved("GPU") in (0, 5)
        return {claim.operation for claim in found_claims}
    if kind == "journals":
        assert list(journal.dead()) == []
        return {summary.operation for summary in (*journal.under_way(), *journal.dead_of_others())}
    shown = device_nodes.seen(str(eve.folder / "sees" / eve.file("sees")[0]))
    return {WORDS[number] for number in shown or ()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("logs", "vault", "mover")])
def test_a_file_that_is_exchanged_while_it_is_read_is_hers_or_none(base: Path, eve: Eve, kind: str) -> None:
    """For other files of hers, a pipe, a huge one, and links to what others say of her: one of ada's, one of root's.

    ``logs`` is not gone through, as nobody reads it; sockets are, below.
    """
    name, good = eve.file(kind)
    hers = eve.file(kind, "hers")[1]
    eve.secret.write_bytes(eve.file(kind, "roots")[1])
    adas = base / "run" / "users" / f"limosa-{ADA}" / kind / "another"
    as_user(ADA, lambda: _write(adas, eve.file(kind, "adas")[1]))

    def exchange() -> None:
        os.chdir(eve.folder / kind)
        Path("good").write_bytes(good)
        Path("hers").write_bytes(hers)
        os.mkfifo("pipe")
        _huge(Path("huge"), good)
        os.symlink(eve.secret, "link")
        os.symlink(adas, "link2")
        while True:
            for form in ("good", "link", "hers", "pipe", "good", "link2", "hers", "huge"):
                os.link(form, "next", follow_symlinks=False)
                os.rename("next", name)

    before = roots_things(base)
    heard = set() if kind in ("ended", "cloned") else {"eves", "hers"}  # of those root believes no user
    read, words, rounds_, longest = set[bytes](), set[str](), 0, 0.0
    with meanwhile(EVE, exchange):
        end = time.monotonic() + 1
        while (begun := time.monotonic()) < end or rounds_ < 20 or (read != {good, hers} and begun < end + 60):
            read |= {note.data for note in belief.read_called(kind, name) if note.owner == EVE}
            words |= said_by(kind, eve)
            rounds_, longest = rounds_ + 1, max(longest, time.monotonic() - begun)
    assert read == {good, hers}  # as nothing else can be there with that name
    assert words == heard
    assert longest < 60, "nobody ever writes to the pipe"
    assert roots_things(base) == before


@pytest.mark.parametrize("kind", ["vault", "mover"])
def test_a_socket_that_is_exchanged_while_root_connects_is_hers_or_none(base: Path, eve: Eve, kind: str) -> None:
    """For a pipe, a file, and links to where ada's and root's listen: root asks each once, as its owner's."""
    name = socket_name(kind)

    def listens() -> int:
        os.chdir(places.own_folder(kind))
        return _listen(Path(name), answers=True)

    pids = {uid: as_user(uid, listens) for uid in (0, ADA, EVE)}
    eve.listening += pids.values()

    def exchange() -> None:
        os.chdir(eve.folder / kind)
        os.rename(name, "good")
        os.mkfifo("pipe")
        Path("file").write_text("no socket")
        os.symlink(base / "run" / "0" / kind / name, "link")
        os.symlink(base / "run" / "users" / f"limosa-{ADA}" / kind / name, "link2")
        while True:
            for form in ("good", "link", "pipe", "good", "link2", "file"):
                os.link(form, "next", follow_symlinks=False)
                os.rename("next", name)

    before = roots_things(base)
    type_, seen, end = {"vault": Vault, "mover": Mover}[kind], set[int](), time.monotonic() + 1
    with meanwhile(EVE, exchange):
        while (begun := time.monotonic()) < end or (seen != set(pids) and begun < end + 60):
            residents = type_.all()
            for one in residents:
                one.close()
            found = [(one.uid, one.identity.pid) for one in residents]
            assert len(found) == len(set(found))
            assert set(found) <= set(pids.items())
            assert time.monotonic() - begun < 60, "nobody ever writes to the pipe"
            seen |= {uid for uid, _ in found}
    assert seen == {0, ADA, EVE}
    assert roots_things(base) == before


def test_a_file_of_roots_with_a_name_in_a_users_folder_is_no_word_of_his_and_is_not_emptied(
    base: Path, eve: Eve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a hard link is, where the kernel lets users make them."""
    name, good = eve.file("jobs")
    eve.secret.write_bytes(good)
    os.link(eve.secret, eve.folder / "jobs" / name)
    assert RunRecord.all() == []

    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", broken)
        RunRecord(root=eve.process, name="", command=[]).forget()
    assert eve.secret.read_bytes() == good


def test_a_person_of_many_user_ids_has_no_more_read_of_him_than_so_much(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /etc/subuid gives them; whoever comes after them has room for his ordinary files all the same."""
    monkeypatch.setattr(belief, "_MOST_OF_OTHERS", 3 * MOST_BYTES)
    for uid in range(70_000, 70_010):
        for name in ("a", "b"):
            as_user(
                uid, lambda name=name: (places.own_folder("claims") / f"{name}.json").write_bytes(b" " * MOST_BYTES)
            )  # type: ignore[misc]
    as_user(80_000, lambda: (places.own_folder("claims") / "move-1.json").write_bytes(b"{}"))
    found = belief.read("claims")
    assert [n.name for n in found if n.owner == 80_000] == ["move-1.json"]
    assert sum(len(n.data) for n in found) <= 4 * MOST_BYTES


def test_a_user_who_never_answers_for_his_vault_and_mover_holds_up_nobody(base: Path, eve: Eve) -> None:
    def silent() -> list[int]:
        listening = []
        for kind in ("vault", "mover"):
            for n in range(20):
                os.chdir(eve.folder / kind)
                listening.append(_listen(Path(socket_name(kind) if not n else f"{socket_name('mover')}.{n}.holds")))
        return listening

    eve.listening += as_user(EVE, silent)
    goes_on(base, (1 + ASKS) * SECONDS)


@pytest.fixture
def crowd(eve: Eve) -> None:
    """All forms at once, and journals in thousands."""

    def put() -> None:
        for kind in ("jobs", "suspended", "ended", "claims", "journals"):
            name, good = eve.file(kind)
            os.chdir(eve.folder / kind)
            for n, (form, make) in enumerate(FORMS.items()):
                if form != "socket":
                    make(Path(f"{n}-{name}"), good, eve)
            for n in range(1_500):
                Path(f"{n}-{n}{Path(name).suffix}").write_bytes(good)

    as_user(EVE, put)


@pytest.mark.usefixtures("crowd")
def test_the_commands_of_root_end_well(base: Path, limosa: Callable[..., Any]) -> None:
    env = {"LIMOSA_RUNTIME_DIR": str(base / "run")}
    before = roots_things(base)
    limosa("ps", "-o", "json", env=env, rc=0)
    limosa("run", "-d", "--log", base / "log", "--", "sleep", "1", env=env, rc=0)
    limosa("recover", "-o", "json", env=env, rc=0)
    said = limosa("rm", "a/" * 60_000, env=env)
    assert said.rc == 2, said.stderr
    kept = {k: v for k, v in roots_things(base).items() if "/jobs/" not in k}
    assert kept == before


@pytest.mark.usefixtures("crowd")
def test_the_commands_of_a_user_end_well(base: Path) -> None:
    home = base / "ada"
    home.mkdir(mode=0o700)
    os.chown(home, ADA, ADA)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "NO_COLOR": "1", "LIMOSA_RUNTIME_DIR": str(base / "run")}
    python = sys.executable
    if not as_user(ADA, lambda: os.access(python, os.X_OK)):  # in root's home: the system's may do as well
        python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        env["PYTHONPATH"] = ":".join(path for path in sys.path if os.path.isabs(path) and "-packages" in path)
        env["PYTHONPATH"] += f":{Path(operation.__file__).parents[2]}"

    def runs(*words: str) -> subprocess.CompletedProcess[str]:
        rights = ["setpriv", f"--reuid={ADA}", f"--regid={ADA}", "--clear-groups", "--no-new-privs"]
        return subprocess.run(
            [*rights, python, *words],
            env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def ended(*words: str) -> tuple[int, str]:
        done = runs("-m", "limosa", *words)
        assert "Traceback" not in done.stderr, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        return done.returncode, done.stdout

    if not os.access(python, os.X_OK) or runs("-c", "import limosa.cli.ps, limosa.operation, cuda, pynvml").returncode:
        pytest.skip(f"other users cannot run {sys.executable}, which is in root's home, and {python} has no packages")
    before = roots_things(base)
    code, told = ended("ps", "-o", "json")
    assert (code, json.loads(told)["warnings"]) == (0, [])
    assert ended("ps")[0] == 0
    assert ended("run", "--", "echo", "hers alone") == (0, "hers alone\n")
    assert ended("run", "--", "sh", "-c", "exit 7")[0] == 7
    assert ended("run", "-d", "-q", "--name", "adas", "--", "sleep", "1")[0] == 0
    assert ended("wait", "nobody")[0] == 125
    code, told = ended("recover", "-o", "json")
    assert (code, json.loads(told)["recovered"]) == (0, [])
    assert roots_things(base) == before


def test_a_claim_with_an_endless_path_is_none_and_holds_up_nobody(
    base: Path, eve: Eve, limosa: Callable[..., Any]
) -> None:
    """Longer than a file is read; as long as one is read at most; and so many of these that not all are read."""
    name, good = eve.file("claims")
    runtime = {"LIMOSA_RUNTIME_DIR": str(base / "run")}

    def claimed(n: int, path: str) -> None:
        """Her claim, under another id, on that folder."""
        data = good.replace(b"move-1-e", b"move-%d-e" % n).replace(b'["/x"]', json.dumps([path]).encode())
        (eve.folder / "claims" / name.replace("-1-", f"-{n}-")).write_bytes(data)

    def believed() -> tuple[int, bool, bool]:
        of_hers = [claim for claim in claims.everybodys() if claim.owner == EVE]
        return claims.reserved("GPU"), eve.process.pid in claims.being_worked_on(), bool(of_hers)

    def commands() -> None:
        image = base / "image"
        (image / "criu").mkdir(parents=True, mode=0o700)
        (image / "manifest.json").touch()  # a damaged image is removed as a whole one is
        limosa("rm", image, env=runtime, rc=0)
        limosa("run", "--", "true", env=runtime, rc=0)
        assert not image.exists()

    def nothing_believed() -> None:
        assert believed() == (0, False, False)

    as_user(EVE, lambda: claimed(1, "/x"))
    assert believed() == (5, True, True)  # so it is the path that makes the others none
    as_user(EVE, (eve.folder / "claims" / name).unlink)
    quiet = quickest(commands, 0.0, 1)
    before = roots_things(base)
    longest = "a/" * ((MOST_BYTES - len(good)) // 2)
    for paths in (["a/" * 2_000_000], [longest], [longest] * 12):
        as_user(EVE, lambda paths=paths: [claimed(n, path) for n, path in enumerate(paths, 1)])  # type: ignore[misc]
        sizes = [path.stat().st_size for path in (eve.folder / "claims").iterdir()]
        assert min(sizes) > 4_000_000 or MOST_BYTES - 10 < max(sizes) <= MOST_BYTES, sizes
        assert quickest(nothing_believed, SECONDS) < SECONDS
        took = quickest(commands, SECONDS + 3 * quiet)
        assert took < SECONDS + 3 * quiet, f"{took:.1f} s, {quiet:.1f} s without eve"
        for path in (eve.folder / "claims").iterdir():
            path.unlink()
    assert {k: v for k, v in roots_things(base).items() if "/jobs/" not in k} == before
