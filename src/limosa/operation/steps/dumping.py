"""One checkpoint under way: what its steps do (``dump.py`` has them).

What is hashed, synced and renamed when:

- The job is to end: in CRIU's ``post-dump`` action, while the tree is frozen and CRIU waits for the answer. Only after
  the rename (the commit point) does CRIU end the tree; whoever fails or dies before leaves a job that runs on.
- The job runs on (``leave_running``): CRIU lets it go, the driver brings its device memory back, and only then is
  the image hashed and committed, so that the pause does not pay for it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from limosa import gpu
from limosa.errors import (
    CancelledUndone,
    CannotBeMoved,
    CriuFailed,
    FailedUndone,
    GpuUnavailable,
    LimosaError,
    NoRoomOnHost,
    NoSuchProcess,
    Reason,
    TimedOutUndone,
)
from limosa.image import (
    DeviceMemory,
    Draft,
    GpuRecord,
    Image,
    JobRecord,
    LockedFile,
    Manifest,
    OpenFile,
    ShmFile,
    TreeProcess,
    now,
)
from limosa.operation import estimate, locks, same_files, shm
from limosa.operation.dump_options import Options, dump_options
from limosa.operation.frozen import shared_outside, tree_and_files
from limosa.operation.holding import refuse_stale
from limosa.operation.journal import Member, Noted, Phase, added_up
from limosa.operation.leftovers import end_rest, has_ended, keep_log, release_network
from limosa.operation.parked.parkable import held_still
from limosa.operation.parked.saving import Pace, Saving, look_for
from limosa.operation.parked.still import Still
from limosa.operation.prepare import Prepared
from limosa.operation.results import CheckpointResult
from limosa.operation.step import BACK, HOME, Verb, run
from limosa.operation.steps.on_gpus import OnGpus
from limosa.operation.work import Work
from limosa.parking.shim import ShimError, under_shim
from limosa.process import device_nodes, sizes
from limosa.process.candidates import may_use_cuda
from limosa.process.criu.program import Criu
from limosa.process.criu.run import DUMP_LOG, dump, nft_table
from limosa.process.criu.stats import DumpStats
from limosa.process.identity import Identity, read_stat
from limosa.process.observation import ProcessObservation
from limosa.process.procfs import read_maps
from limosa.process.records import EndedRecord, RunRecord, SuspendRecord
from limosa.process.tree import job_tree
from limosa.progress import Progress
from limosa.terms import Route

_REAP_SECONDS = 10.0
_MAPPING_BYTES = 20  # that CRIU writes of a mapping, at least
TRIES = 4
"""Of a dump, where the job makes semaphores meanwhile, and where its shim is asked."""
ANSWERED = 0.1
"""Seconds until whoever asked has his answer, and has gone."""
_NOTED = ("leave_running", "tcp_established", "tcp_close", "shell_job", "file_locks", "link_remap", "ext_unix_sk")


class _OtherSemaphores(Exception):
    """CRIU found one that was not there when it was looked."""


class _Asked(Exception):
    """Somebody had a connection to the shim, a ``limosa ps`` for one: to CRIU it is one to a process outside."""


class Dumping(OnGpus):
    """One checkpoint under way: what its steps share."""

    def __init__(self, work: Work, verb: Verb, job: Prepared, options: Options, program: Criu):
        super().__init__(work, verb, [job])
        self.job, self.options, self.program = job, options, program
        self.leave_running = options.leave_running
        self.root = job.root
        self.dest = Path(os.path.abspath(options.output))
        self.draft: Draft
        self.image: Image | None = None
        self.saving: Saving | None = None
        self.open_files: list[OpenFile] = []
        self.shm: list[ShmFile] = []
        self.locks: list[LockedFile] = []
        self.tree: list[TreeProcess] = []
        self.descriptors = 0
        self.told_again = 0.0
        self.nft_table: str | None = None
        self.stats = DumpStats()
        self.unreaped: dict[int, int] = {}
        self.device: list[DeviceMemory] = []
        assert job.observation is not None
        self.dump_options = dump_options(options, job.observation)
        self.lost = shm.Lost()
        self.tries = self.asked = 1

    @property
    def asleep(self) -> list[Member]:
        """Those that the driver is to restore: of a job that runs on, all that were not suspended before."""
        return [m for m in self.members if m.was != gpu.State.CHECKPOINTED] if self.leave_running else []

    @property
    def removed(self) -> list[str]:
        """What of a container is gone."""
        return []

    @property
    def locked(self) -> list[Member]:
        return self.asleep

    @property
    def pauses(self) -> bool:
        """A job that ends does not go on after a pause."""
        return self.leave_running and super().pauses

    def run(self) -> CheckpointResult:
        self.work.check()
        self._begin()
        self.look_at_names()
        refuse_stale(self.work, self.prepared)
        run(self.verb, self)
        self.work.drop("draft")
        assert self.image is not None
        with contextlib.suppress(OSError):
            self.draft.secure_log()
        result = self._result(self.image)
        self.image.close()
        self.draft.close()
        return result

    def look_at_names(self) -> None:
        """Looks for semaphores that have lost the names by which CRIU would look for them."""
        self.lost.look([i.pid for i in job_tree(self.root)])

    @contextlib.contextmanager
    def _names_given_back(self) -> Iterator[None]:
        """CRIU finds the semaphores of the job by the names that they have lost."""
        given: shm.Made = {}
        if self.lost.names:
            self.work.note(Noted.NAMES, Phase.BEGIN, lost=shm.to_note(self.lost.names))
            given = shm.give_back(self.lost.names)
        try:
            yield
        finally:
            shm.take_away(given | self.lost.remaps)

    def dump(self) -> None:
        """Dumps; again where the job has made a semaphore between the look and CRIU's, or its shim was asked.

        The last time CRIU gives those a name itself, by a number that another's dump at the same moment may have taken.
        """
        while True:
            self.lost.look([i.pid for i in job_tree(self.root)], again=self.tries > 1)
            try:
                with self._names_given_back():
                    self.stats = self._dump()
                break
            except _OtherSemaphores:
                self.tries += 1
            except _Asked:
                self.asked += 1
                self.work.cancel.wait(ANSWERED)
            self.draft.empty_criu()
        if not self.leave_running:  # it has ended, and the image is whole: there is no way back any more
            self.work.drop(HOME)
            self._let_go_of_device_memory()

    def leave(self) -> None:
        """Leaves the job to CRIU, where it will not stand still for too long by that."""
        assert self.bulk is not None
        self.bulk.let_go()
        if self.carrier is not None:
            self.carrier.disconnect()
        back = estimate.restore_seconds(self.members)
        to_come = estimate.dump_seconds(self.job.host_bytes + self.job.shape.beside) + back
        self.work.check_pause(to_come, back)

    def _begin(self) -> None:
        work = self.work
        # The journal first: a folder that nobody's journal knows of would never be cleaned up.
        journal = work.begin(
            self.members,
            roots=[self.root],
            tree=self.job.tree,
            image=str(self.dest),
            leave_running=self.options.leave_running,
        )
        self.draft = Draft.create(self.dest, operation=work.id)
        work.push("draft", self._discard)
        journal.header.draft = str(self.draft.path)
        journal.rewrite_header()

    def save(self) -> None:
        """Copies what the shim looks after while the job runs; where that way is not open the driver carries it.

        CannotBeMoved: the driver would lose it. FailedUndone: it failed, and there is no other way. The job runs on.
        """
        work, options = self.work, self.options
        found = look_for(self.members)
        if not found.awake and not found.asleep:
            self.carrier = Still(work, found.others, stays=True) if found.others else None
            return
        try:
            folder = self.draft.make_chunks()
        except BaseException:
            for _, shim in found.awake + found.asleep + found.others:
                shim.close()
            raise
        try:
            self.carrier = self.saving = Saving(
                work,
                found.awake,
                found.asleep,
                found.others,
                folder=folder,
                chunk=options.chunk_bytes,
                pace=Pace(options.rounds, options.rate or 0.0, ends=not options.leave_running),
            )
            self.saving.prepare()
        except (CancelledUndone, TimedOutUndone, NoRoomOnHost):
            raise
        except LimosaError as error:
            self.not_saved()
            for _, shim in found.awake + found.asleep + found.others:  # it may not have come to take them over
                shim.close()
            # It may be stopped, and the driver would wait for it as well.
            if isinstance(error, ShimError) and isinstance(error.__cause__, TimeoutError):
                detail, hint = f"{error}: it does not answer", "try again; a stopped one has to go on first"
                raise FailedUndone(what="checkpoint", detail=detail, hint=hint) from error
            if isinstance(error, FailedUndone) and (found.only_so or not self.job.driver_fits):
                hint = "try again; limosa doctor looks at the mover and the vault"
                raise FailedUndone(what="checkpoint", detail=str(error), hint=hint) from error
            if found.only_so:
                text = f"its device memory cannot be written the parked way ({error}), and the driver would lose it"
                raise CannotBeMoved(detail=text) from error
            shut = f"the parked way is not open ({error})"
            if not self.job.driver_fits:
                detail = f"{shut}, and host memory does not take what the driver would save"
                raise NoRoomOnHost(detail=detail) from error
            self.draft.drop_chunks()
            self.job.parked = 0
            work.warnings.append(Reason(id="driver-way", text=f"{shut}: the driver carries the memory"))
            running = [m for m in self.members if m.was == gpu.State.RUNNING]
            self.carrier = Still(work, held_still(running), stays=True)

    def not_saved(self) -> None:
        carrier, self.saving, self.carrier = self.carrier, None, None
        if carrier is not None:
            carrier.back()
            carrier.release()

    def _let_go_of_device_memory(self) -> None:
        """The image is whole, or the job has its memory again: nobody needs what was held for it."""
        if self.carrier is not None:
            self.work.drop(BACK)
            self.carrier.release()

    def _discard(self) -> None:
        if self.image is None:
            self.draft.discard()
        else:  # it is committed and stays
            self.image.close()
            self.draft.close()

    # -- CRIU --------------------------------------------------------------------------------------------------

    def _dump(self) -> DumpStats:
        work = self.work
        work.note(Noted.DUMP, Phase.BEGIN, self.root.pid)
        self.draft.follow()
        try:
            stats = dump(
                self.program,
                self.root.pid,
                self.draft.criu_fd,
                self.draft.log_fd,
                msgspec.structs.replace(self.dump_options, link_remap=self._remaps()),
                on_action=self._on_action,
                on_start=lambda who: work.note(Noted.DUMP, Phase.NOTE, who.pid, criu=who.to_str()),
                timeout=work.left,
                cancel=work.cancel,
                on_tick=self._tell_written,
            )
        except BaseException as error:
            work.try_note(Noted.DUMP, Phase.FAILED, self.root.pid)
            if self.image is not None and has_ended(self.root):
                # CRIU died after the commit, while it ended the tree: what is left to do is to end the rest.
                end_rest(self.job.tree)
                return DumpStats()
            if self.dump_options.tcp_established:  # a CRIU that was killed has left the connections shut
                release_network(self.job.tree, self.draft.log_fd, self.root.pid, self.program)
            if self.image is not None:
                # CRIU died between the commit and the end of the tree: the job lives, and so does a whole image.
                self._forget_ended()
                raise FailedUndone(
                    f"{error}; the image was committed all the same: {self.dest}", image=str(self.dest)
                ) from error
            if not self.root.alive():
                text = f"process {self.root.pid} ended while it was dumped ({error})"
                raise NoSuchProcess(text, pid=self.root.pid, job_state="gone", hint="") from error
            work.check()  # where that is the reason, say it of the whole operation
            if isinstance(error, CriuFailed):
                self._say_if_it_passes(error)
                # The folder goes with the undo; what CRIU said stays.
                kept = keep_log(self.draft.log_fd, DUMP_LOG, work.id)
                if error.fields.get("kind") == "no-space":
                    raise NoRoomOnHost(detail=f"{error.fields['reason']} in {self.dest.parent}") from error
                fields = {name: error.fields.get(name, "") for name in ("what", "reason", "kind")}
                raise CriuFailed(log=kept, **fields) from error
            raise
        finally:
            self.draft.followed()
        if self.options.leave_running:
            work.note(Noted.DUMP, Phase.DONE, self.root.pid, nft_table=stats.nft_table)
        else:  # the job has ended and the image is whole: nothing that goes wrong from here on changes that
            work.try_note(Noted.DUMP, Phase.DONE, self.root.pid, nft_table=stats.nft_table)
        if not self.members and self.options.leave_running:
            work.timings["pause_seconds"] = stats.freezing_time + stats.frozen_time
        return stats

    def _say_if_it_passes(self, error: CriuFailed) -> None:
        """Raises _OtherSemaphores or _Asked where the next try may succeed."""
        kind = error.fields.get("kind")
        semaphore = kind == "link-remap" and shm.FOLDER in str(error.fields.get("reason"))
        if semaphore and self.tries < TRIES:
            raise _OtherSemaphores from error
        shims = kind == "external-unix" and any(under_shim(each.pid) for each in job_tree(self.root))
        if shims and self.asked < TRIES:
            raise _Asked from error

    def _remaps(self) -> bool:
        return self.dump_options.link_remap or self.tries == TRIES

    def _tell_written(self) -> None:
        """How much CRIU has written: it says nothing itself, its files do."""
        begun = time.monotonic()
        if begun < self.told_again:
            return
        total = self.job.host_bytes + estimate.device_bytes(self.members)
        with contextlib.suppress(OSError), os.scandir(self.draft.criu_fd) as files:
            done = sum(file.stat(follow_symlinks=False).st_size for file in files)
            self.work.progress(Progress("dump", done=min(done, total), total=total))
        self.told_again = time.monotonic() + 20 * (time.monotonic() - begun)  # there may be tens of thousands of files

    def _on_action(self, action: str) -> bool:
        """CRIU has written everything and holds the tree frozen: the last moment to say no."""
        if action != "post-dump":
            return True
        self.work.check()
        self.work.armed()
        self._refuse_new_cuda_state()
        self.job.tree = job_tree(self.root)  # what it has started since it was looked at belongs to it
        assert self.work.journal is not None
        self.work.journal.header.tree = self.job.tree
        self.work.journal.rewrite_header()
        if self._remaps():
            self.lost.look_for_remaps([i.pid for i in self.job.tree])
            self.work.note(Noted.NAMES, Phase.BEGIN, lost=shm.to_note(self.lost.remaps))
        self.lost.look_for_shared([i.pid for i in self.job.tree], shared_outside(self.job))
        put = lambda name, source: self.draft.put_in(name, source, self.work.check)  # noqa: E731
        self.shm = shm.read(self.lost.names | self.lost.remaps, self.lost.shared, put)
        self.tree, self.open_files = tree_and_files(self.job, self.lost.names)
        if self.dump_options.file_locks:
            self.locks = locks.read(i.pid for i in self.job.tree)
        if self.saving is not None:
            self.tree = [
                msgspec.structs.replace(p, held=added_up([p.held, self.saving.held(p.pid)])) for p in self.tree
            ]
        self._refuse_what_has_grown()
        if os.geteuid() == 0 and not self.options.leave_running and "socket-name" not in self.options.force:
            ids = (self._first.uid, self._first.gid) if self._first else (0, 0)
            same_files.look_at_sockets(self.draft.criu_fd, *ids)
        self.nft_table = nft_table(self.program, self.draft.criu_fd, self.root.pid, self.dump_options)
        self.work.note(Noted.POST_DUMP, Phase.DONE, self.root.pid, nft_table=self.nft_table)
        if not self.options.leave_running:
            with self.work.timed("commit", "hash and sync"):
                self._commit()
        return True

    def _refuse_new_cuda_state(self) -> None:
        """The tree is frozen: what has got a context since it was looked at would be dumped without its device memory.

        The driver is not asked (it does not answer for a frozen process); its mapping of /dev/nvidia-uvm tells. A child
        that a member has forked inherits that mapping and is none.
        """
        assert self.job.observation is not None
        before = {p.pid: p.n_uvm_maps for p in self.job.observation.processes}
        members = {m.pid for m in self.members}
        for identity in job_tree(self.root):
            pid = identity.pid
            if pid in members or before.get(pid) or not may_use_cuda(pid):
                continue
            if read_maps(f"/proc/{pid}").uvm and read_stat(pid).ppid not in members:
                raise FailedUndone(what="checkpoint", detail=f"process {pid} began to use CUDA in the middle of it")

    def _refuse_what_has_grown(self) -> None:
        """The tree is frozen: what could not come back, for it has more than when it was looked at, does not end."""
        for identity in self.job.tree:
            with contextlib.suppress(OSError):
                mappings = os.stat(f"mm-{identity.pid}.img", dir_fd=self.draft.criu_fd).st_size // _MAPPING_BYTES
                if sizes.could_need(len(os.listdir(f"/proc/{identity.pid}/fd")), mappings):
                    self.descriptors = max(self.descriptors, sizes.descriptors_needed(identity.pid))
        reason = sizes.too_many(self.descriptors, "the job")
        if reason is not None and reason.id not in self.options.force and not self.options.leave_running:
            raise CannotBeMoved(detail=reason.text, hint=reason.hint)

    # -- commit ------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        work = self.work
        if self.saving is not None:
            self.saving.arrive()
            self.device = self.saving.device
        self.draft.prepare(self._manifest(), work.progress, cancel=work)
        image_id = self.draft.id
        try:
            if not self.options.leave_running:
                # Before the rename, so that an attached `limosa run` finds it however we end.
                EndedRecord(root=self.root, image=str(self.dest), image_id=image_id, name=self.job.job.name).save()
            work.note(Noted.COMMIT, Phase.BEGIN, self.root.pid, image_id=image_id)
            work.check()
            self.image = self.draft.publish()
        except BaseException:
            self._forget_ended()
            raise
        work.try_note(Noted.COMMIT, Phase.DONE, self.root.pid, image_id=image_id)
        work.timings["hash"], work.timings["sync"] = self.draft.timings.hash, self.draft.timings.sync

    def _forget_ended(self) -> None:
        with contextlib.suppress(OSError, LimosaError):
            EndedRecord(root=self.root, image="").forget()

    @property
    def _first(self) -> ProcessObservation | None:
        return self.job.observation.processes[0] if self.job.observation else None

    def _manifest(self) -> Manifest:
        record = RunRecord.of(self.root)
        inventory = self.job.inventory
        held = added_up(p.held for p in self.tree)
        first = self._first
        return Manifest(
            created=now(),
            criu=self.program.version,
            kernel=platform.release(),
            machine=platform.machine(),
            hostname=socket.gethostname(),
            driver=inventory.driver_version if inventory else "",
            job=JobRecord(
                pid=self.root.pid,
                name=self.job.job.name,
                cwd=_cwd(self.root.pid),
                log=(record.log or None) if record else None,
                run=record is not None,
                uid=first.uid if first else 0,
                gid=first.gid if first else 0,
                cgroup=first.cgroup.path if first else "",
                sees=record.sees if record else "",
                seen=_seen(record.sees, inventory) if record else [],
            ),
            tree=self.tree,
            options={
                **{name: getattr(self.dump_options, name) for name in _NOTED},
                "ghost_limit": self.dump_options.ghost_limit or 0,
                "network_lock": self.dump_options.network_lock or self.program.network_lock,
                "force": ",".join(sorted(self.options.force)),
            },
            gpus=[
                GpuRecord(
                    index=g.index,
                    uuid=g.uuid,
                    name=g.name,
                    bytes=held.get(g.uuid, 0),
                    memory_total=g.memory_total,
                    driver=inventory.driver_version if inventory else "",
                    pci_bus_id=g.pci_bus_id,
                )
                for g in (inventory.gpus if inventory and self.members else [])
            ],
            open_files=self.open_files,
            shm=self.shm,
            locks=self.locks,
            descriptors=self.descriptors,
            nft_table=self.nft_table.removeprefix("inet ") if self.nft_table else None,
            software_gpu=inventory.software if inventory else False,
            chunk_bytes=self.options.chunk_bytes if self.device else 0,
            device=self.device,
        )

    # -- after -------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Its memory is its own again, and nothing is kept free for it any more."""
        work = self.work
        if self.carrier is not None:
            self.carrier.back()
            work.drop(BACK)
            work.push(BACK, self.carrier.release)
        if work.claim is not None:
            work.claim.gpus = {}
            work.claim.save()
        work.drop(HOME)

    def commit(self) -> None:
        self._commit()
        self._let_go_of_device_memory()

    def see_off(self) -> None:
        """Waits until the job's pids are free; whoever has not reaped them after ten seconds is named."""
        SuspendRecord(root=self.root).forget()
        waiting = [i.pid for i in self.job.tree]
        deadline = time.monotonic() + _REAP_SECONDS
        while True:
            waiting = [pid for pid in waiting if _same_process(pid, self.job.tree)]
            if not waiting or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        unreaped = self.unreaped
        for pid in waiting:
            with contextlib.suppress(LimosaError, OSError):
                unreaped[pid] = read_stat(pid).ppid
        for pid, parent in unreaped.items():
            text = f"process {pid} has ended and its parent {parent} has not reaped it: a restore must wait for that"
            self.work.warnings.append(Reason(id="unreaped", text=text, pid=pid))

    def _result(self, image: Image) -> CheckpointResult:
        state = "running" if self.options.leave_running else "ended"
        was_suspended = self.job.states == {gpu.State.CHECKPOINTED}
        if self.options.leave_running and was_suspended:
            state = "checkpointed"
        self.work.progress(Progress("done", message=f"image {self.dest}"))
        return CheckpointResult(
            image=str(self.dest),
            id=image.id,
            bytes=image.manifest.bytes,
            pid=self.root.pid,
            name=self.job.job.name,
            way=Route.PARKED if self.saving is not None else Route.DRIVER if self.members else Route.HOST,
            other=self.verb.other_way(self.job.shape),
            device_bytes=image.manifest.device_bytes,
            rounds=self.saving.rounds if self.saving is not None else [],
            left_running=self.options.leave_running,
            was_suspended=was_suspended,
            removed=self.removed,
            state=state,
            warnings=[*self.work.warnings, *self.job.warnings()],
            unreaped=self.unreaped,
            stats=msgspec.to_builtins(self.stats) if self.options.print_stats else {},
        )


def _same_process(pid: int, tree: Sequence[Identity]) -> bool:
    """Whether the pid still belongs to the job, a zombie included."""
    try:
        start = read_stat(pid).start_time
    except (LimosaError, OSError):
        return False
    return any(i.pid == pid and i.start_time == start for i in tree)


def _cwd(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return "/"


def _seen(path: str, inventory: gpu.Inventory | None) -> list[str]:
    """The UUIDs of the GPUs that a job sees from which others are hidden."""
    minors = device_nodes.seen(path) if path else None
    if minors is None:
        return []
    with contextlib.suppress(GpuUnavailable):
        return [g.uuid for g in (inventory or gpu.inventory()).gpus if g.minor in minors]
    return []
