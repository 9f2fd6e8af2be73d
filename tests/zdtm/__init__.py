"""CRIU's own tests, run through ``limosa checkpoint`` and ``limosa restore`` beside bare CRIU: ``make test-zdtm``.

Each is a small program that makes one thing a process can have (a kind of socket, of mapping, of lock …), is told to
go on after it was brought back, and then looks whether that thing is as it was. CRIU's source comes from Debian's
source package of the version in use, checked by apt; nothing of it is kept in this repository.

``source`` fetches and builds, ``suite`` says which tests apply here and why the others do not, ``play`` runs one test
one way, ``__main__`` runs them all, ``report`` makes a page of it.
"""
