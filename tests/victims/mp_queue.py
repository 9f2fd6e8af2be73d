"""multiprocessing: a queue there, a queue back, an event, a lock, two workers."""

import multiprocessing
import queue

from common import loop, own_semaphores


def work(inbox, outbox, lock):
    while (item := inbox.get()) is not None:
        with lock:
            outbox.put(item * item)


def main(context):
    own_semaphores()
    inbox, outbox, lock = context.Queue(), context.Queue(), context.Lock()
    workers = [context.Process(target=work, args=(inbox, outbox, lock), daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()

    def check(n):
        for i in range(4):
            inbox.put(n + i)
        try:
            found = sorted(outbox.get(timeout=30) for _ in range(4))
        except queue.Empty:
            raise AssertionError("no answer from the workers") from None
        assert found == [(n + i) ** 2 for i in range(4)]

    loop(check)
    for _ in workers:
        inbox.put(None)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0


if __name__ == "__main__":
    main(multiprocessing.get_context("fork"))
