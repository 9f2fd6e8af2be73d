"""The options of ``checkpoint``, and those that CRIU gets for them."""

from __future__ import annotations

import os
from collections.abc import Collection

import msgspec

from limosa.errors import UsageError
from limosa.image.chunks import LEAST_CHUNK, MOST_CHUNK, USUAL_CHUNK
from limosa.operation.options import check_force
from limosa.process import hazards
from limosa.process.criu.run import DumpOptions
from limosa.process.observe import JobObservation


class Options(msgspec.Struct, kw_only=True, frozen=True):
    """What ``checkpoint`` can be told; names as CRIU and podman have them."""

    output: str | os.PathLike[str]  # the image's folder
    leave_running: bool = False  # the job runs on
    # connections to processes outside the tree are kept in the image (and cut until restored)
    tcp_established: bool = False
    tcp_close: bool = False  # such connections are closed in the restored job
    shell_job: bool = False  # the job is attached to a terminal
    file_locks: bool = False  # dump file locks
    # largest deleted file, in bytes, that goes into the image; None: as large as the job has them
    ghost_limit: int | None = None
    link_remap: bool = False  # give files that lost a name and have another one of CRIU's, for one restore
    # TCP connections that the job has not accepted yet are left out; their clients connect again
    skip_in_flight: bool = False
    ext_unix_sk: bool = False  # datagram unix sockets are connected anew to the name outside that they send to
    criu: str | None = None  # CRIU's path
    # bytes a second for what is copied while the job runs (parked way); None: as fast as it goes
    rate: float | None = None
    # how often device memory is copied while the job runs, at most (parked way); None: for as long as what has changed
    # becomes less; 0: everything is copied in the pause
    rounds: int | None = None
    chunk_bytes: int = USUAL_CHUNK  # size of the chunks that device memory is cut into
    print_stats: bool = False  # fill in the result's ``stats``
    max_pause: float | None = None  # this and the next as for ``move``
    force: Collection[str] = ()

    def __post_init__(self) -> None:
        check_force(self.force)
        if not LEAST_CHUNK <= self.chunk_bytes <= MOST_CHUNK or self.chunk_bytes % (2 << 20):
            raise UsageError(detail="a chunk has 4 to 64 MiB, a multiple of 2 MiB")
        if self.rate is not None and self.rate <= 0:
            raise UsageError(detail="a rate is more than nothing")
        if self.rounds is not None and self.rounds < 0:
            raise UsageError(detail="rounds are 0 or more")


def dump_options(options: Options, observation: JobObservation) -> DumpOptions:
    """What CRIU is told: the user's options and what the job needs without anybody's permission.

    The limit for files without a name is what the job has; the user's value is a cap on it.
    """
    needs = hazards.checkpoint_needs(observation)
    limit = needs.ghost_limit
    if options.ghost_limit is not None:
        limit = min(limit, options.ghost_limit)
    return DumpOptions(
        leave_running=options.leave_running,
        tcp_established=options.tcp_established or (needs.tcp_established and not options.tcp_close),
        tcp_close=options.tcp_close,
        shell_job=options.shell_job or needs.shell_job,
        file_locks=options.file_locks,
        ghost_limit=limit,
        link_remap=options.link_remap,
        skip_in_flight=options.skip_in_flight,
        ext_unix_sk=options.ext_unix_sk,
    )
