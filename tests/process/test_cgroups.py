"""Which cgroup hierarchies are seen, where mounts lie over each other."""

from __future__ import annotations

import pytest

from limosa.process.cgroups import cgroup_folders, cgroup_mounts

ROOT = "20 1 254:0 / / rw - ext4 /dev/vda rw"
TOP = "30 20 0:30 / /sys/fs/cgroup ro - tmpfs tmpfs ro"
UNIFIED = "31 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
DEVICES = "32 30 0:32 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices"


def seen(*lines: str) -> list[tuple[str, str]]:
    return sorted(cgroup_mounts("\n".join(lines) + "\n"))


def test_all_are_seen() -> None:
    assert seen(ROOT, TOP, UNIFIED, DEVICES) == [("/", "/sys/fs/cgroup/devices"), ("/", "/sys/fs/cgroup/unified")]


@pytest.mark.parametrize("number", [7, 99])  # the kernel gives a mount the lowest number that is free
def test_what_is_mounted_over_them_hides_them(number: int) -> None:
    over = f"{number} 30 0:40 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    assert seen(ROOT, TOP, UNIFIED, DEVICES, over) == [("/", "/sys/fs/cgroup")]


@pytest.mark.parametrize("number", [7, 99])
def test_one_of_them_can_be_hidden(number: int) -> None:
    over = f"{number} 31 0:41 / /sys/fs/cgroup/unified rw - tmpfs tmpfs rw"
    assert seen(ROOT, TOP, UNIFIED, DEVICES, over) == [("/", "/sys/fs/cgroup/devices")]
    beneath = f"{number} 30 0:41 / /sys/fs/cgroup/unified/a rw - tmpfs tmpfs rw"
    assert seen(ROOT, TOP, UNIFIED, DEVICES, beneath) == seen(ROOT, TOP, UNIFIED, DEVICES)


@pytest.mark.parametrize("number", [7, 99])
def test_what_lies_below_a_covered_folder_hides_nothing(number: int) -> None:
    hidden = f"{number} 20 0:41 / /sys/fs rw - tmpfs tmpfs rw"
    assert seen(ROOT, "25 20 0:25 / /sys rw - sysfs sysfs rw", TOP.replace("30 20", "30 25"), UNIFIED, hidden) == [
        ("/", "/sys/fs/cgroup/unified")
    ]


def test_where_a_criu_that_restores_has_them_is_no_place_to_look() -> None:
    """It takes them away in a moment; seen where version 2 is mounted nowhere else."""
    place = "/var/lib/containers/storage/overlay-containers/1/userdata/.criu.cgyard.r9xlcp/unified"
    line = f"90 24 0:60 / {place} rw - cgroup2 criu rw\n"
    assert list(cgroup_folders("0::/one\n", line, "devices")) == []
    assert list(cgroup_folders("0::/one\n", line.replace(place, "/mnt"), "devices")) == [("v2", "/mnt/one", "/mnt")]
