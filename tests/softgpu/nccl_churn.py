"""Makes a communicator of two ranks, uses it and destroys it, again and again: what CRIU is to dump in between.

    nccl_churn.py FOLDER

It counts rounds in FOLDER/rounds. While FOLDER/hold is there it has no communicator, and says so in FOLDER/held. It
ends with FOLDER/verdict once FOLDER/finish is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import nccl_words


def tell(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def main(folder: Path) -> int:
    nccl_words.N.device(0)
    rounds, right = 0, True
    while right and not (folder / "finish").exists():
        if (folder / "hold").exists():
            tell(folder / "held", str(rounds))
        else:
            right = nccl_words.all_in_one(2)
            rounds += 1
            tell(folder / "rounds", str(rounds))
        time.sleep(0.01)
    tell(folder / "verdict", "right" if right else f"wrong in round {rounds}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
