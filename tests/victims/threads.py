"""Four threads that hand a number round under a condition; one more sleeps in the kernel all the time."""

import os
import threading

from common import loop

baton, condition, stop = 0, threading.Condition(), False
N = 4


def runner(number):
    global baton
    while True:
        with condition:
            assert condition.wait_for(lambda: stop or baton % (N + 1) == number, 60)  # noqa: B023 - it is the global
            if stop:
                return
            baton += 1
            condition.notify_all()


idle_reader, idle_writer = os.pipe()
sleeper = threading.Thread(target=os.read, args=(idle_reader, 1))
threads = [threading.Thread(target=runner, args=(i,), daemon=True) for i in range(N)]
for thread in (sleeper, *threads):
    thread.start()


def check(n):
    global baton
    with condition:
        assert condition.wait_for(lambda: baton % (N + 1) == N, 60), f"the threads stand still at {baton}"
        assert baton == (N + 1) * n - 1
        baton += 1
        condition.notify_all()
    assert all(t.is_alive() for t in (sleeper, *threads))


loop(check)
with condition:
    stop = True
    condition.notify_all()
os.write(idle_writer, b"x")
sleeper.join(60)
assert not sleeper.is_alive()
