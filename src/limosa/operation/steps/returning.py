"""One restore under way: what its steps do (``from_image.py`` has them)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from limosa import gpu
from limosa.errors import (
    CriuFailed,
    DamagedImage,
    FailedUndone,
    LimosaError,
    NoRoomOnGpu,
    NoSuchImage,
    PermissionDenied,
    Reason,
    Refused,
)
from limosa.image import Image, open_image
from limosa.image.verify import Part
from limosa.image.verify import verify as verify_image
from limosa.operation import driver_steps, idle, locks, ports, room, shm
from limosa.operation.background import Background
from limosa.operation.journal import Member, Noted, Phase
from limosa.operation.leftovers import let_go_on, stopped
from limosa.operation.members import minors
from limosa.operation.parked.gates import Gates, gate_was_opened, stand_of
from limosa.operation.parked.loading import Loading
from limosa.operation.restore_options import ImageFacts, Options, shape_of
from limosa.operation.restored import end_tree, keep_record
from limosa.operation.results import RestoreResult
from limosa.operation.rewind import Rewind
from limosa.operation.same_files import TRIED_AGAIN, Looked, groups_of
from limosa.operation.step import Op, Verb, run
from limosa.operation.work import Work
from limosa.parking.names import stand_ins
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, under_shim
from limosa.process import device_nodes
from limosa.process.criu import leftovers
from limosa.process.criu.program import Criu
from limosa.process.criu.run import RestoreOptions
from limosa.process.criu.run import restore as criu_restore
from limosa.process.criu.stats import restore_stats
from limosa.process.identity import Identity
from limosa.process.records import RunRecord
from limosa.process.tree import job_tree
from limosa.terms import Route

_PR_SET_CHILD_SUBREAPER = 36


class Checked:
    """CRIU's files compared with the manifest, beside what is done before CRIU is started.

    Pages of memory, which CRIU only copies, are compared last, and may be so while it works: nothing runs before they
    are. Chunks are only looked for, with their sizes: they are read once, on their way to the GPU, and compared there.
    """

    def __init__(self, work: Work, image: Image, asked_for: bool):
        self._work, self._image = work, image
        self._stop = threading.Event()
        self._asked_for = asked_for
        self._rest, self._pages = Background("limosa-verify"), Background("limosa-verify-pages")

    def wait_for_rest(self) -> None:
        """Waits until all but pages of memory is compared; DamagedImage: it is not what was committed."""
        self._rest.wait()
        self._work.check()

    def wait(self) -> None:
        """Waits until all is compared; DamagedImage: it is not what was committed."""
        self.compared()
        self._work.check()

    def compared(self) -> None:
        """The same where it is too late to cancel: what was compared and is right stays so."""
        self._rest.wait()
        self._pages.wait()

    def is_set(self) -> bool:
        """Whether to stop: what verifying takes as ``cancel=``."""
        return self._stop.is_set() or self._work.stop_asked()

    def __enter__(self) -> Checked:
        if self._asked_for:
            self._rest.start(self._compare_rest)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._rest.settle()
        self._pages.settle()

    def _compare_rest(self) -> None:
        self._compare("rest")
        self._pages.start(lambda: self._compare("pages"))

    def _compare(self, part: Part) -> None:
        with self._work.timed("verify", "verifying", total=self._image.manifest.host_bytes):
            verify_image(self._image, self._work.progress, cancel=self, read_chunks=False, part=part).check()


class Returning(Op):
    """One restore under way."""

    def __init__(
        self, work: Work, verb: Verb, image: Image, facts: ImageFacts, options: Options, program: Criu, checked: Checked
    ):
        super().__init__(work, facts.members)
        self.verb = verb
        self.members = facts.members  # CRIU brings them back: each gets the identity that it has then
        self.checked = checked
        self.image, self.facts, self.options, self.program = image, facts, options, program
        self.manifest = image.manifest
        self.remade: shm.Remade | None = None
        self.root: Identity | None = None
        self.criu_process: Identity | None = None
        self.stats: dict[str, float] = {}
        self.loading: Loading | None = None
        self.shut: list[Member] = []  # those that had nothing to park, and were held still
        self.gates = Gates(work)
        self.looked: Looked | None = None
        self.cut_back: list[Rewind] = []
        self.noted = False  # what it sees of the GPUs
        self.log = self.manifest.job.log or ""  # where its output goes

    @property
    def shims(self) -> Mapping[int, Shim]:
        return self.loading.connections if self.loading is not None else {}

    def run(self) -> RestoreResult:
        work = self.work
        gpus = room.needs(self.members)
        work.begin(self.members, image=str(self.image.path), gpus=gpus, check=self.look_again, **self.claims())
        run(self.verb, self)
        if self.loading is not None:  # it runs: nothing that comes now is a reason to end it
            with contextlib.suppress(LimosaError, OSError, EOFError):
                self.loading.release()
        assert self.root is not None
        name = self.keep_record()
        if name != self.manifest.job.name and self.manifest.container is None:
            text = f"another job is called {self.manifest.job.name!r}: this one is called 'restored-{self.root.pid}'"
            work.warnings.append(Reason(id="name-taken", text=text, pid=self.root.pid))
        return RestoreResult(
            pid=self.root.pid,
            id=self.image.id,
            image=str(self.image.path),
            name=name,
            log=self.log,
            way=Route.PARKED if self.loading is not None else Route.DRIVER if self.members else Route.HOST,
            other=self.verb.other_way(shape_of(self.facts, self.manifest, self.options)),
            device_bytes=self.manifest.device_bytes,
            map={a: b for m in self.members for a, b in m.map.items()},
            gpus=room.places(self.members),
            stats=self.stats,
            warnings=[*work.warnings, *(r for r in self.facts.reasons if not r.refuses)],
        )

    def keep_record(self) -> str:
        """Makes the job known again; returns what it is called."""
        assert self.root is not None
        return keep_record(self.manifest, self.root)

    def show_gpus(self) -> None:
        """Notes what the job is to see, where ``limosa run --gpus`` hides GPUs from it; PermissionDenied: not yours."""
        job = self.manifest.job
        if not device_nodes.known(job.sees):
            return
        # Whoever finds the record of the job that was ended would take the file for that one's and remove it.
        RunRecord(root=Identity(job.pid, self.manifest.tree[0].start_time), name="", command=[]).forget()
        self.noted = True
        text = f"what the job sees of the GPUs cannot be noted in {job.sees}"
        if device_nodes.owner(job.sees) not in (job.uid, os.geteuid()):
            raise PermissionDenied(detail=f"{text}: that is neither its user's nor yours")
        wanted = {m.nodes[u] for m in self.members for u in m.map.values() if u in m.nodes}
        if not self.members:  # it has not come to use one
            with contextlib.suppress(LimosaError):
                nodes = minors(gpu.inventory())
                wanted = {nodes[u] for u in job.seen if u in nodes}
        try:
            if wanted and not device_nodes.show(job.sees, wanted):
                self.work.warnings.append(Reason(id="gpus-not-hidden", text=f"{text}: it sees all of them"))
        except OSError as error:
            raise PermissionDenied(detail=f"{text}: {error.strerror}") from error

    def verified(self) -> None:
        """Waits for what has to be compared before CRIU is started."""
        self.checked.wait_for_rest()

    def hide_gpus(self) -> None:
        if self.noted:
            device_nodes.forget(self.manifest.job.sees)

    def rewind(self) -> None:
        for rewind in self.facts.rewind:
            self.cut_back.append(rewind)
            self.work.note(Noted.REWIND, Phase.BEGIN, **msgspec.to_builtins(rewind))
            rewind.do()

    def wind_forward(self) -> None:
        while self.cut_back:
            self.cut_back.pop().undo()

    def load(self) -> None:
        work = self.work
        self.loading = Loading(work, self.image, self.members, self.gates)
        self.loading.prepare()
        self.loading.copy()
        if work.claim is not None:  # it is taken now: nobody needs to keep it free
            work.claim.gpus = room.needs(self.members)
            work.claim.save()

    def unload(self) -> None:
        if self.loading is not None:
            self.loading.back()

    def make_names(self) -> None:
        if not self.manifest.shm:
            return
        self.remade = shm.Remade(self.manifest.shm, self.image.criu_fd, self.work.check)
        names, lost = shm.to_note(self.remade.names), shm.to_note(self.remade.lost)
        self.work.note(Noted.NAMES, Phase.BEGIN, names=names, lost=lost)
        self.remade.put()

    def take_names_away(self) -> None:
        if self.remade is not None:
            self.remade.undo()

    def claims(self) -> dict[str, Any]:
        """What ``Work.begin`` is to claim besides: as the pids of the image, it is this restore's alone."""
        return {}

    def look_again(self) -> None:
        """What others may have done since it was looked at, now that they see the claim."""
        try:
            there = os.path.samestat(os.stat(self.image.path), os.fstat(self.image.fd))
        except OSError:
            there = False
        if not there:  # ``rm`` was faster
            raise NoSuchImage(path=self.image.path)
        if self.members:
            idle.refuse_shortage(self.work.driver, self.members, self.work.id)

    def criu(self) -> None:
        with stand_ins(self.image.criu_fd) as inherit:
            self._run_criu(inherit)
        if self.remade is not None:
            self.remade.done()

    def _run_criu(self, inherit: Mapping[str, int]) -> None:
        work, given = self.work, self.manifest.options
        options = RestoreOptions(
            tcp_established=bool(given.get("tcp_established")) or self.options.tcp_established,
            tcp_close=bool(given.get("tcp_close")) or self.options.tcp_close,
            shell_job=bool(given.get("shell_job")) or self.options.shell_job,
            file_locks=bool(given.get("file_locks")) or self.options.file_locks,
            ext_unix_sk=bool(given.get("ext_unix_sk")),
            cgroup=self.options.cgroup,
            inherit=inherit,
        )
        if self.options.adopt:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if self.members:
            work.driver.warm()  # cuInit takes half a second; CRIU works meanwhile
        self.looked = Looked(self.image)  # the last thing before CRIU opens them
        if os.geteuid() == 0 and self.program.plugin_dir is None:
            self.looked.need_guard()
        work.note(Noted.CRIU_RESTORE, Phase.BEGIN, self.manifest.job.pid)
        log_fd = self.image.open_log()
        try:
            pid = criu_restore(
                self.program,
                self.image.criu_fd,
                log_fd,
                options,
                on_action=self._on_action,
                on_start=self._started,
                timeout=work.left,
                cancel=work.cancel,
                locks=locks.for_plugin(self.manifest),
                user=(self.manifest.job.uid, groups_of(self.manifest.job.uid, self.manifest.job.gid)),
            )
        except CriuFailed as error:
            if error.fields.get("kind") in (None, "", "image-damaged"):
                self._refuse_damaged()
            work.check()
            told = self._in_words(error)
            if told is error:
                raise
            raise told from error
        finally:
            self.stats = restore_stats(log_fd) if self.options.print_stats else {}
            os.close(log_fd)
        self.checked.compared()  # where CRIU has not asked at the end
        work.armed()
        self._note_root(pid)

    def _refuse_damaged(self) -> None:
        """What CRIU could not read may not be what was committed: then that is what is told."""
        try:
            self.checked.wait()
        except DamagedImage:
            raise
        except LimosaError:
            pass

    def _in_words(self, error: CriuFailed) -> LimosaError:
        """What CRIU has failed for, where we know more of it than CRIU says."""
        kind = error.fields.get("kind")
        if kind == "port-taken" and (taken := [r for r in ports.in_the_way(self.image.criu_fd) if r.refuses]):
            return Refused(taken)
        if kind == "exchanged":
            text = str(error.fields["reason"])
            return Refused([Reason(id="file-changed", text=text, exit_code=23, hint=TRIED_AGAIN)])
        assert self.looked is not None
        if reasons := self.looked.in_the_way(f"{error.fields.get('reason')} {error.fields.get('raw')}"):
            return Refused(reasons)
        error.hint = "nothing was started; the image is as it was"
        return error

    def half_made(self) -> list[int]:
        """The pids that a CRIU which was killed may have left processes under."""
        return [p.pid for p in self.manifest.tree]

    def here(self, pid: int) -> int:
        """What a process of the image is called here."""
        return pid

    def _note_root(self, pid: int) -> None:
        """Journals and claims what there is of the job now, and lets those go on that were stopped."""
        work = self.work
        try:
            self.root = Identity.of(pid)
        except LimosaError:
            raise FailedUndone(
                what="restore", detail=f"process {pid} was restored and ended at once", hint="see the job's own log"
            ) from None
        for member in self.members:
            member.identity = Identity.of(self.here(member.pid))
        work.note(Noted.CRIU_RESTORE, Phase.DONE, pid, root=self.root.to_str())
        assert work.journal is not None
        work.journal.header.roots = [self.root]
        work.journal.rewrite_header()
        assert work.claim is not None
        work.claim.pids = job_tree(self.root)
        work.claim.save()
        if self.members:
            for stopped_pid in let_go_on(work.claim.pids):
                text = f"process {stopped_pid} was stopped when it was written to disk; it goes on"
                work.warnings.append(Reason(id="was-stopped", text=text, pid=stopped_pid))
            return
        for identity in stopped(work.claim.pids):
            text = f"process {identity.pid} is stopped, as it was when it was written to disk"
            hint = f"kill -CONT {identity.pid}"
            work.warnings.append(Reason(id="comes-back-stopped", text=text, hint=hint, pid=identity.pid))

    def _on_action(self, action: str) -> bool:
        """What is looked at in CRIU's steps: nothing runs yet; at "pre-resume" it does not ask any more."""
        if action == "post-restore" and self.looked is not None:
            self.looked.check()
            self.checked.wait()
        if action == "pre-resume":
            locks.see_all_there(self.manifest, self.criu_process)
        return True

    def _started(self, who: Identity) -> None:
        self.criu_process = who
        self.work.note(Noted.CRIU_RESTORE, Phase.NOTE, who.pid, criu=who.to_str())

    def restore(self) -> None:
        """Has the driver restore what it carries, once all came back as they should."""
        for member in self.members:
            state = driver_steps.settled_state(self.work.driver, member.pid, self.work.progress)
            if state != gpu.State.CHECKPOINTED:
                raise FailedUndone(what="restore", detail=f"process {member.pid} came back {state or 'without CUDA'}")
        self.work.check()
        if self.loading is not None:
            self.loading.check()
        come = self.loading.pids if self.loading is not None else set()
        for member in self.members:
            if member.pid in come or not under_shim(member.pid):
                continue
            stand = stand_of(member)
            if stand is Stand.AWAY:
                text = "its device memory is not in the image as chunks: an unreleased version of Limosa wrote it"
                raise FailedUndone(what="restore", detail=text)
            if stand is Stand.CLOSED:
                self.shut.append(member)
        with self._copy_is_the_image():
            driver_steps.restore(self.work, self.members)

    def unlock(self) -> None:
        driver_steps.unlock(self.work, self.members)

    def all_loaded(self) -> None:
        assert self.loading is not None
        with self._copy_is_the_image():
            self.loading.wait()

    def arrive(self) -> None:
        if self.loading is not None:
            self.loading.arrive()
            self.loading.open()
        if self.shut:
            self.gates.open_all(self.shut)

    @contextlib.contextmanager
    def _copy_is_the_image(self) -> Iterator[None]:
        """Says where the copy is where there is no room."""
        try:
            yield
        except NoRoomOnGpu as error:
            error.hint = f"the tree was ended again; {self.image.path} is the copy"
            raise

    def end_tree(self) -> None:
        self.unload()  # the library in the job serves one at a time
        if self.gates.opened:  # the job may run
            raise gate_was_opened("restore")
        with open_image(self.image.path, trust=False):
            pass  # it is the copy: without it nothing is ended
        if self.root is not None:
            # Those that were not to be restored yet are as CRIU has made them, whether or not the driver can be asked.
            journal = self.work.journal
            awake = [m for m in self.members if journal is None or journal.began(Noted.RESTORE, m.pid)]
            end_tree(self.work.driver, self.root.pid, awake, self.work.started, self.root)
        elif self.criu_process is not None:
            # CRIU has said no root: what it has made, and only that, is under its own session or the image's pids.
            leftovers.end_unfinished(self.criu_process, self.half_made())
