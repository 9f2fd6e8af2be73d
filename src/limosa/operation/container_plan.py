"""A job that is a container: which runtime writes it to disk, and what stands against that."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import termios
from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from limosa.containers import Container, Containers
from limosa.containers.freezer import cannot_be_traced, freezer_of
from limosa.containers.published import Published
from limosa.containers.runtime import PRIVATE, SHARES, Contained, Runtime, check_name
from limosa.containers.runtimes import known, runtime_of
from limosa.errors import InvalidArgument, LimosaError, Reason
from limosa.image import ContainerRecord
from limosa.operation import clones
from limosa.operation.container_gpus import RECORD
from limosa.operation.journal import Member
from limosa.process.identity import Identity
from limosa.process.namespaces import is_ours
from limosa.process.observation import FdObservation, JobObservation, ProcessObservation
from limosa.process.openat import closing
from limosa.process.slurp import lines
from limosa.process.tree import descendants, job_tree, snapshot

# What is so of every container, or what its runtime sees to.
_RUNTIMES_OWN = {"mount-namespace", "pid-namespace", "session", "session-outside", "terminal", "pty-outside"}
_STANDARD = (0, 1, 2)
_DRIVERS = "/dev/nvidia"
_LISTENS = b"0A"
_MOST_SOCKETS = 1 << 20  # of a table; those that listen come first in it
_MOST_SAID, _MOST_TRIED = 16, 2000  # ports
_SAID = {
    errno.EADDRINUSE: ("port-taken", "somebody has it", "end who has it (ss -lntup)"),
    errno.EADDRNOTAVAIL: ("address-missing", "it does not have that address", "give it the address (ip address add)"),
}


class Boxed(NamedTuple):
    """A container that is a job."""

    runtime: Runtime
    container: Container
    contained: Contained
    freezer: str  # the folder of the cgroup by which it is frozen


def boxed(root: Identity, *, leave_running: bool) -> tuple[Boxed | None, list[Reason]]:
    """Return the container whose first process a job's topmost one is, and what stands against writing it to disk.

    None without a reason: it is in no container that a runtime here notes.

    Args:
        root: the process.
        leave_running: whether it goes on afterwards.
    """
    if is_ours(root.pid, "mnt"):
        return None, []
    containers = Containers()
    container = containers.of(root.pid)
    if container is None:
        return None, []
    if container.init != root:
        text = f"process {root.pid} is a part of container {container.called}, which goes to disk as a whole"
        return None, [_refused("container-part", text, f"name the container: {container.called}", root)]
    try:
        runtime = runtime_of(container.runtime)
        contained = known(runtime, container)
    except LimosaError as error:
        return None, [_refused("container-runtime", str(error), error.hint, root)]
    freezer = freezer_of(root, container)
    sharing = containers.sharing(root.pid)
    against = [*_shared_cgroup(root, container, sharing), *_against(root, contained, freezer, leave_running)]
    return Boxed(runtime, container, contained, freezer), against


def _shared_cgroup(root: Identity, container: Container, sharing: Sequence[Container]) -> list[Reason]:
    """Held still by its cgroup, another would be as well."""
    others = [one.called for one in sharing if one.init != root]
    text = f"container {container.called} has its control group together with {', '.join(others)}"
    return [_refused(SHARES, text, "start them with different linux.cgroupsPath", root)] if others else []


def _against(root: Identity, contained: Contained, freezer: str, leave_running: bool) -> list[Reason]:
    found = [_refused(id_, f"{contained.name}: {why}", "", root) for id_, why in contained.against]
    if contained.stays and not leave_running:
        text = f"container {contained.name} would not end: {contained.stays}"
        found.append(_refused("container-restarts", text, "--leave-running", root))
    if os.geteuid() or not is_ours(root.pid, "user"):
        text = f"container {contained.name} is rootless: it has a user namespace, which does not come back as it was"
        found.append(_refused("container-rootless", text, "root's containers can be written to disk", root))
    if not freezer:
        text = f"container {contained.name} has no control group of its own by which it could be held still"
        found.append(_refused("container-cgroup", text, "", root))
    for identity in cannot_be_traced(freezer, job_tree(root)) if freezer else []:
        found.append(_refused("container-stopped", *stopped_words(identity), identity))
        break
    outside = _started_from_outside(root)
    if outside:
        text = f"process {outside[0]} was started in container {contained.name} from outside, and CRIU would not see it"
        found.append(_refused("container-exec", text, "let it end (podman exec, runc exec)", root))
    return found


def stopped_words(identity: Identity) -> tuple[str, str]:
    """Say that a process of a container is stopped, and what helps."""
    text = f"process {identity.pid} is stopped, and CRIU cannot write it from a container that is frozen by version 1 "
    return text + "of control groups", f"kill -CONT {identity.pid}"


def _started_from_outside(root: Identity) -> list[int]:
    """Processes of a container that none of it has started."""
    processes = snapshot()
    if root.pid not in processes:
        return []
    seen = set(descendants(root.pid, processes))
    mine = os.stat(f"/proc/{root.pid}/ns/pid").st_ino
    found = []
    for pid in processes:
        if pid not in seen and not is_ours(pid, "pid"):
            try:
                if os.stat(f"/proc/{pid}/ns/pid").st_ino == mine:
                    found.append(pid)
            except OSError:
                continue
    return found


def return_reasons(record: ContainerRecord, name: str | None, bundle: str | None) -> list[Reason]:
    """Return what stands against bringing a container back, and what is to be known of it.

    Args:
        record: what the image says of it.
        name: what it is to be called; None for what it was called.
        bundle: its bundle, where that is to be another.
    """
    called = name if name is not None else record.name
    try:
        check_name(called)
        runtime = runtime_of(record.runtime)
        against = runtime.against_return(record, called, bundle or "")
    except LimosaError as error:
        id_ = "container-name" if isinstance(error, InvalidArgument) else "container-runtime"
        return [Reason(id=id_, text=str(error), exit_code=error.exit_code, hint=error.hint)]
    found = [Reason(id=id_, text=text, exit_code=23, hint=hint) for id_, text, hint in against]
    if not found:
        found += clones.in_the_way(record, runtime, runtime.bundle_of(record, bundle or ""))
    if os.geteuid():
        found.append(Reason(id="permission", text="only root can bring a container back", exit_code=11, hint="sudo"))
    return [*found, *_of_ports(record)]


def _of_ports(record: ContainerRecord) -> list[Reason]:
    """Ports of the machine that are the container's, and addresses that the machine does not have."""
    against = [(str(port), errno.EADDRINUSE) for port in sorted(listened_on(record.ports))]
    for word in record.published[:_MOST_TRIED]:
        one = Published.of(word)
        if one is not None and (code := one.against()) in _SAID:
            against.append((word, code))
    another = ", or name another (--publish)" if record.network == PRIVATE else ""
    found = []
    for port, code in against[:_MOST_SAID]:
        id_, why, hint = _SAID[code]
        text = f"port {port} of the machine is the container's, and {why}"
        found.append(Reason(id=id_, text=text, exit_code=23, hint=hint + another))
    return found


def record_stays(record: ContainerRecord, name: str | None, members: Collection[Member]) -> list[Reason]:
    """Say what a container that comes back on other GPUs would get if its runtime started it again.

    Args:
        record: what the image says of it.
        name: what it is to be called; None for what it was called.
        members: its processes that use GPUs.
    """
    if not any(m.changes_gpu for m in members):
        return []
    called = name if name is not None else record.name
    if record.runtime == "containerd":  # which is told as soon as it runs
        return [record_changes(called)]
    text = f"{record.runtime}'s record of {called} still says the GPUs that it had: started again, it gets those"
    return [Reason(id=RECORD, text=text)]


def record_changes(called: str, why: str = "") -> Reason:
    """Say what containerd's record of a container that comes back on other GPUs says; ``why`` it was not told."""
    gets = "is told of its new GPUs: started again, it gets those"
    if why:
        gets = f"still says the GPUs that it had (containerd cannot be told: {why}): started again, it gets those"
    return Reason(id=RECORD, text=f"containerd's record of {called} {gets}")


def listened_on(ports: Collection[int]) -> set[int]:
    """Return those of some TCP ports on which somebody listens on the machine.

    An image may name every port that there is: the kernel's tables are read once, for all of them.

    Args:
        ports: the ports.
    """
    wanted, found = set(ports), set[int]()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6") if wanted else ():
        with contextlib.suppress(OSError):
            for line in itertools.islice(lines(table), _MOST_SOCKETS):
                fields = line.split()
                if len(fields) > 3 and fields[3] == _LISTENS and (port := int(fields[1][-4:], 16)) in wanted:
                    found.add(port)
    return found


def _refused(id_: str, text: str, hint: str, root: Identity) -> Reason:
    return Reason(id=id_, text=text, exit_code=13, hint=hint, pid=root.pid)


def unread_input(root: Identity) -> list[Reason]:
    """Say how much was written to a container's standard input and not read yet: it does not come along.

    The container may have put anything there. So what is opened for reading is a pipe without a name, and the very one
    that was looked at.
    """
    waiting = array("i", [0])
    with contextlib.suppress(OSError), closing(os.open(f"/proc/{root.pid}/fd/0", os.O_PATH | os.O_CLOEXEC)) as fd:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:["):
            with closing(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as pipe:
                fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    if waiting[0] <= 0:
        return []
    text = f"{waiting[0]} bytes that were written to its standard input were not read yet: they do not come along"
    return [Reason(id="container-input", text=text, hint="write them again after the restore", pid=root.pid)]


def as_seen_by_criu(observation: JobObservation) -> JobObservation:
    """Return what is known of a job without what its runtime sees to: the pipes that its first process began with."""
    first = observation.process(observation.root)
    own = {fd.inode for fd in first.fds if fd.fd in _STANDARD and fd.kind in ("pipe", "fifo")}

    def kept(process: ProcessObservation) -> list[FdObservation]:
        return [fd for fd in process.fds if fd.kind not in ("pipe", "fifo") or fd.inode not in own]

    processes = [msgspec.structs.replace(process, fds=kept(process)) for process in observation.processes]
    return msgspec.structs.replace(observation, processes=processes)


def hazards_of(found: Sequence[Reason], observation: JobObservation) -> list[Reason]:
    """Return what stands against a container's dump, of what stands against any job's, and what is its own."""
    reasons = [r for r in found if r.id not in _RUNTIMES_OWN]
    # Its hint is an option that containers do not have.
    reasons = [msgspec.structs.replace(r, hint="close the file") if r.id == "link-remap" else r for r in reasons]
    return reasons + list(_outside_files(observation))


def _outside_files(observation: JobObservation) -> Collection[Reason]:
    """Files of the machine that it has open: what it was started with went to a file, say."""
    for process in observation.processes:
        for fd in process.fds:
            # What a job was given of a software GPU's memory is a file outside as well; the shim lets go of it before.
            if fd.kind == "file" and not fd.mounted and not fd.target.startswith(_DRIVERS):
                text = f"descriptor {fd.fd} of process {process.title} is {fd.target}, a file outside of its container"
                hint = "start it with a pipe for its output (podman does), or write to a file inside"
                reason = Reason(id="container-file", text=text, exit_code=13, hint=hint, pid=process.pid)
                return [reason]
    return []
