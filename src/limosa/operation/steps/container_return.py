"""A restore of a container: its runtime makes it of the image, with Limosa's CRIU; what else is done is the same.

The container's /dev comes back as it was, with the device node of the GPU that it had. Before the driver brings the
device memory back, the nodes and what its cgroup allows become those of the GPUs that it is to be on, and afterwards
those alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from limosa import start
from limosa.containers import Containers
from limosa.containers.runtime import Contained, Kept
from limosa.containers.runtimes import runtime_of
from limosa.errors import FailedUndone, LimosaError, NoWorkingCriu, Reason, Refused, UndoFailed
from limosa.image import Image
from limosa.operation import clones, container_gpus, container_options, container_plan
from limosa.operation.journal import Noted, Phase
from limosa.operation.leftovers import keep_log
from limosa.operation.restore_options import ImageFacts, Options
from limosa.operation.step import Verb
from limosa.operation.steps.returning import Checked, Returning
from limosa.operation.work import Work
from limosa.process import sees_inside
from limosa.process.criu.lent import lent, work_folder
from limosa.process.criu.program import Criu
from limosa.process.criu.run import RESTORE_LOG
from limosa.process.identity import Identity
from limosa.process.launch import open_log
from limosa.process.namespaces import Pids


class ContainerReturning(Returning):
    """One restore of a container under way."""

    def __init__(
        self, work: Work, verb: Verb, image: Image, facts: ImageFacts, options: Options, program: Criu, checked: Checked
    ):
        super().__init__(work, verb, image, facts, options, program, checked)
        assert self.manifest.container is not None
        self.record = container_options.as_asked(self.manifest.container, options)
        self.runtime = runtime_of(self.record.runtime)
        self.called = options.name if options.name is not None else self.record.name
        self.bundle = self.runtime.bundle_of(self.record, options.bundle or "")
        self.made_as = self.runtime.made_as(self.called, work.id, self.record)
        self.contained: Contained | None = None
        self.volumes: list[str] = []  # that it makes
        self.began = 0.0
        self.log = ""
        self.keeper: subprocess.Popen[bytes] | None = None  # of its output

    def claims(self) -> dict[str, Any]:
        """The image is only read: others may make containers of it at the same time, under other names."""
        names, uses = self.runtime.alone(self.record, self.called, self.bundle)
        if clones.ID not in self.options.force:  # two clones that would share it are not made at the same moment
            names = [*names, *clones.claimed(self.record, self.runtime, self.bundle)]
        return {"shared": True, "names": names, "uses": uses}

    def look_again(self) -> None:
        super().look_again()
        if since := self.runtime.taken_since(self.record, self.called, self.bundle):
            raise Refused([Reason(id=id_, text=text, exit_code=23, hint=hint) for id_, text, hint in since])
        if clones.ID not in self.options.force and (
            shared := clones.in_the_way(self.record, self.runtime, self.bundle)
        ):
            raise Refused(shared)

    def verified(self) -> None:
        """All of it: what CRIU has restored is running when the runtime has ended."""
        self.checked.wait()

    def criu(self) -> None:
        work, given = self.work, self.manifest.options
        if self.program.plugin_dir is None:
            text = "files are opened by names that a container could change, and Limosa's plugin is not built"
            raise NoWorkingCriu(detail=text, hint="limosa doctor --fix builds it")
        if self.members:
            work.driver.warm()
        self.volumes, self.began = self.runtime.to_make(self.record), time.time()
        work.note(
            Noted.CRIU_RESTORE,
            Phase.BEGIN,
            runtime=self.record.runtime,
            program=self.runtime.program,
            configured=self.runtime.configured,
            notes=self.runtime.notes,
            made=self.made_as,
            bundle=self.bundle,
            volumes=self.volumes,
            called=self.called,
        )
        output = self._kept_in(self.options.log) if self.options.log is not None else None
        options = self.options
        chosen = {
            "--tcp-close": given.get("tcp_close") or options.tcp_close,
            "--tcp-established": given.get("tcp_established") or options.tcp_established,
            "--file-locks": given.get("file_locks") or options.file_locks,
            "--ext-unix-sk": given.get("ext_unix_sk"),
        }
        extra = [word for word, is_chosen in chosen.items() if is_chosen]
        try:
            with (
                lent(self.program, extra, operation=work.id, restores=True) as folder,
                self._logs(folder) as log_fd,
            ):
                kept = Kept(
                    criu_folder=folder,
                    images_fd=self.image.criu_fd,
                    work_fd=log_fd,
                    tcp_established=bool(chosen["--tcp-established"]),
                    file_locks=bool(chosen["--file-locks"]),
                    ext_unix_sk=bool(chosen["--ext-unix-sk"]),
                    stats=self.options.print_stats,
                    output=output if output is not None else subprocess.DEVNULL,
                    own_name=self.called == self.record.name,
                    publish=tuple(self.options.publish),
                    on_start=self._started,
                    tick=work.check,
                )
                self.contained = self.runtime.bring_back(self.record, self.made_as, self.bundle, kept)
                self.stats = dict(self.contained.stats)
                if output is not None and not _writes_to(self.contained.init, output):
                    self.log = ""
                work.note(Noted.CRIU_RESTORE, Phase.NOTE, made=self.contained.id, run=self.contained.run)
                self.runtime.rename(self.contained, self.called)
        finally:
            if output is not None:
                os.close(output)
        work.armed()
        assert self.contained.init is not None
        self._note_root(self.contained.init.pid)

    @contextlib.contextmanager
    def _logs(self, folder: str) -> Iterator[int]:
        """A folder for CRIU's log: nothing is written into the image. What says why it failed is kept."""
        with work_folder(folder) as fd:
            try:
                yield fd
            except FailedUndone as error:
                with contextlib.suppress(OSError):
                    os.stat(RESTORE_LOG, dir_fd=fd, follow_symlinks=False)
                    error.hint = error.hint or f"CRIU's log is {keep_log(fd, RESTORE_LOG, self.work.id)}"
                raise

    def _kept_in(self, path: str | os.PathLike[str]) -> int:
        """Return a pipe whose other end goes to a file, for as long as anybody has it.

        CRIU opens anew what is in the place of the container's own pipe: a file would be written from its beginning.
        """
        program = start.program("cat")
        if program is None:
            raise FailedUndone(what="restore", detail="there is no program cat on the PATH that only root can change")
        log = open_log(path)
        reader, writer = os.pipe()
        try:
            self.keeper = start.popen(
                [program], stdin=reader, stdout=log.fd, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
            os.close(log.fd)
        self.log = str(log.path)
        return writer

    def half_made(self) -> list[int]:
        return []  # the image's pids are of its own namespace, and its runtime takes away what it has made

    def here(self, pid: int) -> int:
        assert self.root is not None
        return Pids(self.root.pid).here(pid)

    def _note_root(self, pid: int) -> None:
        found, made = Containers().of(pid), self.contained
        if found is None or made is None or (found.id, found.init) != (made.id, made.init):
            text = f"{self.runtime.name} says that process {pid} is its first one, and its control group is another's"
            raise FailedUndone(what="restore", detail=text)
        super()._note_root(pid)

    def restore(self) -> None:
        assert self.root is not None
        with _its_devices():
            container_gpus.give(self.root, self.members)
            self._show_those()
        super().restore()
        with _its_devices():
            container_gpus.keep_only(self.root, self.members)

    def _show_those(self) -> None:
        """Shows them to those from which ``limosa run --gpus`` in the container hides the others."""
        for member in self.members:
            if path := sees_inside.file_of(member.pid):
                seen = [member.nodes[uuid] for uuid in member.map.values() if uuid in member.nodes]
                sees_inside.show(member.identity, path, seen)

    def end_tree(self) -> None:
        """The container is taken away again; the image is the copy."""
        failed: LimosaError | None = None
        try:
            super().end_tree()
        except UndoFailed as error:
            failed = error  # its runtime may still do it
        if not self.gates.opened:
            self.runtime.remove_made(self.made_as, self.bundle, self.work.id)
            if self.contained is not None and self.contained.id != self.made_as:
                self.runtime.remove_made(self.contained.id, self.bundle, "")
            self.runtime.remove_volumes(self.volumes, self.began - 1, time.time())
        if failed is not None and self.root is not None and self.root.alive():
            raise failed

    def keep_record(self) -> str:
        assert self.root is not None
        clones.keep_record(self.record, self.root)
        self._tell_runtime(self.root)
        return f"{self.runtime.name}:{self.called}"

    def _tell_runtime(self, root: Identity) -> None:
        """Tells containerd of other GPUs than the container had; what it says takes the place of what the plan said."""
        if self.record.runtime == "containerd" and any(r.id == container_gpus.RECORD for r in self.facts.reasons):
            self.facts.reasons = [r for r in self.facts.reasons if r.id != container_gpus.RECORD]
            if why := container_gpus.tell_returned(root, self.members):
                self.facts.reasons.append(container_plan.record_changes(self.called, why))

    def _started(self, who: Identity) -> None:
        self.work.note(Noted.CRIU_RESTORE, Phase.NOTE, who.pid, criu=who.to_str())


@contextlib.contextmanager
def _its_devices() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise FailedUndone(what="restore", detail=f"the container's devices: {error.strerror}{where}") from error


def _writes_to(init: Identity | None, pipe: int) -> bool:
    """Whether a container's output goes to a pipe: only one that was on a pipe before is given this one by CRIU."""
    if init is None:
        return False
    for number in (1, 2):
        with contextlib.suppress(OSError):
            # By its name: looking at the file itself would go to a file system of the container's.
            if os.readlink(f"/proc/{init.pid}/fd/{number}") == os.readlink(f"/proc/self/fd/{pipe}"):
                return True
    return False
