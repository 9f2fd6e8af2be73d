"""CRIU: finding one that works, running it on a job, understanding what it says, clearing up what it leaves.

``docs/criu.md`` tells the whole story; ``native/criu/DESIGN.md`` that of our plugin.
"""

from limosa.process.criu.program import Criu

__all__ = ["Criu"]
