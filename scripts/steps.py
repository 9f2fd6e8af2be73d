"""Writes ``docs/steps.md``: the steps of each verb, from the lists that the verbs are made of.

python scripts/steps.py [FILE]
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from limosa.operation.step import NOTHING, Step, Verb
from limosa.operation.verbs import VERBS

HEAD = """# The steps of each verb

Made by `scripts/steps.py` from the lists in `src/limosa/operation/verbs.py`; `make test` compares. What runs them, and
what a step has to say, is in `src/limosa/operation/step.py`; [how to add one](adding-a-step.md).

Steps are done in this order; those that have nothing to do for a job are left out. *Still*: the job stands still
meanwhile. *Undo*: what is done if this step or a later one fails, the newest first; steps with the same undo share it.
*After a crash*: what `limosa recover` makes of an operation whose last step this is.
"""


def sentence(what: object) -> str:
    """What a step, an undo or a release does: the first paragraph of its docstring."""
    text = inspect.cleandoc(getattr(what, "__doc__", None) or "").partition("\n\n")[0]
    return " ".join(text.replace("``", "`").split())


def table(verb: Verb) -> str:
    """One verb's."""
    rows = ["| step | what is done | still | job afterwards | undo | after a crash |", "|---|---|---|---|---|---|"]
    for step in verb.steps:
        undo = "" if step.undone == NOTHING else f"*{step.undone}*"
        cells = (f"`{step.name}`", sentence(type(step)), "yes" if step.still else "", step.after, undo, step.left)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def undos() -> str:
    """What each undo is."""
    told: dict[str, str] = {}
    for verb in VERBS.values():
        for step in verb.steps:
            if step.undone != NOTHING and step.undone not in told:
                told[step.undone] = sentence(type(step).undo)
    return "\n".join(f"| *{name}* | {text} |" for name, text in told.items())


def releases() -> str:
    """What is done at the end of an operation that went well, in that order."""
    told: dict[str, str] = {}
    for verb in VERBS.values():
        for step in verb.steps:
            if type(step).release is not Step.release:
                told[step.name] = sentence(type(step).release)
    return "\n".join(f"| `{name}` | {text} |" for name, text in reversed(told.items()))


def page() -> str:
    """The whole page."""
    parts = [HEAD, "| undo | what it is |", "|---|---|", undos(), ""]
    parts += ["When all went well, the *releases* of the steps are done, in reverse order:", ""]
    parts += ["| step | release |", "|---|---|", releases(), ""]
    for verb in VERBS.values():
        if verb.steps:
            parts += [f"## `{verb.name}`", "", table(verb), ""]
    parts += ["`toggle` runs the list of `suspend` or of `resume`.", ""]
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs/steps.md").write_text(page())
