"""The host side of a job: its identity, what it holds, what speaks against moving it, and CRIU."""
