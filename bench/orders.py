"""How the jobs of the benchmark are told what to hold."""

import os

IDLE = 900  # seconds without an order after which nobody is there any more


def order(folder, last):
    """The next order, its number and its words; None where there is none since ``last``."""
    try:
        with open(os.path.join(folder, "order"), encoding="ascii") as file:
            number, *words = file.read().split()
    except (FileNotFoundError, ValueError):
        return None
    return (number, words) if number != last else None
