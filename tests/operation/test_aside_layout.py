"""What a job that was suspended with ``--release=memory-only`` keeps for us: which piece of memory is where."""

from __future__ import annotations

import os

import pytest

from limosa.errors import CannotBeMoved
from limosa.operation.parked.aside import read_layout
from limosa.parking.segments import layout_file

WORDS = b'{"pieces":[{"id":1,"bytes":64,"gpu":"GPU","offset":0}],"saw":[],"operation":"suspend"}'


def test_what_can_still_change_is_not_read() -> None:
    """It is the job's, and so its user's: what is looked at must be what is used."""
    sealed, open_ = layout_file(WORDS), os.memfd_create("limosa-arena", os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(open_, WORDS, 0)
        assert read_layout(sealed).pieces[0].bytes == 64
        with pytest.raises(CannotBeMoved, match="may change"):
            read_layout(open_)
    finally:
        os.close(sealed)
        os.close(open_)
