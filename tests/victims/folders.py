"""Works in a folder that was removed, has another removed one open, and a link itself (not what it leads to)."""

import os

from common import folder, loop

base = os.path.abspath(folder())
os.mkdir(f"{base}/gone")
os.makedirs(f"{base}/above/open")
os.symlink("/etc/passwd", f"{base}/link")
link = os.open(f"{base}/link", os.O_PATH | os.O_NOFOLLOW)
opened = os.open(f"{base}/above/open", os.O_RDONLY | os.O_DIRECTORY)
os.chdir(f"{base}/gone")
os.rmdir(f"{base}/gone")
os.removedirs(f"{base}/above/open")


def check(n):
    assert os.readlink("", dir_fd=link) == "/etc/passwd"
    assert os.listdir(opened) == []
    for at in (os.readlink("/proc/self/cwd"), os.readlink(f"/proc/self/fd/{opened}")):
        assert at.endswith(" (deleted)"), at
        assert not os.path.lexists(at.removesuffix(" (deleted)")), at


loop(check)
