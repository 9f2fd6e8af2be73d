"""Semaphores that come and go all the time, and one that stays."""

import multiprocessing

from common import loop, own_semaphores

if __name__ == "__main__":
    own_semaphores()
    context = multiprocessing.get_context("spawn")
    stays = context.Semaphore(0)

    def check(n):
        stays.release()
        with context.Lock():
            assert stays.get_value() == n

    loop(check)
