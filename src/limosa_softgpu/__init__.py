"""A GPU node in software: starts one (``node``), describes it (``spec``), lets it fail (``faults``).

Nothing in Limosa that moves jobs imports this package: it is not to know what it runs on. What answers in place of
the driver is in C, in ``native``.
"""
