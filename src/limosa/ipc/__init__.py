"""How Limosa's processes talk to each other, and to the library in a job (``DESIGN.md``)."""
