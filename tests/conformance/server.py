"""The one program of this suite: makes driver calls on request and answers with results and values.

It is the job, the controller and the reader of NVML, each in a process of its own. Requests are JSON objects, one a
line, on standard input: ``{"id": 7, "thread": "main", "op": "call", "name": "cuMemAlloc", "args": [4096]}``; answers,
in whatever order they come, on standard output: ``{"id": 7, "result": 0, "value": 140211, "seconds": 0.0001}``. Each
thread has a queue of its own, so that a call that blocks holds up nothing but its thread. "main" is the main thread.

Arguments: numbers, strings and null are themselves; ``{"b": HEX}`` bytes, ``{"e": "CUlimit.CU_LIMIT_STACK_SIZE"}`` an
enumerator, ``{"s": TYPE, "f": {FIELD: VALUE}, "raw": HEX}`` a structure (fields may be dotted, raw is copied over it),
``{"r": 2}`` a CUresult, ``{"k": [[VALUE, CTYPE] …]}`` a kernel's arguments. The end of standard input ends the process.
"""

import ctypes
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time

SCRATCH = 1 << 20  # bytes of host memory that each server has for a start
LIBRARY = "libcuda.so.1"
NAMES = {"gettid": 186, "pidfd_open": 434, "pidfd_getfd": 438}  # x86-64

libc = ctypes.CDLL(None, use_errno=True)
kept = []  # what must outlive the request that made it
callbacks = {}
threads = {}
replies = threading.Lock()
driver = None  # cuda.bindings.driver
nvml = None


def binding():
    global driver
    if driver is None:
        import cuda.bindings.driver as driver_module

        driver = driver_module
    return driver


def decode(value):
    """A request's argument as the bindings take it."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "b" in value:
        return bytes.fromhex(value["b"])
    if "e" in value:
        kind, _, name = value["e"].partition(".")
        return getattr(getattr(binding(), kind), name)
    if "r" in value:
        return binding().CUresult(value["r"])
    if "k" in value:
        return tuple(v for v, _ in value["k"]), tuple(getattr(ctypes, t) if t else None for _, t in value["k"])
    made = getattr(binding(), value["s"])()
    for path, field in value.get("f", {}).items():
        *outer, last = path.split(".")
        place = made
        for name in outer:
            place = getattr(place, name)
        setattr(place, last, decode(field))
    if "raw" in value:
        raw = bytes.fromhex(value["raw"])
        ctypes.memmove(made.getPtr(), raw, len(raw))
    kept.append(made)
    return made


def encode(value):
    """What the bindings answered, as JSON."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [encode(one) for one in value]
    if type(value).__name__ == "CUuuid":
        return bytes(value.bytes).hex()
    if hasattr(value, "__int__"):
        return int(value)
    if type(value).__name__ in ("CUipcMemHandle", "CUipcEventHandle"):
        return ctypes.string_at(value.getPtr(), 64).hex()
    fields = {}
    for name in dir(value):
        if not name.startswith("_") and name != "getPtr":
            try:
                fields[name] = encode(getattr(value, name))
            except Exception as error:
                fields[name] = repr(error)
    return fields


def call(name, args):
    """A driver call through cuda.bindings: (result, value); several values are a list."""
    answer = getattr(binding(), name)(*decode(args))
    values = [encode(value) for value in answer[1:]]
    return int(answer[0]), (values[0] if len(values) == 1 else values or None)


def raw(name, args):
    """A driver call past the bindings: numbers are passed as 64 bits, null as a null pointer."""
    function = getattr(ctypes.CDLL(LIBRARY), name)
    function.restype = ctypes.c_int
    return function(*(ctypes.c_void_p(None if one is None else one & (1 << 64) - 1) for one in args)), None


def exported(name):
    """Whether the library itself has a symbol."""
    return 0, hasattr(ctypes.CDLL(LIBRARY), name)


def ask_nvml(name, args):
    """A call of NVML: ``{"gpu": INDEX}`` is a handle. Answers' structures become objects."""
    global nvml
    if nvml is None:
        import pynvml

        pynvml.nvmlInit()
        nvml = pynvml
    try:
        given = [nvml.nvmlDeviceGetHandleByIndex(a["gpu"]) if isinstance(a, dict) else a for a in args]
        answer = getattr(nvml, name)(*given)
    except nvml.NVMLError as error:
        return {"nvml": error.value}, None
    if name.startswith("nvmlDeviceGetHandleBy"):
        answer = nvml.nvmlDeviceGetIndex(answer)
    if isinstance(answer, list) and all(hasattr(one, "__dict__") for one in answer):
        return 0, [{k: v for k, v in vars(one).items() if isinstance(v, (int, str, type(None)))} for one in answer]
    if isinstance(answer, ctypes.Structure):
        return 0, {name: encode(getattr(answer, name)) for name, *_ in answer._fields_}
    return 0, encode(answer)


def host_memory(size):
    """Page-aligned memory of this process that lives for ever: its address."""
    made = mmap.mmap(-1, size)
    kept.append(made)
    return ctypes.addressof(ctypes.c_char.from_buffer(made))


def callback(name, kind, wait, call_inside):
    """A host callback: counts how often it runs, may wait for ``release``, may make a driver call; its address."""
    state = {"count": 0, "entered": False, "go": threading.Event(), "inside": None, "arguments": None}

    def run(*arguments):
        state["entered"] = True
        if wait:
            state["go"].wait()
        if call_inside:
            state["inside"] = raw(call_inside, [0, 0])[0]
        state["arguments"] = list(arguments)
        state["count"] += 1

    types = [ctypes.c_void_p] if kind == "host" else [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    function = ctypes.CFUNCTYPE(None, *types)(run)
    state["function"] = function
    callbacks[name] = state
    return ctypes.cast(function, ctypes.c_void_p).value


def fork(calls, twice):
    """Fork (or fork and fork again); the last child makes calls past the bindings, tells their results and lives on."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        libc.prctl(1, signal.SIGKILL)
        if twice and os.fork():
            signal.pause()
        libc.prctl(1, signal.SIGKILL)
        results = [raw(name, args)[0] for name, args in calls]
        os.write(write, json.dumps({"pid": os.getpid(), "results": results}).encode() + b"\n")
        while True:
            signal.pause()
    os.close(write)
    with os.fdopen(read) as answers:
        line = answers.readline()
    return json.loads(line)


def take_fd(pid, fd):
    """A duplicate of another process's descriptor."""
    pidfd = libc.syscall(NAMES["pidfd_open"], pid, 0)
    got = libc.syscall(NAMES["pidfd_getfd"], pidfd, fd, 0)
    error = ctypes.get_errno()
    os.close(pidfd)
    if got < 0:
        raise OSError(error, os.strerror(error))
    return got


OPERATIONS = {
    "call": call,
    "raw": raw,
    "exported": exported,
    "nvml": ask_nvml,
    "memory": lambda size: (0, host_memory(size)),
    "peek": lambda address, size: (0, ctypes.string_at(address, size).hex()),
    "poke": lambda address, data: (0, ctypes.memmove(address, bytes.fromhex(data), len(data) // 2)),
    "callback": lambda *a: (0, callback(*a)),
    "release": lambda name: (0, callbacks[name]["go"].set()),
    "release_all": lambda: (0, [state["go"].set() for state in callbacks.values()] and None),
    "callback_state": lambda name: (0, {k: v for k, v in callbacks[name].items() if k not in ("go", "function")}),
    "fork": lambda calls, twice=False: (0, fork(calls, twice)),
    "take_fd": lambda pid, fd: (0, take_fd(pid, fd)),
    "close": lambda fd: (0, os.close(fd)),
    "dup": lambda fd: (0, os.dup(fd)),
    "gettid": lambda: (0, libc.syscall(NAMES["gettid"])),
    "sleep": lambda seconds: (0, time.sleep(seconds)),
    "exit": os._exit,
}


def reply(answer):
    with replies:
        os.write(1, json.dumps(answer).encode() + b"\n")


def serve(requests):
    """Answer one thread's requests as they come."""
    while True:
        request = requests.get()
        begin = time.monotonic()
        answer = {"id": request["id"]}
        try:
            answer["result"], answer["value"] = OPERATIONS[request["op"]](*request["args"])
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answer["seconds"] = round(time.monotonic() - begin, 6)
        reply(answer)


def read():
    """Hand the requests to their threads; at the end of them, end."""
    for line in sys.stdin:
        request = json.loads(line)
        name = request["thread"]
        if name not in threads:
            threads[name] = queue.SimpleQueue()
            threading.Thread(target=serve, args=(threads[name],), daemon=True).start()
        threads[name].put(request)
    os._exit(0)


if __name__ == "__main__":
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also where it is stopped or blocked
    threads["main"] = queue.SimpleQueue()
    reply({"id": 0, "result": 0, "value": {"pid": os.getpid(), "scratch": host_memory(SCRATCH)}, "seconds": 0})
    threading.Thread(target=read, daemon=True).start()
    serve(threads["main"])
