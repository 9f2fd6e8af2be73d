"""Programs of all kinds start under the shim as they did: other C libraries, static, setuid, those that close files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from soft_node import Node
from softgpu.far import Far

from limosa.errors import LimosaError
from limosa.native.build import SHIM
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

MIB = 1 << 20
pytestmark = pytest.mark.timeout(300)
IN_MUSL = """
__errno_location _exit accept4 bind calloc clock_gettime close closedir connect dl_iterate_phdr dladdr
dlopen fcntl free fstat ftruncate secure_getenv geteuid getpid getrandom getrlimit getsockname getsockopt listen madvise
malloc memchr memcmp memcpy memmove mremap munmap nanosleep open opendir poll prctl pthread_attr_destroy
pthread_attr_init
pthread_attr_setdetachstate pthread_attr_setstacksize pthread_cond_broadcast pthread_cond_init pthread_cond_signal
pthread_cond_timedwait pthread_cond_wait pthread_condattr_init pthread_condattr_setclock pthread_create pthread_join
pthread_key_create pthread_mutex_init pthread_mutex_lock pthread_mutex_timedlock pthread_mutex_unlock pthread_once
pthread_setcancelstate pthread_setspecific pthread_sigmask qsort read readdir realloc recv recvmsg sched_yield
send sendmsg setrlimit setsockopt shutdown sigfillset snprintf socket strcmp strdup strlen strncmp strnlen strrchr
dlerror strstr syscall
"""
"""What the shim asks of a C library, all of which musl has, too: it is looked up where musl is installed."""


def says(library: Path, program: Path, **options: object) -> tuple[int, str, str]:
    env = {**os.environ, "LD_PRELOAD": str(library)}
    ran = subprocess.run([program], env=env, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload]
    return ran.returncode, ran.stdout, ran.stderr


def test_an_ordinary_program_has_it(library: Path, compiled: Callable[..., Path]) -> None:
    assert says(library, compiled("mapped.c")) == (0, "mapped\n", "")


def test_a_static_program_runs_without_it(library: Path, compiled: Callable[..., Path]) -> None:
    assert says(library, compiled("mapped.c", "-static")) == (0, "not mapped\n", "")


@pytest.mark.parametrize(
    "flags",
    [("address", "-static-libasan"), ("thread", "-static-libtsan"), ("thread",), ("undefined",), ("leak",)],
    ids="-".join,
)
def test_a_program_with_a_sanitizer(library: Path, compiled: Callable[..., Path], flags: tuple[str, ...]) -> None:
    """Its own strcmp, or dl_iterate_phdr, cannot be called when it first asks dlsym: for the real one."""
    kind, *more = flags
    assert says(library, compiled("mapped.c", f"-fsanitize={kind}", *more)) == (0, "mapped\n", "")


def test_it_needs_nothing_that_another_c_library_lacks(library: Path) -> None:
    """A loader that does not find a symbol of a preloaded library ends the program: what only glibc has is weak."""
    said = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    words = [line.split()[-2:] for line in said.splitlines()]
    strong = {name.partition("@")[0] for kind, name in words if kind == "U"}
    assert "malloc" in strong
    assert strong - set(IN_MUSL.split()) == set(), "look whether musl has them, and add them here"


def test_a_program_of_another_c_library(library: Path, tmp_path: Path) -> None:
    """Where musl's compiler is installed: such a program has the shim. What is noted of musl is true, too."""
    for compiler in filter(None, [shutil.which("musl-gcc")]):
        program = tmp_path / "musl"
        subprocess.run([compiler, "-w", "-o", program, Path(__file__).parent / "mapped.c"], check=True, timeout=60)
        assert says(library, program) == (0, "mapped\n", "")
        shown = subprocess.run(["readelf", "-l", program], capture_output=True, text=True, check=True).stdout
        libc = shown.partition("program interpreter: ")[2].partition("]")[0]  # with musl both are one
        said = subprocess.run(["nm", "-D", "--defined-only", libc], capture_output=True, text=True, check=True).stdout
        assert set(IN_MUSL.split()) - {line.split()[-1] for line in said.splitlines()} == set()


@pytest.mark.root
def test_it_is_ignored_by_setuid_programs(library: Path, compiled: Callable[..., Path], tmp_path: Path) -> None:
    program = compiled("mapped.c")
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    program.chmod(0o755)
    plain = says(library, program, user=65534, group=65534)
    program.chmod(0o4755)
    assert plain[:2] == (0, "mapped\n"), "another user's program has it"
    assert says(library, program, user=65534, group=65534)[:2] == (0, "not mapped\n")


def test_no_compiler_has_anything_to_say() -> None:
    """Plain C11 with every warning an error, for this machine and for aarch64, by whatever compilers there are."""
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    there = list(filter(None, map(shutil.which, ("cc", "clang", "aarch64-linux-gnu-gcc"))))
    assert there
    for compiler in there:
        for source in sorted(SHIM.glob("*.c")):
            more = ["-mgeneral-regs-only"] if source.name == "hooks.c" else []
            argv = [compiler, *flags, *more, str(source)]
            ran = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
            assert ran.returncode == 0, ran.stderr[:2000]


@pytest.mark.root
def test_a_program_that_closes_all_its_descriptors(node: Node, library: Path, compiled: Callable[..., Path]) -> None:
    """The control socket is one of them; a new one takes its place, and nobody else's is taken for it."""
    program = compiled("closing.c", "-ldl")
    env = {"LD_PRELOAD": str(library)}
    job = node.popen([program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n"
    for _ in range(3):
        with Shim(Identity.of(job.pid)) as shim:
            assert shim.hello().stand == Stand.OPEN
            assert [m.bytes for m in shim.memories()] == [4 * MIB]
        time.sleep(0.1)
    job.communicate("\n", timeout=60)
    assert job.returncode == 0


@pytest.mark.root
def test_a_program_that_execs(job: Far, shim: Shim) -> None:
    """Nothing of it is left behind in what comes after, and that has a shim of its own."""
    job("large(4)")
    code = (
        "import os, sys, json\\n"
        "links = [os.readlink('/proc/self/fd/' + n) for n in os.listdir('/proc/self/fd') if n != '3']\\n"
        "print(json.dumps([l for l in links if 'nvidia' in l or 'socket' in l]), flush=True)"
    )
    ran = job(
        f"(lambda r: (r.returncode, r.stdout))(subprocess.run([sys.executable, '-c', '''"
        f"import os, sys; os.execv(sys.executable, [sys.executable, \"-c\", {code!r}])'''],"
        " capture_output=True, text=True))"
    )
    assert ran[0] == 0
    assert json.loads(ran[1]) == []


def numbers(pid: int) -> set[int]:
    """The descriptors that a process has below its limit."""
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd") if int(name) < 64}


@pytest.mark.root
def test_more_pieces_than_descriptors(node: Node, library: Path) -> None:
    """A job with a low limit is put away and taken back all the same; its limit and its numbers are as they were."""
    far = Far(node, env={"LD_PRELOAD": str(library)})
    far((Path(__file__).parent / "words.py").read_text())
    far("start(0)")
    far("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))")
    for seed in range(40):
        far(f"plain(2, {seed})")
    before = numbers(far.pid)
    with Shim(Identity.of(far.pid)) as shim:
        for _ in range(2):
            shim.close_gate(60)
            ids = [memory.id for memory in shim.memories()]
            fds = shim.export(ids)
            shim.unmap()
            assert shim.map(ids, fds) == Stand.CLOSED
            shim.open_gate()
            for fd in fds:
                os.close(fd)
        assert len(ids) == 40
    assert far("intact()")
    assert far("resource.getrlimit(resource.RLIMIT_NOFILE)") == [64, 4096]
    end = time.monotonic() + 60  # the end of the connection is seen to by the shim's own thread
    while other := numbers(far.pid) ^ before:
        assert time.monotonic() < end, other
    kept = [int(fd) for fd in os.listdir(f"/proc/{far.pid}/fd") if int(fd) >= 64]
    assert len(kept) >= 40


@pytest.mark.root
def test_more_pieces_than_it_may_ever_have_descriptors(node: Node, library: Path) -> None:
    """Refused before anything is unmapped."""
    far = Far(node, env={"LD_PRELOAD": str(library)})
    far((Path(__file__).parent / "words.py").read_text())
    far("start(0)")
    for seed in range(10):
        far(f"plain(2, {seed})")
    far("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))")
    with Shim(Identity.of(far.pid)) as shim:
        shim.close_gate(60)
        with pytest.raises(Exception, match="Too many open files"):
            shim.unmap()
        assert shim.hello().stand == Stand.CLOSED
        shim.open_gate()
    assert far("intact()")


@pytest.mark.root
def test_children_that_are_forked_and_begin_by_themselves(node: Node, library: Path) -> None:
    """Forked before the driver was initialised: each has a socket and memory of its own."""
    far = Far(node, env={"LD_PRELOAD": str(library)})
    code = """
def child():
    pid = os.fork()
    if pid:
        return pid
    ok(cu.cuInit(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    ok(cu.cuMemAlloc(6 << 20))
    time.sleep(250)
    os._exit(0)
"""
    far(code)
    first, second = far("child()"), far("child()")
    far("start()")
    far("plain(4, 1)")
    for pid, size in ((first, 6 * MIB), (second, 6 * MIB), (far.pid, 4 * MIB)):
        end = time.monotonic() + 60
        while True:
            try:
                with Shim(Identity.of(pid)) as shim:
                    if [m.bytes for m in shim.memories()] == [size]:
                        break
            except LimosaError:
                pass
            assert time.monotonic() < end, pid
            time.sleep(0.05)
    assert far(f"[os.kill(pid, 9) for pid in ({first}, {second})]") == [None, None]
    assert far("intact()")
