"""A semaphore that is another one every few milliseconds: whoever looks is late."""

import multiprocessing
import threading
import time

from common import loop, own_semaphores

if __name__ == "__main__":
    own_semaphores()
    context = multiprocessing.get_context("spawn")

    def churn():
        while True:
            lock = context.Lock()
            time.sleep(0.01)
            del lock

    threading.Thread(target=churn, daemon=True).start()
    loop()
