"""Runs a module of this very Limosa in a process of its own; :func:`limosa.start.python` writes the command line.

``python -I boot.py FOLDERS MODULE ARGUMENT…``. ``-I``: nothing is taken from the working directory, from ``PYTHON…``
variables or from the user's own packages. ``limosa`` is the package that this file lies in, wherever that is, and
``limosa_softgpu`` the one beside it; ``FOLDERS`` (with colons) are where else its dependencies may be, after all of
Python's own.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from os import path


def main() -> object:
    """Run ``main(arguments)`` of the module; what it returns is the exit code."""
    gc.set_threshold(100_000, 20, 100)  # what is loaded stays
    folders, name, *arguments = sys.argv[1:]
    sys.path += [folder for folder in folders.split(":") if folder and folder not in sys.path]
    package = path.dirname(path.abspath(__file__))
    _take("limosa", package)
    beside = path.join(path.dirname(package), "limosa_softgpu")
    if _owner(beside) in (0, _owner(package)):  # a folder above may be open to others, as /tmp is
        _take("limosa_softgpu", beside)
    else:
        sys.modules["limosa_softgpu"] = None  # type: ignore[assignment] # none from elsewhere
    sys.argv = [name, *arguments]
    return import_module(name).main(arguments)


def _take(name: str, folder: str) -> None:
    """Import a package from this folder, wherever else one of that name may be found."""
    spec = spec_from_file_location(name, path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = package = module_from_spec(spec)
    spec.loader.exec_module(package)


def _owner(folder: str) -> int:
    """Whose a folder is; -1 where there is none."""
    try:
        return os.lstat(folder).st_uid
    except OSError:
        return -1


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[arg-type]
