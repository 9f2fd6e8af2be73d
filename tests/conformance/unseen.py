"""Checks whose expectation is a guess: nobody has seen the real driver's answer yet.

Test id (what it begins with) → what to look at in a recording of the real driver (record.py). A line goes when its
answer has been seen and the check says what was seen.
"""

UNSEEN: dict[str, str] = {
    "test_refused.py::test_ipc_of_an_event": "the unlock; both restores have been seen",
}
