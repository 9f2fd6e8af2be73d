"""``limosa verify``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from limosa.cli import words
from limosa.cli.options import IMAGE
from limosa.cli.output import Report, plain
from limosa.cli.verb import verb
from limosa.errors import DamagedImage, NoSuchImage, Reason

if TYPE_CHECKING:
    from pathlib import Path

    from limosa.image import Image
    from limosa.image.verify import VerifyResult


@verb(
    IMAGE,
)
def command(report: Report, *, image: Path) -> None:
    """Check every byte of an image against its hashes.

    It names damaged, missing, extra, swapped and truncated files.

    Exit code 0: every byte is right. 16: not.
    """
    from limosa.cli.signals import cancelling
    from limosa.image import open_image
    from limosa.image.verify import verify

    try:
        opened = open_image(image, trust=False)
    except NoSuchImage:
        raise
    except DamagedImage as error:
        report.result(_nothing(os.path.abspath(image), error), f"damaged: {error.message}", exit_code=16)
        return
    with opened, cancelling(report, "the image is only read") as cancel:
        doubtful(report, opened, image)
        result = verify(opened, report.progress, cancel=cancel)
    report.result(result, _text(result), exit_code=0 if result.ok else 16)


def doubtful(report: Report, opened: Image, path: Path) -> None:
    """Warns of an image that may be looked at and would not be restored: whole is not the same as one's own."""
    from limosa.image.trust import doubt

    if problem := doubt(opened.fd, path):
        report.warn(Reason(id="untrusted-image", text=f"limosa restore would refuse this image: {problem}"))


def _nothing(path: str, error: DamagedImage) -> dict[str, Any]:
    """The result where not even the manifest can be read."""
    problem = {"path": "manifest.json", "problem": "damaged", "text": error.message}
    if error.id == "unfinished-image":
        problem["problem"] = "missing"
    return {"image": path, "id": "", "ok": False, "files": [], "problems": [problem], "bytes": 0, "seconds": 0.0}


def _text(result: VerifyResult) -> str:
    rate = words.rate(result.bytes / result.seconds) if result.seconds > 0.001 else "at once"
    if result.ok:
        n = len(result.files)
        return f"whole: {n} file{'s'[: n != 1]}, {words.size(result.bytes)}, {rate}\nid {result.id}"
    many = len(result.problems)
    lines = [f"damaged: {many} problem{'s' if many > 1 else ''}"]
    lines += [f"  {p['problem']}: {words.clean(p['text'])}" for p in plain(result.problems)]
    return "\n".join(lines)
