"""The node's state as Python and C see it; what a node can be; the switches that change one while it runs."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time

import pytest

from limosa.errors import UsageError
from limosa.native.build import compilers
from limosa_softgpu import faults, state
from limosa_softgpu.build import SOFTGPU
from limosa_softgpu.faults import check_rule
from limosa_softgpu.spec import CHIPS, make_spec

STRUCTURES = {
    "node_gpu": state.NodeGpu,
    "node_rates": state.NodeRates,
    "node_block": state.NodeBlock,
    "node_state": state.NodeState,
}


def test_python_and_c_have_one_layout(tmp_path):
    lines = ["#include <stdio.h>", '#include "node.h"', "int main(void) {"]
    ours = {}
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        ours[name] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            where = getattr(structure, field)
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof(struct {name}, {field}),'
                f" sizeof(((struct {name} *)0)->{field}));"
            )
            ours[f"{name}.{field}"] = (where.offset, where.size)
    for name, value in {
        "NODE_MAX_GPUS": state.MAX_GPUS,
        "NODE_MAX_BLOCKS": state.MAX_BLOCKS,
        "NODE_GRANULARITY": state.GRANULARITY,
        "NODE_MAGIC": state.MAGIC,
        "NODE_RESERVED": state.KIND_RESERVED,
        "NODE_NVML_MPS": state.NVML_MPS,
    }.items():
        lines.append(f'printf("{name} %llu\\n", (unsigned long long){name});')
        ours[name] = value
    source = tmp_path / "layout.c"
    source.write_text(
        "\n".join([*lines, f'puts("folder " NODE_FOLDER); return sizeof("{state.NODE_FOLDER}") == 1; }}'])
    )
    argv = [*compilers()[0], "-std=gnu11", f"-I{SOFTGPU}", "-o", str(tmp_path / "layout")]
    subprocess.run([*argv, str(source)], check=True, timeout=60)
    said = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True, timeout=60).stdout
    theirs = {}
    for line in said.splitlines():
        name, *values = line.split()
        theirs[name] = (
            values[0] if name == "folder" else int(values[0]) if len(values) == 1 else tuple(map(int, values))
        )
    assert theirs.pop("folder") == state.NODE_FOLDER
    assert theirs == ours


def test_every_field_of_the_header_is_there():
    """A field that only C has would shift nothing where it takes up padding."""
    text = re.sub(r"/\*.*?\*/", " ", (SOFTGPU / "node.h").read_text(), flags=re.S)
    for name, structure in STRUCTURES.items():
        body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, flags=re.S)
        assert body, name
        fields = [
            re.sub(r"\[.*", "", word.split()[-1])
            for declared in body[1].split(";")
            if declared.strip()
            for word in declared.split(",")
        ]
        assert fields == [field for field, *_ in structure._fields_]


# --- what a node can be ------------------------------------------------------------------------------------------


def test_a_list_or_one_for_all():
    one = make_spec(3, [64 << 20], ["H100"])
    assert [(g.chip, g.memory) for g in one.gpus] == [("H100", 64 << 20)] * 3
    each = make_spec(2, [64 << 20, (64 << 20) + 1], ["H100", "A100"])
    assert [(g.chip, g.memory) for g in each.gpus] == [("H100", 64 << 20), ("A100", 66 << 20)]


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [("610.10", 13030), ("580.159.04", 13000), ("570.86.10", 12080), ("550.54.15", 12040), ("470.1", 12000)],
)
def test_the_driver_knows_the_cuda_of_its_branch(driver, cuda):
    assert make_spec(1, [64 << 20], ["H200"], driver_version=driver).cuda_version == cuda


def test_like_an_h200_is_slower_than_the_machine():
    like = make_spec(1, [1 << 30], ["H200"], like="h200").rates
    assert 1e9 < like.checkpoint < like.restore < like.host_to_device < like.peer < like.device_to_device
    assert 0 < like.restore_fixed < like.checkpoint_fixed < 1
    assert make_spec(1, [1 << 30], ["H200"]).rates.checkpoint == 0


def test_rates_and_costs_of_ones_own():
    given = make_spec(
        1, [1 << 30], ["H200"], like="h200", speeds=["copy=20GB/s", "peer=1GiB/s", "restore=0"], costs=["lock=0.5"]
    ).rates
    assert (given.host_to_device, given.device_to_device, given.peer) == (20e9, 20e9, 1 << 30)
    assert (given.restore, given.lock_fixed) == (0, 0.5)
    assert given.checkpoint == make_spec(1, [1 << 30], ["H200"], like="h200").rates.checkpoint


@pytest.mark.parametrize(
    "options",
    [
        *({"speeds": [word]} for word in ("copy", "copy=fast", "walk=1GB/s", "copy=-1")),
        *({"costs": [word]} for word in ("copy=1GB", "peer=1", "lock=", "lock=-1")),
    ],
)
def test_rates_and_costs_that_are_none(options):
    with pytest.raises(UsageError):
        make_spec(1, [1 << 30], ["H200"], **options)


def test_a_new_state_is_whole():
    new = state.NodeState()
    make_spec(2, [64 << 20], list(CHIPS)[:2]).fill(new)
    assert (new.magic, new.size, new.n_gpus) == (state.MAGIC, ctypes.sizeof(state.NodeState), 2)
    assert bytes(new.gpus[0].uuid) != bytes(new.gpus[1].uuid)
    assert (new.gpus[1].minor, new.gpus[1].pci, new.gpus[1].persistence) == (1, b"00000000:02:00.0", 1)
    assert (new.fault_generation, new.n_blocks, new.gpus[2].memory) == (0, 0, 0)


# --- rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        "result=999",
        "result=UNKNOWN",
        "after=ECC_UNCORRECTABLE",
        "function=cuCheckpointProcessRestore nth=3 result=CUDA_ERROR_UNKNOWN",
        "function=cuMem* caller=12 target=13 after=2 every=1",
        "hang",
        "delay=0.25",
        "delay=3",
        "crash=caller",
        "crash-after=target",
        "function=cuCheckpointProcessGetState state=7 every=1",
        "memory=device",
        "memory=host",
        "function=step:* lost=1",
        "hazard=restore-poisons",
        "function=cuMemAlloc result=CUDA_ERROR_NOT_MAPPED",
        "after=NVML_ERROR_IN_USE",
        "function=nvmlDeviceGetMemoryInfo* lie=free:0",
        "lie=driver:1.2",
        "caller=train.py target=python* hang",
    ],
)
def test_rules_that_are_rules(rule):
    check_rule(rule)


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "function=cuInit",
        "nth=2",
        "explode",
        "result",
        "result=",
        "result=bad-name",
        "delay=soon",
        "delay=-1",
        "nth=0 hang",
        "every=2 hang",
        "nth=1 every=1 hang",
        "hang=1",
        "crash=everybody",
        "memory=swap",
        "caller=0 hang",
        "target=0 hang",
        "lost=gpu",
        "lie=free",
        "hang hang=2",
        "result=1 result=2",
        "hazard=What",
        "hazard=nonsense",
        "function=cuNoSuch hang",
        "result=CUDA_ERROR_FOO",
        "after=NVML_ERROR_FOO",
        "lie=weather:fine",
        "lie=count:many",
        "lie=mig:yes",
        "function=nvmlDeviceGetName lie=free:0",
        "function=cuMemAlloc crash=target",
    ],
)
def test_rules_that_are_none(rule):
    with pytest.raises(UsageError):
        check_rule(rule)


def test_the_names_are_those_that_the_library_asks_for():
    text = "".join(path.read_text() for path in sorted(SOFTGPU.rglob("*.c")))
    hazards = re.findall(r'fault_hazard(?:_wait|_about)?\("([a-z0-9-]+)"|define KILL_HAZARD "([a-z-]+)"', text)
    assert {one or other for one, other in hazards} == faults.HAZARDS
    assert set(re.findall(r'"(step:[a-z-]+)"', text)) == faults.STEPS


def test_the_library_takes_every_word_that_is_taken_here(node):
    """What Python lets through must not be void for the C side (it says so in the node's log)."""
    values = {
        "function": "nvmlSystemGetNVMLVersion",
        "nth": "9999",
        "every": "1",
        "caller": "1",
        "target": "1",
        "result": "CUDA_ERROR_UNKNOWN",
        "after": "999",
        "delay": "0.5",
        "crash": "caller",
        "crash-after": "target",
        "state": "2",
        "memory": "host",
        "lost": "0",
        "hazard": "vgpu",
        "lie": "free:1",
    }
    assert set(values) == set(faults.WORDS)
    for key, value in values.items():
        rule = f"{key}={value}" if key not in faults.CONDITIONS else f"{key}={value} delay=0"
        node.switches.add(rule if key in ("nth", "every") else rule + " nth=9999")
    node.switches.add("hang nth=9999")
    node.python("import pynvml; pynvml.nvmlInit(); pynvml.nvmlSystemGetDriverVersion()")
    assert [line for line in node.log() if "void" in line] == []
    with open(f"{node.folder}/faults/999999", "w", encoding="utf-8") as file:
        file.write("nonsense=1\n")
    node.switches.add("delay=0 nth=9999")
    node.python("import pynvml; pynvml.nvmlInit()")
    assert any("999999 is void" in line for line in node.log())


def test_rules_have_names_and_counts(node):
    switches = node.switches
    first = switches.add("function=nvmlDeviceGetCount_v2 delay=0 nth=2")
    second = switches.add("  function=nvmlInit*   delay=0 every=1 ")
    assert switches.rules() == {
        first: "function=nvmlDeviceGetCount_v2 delay=0 nth=2",
        second: "function=nvmlInit* delay=0 every=1",
    }
    code = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceGetCount(); n.nvmlDeviceGetCount(); n.nvmlDeviceGetCount()"
    assert switches.count(first) == 0
    node.python(code)
    assert switches.count(first) == 3
    switches.remove(first)
    switches.remove("no-such-rule")
    assert list(switches.rules()) == [second]
    assert switches.add("hang") > second
    switches.clear()
    assert switches.rules() == {}
    assert os.listdir(f"{node.folder}/faults") == []


def test_a_rule_is_seen_at_once_by_a_process_that_runs(node):
    code = (
        "import pynvml as n, sys\nn.nvmlInit()\n"
        "for line in sys.stdin:\n"
        "    try: print(n.nvmlDeviceGetCount(), flush=True)\n"
        "    except n.NVMLError as e: print(e.value, flush=True)\n"
    )
    job = node.popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer():
        job.stdin.write("\n")
        job.stdin.flush()
        return job.stdout.readline().strip()

    assert answer() == "2"
    rule = node.switches.add("function=nvmlDeviceGetCount_v2 result=999 every=1")
    assert [answer(), answer()] == ["999", "999"]
    node.switches.remove(rule)
    assert answer() == "2"


# --- GPUs --------------------------------------------------------------------------------------------------------


def test_memory_that_is_taken_away_comes_back(node):
    assert node.switches.used(0) == 4 << 20
    with node.switches.fill(0, 5 << 20) as taken:  # rounded up to what a GPU gives
        assert taken.bytes == 6 << 20
        assert node.switches.used(0) == 10 << 20
        assert node.switches.used(1) == 4 << 20
        with pytest.raises(MemoryError):
            node.switches.fill(0, 64 << 20)
        with node.switches.fill(0, leave=3 << 20) as rest:
            assert rest.bytes == 50 << 20  # at least 3 MiB are left
    assert node.switches.used(0) == 4 << 20
    assert node.blocks() == []
    gpu = node.limosa("gpus", "-o", "json").json["gpus"][0]
    assert gpu["memory_used"] == 4 << 20
    assert gpu["processes"] == []


def test_memory_taken_away_by_a_process_comes_back_when_it_is_killed(node):
    code = (
        "import sys, time\nfrom limosa_softgpu.faults import Switches\n"
        "kept = Switches().fill(1, leave=0)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    job = node.popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert job.stdout.readline() == b"up\n"
    used = [g["memory_used"] for g in node.limosa("gpus", "-o", "json").json["gpus"]]
    assert used == [4 << 20, 64 << 20]
    job.kill()
    job.wait(60)
    used = [g["memory_used"] for g in node.limosa("gpus", "-o", "json").json["gpus"]]
    assert used == [4 << 20, 4 << 20]


def test_gpus_that_are_not_there(node):
    for change in (node.switches.lose, node.switches.mig, node.switches.fill):
        with pytest.raises(IndexError):
            change(2)


def test_a_writer_that_is_killed_leaves_the_node_working(node):
    """The lock is the kernel's: it ends with its holder."""
    code = (
        "import time\nfrom limosa_softgpu.state import locked\n"
        "with locked():\n    print('locked', flush=True)\n    time.sleep(60)"
    )
    job = node.popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert job.stdout.readline() == b"locked\n"
    ask = node.popen(
        [
            sys.executable,
            "-c",
            "import pynvml as n; n.nvmlInit(); n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0))",
        ]
    )
    time.sleep(0.3)
    assert ask.poll() is None
    job.kill()
    assert ask.wait(60) == 0


def test_the_command_line_changes_the_node_that_it_is_called_in(node):
    def softgpu(*options, rc=0):
        return node.run([sys.executable, "-m", "limosa", "softgpu", *options], rc=rc)

    told = softgpu("--fault", "function=cuMemAlloc hang", "--turn", "1:lost=on", "-o", "json")
    ((name, rule),) = node.switches.rules().items()
    assert json.loads(told.stdout)["faults"] == [{"name": name, "rule": rule, "calls": 0}]
    assert rule == "function=cuMemAlloc hang"
    with state.opened(node.folder) as seen:
        assert [seen.gpus[0].lost, seen.gpus[1].lost] == [0, 1]
        del seen
    assert rule in softgpu().stdout
    softgpu("--lift", name, "--turn", "1:lost=off", "--turn", "mps=on")
    assert node.switches.rules() == {}
    for wrong in ("7:lost=on", "lost=on", "1:mps=on", "1:lost"):
        assert "--turn" in softgpu("--turn", wrong, rc=2).stderr
    assert "hazard" in softgpu("--fault", "hazard=nonsense", "--lift", "all", rc=2).stderr
    assert "no fault called 7" in softgpu("--lift", "7", rc=2).stderr


@pytest.mark.parametrize("option", [("--rate", "copy=1GB/s"), ("--cost", "lock=1"), ("--log", "x"), ("--like", "h200")])
def test_what_makes_a_node_changes_none(node, option):
    answer = node.limosa("softgpu", *option, rc=2)
    assert "name a COMMAND" in answer.stderr


def test_a_node_is_changed_from_inside_only():
    told = subprocess.run(
        [sys.executable, "-m", "limosa", "softgpu", "--turn", "0:lost=on", "--", "true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (told.returncode, "this is none" in told.stderr) == (2, True)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (f"function=cuIn{'*' * 300}it result=100", "too long"),
        (f"caller={'x' * 200} result=100", "too long"),
        ("function=cuMemFree memory=device", "does not heed"),
        ("function=step:lock-begin memory=device", "does not heed"),
        ("function=nvmlInit* memory=host", "does not heed"),
        ("function=cuMemAlloc* state=3", "does not heed"),
        ("lost=7", "2 GPUs"),
        ("caller=\udcff result=100", "no UTF-8"),
    ],
)
def test_a_rule_that_could_never_be_met_is_refused(node, rule, why):
    with pytest.raises(UsageError, match=why):
        node.switches.add(rule)


def test_memory_that_is_full_means_the_calls_that_want_some(node):
    rule = node.switches.add("memory=device")
    node.python("from cuda.bindings import driver as cu; assert int(cu.cuInit(0)[0]) == 0; cu.cuDeviceGetCount()")
    assert node.switches.count(rule) == 0
    node.python(
        "from cuda.bindings import driver as cu; cu.cuInit(0); "
        "assert int(cu.cuDevicePrimaryCtxRetain(0)[0]) == 2; assert int(cu.cuDevicePrimaryCtxRetain(0)[0]) == 0"
    )
    assert node.switches.count(rule) == 2


def test_a_command_goes_into_the_node_of_a_process(node):
    sleeper = node.popen(["sleep", "30"])
    try:
        argv = [sys.executable, "-m", "limosa", "softgpu", "--join", str(sleeper.pid), "--"]
        inside = subprocess.run(
            [*argv, sys.executable, "-m", "limosa", "gpus", "-o", "json"], capture_output=True, timeout=60, check=False
        )
        assert [gpu["name"] for gpu in json.loads(inside.stdout)["gpus"]] == ["Soft GPU H200"] * 2
        assert subprocess.run([*argv, "sh", "-c", "exit 7"], timeout=60, check=False).returncode == 7
    finally:
        sleeper.kill()
        sleeper.wait(60)
    for pid, code in ((sleeper.pid, 10), (os.getpid(), 2)):
        argv[argv.index("--join") + 1] = str(pid)
        assert subprocess.run([*argv, "true"], capture_output=True, timeout=60, check=False).returncode == code
