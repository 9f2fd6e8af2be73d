"""``limosa softgpu``: what is in a node, what it leaves alone, and how the command in it begins and ends."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from soft_node import ROOT, Node

from limosa_softgpu.state import NODE_FOLDER

LIMOSA = [sys.executable, "-m", "limosa"]
LOOK = """
import json, os, stat
print(json.dumps({n: [stat.S_IFMT(s.st_mode), s.st_rdev, oct(s.st_mode & 0o777)]
    for n in os.listdir("/dev") for s in [os.lstat("/dev/" + n)]}))
"""


def softgpu(*arguments: object, **options):
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(
        [*LIMOSA, "softgpu", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, **options
    )


# --- the command -------------------------------------------------------------------------------------------------


def test_the_exit_code_and_the_output_are_the_commands(libraries):
    ran = softgpu("--", "sh", "-c", "echo out; echo words >&2; exit 7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "out\n", "words\n")


def test_a_command_that_a_signal_ended_is_told_as_such(libraries):
    assert softgpu("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_the_commands_own_options_are_left_to_it(libraries):
    assert softgpu("--gpus", 1, "--", "echo", "--gpus", "-h").stdout == "--gpus -h\n"


def test_what_cannot_be_started(libraries, tmp_path):
    ran = softgpu("--", "no-such-program-anywhere")
    assert ran.returncode == 127
    assert "no-such-program-anywhere" in ran.stderr
    text = tmp_path / "text"
    text.write_text("x")
    assert softgpu("--", text).returncode == 126


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_command(libraries, number):
    code = (
        "import signal, sys\n"
        "signal.signal(int(sys.argv[1]), lambda *_: sys.exit(33))\n"
        "print('up', flush=True)\n"
        "signal.pause()"
    )
    process = subprocess.Popen(
        [*LIMOSA, "softgpu", "--", sys.executable, "-c", code, str(int(number))], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(60) == 33
    finally:
        process.kill()
        process.communicate()


def test_the_command_may_die_of_a_closed_pipe(libraries):
    """Python ignores SIGPIPE; what it starts must not."""
    ran = subprocess.run(
        f"{sys.executable} -m limosa softgpu -- yes | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("y\n", "")


def test_standard_input_is_the_commands(libraries):
    ran = softgpu("--", "cat", input="words\n")
    assert ran.stdout == "words\n"


def test_a_shell_has_the_terminal(libraries):
    pid, master = pty.fork()
    if pid == 0:
        os.environ["SHELL"] = "/bin/sh"
        os.execv(sys.executable, [*LIMOSA, "softgpu", "--gpus", "3", "--shell"])
    said = b""
    try:
        os.write(master, b"test -t 0 && test -t 1 && ls /dev/nvidia[0-9] | wc -l; echo so-far; exit 5\n")
        end = time.monotonic() + 60
        while time.monotonic() < end and select.select([master], [], [], 1) is not None:
            try:
                said += os.read(master, 4096)
            except OSError:  # the terminal has no other end any more
                break
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(master)
    assert os.waitstatus_to_exitcode(status) == 5, said
    assert b"3\r\nso-far\r\n" in said
    assert b"3 software GPUs" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "COMMAND"),
        (("--shell", "--", "true"), "COMMAND"),
        (("--gpus", 0, "--", "true"), "1 to 16"),
        (("--gpus", 17, "--", "true"), "1 to 16"),
        (("--gpus", "many", "--", "true"), "--gpus"),
        (("--memory", "2 elephants", "--", "true"), "size"),
        (("--memory", "1KiB", "--", "true"), "16 MiB"),
        (("--gpus", 3, "--memory", "1GiB,2GiB", "--", "true"), "3"),
        (("--gpus", 2, "--chip", "H200,H100,A100", "--", "true"), "2"),
        (("--chip", "Z80", "--", "true"), "H200"),
        (("--like", "warp", "--", "true"), "h200"),
        (("--driver", "newest", "--", "true"), "580"),
        (("--fault", "explode", "--", "true"), "explode"),
        (("--fault", "function=cuInit", "--", "true"), "what is to go wrong"),
        (("--no-such-option", "--", "true"), "no-such-option"),
    ],
)
def test_bad_arguments(libraries, arguments, words):
    ran = softgpu(*arguments)
    assert ran.returncode == 2, ran.stderr
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


def test_bad_arguments_as_json(libraries):
    ran = softgpu("-o", "json", "--gpus", 0, "--", "true")
    assert (ran.returncode, json.loads(ran.stdout)["error"]["exit_code"]) == (2, 2)


def test_the_log_is_kept_where_it_is_wanted(tmp_path):
    code = (
        "import pynvml as n\nn.nvmlInit()\n"
        "try: n.nvmlDeviceGetPowerUsage(n.nvmlDeviceGetHandleByIndex(0))\nexcept n.NVMLError: pass"
    )
    log = tmp_path / "log"
    log.write_text("before\n")
    run = ["--log", "log", "--fault", "function=nvmlInit* delay=0", "--", sys.executable, "-c", code]
    assert softgpu(*run, cwd=tmp_path).returncode == 0
    first, *more = log.read_text().splitlines()
    assert first == "before"
    assert [line.split(" ", 2)[2] for line in more] == [
        "fault 000001: nvmlInitWithFlags",
        "nvmlDeviceGetPowerUsage is not implemented",
    ]
    other = tmp_path / "other"
    assert (
        softgpu(
            "--log", other, "--", "sh", "-c", "chmod 700 /dev/nvidia-soft; echo x >> /dev/nvidia-soft/log"
        ).returncode
        == 0
    )
    assert other.read_text() == "x\n"
    assert stat.S_IMODE(other.stat().st_mode) == 0o666  # of whoever runs in the node
    for odd in (tmp_path, tmp_path / "none" / "log", "/dev/null"):
        ran = softgpu("--log", odd, "--", "true")
        assert (ran.returncode, f"--log {odd}" in ran.stderr) == (2, True), ran.stderr


def test_others_than_root_are_refused_with_words(libraries):
    def drop():
        os.setgid(65534)
        os.setuid(65534)

    # As in the program, but without what nobody may read here (a checkout in somebody's home).
    ran = subprocess.run(
        ["cat", "/proc/self/status"], preexec_fn=drop, capture_output=True, text=True, timeout=60, check=True
    )
    assert "Uid:\t65534" in ran.stdout
    code = (
        "import os; from limosa_softgpu import node; from limosa_softgpu.spec import make_spec\n"
        "from limosa.errors import LimosaError\n"
        "spec = make_spec(1, [1 << 30], ['H200'])\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: node.enter(spec)\n"
        "except LimosaError as error: print(error.exit_code, error, error.hint)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith("11 not permitted: ")
    assert "root" in ran.stdout
    assert "sudo" in ran.stdout


@pytest.mark.parametrize("capability", ["sys_admin", "mknod"])
def test_root_without_a_capability_is_refused_with_words(libraries, capability):
    """As in a container."""
    drop = [f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]
    ran = subprocess.run(
        ["setpriv", *drop, *LIMOSA, "softgpu", "--", "true"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 11
    assert "SYS_ADMIN and MKNOD" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_libraries_that_are_missing_are_built(tmp_path):
    from limosa_softgpu.node import check_libraries

    check_libraries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["libcuda.so.1", "libnccl.so.2", "libnvidia-ml.so.1"]


def test_libraries_that_cannot_be_built_are_told(tmp_path, monkeypatch):
    from limosa.errors import GpuUnavailable
    from limosa_softgpu.node import check_libraries

    monkeypatch.setenv("CC", "false")
    with pytest.raises(GpuUnavailable, match="cannot be built") as caught:
        check_libraries(tmp_path)
    assert "compiler" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


# --- what is in it -----------------------------------------------------------------------------------------------


def test_device_nodes(new_node):
    found = new_node(gpus=3).python(LOOK).json
    for minor in range(3):
        assert found[f"nvidia{minor}"] == [stat.S_IFCHR, os.makedev(4000, minor), "0o666"]
    assert "nvidia3" not in found
    for name in ("nvidiactl", "nvidia-uvm"):  # mapped by name, harmless
        assert found[name] == [stat.S_IFCHR, os.makedev(1, 5), "0o666"]


def test_the_machines_devices_are_all_there(node):
    outside = {
        n: [stat.S_IFMT(s.st_mode), s.st_rdev, oct(s.st_mode & 0o777)]
        for n in os.listdir("/dev")
        for s in [os.lstat(f"/dev/{n}")]
        if not n.startswith("nvidia") and n != "shm"
    }
    inside = {n: v for n, v in node.python(LOOK).json.items() if not n.startswith("nvidia") and n != "shm"}
    assert inside == outside
    ran = node.run(
        [
            "sh",
            "-c",
            "echo x > /dev/null; head -c 4 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c; echo y > /dev/fd/1",
        ]
    )
    assert ran.stdout.split() == ["4", "4", "y"]
    node.python("import pty, os; a, b = pty.openpty(); assert os.ttyname(b).startswith('/dev/pts/')")


def test_opening_a_gpu_fails_without_harm(node):
    """The library takes the name only (O_PATH): there is no driver behind the number."""
    code = (
        "import os\n"
        "os.close(os.open('/dev/nvidia0', os.O_PATH))\n"
        "try: os.open('/dev/nvidia0', os.O_RDWR)\n"
        "except OSError as error: print(error.errno)"
    )
    import errno

    assert int(node.python(code).stdout) == errno.ENXIO


def test_a_driver_of_the_machine_is_covered_in_the_node_alone(libraries, tmp_path):
    """Programs that load it by its full name get the node's; it is bound over, not replaced."""
    folder = tmp_path / "lib" / "any-linux-gnu"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.580.1").write_text("the real one")
    (folder / "libcuda.so.1").symlink_to("libcuda.so.580.1")
    code = (
        "import os, sys\nfrom limosa_softgpu import build, kernel, node\n"
        "kernel.unshare(kernel.CLONE_NEWNS)\n"
        "kernel.mount('none', '/', None, kernel.MS_REC | kernel.MS_PRIVATE)\n"
        "node._cover_driver([sys.argv[1] + '/lib/*-linux-gnu', sys.argv[1] + '/none'])\n"
        "for name in ('libcuda.so.1', 'libcuda.so.580.1'):\n"
        "    path = sys.argv[1] + '/lib/any-linux-gnu/' + name\n"
        "    assert os.path.samefile(path, build.SOFTGPU / 'libcuda.so.1'), path\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=60)
    assert (folder / "libcuda.so.1").read_text() == "the real one"
    assert sorted(path.name for path in folder.iterdir()) == ["libcuda.so.1", "libcuda.so.580.1"]


def test_shared_memory_is_the_nodes_own(node):
    name = f"limosa-test-{os.getpid()}"
    outside = f"/dev/shm/{name}"
    node.run(["sh", "-c", f"echo inside > {outside}"])
    assert not os.path.exists(outside)
    assert node.run(["cat", outside]).stdout == "inside\n"


def test_semaphores_and_shared_memory_work(node):
    """What Python's multiprocessing needs of /dev/shm."""
    node.python(
        "import multiprocessing as m\nfrom multiprocessing import shared_memory as s\n"
        "q = m.Queue(); l = m.Lock()\nwith l: q.put(4)\nassert q.get(timeout=60) == 4\n"
        "b = s.SharedMemory(create=True, size=9); b.close(); b.unlink()"
    )


def machine():
    """Its devices and mounts; not the one that a test beside makes and takes away, which is called so."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted(os.listdir("/dev")), [line for line in mounts if " - fuse limosa-test " not in line]


def test_nothing_outside_is_touched(libraries):
    before = machine()
    with Node() as node:
        assert os.path.exists(f"{node.folder}/state")
        assert machine() == before
        assert not os.path.exists(NODE_FOLDER)
    assert machine() == before


def test_it_is_gone_with_its_last_process(libraries, tmp_path):
    """A process that outlives the command keeps the node; nothing else does."""
    pidfile = tmp_path / "pid"
    code = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid(); [os.close(n) for n in range(3)]; open(sys.argv[1] + '.new', 'w').write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '.new', sys.argv[1]); time.sleep(60)"
    )
    assert softgpu("--", sys.executable, "-c", code, pidfile).returncode == 0
    end = time.monotonic() + 60
    while not pidfile.exists() and time.monotonic() < end:
        time.sleep(0.01)
    pid = int(pidfile.read_text())
    held = os.open(f"/proc/{pid}/root{NODE_FOLDER}/state", os.O_RDONLY)
    os.close(held)
    os.kill(pid, signal.SIGKILL)
    while os.path.exists(f"/proc/{pid}/root{NODE_FOLDER}/state") and time.monotonic() < end:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}/root{NODE_FOLDER}/state")


def test_a_node_in_a_node(new_node):
    outer = new_node(gpus=2)
    inner = outer.limosa("softgpu", "--gpus", 1, "--", sys.executable, "-c", LOOK).json
    assert sorted(n for n in inner if n.startswith("nvidia")) == ["nvidia-soft", "nvidia-uvm", "nvidia0", "nvidiactl"]
    assert "nvidia1" in outer.python(LOOK).json


@pytest.mark.parametrize("option", [("--gpus", 3), ("--memory", "1GiB"), ("--chip", "A100")])
def test_what_makes_a_node_changes_none_that_runs(new_node, option):
    """It was passed over without a word: the faults were listed."""
    said = new_node(gpus=1).limosa("softgpu", *option, rc=2)
    assert "name a COMMAND for it" in said.stderr


def test_two_nodes_know_nothing_of_each_other(new_node):
    first, second = new_node(gpus=1), new_node(gpus=1)
    uuids = [n.limosa("gpus", "-o", "json").json["gpus"][0]["uuid"] for n in (first, second)]
    assert uuids[0] != uuids[1]
    with first.switches.fill(0, 32 << 20):
        assert first.limosa("gpus", "-o", "json").json["gpus"][0]["memory_used"] == (32 + 4) << 20
        assert second.limosa("gpus", "-o", "json").json["gpus"][0]["memory_used"] == 4 << 20


def test_a_dev_that_is_odd(libraries, tmp_path):
    """As in a container: mounts below /dev, files bound over devices, no /dev/shm, links that lead nowhere."""
    script = tmp_path / "odd"
    script.write_text(
        "set -e\n"
        "mount -t tmpfs none /dev -o mode=755\n"
        "for d in 'null 1 3' 'zero 1 5' 'full 1 7' 'random 1 8' 'urandom 1 9' 'tty 5 0'; do\n"
        "  set -- $d; mknod -m 666 /dev/$1 c $2 $3; done\n"
        "ln -s /proc/self/fd /dev/fd; ln -s /proc/self/fd/0 /dev/stdin; ln -s pts/ptmx /dev/ptmx\n"
        "ln -s /nowhere /dev/core\n"
        "mkdir /dev/pts /dev/mqueue /dev/deep /dev/deep/er\n"
        "mount -t devpts none /dev/pts -o newinstance,ptmxmode=666\n"
        "mount -t mqueue none /dev/mqueue\n"
        "mount -t tmpfs none /dev/deep/er; echo deep > /dev/deep/er/file\n"
        "echo text > /dev/regular; mkfifo /dev/pipe\n"
        "touch /dev/console; mount --bind /dev/null /dev/console\n"
        "echo there > /dev/nvidia0; mkdir /dev/nvidia-caps\n"
        f'exec {sys.executable} -m limosa softgpu --gpus 1 -- "$0" "$1"\n'.replace('"$0" "$1"', "sh -c '\n")
        + "cat /dev/deep/er/file /dev/regular\n"
        "test -d /dev/mqueue -a -p /dev/pipe -a -c /dev/nvidia0 -a -c /dev/console -a ! -e /dev/nvidia-caps\n"
        "echo x > /dev/console; readlink /dev/core /dev/ptmx\n"
        "test -d /dev/shm; echo y > /dev/shm/y; cat /dev/shm/y; echo z | cat /dev/stdin\n"
        "'\n"
    )
    ran = subprocess.run(
        ["unshare", "-m", "sh", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == ["deep", "text", "/nowhere", "pts/ptmx", "y", "z"]


# --- with the rest of Limosa -------------------------------------------------------------------------------------


def test_gpus_and_doctor_say_software_gpu(new_node):
    node = new_node(gpus=4, memory="2GiB", chip=["H200", "H200", "H100", "A100"], driver="570.86.10")
    shown = node.limosa("gpus")
    assert "these are software GPUs, not real ones" in shown.stderr
    found = node.limosa("gpus", "-o", "json").json
    assert found["software"] is True
    assert (found["driver_version"], found["cuda_version"]) == ("570.86.10", "12.8")
    assert [g["name"] for g in found["gpus"]] == [f"Soft GPU {c}" for c in ("H200", "H200", "H100", "A100")]
    assert {g["memory_total"] for g in found["gpus"]} == {2 << 30}
    assert [g["minor"] for g in found["gpus"]] == [0, 1, 2, 3]
    doctor = node.limosa("doctor", "-o", "json", rc=None).json
    assert "software GPU" in next(c["detail"] for c in doctor["checks"] if c["name"] == "driver")


def test_programs_outside_see_no_software_gpu(libraries, node):
    code = "import pynvml\ntry: pynvml.nvmlInit(); print('driver')\nexcept pynvml.NVMLError as e: print('none')"
    outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert node.python(code).stdout == "driver\n"
    if not os.path.exists("/dev/nvidiactl"):
        assert outside.stdout == "none\n"


JOB = """
import sys, time
from cuda.bindings import driver as cuda
import pynvml
def ok(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) == 2 else None
ok(cuda.cuInit(0))
ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(ok(cuda.cuDeviceGet(0))))))
memory, n, back = ok(cuda.cuMemAlloc(8 << 20)), 0, bytearray(4)
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
while True:
    n += 1
    ok(cuda.cuMemsetD32(memory, n, 1024))
    ok(cuda.cuMemcpyDtoH(back, memory, 4))
    assert int.from_bytes(back, "little") == n
    print(n, pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20, flush=True)
    time.sleep(0.01)
"""


@pytest.fixture
def job(tmp_path):
    """Starts a job that computes and asks NVML, in a node; gives it and its lines."""

    def go(node):
        path = tmp_path / "job-log"
        with open(path, "ab") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True, "cwd": tmp_path}
            process = node.popen([sys.executable, "-c", JOB], **options)

        def lines(more=3):
            """Its lines, once there are some more than now."""
            before, end = path.read_text().count("\n"), time.monotonic() + 60
            while path.read_text().count("\n") < before + more:
                assert time.monotonic() < end, path.read_text()[-2000:]
                time.sleep(0.01)
            return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]

        lines()
        return process, lines

    return go


def test_a_job_of_one_node_is_none_of_anothers(new_node, job):
    """Nor of the machine's: each has its own GPUs, and what is on them."""
    mine, other = new_node(memory="128MiB"), new_node(memory="128MiB")
    process, lines = job(mine)
    assert [j["pid"] for j in mine.limosa("ps", "-o", "json").json["jobs"]] == [process.pid]
    assert other.limosa("ps", "-o", "json").json["jobs"] == []
    assert other.limosa("gpus", "-o", "json").json["gpus"][0]["processes"] == []
    refused = other.limosa("move", process.pid, "--to", 1, rc=12)  # it has a context, and this node's driver denies it
    assert "holds no CUDA state" in refused.stderr
    outside = subprocess.run(
        [*LIMOSA, "checkpoint", str(process.pid), "--output", "image"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outside.returncode in (12, 13)
    assert "another mount namespace" in outside.stderr
    assert process.poll() is None
    lines()
    mine.limosa("move", process.pid, "--to", 1)
    lines()


@pytest.mark.criu
def test_a_job_goes_on_on_another_node(new_node, job, tmp_path):
    """Other GPUs, another folder of shared state; NVML, which it had open, tells what is true there."""
    first, second = new_node(memory="128MiB"), new_node(memory="128MiB")
    process, lines = job(first)
    checkpoint = first.popen([*LIMOSA, "checkpoint", process.pid, "--output", tmp_path / "image"])
    assert process.wait(60) == -signal.SIGKILL
    assert checkpoint.wait(60) == 0
    stood = len(lines(0))
    assert first.limosa("gpus", "-o", "json").json["gpus"][0]["memory_used"] == 4 << 20
    with second.switches.fill(0, 10 << 20):
        second.limosa("restore", tmp_path / "image", "--to", 0)
        found = lines()
    assert [n for n, _ in found] == list(range(1, len(found) + 1))
    assert {used for _, used in found[:stood]} == {4 + 8 + 8}
    assert found[-1][1] == 4 + 8 + 8 + 10
    assert second.limosa("gpus", "-o", "json").json["gpus"][0]["processes"][0]["pid"] == process.pid


@pytest.mark.criu
def test_criu_dumps_and_restores_what_runs_in_a_node(node, tmp_path, runtime):
    """A plain job; its standard streams were opened outside of the node, and files of the node's /dev are open."""
    code = (
        "import time, sys\n"
        "kept = [open('/dev/null'), open('/dev/zero', 'rb'), open('/dev/shm/mine', 'w')]\n"
        "n = 0\n"
        "while True: n += 1; print(n, flush=True); time.sleep(0.01)\n"
    )
    log = tmp_path / "log"
    with open(log, "ab") as out:
        job = node.popen([sys.executable, "-c", code], stdout=out, stderr=out, start_new_session=True, cwd=tmp_path)

    def ticks() -> int:
        return len(log.read_text().split())

    def goes_on(process_ended=lambda: False) -> None:
        before, end = ticks(), time.monotonic() + 60
        while ticks() < before + 3:
            assert time.monotonic() < end, log.read_text()[-500:]
            time.sleep(0.01)

    goes_on()
    image = tmp_path / "image"
    checkpoint = node.popen([*LIMOSA, "checkpoint", job.pid, "--output", image])
    assert job.wait(60) == -signal.SIGKILL  # reaped while limosa waits for that
    assert checkpoint.wait(60) == 0
    stood = ticks()
    node.limosa("restore", image)
    goes_on()
    numbers = [int(word) for word in log.read_text().split()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > stood
