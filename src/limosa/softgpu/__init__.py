"""A GPU node in software: starts one (``node``), describes it (``spec``), lets it fail (``faults``).

Nothing in the rooms that move jobs imports this one: they are not to know what they run on. What answers in place of
the driver is in C, in ``native/softgpu``.
"""
