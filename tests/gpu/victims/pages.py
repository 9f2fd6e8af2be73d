"""Memory that keeps changing: every page holds (epoch, page) in all its words, so that a stale or foreign page shows.

The epochs are kept on the host and the page numbers are made anew for each comparison: nothing that is compared with
lies in the memory that is looked at.
"""

import torch
from stale import PAGE, Stale

WORDS = PAGE // 8


class Pages:
    """``size`` bytes on ``device``; a step verifies and stamps one window, the next step the next one.

    ``first`` is the number of its first page: memory that must not hold what other memory holds begins elsewhere.
    """

    def __init__(self, device, size, window=128 << 20, first=0):
        self.device = device
        self.first = first
        self.count = max(1, int(size) // PAGE)
        self.per_window = min(self.count, max(1, window // PAGE))
        self.memory = torch.empty((self.count, WORDS), dtype=torch.int64, device=device)
        self.epochs = [0] * -(-self.count // self.per_window)
        self.next = 0
        for window_number in range(len(self.epochs)):
            self.stamp(window_number)

    def _part(self, number):
        first = number * self.per_window
        last = min(self.count, first + self.per_window)
        ids = torch.arange(self.first + first, self.first + last, dtype=torch.int64, device=self.device)
        return first, self.memory[first:last], ((self.epochs[number] << 32) + ids).unsqueeze(1)

    def stamp(self, number):
        _, part, value = self._part(number)
        part.copy_(value.expand_as(part))

    def verify(self, number):
        first, part, value = self._part(number)
        wrong = (part != value).any(dim=1)
        if int(wrong.sum().item()):
            page = int(wrong.nonzero()[0].item())
            held = int(part[page][part[page] != value[page]][0].item())
            raise Stale(
                f"{self.device}: page {first + page} holds epoch {held >> 32} of page {held & 0xFFFFFFFF}, "
                f"not epoch {self.epochs[number]}"
            )

    def step(self):
        number = self.next
        self.verify(number)
        self.epochs[number] += 1
        self.stamp(number)
        self.next = (number + 1) % len(self.epochs)

    def check(self):
        for number in range(len(self.epochs)):
            self.verify(number)

    def spoil(self):
        """Damage one word (to show that the victim would notice)."""
        self.memory[self.count // 2][WORDS // 2] -= 1
