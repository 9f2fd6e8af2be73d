"""Communicators of NCCL between the processes of a job: brought to the same point, closed, made again.

``meeting.py`` finds the point (nothing but numbers); ``closing.py`` talks to the shims.
"""
