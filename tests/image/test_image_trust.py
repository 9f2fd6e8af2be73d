"""An image that somebody else could have written, or could swap, is refused; each rule of docs/image-format.md."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from image_material import write_image

from limosa import start
from limosa.errors import UntrustedImage
from limosa.image import destination_problem, open_image, trust, trusted_uids
from limosa.image.trust import open_path
from limosa.start import parse_served

STRANGER, USER = 65534, 4242
SERVER = Path(__file__).parents[1] / "fuse_server.py"
ROOT_ONLY = frozenset({0})

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="giving files to other users needs root")


@pytest.fixture(autouse=True)
def no_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="limosa-trust-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def image(base: Path) -> Path:
    (base / "a" / "b").mkdir(parents=True)
    write_image(base / "a" / "b" / "image").close()
    return base / "a" / "b" / "image"


def refused(path: Path | str, match: str) -> None:
    with pytest.raises(UntrustedImage, match=match) as e:
        open_image(path)
    assert e.value.exit_code == 11
    assert e.value.hint
    open_image(path, trust=False).close()  # looking is allowed


def test_roots_own_image_is_trusted(image: Path) -> None:
    open_image(image).close()


@pytest.mark.parametrize("part", [".", "criu", "log", "manifest.json", "manifest.blake3", "criu/pages-1.img"])
def test_every_part_must_belong_to_a_trusted_user(image: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(image / part, STRANGER, -1)
    refused(image, f"belongs to user {STRANGER}")
    os.chown(image / part, USER, -1)
    refused(image, f"belongs to user {USER}")
    monkeypatch.setenv("SUDO_UID", str(USER))
    open_image(image).close()
    os.chown(image / part, STRANGER, -1)
    refused(image, f"not to root or user {USER}")


@pytest.mark.parametrize("part", [".", "criu", "log", "manifest.json", "manifest.blake3", "criu/pages-1.img"])
@pytest.mark.parametrize("bit", [0o020, 0o002, 0o1002])
def test_no_part_may_be_writable_to_others(image: Path, part: str, bit: int) -> None:
    """Sticky or not: others could add names to the folder, and CRIU opens some names only if they are there."""
    place = image / part
    place.chmod(place.stat().st_mode | bit)
    refused(image, "others may write to")


@pytest.mark.parametrize("where", ["a", "a/b"])
def test_folders_on_the_way_must_belong_to_a_trusted_user(
    base: Path, image: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(base / where, USER, -1)
    refused(image, f"{where} belongs to user {USER}")
    monkeypatch.setenv("SUDO_UID", str(USER))
    open_image(image).close()


@pytest.mark.parametrize("where", ["a", "a/b"])
@pytest.mark.parametrize(
    ("mode", "ok"), [(0o775, False), (0o757, False), (0o777, False), (0o1777, True), (0o1775, True)]
)
def test_folders_on_the_way_may_be_writable_to_others_only_if_sticky(
    base: Path, image: Path, where: str, mode: int, ok: bool
) -> None:
    (base / where).chmod(mode)
    if ok:
        open_image(image).close()
    else:
        refused(image, "others may write to")


def test_a_strangers_sticky_folder_is_not_trusted(base: Path, image: Path) -> None:
    (base / "a").chmod(0o1777)
    os.chown(base / "a", STRANGER, -1)  # its owner may rename what is in it
    refused(image, f"belongs to user {STRANGER}")


def test_an_access_list_counts_as_writable(base: Path, image: Path) -> None:
    """acl(5) shows a named user's right in the mode's group bits. Set through its extended attribute."""
    user_obj, user, group_obj, mask, other = 0x01, 0x02, 0x04, 0x10, 0x20
    entries = [(user_obj, 7, -1), (user, 7, STRANGER), (group_obj, 5, -1), (mask, 7, -1), (other, 5, -1)]
    acl = (2).to_bytes(4, "little") + b"".join(
        tag.to_bytes(2, "little") + perm.to_bytes(2, "little") + (who & 0xFFFFFFFF).to_bytes(4, "little")
        for tag, perm, who in entries
    )
    os.setxattr(base / "a", "system.posix_acl_access", acl)
    refused(image, "others may write to")


def test_symlinks_are_followed_component_by_component(base: Path, image: Path) -> None:
    (base / "link").symlink_to("a/../a/./b")
    (base / "b2").symlink_to(base / "a/b")
    (base / "latest").symlink_to(image)
    for path in ("link/image", "b2/image", "latest", "b2/../b/image"):
        with open_image(base / path) as opened:
            assert os.fstat(opened.fd).st_ino == image.stat().st_ino
    (base / "a").chmod(0o777)  # seen through every one of them
    for path in ("link/image", "b2/image", "latest"):
        refused(base / path, "others may write to")


def test_a_symlink_must_belong_to_a_trusted_user(base: Path, image: Path) -> None:
    """A stranger's symlink in a sticky folder points where he likes, and tomorrow elsewhere."""
    (base / "tmp").mkdir()
    (base / "tmp").chmod(0o1777)
    (base / "tmp" / "link").symlink_to(image)
    open_image(base / "tmp" / "link").close()
    os.chown(base / "tmp" / "link", STRANGER, -1, follow_symlinks=False)
    refused(base / "tmp" / "link", f"link belongs to user {STRANGER}")


def test_dots_do_not_hide_a_strangers_folder(base: Path, image: Path) -> None:
    (base / "evil").mkdir()
    os.chown(base / "evil", STRANGER, -1)
    with pytest.raises(UntrustedImage):
        os.close(open_path(f"{base}/evil/../a/b/image", ROOT_ONLY))


def test_a_relative_path_is_walked_from_the_root(base: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(image.parent)
    open_image("image").close()
    (base / "a").chmod(0o777)
    refused("image", "others may write to")


def test_symlinks_in_a_circle_end(base: Path) -> None:
    (base / "x").symlink_to("y")
    (base / "y").symlink_to("x")
    with pytest.raises(OSError, match="symbolic links"):
        open_path(base / "x", ROOT_ONLY)


def test_a_walk_leaves_no_descriptor_open(base: Path, image: Path) -> None:
    (base / "link").symlink_to(image)
    (base / "bad").symlink_to("/nowhere/at/all")
    before = len(os.listdir("/proc/self/fd"))
    for path in (image, base / "link"):
        os.close(open_path(path, ROOT_ONLY))
    for path in (base / "bad", image / "manifest.json", image / "nothing"):
        with pytest.raises(OSError, match=r"."):
            open_path(path, ROOT_ONLY)
    os.chown(base / "a", STRANGER, -1)
    with pytest.raises(UntrustedImage):
        open_image(image)
    assert len(os.listdir("/proc/self/fd")) == before


def test_swapping_the_folder_after_it_was_opened_changes_nothing(image: Path) -> None:
    with open_image(image) as opened:
        image.rename(image.with_name("aside"))
        (image / "criu").mkdir(parents=True)
        (image / "criu" / "core-41.img").write_bytes(b"evil")
        assert len(os.listdir(opened.criu_fd)) == len(opened.manifest.files)


@pytest.mark.parametrize("value", ["", "x", "-1", "4242 ", "٤", "0x10"])
def test_a_strange_sudo_uid_adds_nobody(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SUDO_UID", value)
    assert trusted_uids() == ROOT_ONLY


AS_USER = """
import os, sys
from limosa.errors import LimosaError
from limosa.image import open_image
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        open_image(path).close()
        print("ok")
    except LimosaError as e:
        print(e.id)
"""


def test_others_trust_themselves_and_root_and_not_sudo(base: Path, image: Path) -> None:
    own, strange = base / "own", base / "strange"
    for path, uid in ((own, USER), (strange, STRANGER)):
        write_image(path).close()
        for part in [path, *path.rglob("*")]:
            os.chown(part, uid, uid)
    for part in [strange, *strange.rglob("*"), image, *image.rglob("*")]:
        part.chmod(0o755 if part.is_dir() else 0o644)
    closed = base / "closed"
    write_image(closed).close()
    done = subprocess.run(
        [sys.executable, "-c", AS_USER, str(USER), own, image, strange, closed],
        env=os.environ | {"SUDO_UID": str(STRANGER)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["ok", "ok", "untrusted-image", "permission"], done.stderr


def test_where_an_image_would_be_refused_later_is_said_before(base: Path) -> None:
    assert destination_problem(base / "image") is None
    base.chmod(0o777)
    assert "others may write to" in (destination_problem(base / "image") or "")


def test_a_file_system_served_by_a_user_is_his() -> None:
    table = (
        b"36 28 0:45 / /mnt/x rw,nosuid,nodev - fuse.sshfs me:/ rw,user_id=4242,group_id=4242,allow_other\n"
        b"37 28 0:46 / /mnt/r rw - fuseblk /dev/sdb1 rw,user_id=0,group_id=0\n"
        b"38 28 8:1 / / rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw,errors=remount-ro\n"
        b"39 28 0:47 / /odd rw - tmpfs user_id=4242 rw\n"
        b"40 28 0:48 / /machine rw - virtiofs share rw\n"
        b"41 28 0:49 / /nobody rw - fuse x rw\n"
        b"42 28 x:50 / /odd rw - fuse x rw,user_id=0\n"
        b"broken\n"
    )
    assert parse_served(table) == {os.makedev(0, 45): 4242, os.makedev(0, 46): 0, os.makedev(0, 48): 0}


@pytest.mark.parametrize("odd", ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2003", "\u2028", "\u2029"])
@pytest.mark.parametrize("line", ["/mnt/{} rw - fuse x", "/mnt rw - fuse.x{}y x", "/mnt rw - fuse x{}y"])
def test_no_character_in_a_mounts_names_hides_it(line: str, odd: str) -> None:
    """The kernel writes them as they are."""
    table = f"36 28 0:45 / {line.format(odd)} rw,user_id=4242,group_id=4242,allow_other\n"
    assert parse_served(table.encode()) == {os.makedev(0, 45): 4242}


def test_an_image_on_such_a_file_system_is_refused(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "server_of", lambda fd: STRANGER)
    refused(image, f"user {STRANGER} serves")
    monkeypatch.setattr(trust, "server_of", lambda fd: -1)
    refused(image, "nobody knows who serves")
    monkeypatch.setattr(trust, "server_of", lambda fd: 0)
    open_image(image).close()


@pytest.fixture
def mount(base: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a real one in a sticky folder: a user serves it, says that all of it is root's, and names it as given."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("this kernel has no FUSE")
    servers: list[subprocess.Popen[bytes]] = []
    (base / "sticky" / "evil").mkdir(parents=True)
    (base / "sticky").chmod(0o1777)

    def go(*words: str) -> Path:
        command = [sys.executable, SERVER, base / "sticky" / "evil", str(USER), "all", "roots", *words]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert servers[0].stdout is not None
        assert servers[0].stdout.readline() == b"READY\n"
        return base / "sticky" / "evil"

    yield go
    for server in servers:
        server.kill()  # whoever waits for it goes on
        server.wait(60)
    subprocess.run(["umount", "-l", base / "sticky" / "evil"], check=False, timeout=60, stderr=subprocess.DEVNULL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["x", "x\u2028y", "x\ry"])
def test_a_real_one_is_his_whatever_it_is_called(mount: Callable[[str], Path], name: str) -> None:
    evil = mount(f"name={name}")
    assert evil.stat().st_uid == 0
    assert start.untrusted_part(evil) == str(evil)
    with pytest.raises(UntrustedImage, match=f"user {USER} serves"):
        open_path(evil, ROOT_ONLY)


@pytest.mark.timeout(300)
def test_one_that_is_mounted_during_the_walk_is_noticed(
    base: Path, mount: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trust._check_folder

    def check(fd: int, where: str, *rest: Any) -> None:
        if where == "/":
            mount()
        real(fd, where, *rest)

    monkeypatch.setattr(trust, "_check_folder", check)
    with pytest.raises(UntrustedImage, match=f"user {USER} serves"):
        open_path(base / "sticky" / "evil", ROOT_ONLY)


@pytest.mark.timeout(300)
def test_one_that_says_of_itself_that_it_is_not_there_is_there(mount: Callable[[str], Path]) -> None:
    """What is not there yet is as its folder is, but not this."""
    evil = mount("gone")
    assert not start.trusted(evil)
    assert start.real_path(evil) is None


@pytest.mark.timeout(300)
def test_one_that_is_unmounted_meanwhile_is_nobodys(mount: Callable[[], Path]) -> None:
    """What is open stays so, and is in no list any more."""
    evil = mount()
    fd = os.open(evil, os.O_PATH)
    try:
        assert start.server_of(fd) == USER
        subprocess.run(["umount", "-l", evil], check=True, timeout=60)
        assert start.server_of(fd) == -1
    finally:
        os.close(fd)
