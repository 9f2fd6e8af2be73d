"""``python -m limosa`` is ``limosa``."""

from limosa.cli.main import entry

if __name__ == "__main__":
    entry()
