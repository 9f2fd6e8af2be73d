"""multiprocessing with workers that are started afresh: locks keep a name, not the one they were made by."""

import multiprocessing

from mp_queue import main

if __name__ == "__main__":
    main(multiprocessing.get_context("spawn"))
