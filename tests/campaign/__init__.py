"""The fault campaign: every operation × every step × every fault × moving victims (``docs/reliability.md``)."""
