"""Which Limosa this is: what ``pyproject.toml`` says, for those who must not load the rest to know it."""

VERSION = "0.1.0"
