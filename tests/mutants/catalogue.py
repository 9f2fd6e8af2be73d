"""The mutants: each one mistake that would hurt somebody, and the tests that must notice it.

By area: the way back, the commit point, who is believed, one at a time, who a process is, room, maps, the worker's will, the gate, and
who holds the last copy. ``old`` stands in the file exactly once (a test of ``make test`` compares); whoever changes
such a line changes the mutant with it. A mutant that survives gets a test, or a ``reason`` why nothing can show it.
"""

from __future__ import annotations

from typing import NamedTuple

OPERATION = (
    "tests/operation/test_undo.py",
    "tests/operation/test_room.py",
    "tests/operation/test_driver_verbs.py",
    "tests/operation/test_lost_jobs.py",
    "tests/operation/test_driver_loses.py",
)
WRITING = ("tests/image/test_image_draft.py", "tests/image/test_image_crash.py")
READING = (
    "tests/image/test_image_manifest.py",
    "tests/image/test_image_chunks.py",
    "tests/image/test_image_damage.py",
)
REMOVING = ("tests/image/test_image_remove.py", "tests/image/test_image_crash.py")
WORKER = ("tests/gpu_room/test_gpu_worker.py",)
MAPS = ("tests/gpu_room/test_gpu_maps.py",)
GATE = ("tests/shim/test_shim_gate.py", "tests/shim/test_shim_parking.py")
PLACES = ("tests/shim/test_shim_places.py",)
RESIDENTS = ("tests/parking/test_residents.py",)
BELIEF = (
    "tests/operation/test_hostile_runtime.py",
    "tests/process/test_places.py",
    "tests/run/test_records.py",
)
HARD_LINK = "test_a_file_of_roots_with_a_name_in_a_users_folder_is_no_word_of_his_and_is_not_emptied"
CLAIMS = ("tests/operation/test_claims.py", "tests/operation/test_driver_verbs.py", "tests/operation/test_lost_jobs.py")
PARKED = ("tests/e2e_soft/test_soft_parked.py", "tests/e2e_soft/test_soft_aside.py")


class Mutant(NamedTuple):
    """One mistake.

    Attributes:
        name: what it is called.
        file: in the project.
        old, new: the text that is replaced, and by what.
        hurts: what would become of somebody's job.
        tests: which must notice it: paths, with ``::name`` where one is enough.
        reason: why nobody needs to, where nobody can.
    """

    name: str
    file: str
    old: str
    new: str
    hurts: str
    tests: tuple[str, ...]
    reason: str = ""


_OPERATION = "src/limosa/operation/"
_IMAGE = "src/limosa/image/"
_SHIM = "src/limosa/native/shim/"

UNDO = (
    Mutant(
        "undo-oldest-first",
        _OPERATION + "work.py",
        "name, undo = self._undo.pop()",
        "name, undo = self._undo.pop(0)",
        "the claim is let go of, and vault and mover with it, before the job has its memory again",
        OPERATION,
    ),
    Mutant(
        "undo-stops-at-the-first-failure-in-silence",
        _OPERATION + "work.py",
        "            except BaseException as undo_error:\n                self.try_note",
        "            except BaseException as undo_error:\n                continue\n                self.try_note",
        "an undo that fails is not told (40): the journal goes, and nobody recovers the job",
        OPERATION,
    ),
    Mutant(
        "journal-gone-before-the-undo",
        _OPERATION + "work.py",
        '                self.progress(Progress("undo", message=f"{self.operation}: {error}; undoing"))\n',
        "                self.journal and self.journal.finish()\n                self.journal = None\n",
        "killed while it undoes, nothing tells what is where",
        OPERATION,
    ),
    Mutant(
        "driver-undo-not-registered",
        _OPERATION + "step.py",
        "            work.push(step.undone, partial(step.undo, op))\n",
        "            work.push(step.undone, lambda: None)\n",
        "a move that fails leaves the job locked",
        OPERATION,
    ),
    Mutant(
        "target-stays-mapped",
        _OPERATION + "steps/carry.py",
        "        op.carried.leave()\n",
        "        pass\n",
        "a move that fails late brings the process home with the other GPU's memory mapped",
        (
            "tests/e2e_soft/test_soft_parked.py::test_what_one_process_has_there_already_it_leaves_where_the_other_cannot_come",
        ),
    ),
    Mutant(
        "home-by-the-same-map",
        _OPERATION + "driver_steps.py",
        "restore_one(driver, member, {b: a for a, b in member.map.items()}, tell)",
        "restore_one(driver, member, member.map, tell)",
        "the way back leads further away",
        OPERATION,
    ),
    Mutant(
        "half-a-job-goes-on",
        _OPERATION + "driver_steps.py",
        "whole = member.was == gpu.State.RUNNING and member.root not in broken",
        "whole = member.was == gpu.State.RUNNING",
        "one process of a job is lost, the others run on without it",
        OPERATION,
    ),
    Mutant(
        "where-it-is-not-asked",
        _OPERATION + "driver_steps.py",
        "        away = open_step == Noted.RESTORE\n",
        "        pass\n",
        "a restore that was given up on and done later is not seen: the job is looked for on the wrong GPU",
        OPERATION,
    ),
    Mutant(
        "undo-beside-a-call-under-way",
        _OPERATION + "driver_steps.py",
        "if not driver.wait_under_way(member.pid, _PATIENCE):",
        "if False:",
        "a lock that comes after the undo is nobody's to take back",
        OPERATION,
    ),
    Mutant(
        "one-answer-is-believed",
        _OPERATION + "driver_steps.py",
        '            if none_before:\n                return ""\n',
        '            return ""\n',
        "a member of which the driver says once that it has no CUDA state stays locked",
        OPERATION,
    ),
    Mutant(
        "no-way-back-forgotten",
        _OPERATION + "parked/gates.py",
        "        if self.opened:\n            raise gate_was_opened(self._work.operation)\n        leave(parts)",
        "        leave(parts)",
        "the memory of a job that may run already is taken away again",
        ("tests/operation/test_half_opened.py",),
    ),
    Mutant(
        "copy-still-reads",
        _OPERATION + "parked/carrier.py",
        "        self._copying.settle()  # it reads what is about to be given back\n        self._all_home()",
        "        self._all_home()",
        "the mover reads memory that the job has again",
        ("tests/operation/test_half_opened.py",),
    ),
)

COMMIT = (
    Mutant(
        "discard-after-the-commit",
        _IMAGE + "draft.py",
        "if self.committed or self._parent_fd < 0:",
        "if self._parent_fd < 0:",
        "the image, the only copy, is emptied",
        WRITING,
    ),
    Mutant(
        "renamed-before-it-is-on-disk",
        _IMAGE + "draft.py",
        "            self._files.fsync(self.fd)\n            stop_if(cancel)",
        "            stop_if(cancel)",
        "after a power cut the image is there without its manifest",
        WRITING,
    ),
    Mutant(
        "file-not-on-disk",
        _IMAGE + "sync.py",
        "            files.chmod(fd, FILE_MODE)\n        files.fsync(fd)\n        return begin",
        "            files.chmod(fd, FILE_MODE)\n        return begin",
        "after a power cut the image's pages are zeroes",
        WRITING,
    ),
    Mutant(
        "chunk-not-on-disk",
        _IMAGE + "sync.py",
        "                files.fsync(fd)\n            finally:",
        "                pass\n            finally:",
        "after a power cut device memory is missing",
        WRITING,
    ),
    Mutant(
        "rename-not-on-disk-is-no-error",
        _IMAGE + "draft.py",
        "        try:\n            self._files.fsync(self._parent_fd)\n",
        "        try:\n            pass\n",
        "the job is ended, and after a power cut its image has an unfinished name",
        WRITING,
    ),
    Mutant(
        "somebody-elses-folder",
        _IMAGE + "draft.py",
        "        self._check_renamed()\n",
        "",
        "a folder that somebody put in the place of ours becomes the image",
        WRITING,
    ),
    Mutant(
        "hash-of-the-manifest-not-compared",
        _IMAGE + "manifest.py",
        "    if digest != digest_line(found):",
        "    if False:",
        "a manifest that was changed is taken for whole",
        READING,
    ),
    Mutant(
        "file-content-not-compared",
        _IMAGE + "verify.py",
        "found[f.path].problem is None and found[f.path].digest != f.blake3]",
        "found[f.path].problem is None and found[f.path].size != f.size]",
        "a damaged image is restored",
        READING,
    ),
    Mutant(
        "chunk-content-not-compared",
        _IMAGE + "verify.py",
        "    if digest == name:\n        return None\n",
        "    return None\n",
        "damaged device memory is restored",
        READING,
    ),
    Mutant(
        "chunk-sizes-not-compared",
        _IMAGE + "manifest.py",
        "            if len(piece.chunks) != -(-piece.bytes // size):",
        "            if False:",
        "a piece of memory has fewer chunks than bytes",
        READING,
    ),
    Mutant(
        "last-chunk-as-long-as-the-others",
        _IMAGE + "manifest.py",
        "                last = piece.bytes - (len(piece.chunks) - 1) * self.chunk_bytes\n",
        "                last = self.chunk_bytes\n",
        "the end of a piece of memory is read past its chunk, or refused",
        READING,
    ),
    Mutant(
        "needed-chunks-are-removed",
        _IMAGE + "chunks.py",
        "gone = [name for name in self.names() if name not in names]",
        "gone = [name for name in self.names() if name in names]",
        "the commit removes the job's memory",
        READING,
    ),
    Mutant(
        "what-is-being-written-is-removed",
        _IMAGE + "remove.py",
        'owner.state == "alive" and owner.owner != this_process()',
        'owner.state == "dead" and owner.owner != this_process()',
        "`limosa rm` removes an image that is being written",
        REMOVING,
    ),
    Mutant(
        "removed-under-its-own-name",
        _IMAGE + "remove.py",
        "            files.rename(path.name, name, parent_fd)\n",
        "            name = path.name\n",
        "killed in the middle of `rm`, half an image has an image's name",
        REMOVING,
    ),
    Mutant(
        "ended-without-a-will",
        _OPERATION + "steps/dumping.py",
        "        self.work.armed()\n",
        "",
        "the job is ended while nobody would finish if limosa died",
        ("tests/e2e/test_e2e_refusals.py::test_no_job_is_ended_while_nobody_could_finish_for_us",),
    ),
)

BELIEVED = (
    Mutant(
        "any-owner-of-a-folder-on-the-way",
        _IMAGE + "trust.py",
        '    if (uid := os.fstat(fd).st_uid) not in trusted:\n        raise _refused(shown, f"{where} belongs to user {uid}, not to {_names(trusted)}")\n    if (server',
        "    if (server",
        "a stranger exchanges the image on its way to CRIU",
        ("tests/image/test_image_trust.py",),
    ),
    Mutant(
        "anybodys-file-system",
        "src/limosa/start.py",
        "    if file_system(fd) not in (_FUSE, 0):",
        "    if file_system(fd) != _FUSE:",
        "a stranger's server says that all of it is root's, and does not say what it is",
        ("tests/image/test_image_trust.py",),
    ),
    Mutant(
        "any-owner-of-a-part",
        _IMAGE + "trust.py",
        '    if info.st_uid not in trusted:\n        raise _refused(shown, f"{where} belongs to user {info.st_uid}, not to {_names(trusted)}")\n    if not (stat',
        "    if not (stat",
        "root runs a stranger's code",
        ("tests/image/test_image_trust.py",),
    ),
    Mutant(
        "others-may-write",
        _IMAGE + "trust.py",
        "    if info.st_mode & _OTHERS_WRITE:\n",
        "    if False:\n",
        "what was verified is not what CRIU reads",
        ("tests/image/test_image_trust.py",),
    ),
    Mutant(
        "the-root-of-another-is-ours",
        _IMAGE + "trust.py",
        "                    of_proc = file_system(new) == _PROC\n",
        "                    of_proc = False\n",
        "rm of /proc/PID/root/… removes this machine's image of that name",
        ("tests/image/test_image_others.py",),
    ),
    Mutant(
        "a-link-of-anybodys",
        _IMAGE + "trust.py",
        "                    _check_owner(new, os.path.join(where, name), shown, owners)\n",
        "",
        "a stranger's link leads root to another image",
        ("tests/image/test_image_trust.py",),
    ),
    Mutant(
        "recovered-as-root",
        _OPERATION + "orphan.py",
        "        become(int(argv[1]))\n",
        "",
        "what a user's journal says is done with root's rights",
        ("tests/operation/test_hostile_runtime.py",),
    ),
    Mutant(
        "anybodys-process-is-a-member",
        "src/limosa/process/records.py",
        "        self.members = [m for m in self.members if processes.speaks_for(owner, m)]\n",
        "",
        "a user's record has root suspend another user's job",
        ("tests/run/test_records.py",),
    ),
    Mutant(
        "resident-of-anybody",
        "src/limosa/ipc/sessions.py",
        "if peer(connection)[1] not in (0, os.geteuid()):",
        "if False:",
        "a stranger reads another's memory out of the vault",
        RESIDENTS,
    ),
    Mutant(
        "a-descriptor-that-nobody-wants",
        "src/limosa/ipc/messages.py",
        "packet.receive(connection, _BYTES, fds, deadline, memory=memory)",
        "packet.receive(connection, _BYTES, fds + 1, deadline, memory=memory)",
        "root closes a file of a user's own file system, and waits for him for ever",
        RESIDENTS,
    ),
    Mutant(
        "unsealed-words",
        "src/limosa/operation/parked/aside.py",
        "        if not is_sealed(fd):\n",
        "        if False:\n",
        "what is read is changed while it is read",
        ("tests/operation/test_aside_layout.py",),
    ),
    Mutant(
        "another-process-in-the-shims-place",
        "src/limosa/parking/shim.py",
        "        if pid != self.identity.pid or uid not in {0, *users}:\n",
        "        if False:\n",
        "whoever has the name of a job's socket answers for it",
        ("tests/shim/test_shim_names.py::test_only_the_process_itself_is_taken_for_it",),
    ),
    Mutant(
        "cut-off-descriptors-are-all",
        "src/limosa/ipc/packet.py",
        "        if flags & socket.MSG_CTRUNC:\n",
        "        if False:\n",
        "a list of descriptors that was cut off is taken for whole",
        (*RESIDENTS, "tests/fuzz/test_fuzz_packets.py", "tests/fuzz/test_fuzz_shim.py", "tests/shim/test_shim_keep.py"),
    ),
    Mutant(
        "file-of-anybody",
        "src/limosa/process/belief.py",
        "    return stat.S_ISREG(found.st_mode) and found.st_uid == uid\n",
        "    return stat.S_ISREG(found.st_mode)\n",
        "a user's folder has a hard link to root's file in it, and what that says counts as his",
        ("tests/operation/test_strangers.py::" + HARD_LINK,),
    ),
    Mutant(
        "folder-of-anybody",
        "src/limosa/process/openat.py",
        "    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022\n",
        "    return stat.S_ISDIR(found.st_mode)\n",
        "a folder that others may write to counts as a user's",
        BELIEF,
    ),
    Mutant(
        "links-are-followed",
        "src/limosa/process/openat.py",
        "    how = _How(flags, mode, _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS)\n",
        "    flags &= ~os.O_NOFOLLOW\n    how = _How(flags, mode, 0)\n",
        "root reads, and removes, what a user's link leads to",
        BELIEF,
    ),
    Mutant(
        "file-without-an-end",
        "src/limosa/process/belief.py",
        "        while len(data) <= most and (more := os.read(fd, most + 1 - len(data))):\n",
        "        while more := os.read(fd, 1 << 20):\n",
        "a user's large file takes root's memory",
        CLAIMS,
    ),
    Mutant(
        "what-cannot-be-read-is-not-there",
        "src/limosa/process/places.py",
        "        if whole and not nothing_there(error, uid in (0, os.geteuid())):\n",
        "        if False:\n",
        "with no descriptor left a job's memory is called lost, or held on for ever",
        ("tests/process/test_places.py",),
    ),
    Mutant(
        "asked-once",
        "src/limosa/operation/members.py",
        "        if sure:\n            raise\n",
        "        raise\n",
        "one wrong answer of the driver, and a job's host memory alone is written and it is ended",
        ("tests/operation/test_driver_verbs.py",),
    ),
    Mutant(
        "speaks-for-anybody",
        "src/limosa/process/belief.py",
        "        return owner == 0 or self.owner_of(identity) == owner\n",
        "        return True\n",
        "a user's claim counts while root's process lives: room on GPUs is his for ever",
        BELIEF,
    ),
    Mutant(
        "claims-on-anybodys-job",
        _OPERATION + "claims.py",
        "            claim.pids = [p for p in claim.pids if processes.owner_of(p) == note.owner]\n",
        "            pass\n",
        "a user keeps root from root's jobs",
        CLAIMS,
    ),
)

ONE_AT_A_TIME = (
    Mutant(
        "lock-for-all",
        "src/limosa/process/runtime.py",
        "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                break",
        "            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)\n                break",
        "two operations of one user have the same job",
        ("tests/run/test_records.py",),
    ),
    Mutant(
        "not-looked-at-again",
        _OPERATION + "claims.py",
        "                now = everybodys(whole=True, of=claim.pids)\n                _refuse(claim, now, past_dead)\n",
        "                now = everybodys(whole=True, of=claim.pids)\n",
        "a user's operation and root's have the same job",
        CLAIMS,
    ),
    Mutant(
        "room-not-looked-at",
        _OPERATION + "claims.py",
        "                check()\n                return claim\n",
        "                return claim\n",
        "two operations are given the same gigabytes",
        CLAIMS,
    ),
    Mutant(
        "what-a-dead-one-left-is-free",
        _OPERATION + "claims.py",
        "        if other.left:\n",
        "        if False:\n",
        "a job in the middle of a move is moved as if it ran",
        CLAIMS,
    ),
    Mutant(
        "claim-left-behind",
        _OPERATION + "claims.py",
        "                claim.release()\n                came",
        "                came",
        "a job that was refused once stays busy",
        CLAIMS,
    ),
)

WHO = (
    Mutant(
        "pid-alone-is-a-process",
        "src/limosa/process/identity.py",
        "        return stat.start_time == self.start_time and not stat.ended",
        "        return not stat.ended",
        "another process with the same pid is taken for the job",
        ("tests/process/test_identity.py",),
    ),
    Mutant(
        "reused-pid-is-signalled",
        "src/limosa/process/identity.py",
        "        try:\n            identity.check()\n        except BaseException:\n",
        "        try:\n            pass\n        except BaseException:\n",
        "another process is ended in the job's place",
        ("tests/process/test_identity.py",),
    ),
    Mutant(
        "changed-since-it-was-looked-at",
        _OPERATION + "holding.py",
        "            if state != member.was or moved:\n",
        "            if moved:\n",
        "a job that somebody has suspended meanwhile is moved as if it ran",
        OPERATION,
    ),
    Mutant(
        "grown-since-it-was-looked-at",
        _OPERATION + "steps/driver.py",
        "        for prepared in op.prepared:\n            refuse_growth(op.work.driver, prepared)\n",
        "",
        "a process that has got a context meanwhile is left behind",
        OPERATION,
    ),
)

ROOM = (
    Mutant(
        "no-last-look-at-the-room",
        _OPERATION + "driver_steps.py",
        "    room.check(inventory, members, work.id, made=work.made)\n",
        "",
        "a restore runs out of device memory, and the driver never takes the process back",
        OPERATION,
    ),
    Mutant(
        "promised-to-others",
        _OPERATION + "room.py",
        "+ (vacated or {}).get(uuid, 0) - spoken_for",
        "+ (vacated or {}).get(uuid, 0)",
        "two operations are given the same gigabytes",
        OPERATION,
    ),
    Mutant(
        "no-room-kept-for-the-way-back",
        _OPERATION + "steps/driver.py",
        "            for uuid, size in room.needs(members, home=True).items():\n",
        "            for uuid, size in ():\n",
        "somebody else takes the place while the job is away, and it cannot go home",
        CLAIMS,
    ),
    Mutant(
        "home-is-where-it-goes",
        _OPERATION + "room.py",
        "    return uuid if home else member.map.get(uuid, uuid)\n",
        "    return member.map.get(uuid, uuid)\n",
        "the way back is weighed on the wrong GPU",
        OPERATION,
    ),
)

MAP = (
    Mutant(
        "gives-way-in-silence",
        "src/limosa/gpu/maps.py",
        "if held.get(uuid, 0) > 0 and uuid in taken:",
        "if False:",
        "memory of the job is moved of which nobody has spoken",
        MAPS,
    ),
    Mutant(
        "any-chip",
        "src/limosa/gpu/maps.py",
        "[other for other in free if names[other].name == names[uuid].name]",
        "list(free)",
        "the map leads to another chip, which the driver refuses when the job stands still",
        MAPS,
    ),
)

WILL = (
    Mutant(
        "no-will",
        _OPERATION + "work.py",
        "        self.driver.set_will(self._will(), wait=False, name=self.id, holds=self.journal.fd)\n",
        "",
        "limosa is killed, and the job stays locked until somebody calls recover",
        ("tests/operation/test_driver_verbs.py",),
    ),
    Mutant(
        "will-beside-a-call-under-way",
        "src/limosa/gpu/worker_loop.py",
        "    loop.finish()\n",
        "",
        "the undo begins while the driver still copies",
        WORKER,
    ),
    Mutant(
        "last-word-not-heard",
        "src/limosa/gpu/worker_loop.py",
        "if not loop.read(until_empty=dead) or dead:",
        "if dead or not loop.read(until_empty=dead):",
        "a will that was taken back just before the end is carried out",
        WORKER,
    ),
    Mutant(
        "will-of-a-worker-that-was-given-up",
        "src/limosa/gpu/worker_loop.py",
        "        _, old = self.wills.pop(name, ([], -1))\n",
        "        old = -1\n",
        "an operation that has ended is undone",
        WORKER,
    ),
)

CLOSED = (
    Mutant(
        "gate-does-not-wait",
        _SHIM + "gate.c",
        "        while (atomic_load_explicit(&reader->inside, memory_order_acquire)) {\n",
        "        while (0) {\n",
        "memory is taken away from under a call",
        ("tests/shim/test_shim_gate.py::test_threads_that_allocate_launch_wait_and_exit_all_the_time",),
    ),
    Mutant(
        "told-twice-is-moved-twice",
        _SHIM + "places.c",
        "    bool again = table->n && table->operation == operation;\n",
        "    bool again = false;\n",
        "a job whose move was undone, or told of once more, is told of a GPU where it is not",
        PLACES,
    ),
    Mutant(
        "driver-that-knows-better-is-not-believed",
        _SHIM + "places.c",
        "        atomic_store(&driver_knows, true);\n",
        "        ;\n",
        "a job that somebody else has moved is told where Limosa had moved it",
        PLACES,
    ),
    Mutant(
        "gate-opens-itself",
        _SHIM + "gate.c",
        "        while (atomic_load_explicit(&gate_closed, memory_order_relaxed))\n            syscall",
        "        if (atomic_load_explicit(&gate_closed, memory_order_relaxed))\n            syscall",
        "a thread that is woken too early comes through",
        GATE,
        "the outer loop looks again before it lets anybody through",
    ),
    Mutant(
        "gate-not-looked-at-again",
        _SHIM + "gate.c",
        "    } while (atomic_load_explicit(&gate_closed, memory_order_acquire));\n",
        "    } while (0);\n",
        "a thread slips through between being woken and being counted",
        ("tests/shim/test_shim_gate.py::test_nobody_is_behind_a_gate_that_was_opened_and_closed_at_once",),
    ),
    Mutant(
        "closed-in-children",
        _SHIM + "gate.c",
        "    atomic_store(&gate_closed, 0);\n    if (!gate_fence)",
        "    if (!gate_fence)",
        "a child forked while its parent was held stands still for ever",
        ("tests/shim/test_shim_gate.py::test_a_child_that_was_forked",),
    ),
    Mutant(
        "device-not-waited-for",
        _SHIM + "still.c",
        "    CUresult result = device_done(milliseconds > spent ? milliseconds - spent : 1);\n",
        "    CUresult result = CUDA_SUCCESS;\n",
        "memory is taken away from under a kernel",
        ("tests/shim/test_shim_gate.py::test_a_kernel_that_spins_keeps_it_open",),
    ),
    Mutant(
        "others-are-not-held-still",
        _OPERATION + "parked/carrier.py",
        "        still: list[Process] = [*parts, *self._others]\n",
        "        still: list[Process] = [*parts]\n",
        "a synchronise ends a process that has nothing to park, while the driver has checkpointed it",
        ("tests/e2e_soft/test_soft_still.py::test_small_memory_is_moved_suspended_and_resumed",),
    ),
    Mutant(
        "a-suspended-one-is-let-go-on",
        _OPERATION + "parked/gates.py",
        '            if state not in (State.RUNNING, State.LOCKED) and not (state is None and is_ours(pid, "mnt")):\n                continue\n',
        "",
        "recover opens the gate of a suspended job, and the next synchronise ends it",
        ("tests/e2e_soft/test_soft_still.py::test_small_memory_is_moved_suspended_and_resumed",),
    ),
    Mutant(
        "opened-with-nothing-there",
        _SHIM + "still.c",
        "    if (state == STATE_AWAY)\n        return -EBUSY;",
        "    if (0)\n        return -EBUSY;",
        "the job meets addresses with nothing behind them",
        ("tests/shim/test_shim_parking.py",),
    ),
    Mutant(
        "the-watchdogs-clock-goes-on",
        _SHIM + "clock.c",
        "    atomic_store(&stopped_at, kernels());\n",
        "",
        "PyTorch ends a rank that was suspended for longer than its time limit",
        ("tests/shim/test_shim_clock.py::test_the_time_in_which_it_stood_is_left_out",),
    ),
    Mutant(
        "a-future-waits-by-the-wrong-clock",
        _SHIM + "clock.c",
        "kernels_moment(__builtin_return_address(0), seconds * SECOND + rest)",
        "(seconds * SECOND + rest)",
        "waits with a limit end at once after a suspension",
        ("tests/shim/test_shim_clock.py::test_a_wait_lasts_as_long_as_it_should",),
    ),
    Mutant(
        "libuv-opens-a-ring",
        _SHIM + "rings.c",
        "  cmp $425, %edi\\n  je shim_setup_ring\\n",
        "",
        "torchrun in a container without a seccomp profile cannot be written to disk",
        ("tests/shim/test_shim_rings.py::test_no_ring_is_set_up_where_libuvs_switch_is_off",),
    ),
    Mutant(
        "what-was-sent-is-closed",
        "src/limosa/operation/communicators/closing.py",
        "    if not at_one_point(saids):",
        "    if False:",
        "a message that lies in a buffer of NCCL's is lost with its communicator",
        ("tests/operation/test_communicators.py::test_what_was_sent_behind_the_meetings_back_is_not_closed",),
    ),
    Mutant(
        "ranks-of-one-process-do-not-meet",
        _OPERATION + "steps/on_gpus.py",
        "any(p.comms.within for p in self.prepared)",
        "False",
        "nobody's, but its gate closes between two launches, and most moves are undone",
        ("tests/e2e_soft/test_soft_ranks_inside.py",),
    ),
    Mutant(
        "ranks-of-one-process-stay-stopped",
        _OPERATION + "step.py",
        "        return bool(self.ranks)\n",
        "        return len(self.ranks) > 1\n",
        "a job that comes back from an image counts as running, and stands at the gate before NCCL for ever",
        ("tests/e2e_soft/test_soft_ranks_inside.py",),
    ),
    Mutant(
        "stopped-child-of-a-killed-criu-stays",
        "src/limosa/process/criu/leftovers.py",
        "if not stat.stopped or _is_criu(stat.ppid)",
        "if True or _is_criu(stat.ppid)",
        "runc waits for ever, and the container stays frozen",
        ("tests/containers/test_containers_calls.py", "tests/criu/test_standstill.py"),
    ),
    Mutant(
        "came-once-and-not-again",
        _SHIM + "park.c",
        "        memory->kept = fds_away(fd);\n",
        "        fds_close(fd);\n",
        "memory that was moved once cannot be moved again",
        GATE,
    ),
)

HELD = (
    Mutant(
        "vault-ends-with-what-it-holds",
        "src/limosa/parking/vault_main.py",
        "        if clients or vault.held:\n",
        "        if clients:\n",
        "the vault ends while it holds a job's memory",
        ("tests/e2e_soft/test_soft_aside.py::test_the_vault_ends_by_sigterm_once_it_holds_nothing",),
    ),
    Mutant(
        "vault-ends-between-two-looks",
        "src/limosa/parking/vault_main.py",
        "        if clients or vault.held:\n",
        "        if vault.held or clients:\n",
        "what a client puts between the two looks ends with the vault",
        ("tests/parking/test_sessions.py",),
    ),
    Mutant(
        "no-thread-no-vault",
        "src/limosa/ipc/sessions.py",
        "        except (RuntimeError, MemoryError):\n",
        "        except ZeroDivisionError:\n",
        "the vault ends, with what it holds, where no thread can be started",
        ("tests/parking/test_sessions.py",),
    ),
    Mutant(
        "lent-descriptors-are-closed-at-once",
        "src/limosa/parking/vault_main.py",
        "        if self._lent[fd]:\n",
        "        if False:\n",
        "a client is sent the descriptor that has the number by then",
        RESIDENTS,
    ),
    Mutant(
        "half-a-message-is-kept",
        "src/limosa/ipc/messages.py",
        "            if not message.more:\n",
        "            if True:\n",
        "of many descriptors the last are held, the others are not",
        RESIDENTS,
    ),
    Mutant(
        "too-few-replace-the-full-set",
        "src/limosa/parking/vault_main.py",
        "                if len(fds) != n:  # what is held so far may be the last copy\n",
        "                if False:\n",
        "descriptors that did not arrive are the job's only copy",
        (*RESIDENTS, "tests/fuzz/test_fuzz_packets.py"),
    ),
    Mutant(
        "held-for-another-with-that-pid",
        "src/limosa/parking/vault_main.py",
        "        if not alive:\n            held.pop(key).close(close)",
        "        if alive:\n            held.pop(key).close(close)",
        "the vault lets go of the memory of a job that lives",
        (*RESIDENTS, "tests/e2e_soft/test_soft_aside.py"),
    ),
    Mutant(
        "source-not-held",
        _OPERATION + "parked/moving.py",
        'sides = ("source", "target")\n',
        'sides = ("target",)\n',
        "limosa is killed, and nobody has the memory that the job left",
        ("tests/e2e_soft/test_soft_parked.py::test_whoever_is_killed_the_job_comes_back[move-limosa]",),
    ),
    Mutant(
        "suspended-before-it-is-kept",
        _OPERATION + "steps/driver.py",
        "            op.carrier.arrive()\n        driver_steps.leave_suspended(op.members, release=op.release)\n",
        "            driver_steps.leave_suspended(op.members, release=op.release)\n            op.carrier.arrive()\n        driver_steps.leave_suspended(op.members, release=op.release)\n",
        "killed in between, the job is brought back and counts as suspended",
        ("tests/campaign/test_parked_campaign.py::test_what_has_failed_once",),
    ),
)

MUTANTS = (*UNDO, *COMMIT, *BELIEVED, *ONE_AT_A_TIME, *WHO, *ROOM, *MAP, *WILL, *CLOSED, *HELD)
