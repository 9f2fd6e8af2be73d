"""A checkpoint of a container: its runtime writes the host side, with Limosa's CRIU; what else is done is the same.

The container is frozen from before its runtime begins until the image is committed or the job is let go on. So the
files that CRIU writes, the changes in its root file system that the runtime adds to them, and the device memory are of
one moment, and nothing happens after it that the image does not have. The runtime always lets it run on
(``--leave-running``), which for a frozen container means nothing: whether it ends is decided here, after the commit.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence

import msgspec

from limosa.containers.calls import nobody
from limosa.containers.freezer import cannot_be_traced, freeze, pause, thaw
from limosa.containers.runtime import MACHINES, PRIVATE, Contained, Kept, end
from limosa.containers.runtimes import folder_of
from limosa.errors import CannotBeMoved, FailedUndone, LimosaError, NoSuchProcess, Reason
from limosa.image import ContainerRecord, DeviceMemory, Manifest, TreeProcess
from limosa.operation.container_plan import stopped_words
from limosa.operation.dump_options import Options
from limosa.operation.frozen import tree_and_files
from limosa.operation.journal import Noted, Phase, added_up
from limosa.operation.leftovers import connections_go_on, end_rest, has_ended, let_go_on
from limosa.operation.prepare import Prepared
from limosa.operation.results import CheckpointResult
from limosa.operation.step import HOME, STILL, Verb
from limosa.operation.steps.dumping import ANSWERED, TRIES, Dumping
from limosa.operation.work import Work
from limosa.parking.names import is_asked
from limosa.process.criu import network
from limosa.process.criu.lent import lent
from limosa.process.criu.program import Criu
from limosa.process.identity import Handle, Identity, ending
from limosa.process.namespaces import inside
from limosa.process.records import ClonedRecord
from limosa.process.tree import job_tree

_PAUSED = "paused"


class ContainerDumping(Dumping):
    """One checkpoint of a container under way."""

    def __init__(self, work: Work, verb: Verb, job: Prepared, options: Options, program: Criu):
        super().__init__(work, verb, job, options, program)
        assert job.box is not None
        self.box = job.box
        self._was_held = False
        self._stays = False  # somebody has started it anew
        self._pids: dict[int, int] = {}  # what its processes are called here → inside

    @property
    def removed(self) -> list[str]:
        if self.leave_running or self._stays:
            return []
        contained = self.box.contained
        return [self.box.container.called, *([contained.log] if contained.log_goes else [])]

    def look_at_names(self) -> None:
        """They are the container's own, and its runtime brings its /dev/shm back."""

    def run(self) -> CheckpointResult:
        self.work.push(_PAUSED, self._pause)  # the first one, and so the last of all that is undone
        result = super().run()
        self.work.drop(_PAUSED)
        if self.leave_running:
            self._pause()
        return result

    def _pause(self) -> None:
        """Whoever has paused it while it was held sees that it is."""
        runtime = self.box.runtime
        word = runtime.word_of(self.box.contained)
        if self._was_held:
            with contextlib.suppress(LimosaError, OSError):  # it goes on, as the job was to
                pause(self.box.freezer, lambda: runtime.is_paused(word))

    def dump(self) -> None:
        work = self.work
        work.armed()
        work.push(STILL, self._go_on)
        runtime = self.box.runtime
        work.note(
            Noted.FREEZE,
            Phase.BEGIN,
            self.root.pid,
            folder=self.box.freezer,
            runtime=runtime.name,
            program=runtime.program,
            configured=runtime.configured,
            notes=runtime.notes,
            container=runtime.word_of(self.box.contained),
            run=self.box.contained.run,
            shut=self._keeps_connections,
        )
        self._freeze()
        self._refuse_stopped()
        if self._keeps_connections:
            network.shut(self.program, self.root.pid, f"limosa-{work.id}")
        self._write()
        self._note_down()
        if self.leave_running:
            self._go_on()
        else:
            with work.timed("commit", "hash and sync"):
                self._commit()
            self._end()
            work.drop(HOME)
        work.drop(STILL)
        if not self.leave_running:
            self._let_go_of_device_memory()

    def _freeze(self) -> None:
        """Freezes it while nobody asks its shims: to CRIU a connection to them is one to a process outside."""
        self._was_held = True
        freeze(self.box.freezer)
        for _ in range(TRIES - 1):
            if not any(is_asked(member.pid) for member in self.members):
                break
            thaw(self.box.freezer)
            self.work.cancel.wait(ANSWERED)
            freeze(self.box.freezer)

    def _refuse_stopped(self) -> None:
        """The container is frozen: what has stopped since it was looked at would keep CRIU waiting for ever."""
        for identity in cannot_be_traced(self.box.freezer, job_tree(self.root)):
            text, hint = stopped_words(identity)
            raise CannotBeMoved(detail=text, hint=hint)

    @property
    def _keeps_connections(self) -> bool:
        """Whether its peers are not to hear that it ends: they go on when it is back. It is its own peer otherwise."""
        return self.options.tcp_established and not self.leave_running and self.box.contained.network == PRIVATE

    def _go_on(self) -> None:
        failed: FailedUndone | None = None
        if self._keeps_connections:
            try:
                connections_go_on(self.job.tree, self.program, shut=True)
            except FailedUndone as error:
                failed = error
        let_go_on(self.job.tree)
        thaw(self.box.freezer)
        if failed is not None:
            raise failed

    def _write(self) -> None:
        work, given = self.work, self.dump_options
        work.note(Noted.DUMP, Phase.BEGIN, self.root.pid)
        extra = ["--ghost-limit", str(given.ghost_limit)] if given.ghost_limit is not None else []
        if given.tcp_close:
            extra.append("--tcp-close")
        if given.skip_in_flight:
            extra.append("--skip-in-flight")
        self.draft.follow()
        try:
            with lent(self.program, extra, operation=work.id) as folder:
                kept = Kept(
                    criu_folder=folder,
                    images_fd=self.draft.criu_fd,
                    work_fd=self.draft.log_fd,
                    tcp_established=given.tcp_established,
                    file_locks=given.file_locks,
                    ext_unix_sk=given.ext_unix_sk,
                    stats=self.options.print_stats,
                    on_start=self._started,
                    tick=self._tick,
                )
                self.stats = self.box.runtime.write(self.box.contained, kept)
        except BaseException as error:
            work.try_note(Noted.DUMP, Phase.FAILED, self.root.pid)
            if self.dump_options.tcp_established:  # a CRIU that was killed has left them shut
                connections_go_on(self.job.tree, self.program)
            if not self.root.alive():
                text = f"container {self.box.container.called} ended while it was written ({error})"
                raise NoSuchProcess(text, pid=self.root.pid, job_state="gone", hint="") from error
            raise
        finally:
            self.draft.followed()
        work.note(Noted.DUMP, Phase.DONE, self.root.pid)

    def _started(self, who: Identity) -> None:
        self.work.note(Noted.DUMP, Phase.NOTE, who.pid, criu=who.to_str())

    def _tick(self) -> None:
        self.work.check()
        self._tell_written()

    def _note_down(self) -> None:
        """Notes what the frozen container is: its processes."""
        work = self.work
        work.check()
        self._refuse_new_cuda_state()
        self.job.tree = job_tree(self.root)
        assert work.journal is not None
        work.journal.header.tree = self.job.tree
        work.journal.rewrite_header()
        self._pids = {i.pid: inside(i.pid) for i in self.job.tree}
        tree, _ = tree_and_files(self.job)
        if self.saving is not None:
            held = self.saving.held
            tree = [msgspec.structs.replace(p, held=added_up([p.held, held(p.pid)])) for p in tree]
        self.tree = [self._inside(process) for process in tree]
        work.note(Noted.POST_DUMP, Phase.DONE, self.root.pid)

    def _inside(self, process: TreeProcess) -> TreeProcess:
        pid, ppid = self._pids[process.pid], self._pids.get(process.ppid, 0)
        return msgspec.structs.replace(process, pid=pid, ppid=ppid, threads=[])

    def _manifest(self) -> Manifest:
        manifest, contained = super()._manifest(), self.box.contained
        job = msgspec.structs.replace(manifest.job, pid=self._pids[self.root.pid], cwd="/", cgroup="", sees="", seen=[])
        observation = self.job.observation
        sockets = [s for p in observation.processes for s in p.sockets] if observation is not None else []
        ports = {int(s.local.rpartition(":")[2]) for s in sockets if s.protocol == "tcp" and s.state == "listen"}
        record = ContainerRecord(
            runtime=self.box.runtime.name,
            id=contained.id,
            name=contained.name,
            image=contained.image,
            image_id=contained.image_id,
            bundle=contained.bundle,
            folder=folder_of(contained),
            network=contained.network,
            ports=sorted(ports if contained.network == MACHINES else set(contained.ports)),
            published=list(contained.published),
            volumes=[volume.name for volume in contained.volumes],
            log=contained.log,
            namespace=contained.namespace,
            snapshotter=contained.snapshotter,
            pod=contained.pod,
            writes=list(contained.writes),
            origin=cloned.origin if (cloned := ClonedRecord.of(self.root)) is not None else "",
        )
        device = [self._device_inside(one) for one in manifest.device]
        return msgspec.structs.replace(manifest, container=record, job=job, device=device)

    def _device_inside(self, memory: DeviceMemory) -> DeviceMemory:
        return msgspec.structs.replace(memory, pid=self._pids[memory.pid])

    def _end(self) -> None:
        """Ends the container: the image is committed.

        Those that its runtime lets go on for a moment, to end by the first one's end, are stopped before: they go on
        no more.
        """
        others = [i for i in self.job.tree if i != self.root]
        _signal(others, signal.SIGSTOP)
        for identity in self.job.tree if self._keeps_connections else ():
            with contextlib.suppress(LimosaError, OSError):  # its peers hear it then, and the image is whole
                network.enter_repair(identity.pid)
        word = self.box.runtime.word_of(self.box.contained)
        try:
            self._remove(word, self._started)
            end(self.root, (self.box.freezer,))  # of one that its runtime did not know any more
        except (LimosaError, OSError) as error:  # its runtime may have been killed over it
            if self._has_ended(word):
                with contextlib.suppress(LimosaError, OSError):
                    self._remove(word)
                end_rest(self.job.tree)
                return
            _signal(others, signal.SIGCONT)
            self._forget_ended()
            text = f"{error}; the image was committed all the same: {self.dest}"
            raise FailedUndone(text, image=str(self.dest)) from error
        end_rest(self.job.tree)

    def _remove(self, word: str, on_start: Callable[[Identity], None] = nobody) -> None:
        """Ends it and takes it away; another one stays that somebody has made of it since it was looked at."""
        found = self.box.runtime.find(word)
        if found is not None and self._is_another(found):
            text = f"container {self.box.container.called} was started anew meanwhile, and stays"
            self.work.warnings.append(Reason(id="container-anew", text=text))
            self._stays = True
            return
        self.box.runtime.remove(word, on_start)

    def _is_another(self, found: Contained) -> bool:
        """Whether what its runtime has under that name is not what was written."""
        if found.init not in (None, self.root):
            return True
        if self.root.alive():
            return False  # its runtime may not have had an answer about it
        before = self.box.contained.run
        return "" not in (found.run, before) and found.run != before

    def _has_ended(self, word: str) -> bool:
        """Whether it has, now that its runtime has failed to end it."""
        if not has_ended(self.root):
            with contextlib.suppress(LimosaError, OSError):
                begun = self.box.runtime.has_begun_to_end
                if ending(self.root.pid) or begun(word, self.root, self.box.freezer):
                    end(self.root, (self.box.freezer,))
        return has_ended(self.root)


def _signal(processes: Sequence[Identity], number: int) -> None:
    for identity in processes:
        with contextlib.suppress(LimosaError), Handle(identity) as handle:
            handle.signal(number)
