"""The parked way: a preloaded library looks after a job's device memory, so that it can be held aside and moved at once.

``protocol.py`` is what the library and Limosa say to each other, ``shim.py`` one process's end of it.
"""
