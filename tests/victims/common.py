"""What the small programs share: READY once all is set up, then look after it tick by tick until told to stop.

Each takes a folder as its first argument. A tick writes ``tick <n> <CLOCK_MONOTONIC>`` to stdout (the log); when the
file ``stop`` appears in the folder, the program checks a last time, writes ``DONE`` and exits 0. A check that fails is
an exception: a trace in the log and exit code 1.
"""

import os
import sys
import time


def own_semaphores():
    """Gives multiprocessing's semaphores names with this process's pid: /dev/shm/sem.mp-PID-…"""
    from multiprocessing import process

    process.current_process()._config["semprefix"] = f"/mp-{os.getpid()}"  # children have it from here


def folder():
    return sys.argv[1]


def stopped():
    return os.path.exists(os.path.join(folder(), "stop"))


def loop(check=lambda n: None, interval=0.02):
    print("READY", flush=True)
    n = 0
    while True:
        n += 1
        last = stopped()
        check(n)
        sys.stdout.write(f"tick {n} {time.monotonic():.6f}\n")  # in one call: it may be killed between two
        sys.stdout.flush()
        if last:
            print("DONE", flush=True)
            return
        time.sleep(interval)
