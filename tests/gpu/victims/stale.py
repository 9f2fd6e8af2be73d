"""What a victim says when its memory is not what it wrote. Imports nothing, so that JAX runs without PyTorch."""

PAGE = 1 << 16


class Stale(Exception):
    """A page does not hold what was written into it last, or a member of the job has failed."""
