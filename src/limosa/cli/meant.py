"""What somebody may have meant who has mistyped a verb or an option."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

# What the option parser says, in its words.
_TOO_MANY = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", re.DOTALL)
_NO_NUMBER = re.compile(r"is not a valid (?:float|int|integer)(?: range)?(?=\.?$)")
_NEVER_GUESSED = ("--kill", "--force")
"""What nobody is led to who has not written it."""
_EVERY_VERB = ("-o", "--format", "-q", "--quiet", "-v", "--verbose")


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is most like this one, or ""."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), "")


def meant(error: Any) -> tuple[str, str]:
    """What to say about a usage error of the option parser.

    Returns:
        The message, and a guess that ends in "; " or is empty.
    """
    ctx, param, text = getattr(error, "ctx", None), getattr(error, "param", None), error.format_message()
    options = [name for p in (ctx.command.params if ctx is not None else ()) for name in p.opts]
    if type(error).__name__ == "NoSuchOption":
        wrong = error.option_name
        guess = nearest(wrong, [option for option in options if option not in _NEVER_GUESSED])
        if not guess and ctx is not None and ctx.parent is None and wrong in _EVERY_VERB:
            return f"there is no option {wrong} before the verb", f"limosa VERB {wrong}; "
        return f"there is no option {wrong}", f"did you mean {guess}? " if guess else ""
    if getattr(param, "name", "") == "fmt" and "--output" in options:
        return text, "did you mean --output DIR? -o is how the result is printed; "
    if "No such command" in text:
        from limosa.cli.main import ALIASES, VERBS

        word = text.split("'")[1] if "'" in text else ""
        guess = nearest(word, [*VERBS, *ALIASES])
        return f"there is no verb {word!r}", f"did you mean limosa {guess}? " if guess else ""
    many = _TOO_MANY.fullmatch(text)
    if many:
        return f"{many[1]}: more than this verb takes", ""
    return _NO_NUMBER.sub("is not a number", text), ""
