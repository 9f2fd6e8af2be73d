"""Records a job for tests: ``python tests/process/record.py NAME PID`` writes ``recordings/NAME.json``.

Names of users' folders and of the machine's are replaced, so that a recording shows the job and not where it ran.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from limosa.process.identity import Identity
from limosa.process.observe import observe

RECORDINGS = Path(__file__).parent / "recordings"


def record(name: str, pid: int) -> None:
    data = observe(Identity.of(pid)).to_json().decode()
    places = {sys.prefix: "/opt/venv", sys.base_prefix: "/opt/python", str(Path(__file__).parents[2]): "/srv/limosa"}
    for path in sorted(places, key=len, reverse=True):
        data = data.replace(path, places[path])
    data = re.sub(re.escape(tempfile.gettempdir()) + r'/[^",]*/([^"/,]*)', r"/srv/job/\1", data)
    data = data.replace(str(Path.home()), "/home/someone").replace(os.uname().nodename + '"', 'host"')
    (RECORDINGS / f"{name}.json").write_text(data + "\n")


if __name__ == "__main__":
    record(sys.argv[1], int(sys.argv[2]))
