"""Keeps what people keep in files that are locked or mapped: one row a tick, each told only once it is committed.

Arguments: the folder, the kind (wal, journal, lmdb, hdf5, filelock, events); as a visitor the word "visit" and how many
rows to add: it reads all of the job's rows, which must have no gap, adds its own where the kind allows two writers, and
says ``rows OWN OTHERS``.
"""

import os
import struct
import sys
import time
import zlib

from common import folder, loop, stopped

kind = sys.argv[2]
visits = int(sys.argv[4]) if sys.argv[3:4] == ["visit"] else None
path = os.path.join(folder(), kind)


class Sqlite:
    def __init__(self):
        import sqlite3

        self.db = sqlite3.connect(path, timeout=30, isolation_level=None)
        mode = {"wal": "wal", "journal": "delete"}[kind]
        assert self.db.execute(f"PRAGMA journal_mode={mode}").fetchone()[0] == mode
        self.db.execute("CREATE TABLE IF NOT EXISTS rows (who, n)")

    def add(self, who, n):
        self.db.execute("BEGIN IMMEDIATE")
        self.db.execute("INSERT INTO rows VALUES (?, ?)", (who, n))
        time.sleep(0.005)  # half of all checkpoints come in the middle of one
        self.db.execute("COMMIT")

    def rows(self, who):
        assert self.db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        return [n for (n,) in self.db.execute("SELECT n FROM rows WHERE who=? ORDER BY n", (who,))]


class Lmdb:
    def __init__(self):
        import lmdb

        self.db = lmdb.open(path, map_size=1 << 24)

    def add(self, who, n):
        with self.db.begin(write=True) as change:
            change.put(f"{who}{n:08}".encode(), b"x" * 100)
            time.sleep(0.005)

    def rows(self, who):
        with self.db.begin() as look:
            return [int(key[-8:]) for key, _ in look.cursor() if key.startswith(who.encode())]


class Hdf5:
    """One writer, readers beside it (SWMR)."""

    def __init__(self):
        import h5py

        if visits is not None:
            self.file = h5py.File(path, "r", libver="latest", swmr=True)
            return
        self.file = h5py.File(path, "w", libver="latest")
        self.set = self.file.create_dataset("rows", (0,), maxshape=(None,), dtype="i8", chunks=(1024,))
        self.file.swmr_mode = True

    def add(self, who, n):
        if who == "own":
            self.set.resize((n,))
            self.set[n - 1] = n
            self.set.flush()

    def rows(self, who):
        return list(self.file["rows"][:]) if who == "own" else []


class FileLock:
    """A file written under a lock that is taken each time, and another lock held all the while."""

    def __init__(self):
        import filelock

        self.lock = filelock.FileLock(path + ".lock", timeout=30)
        self.held = filelock.FileLock(path + ".held", timeout=0)
        if visits is None:
            self.held.acquire()
        else:
            try:
                self.held.acquire()
            except filelock.Timeout:
                return
            raise AssertionError("the job's lock is not held")

    def add(self, who, n):
        with self.lock, open(path, "a") as file:
            print(who, n, file=file)
            time.sleep(0.005)

    def rows(self, who):
        with self.lock, open(path) as file:
            return [int(line.split()[1]) for line in file if line.startswith(who)]


class Events:
    """Records as TensorBoard's: a length, its checksum, the data, its checksum; appended, read by others meanwhile."""

    def __init__(self):
        self.file = open(path, "ab" if visits is None else "rb")  # noqa: SIM115

    def add(self, who, n):
        if who == "own":
            data, size = struct.pack("<q", n), struct.pack("<Q", 8)
            checks = [struct.pack("<I", zlib.crc32(part)) for part in (size, data)]
            self.file.write(size + checks[0] + data + checks[1])
            self.file.flush()

    def rows(self, who):
        with open(path, "rb") as file:
            raw = file.read() if who == "own" else b""
        found = []
        for at in range(0, len(raw) - 23, 24):
            assert struct.unpack_from("<I", raw, at + 20)[0] == zlib.crc32(raw[at + 12 : at + 20])
            found += struct.unpack_from("<q", raw, at + 12)
        return found


kept = {"wal": Sqlite, "journal": Sqlite, "lmdb": Lmdb, "hdf5": Hdf5, "filelock": FileLock, "events": Events}[kind]()


def check(n):
    kept.add("own", n)
    if stopped():
        assert list(kept.rows("own")) == list(range(1, n + 1))


if visits is None:
    loop(check, 0.01)
else:
    own = list(kept.rows("own"))
    assert own == list(range(1, len(own) + 1)), own
    begin = len(kept.rows("other"))
    for n in range(begin, begin + visits):
        kept.add("other", n)
    print("rows", len(own), len(kept.rows("other")))
