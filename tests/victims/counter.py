"""Counts and stamps, nothing else."""

from common import loop

loop(interval=0.01)
