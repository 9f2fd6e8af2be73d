"""The host side of a job: who it is, what it holds, what stands against moving it, and CRIU."""
