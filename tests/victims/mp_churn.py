"""A semaphore that is another one every few milliseconds: whoever looks is late."""

import multiprocessing
import threading
import time

from common import loop, own_semaphores

if __name__ == "__main__":
    own_semaphores()
    context = multiprocessing.get_context("spawn")

    done = threading.Event()

    def churn():
        while not done.is_set():
            lock = context.Lock()
            time.sleep(0.01)
            del lock

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    loop()
    done.set()  # one that ends in the middle leaves a name that multiprocessing warns of
    thread.join()
