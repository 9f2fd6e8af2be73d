"""The parked way: the part of each operation that has to do with memory that the shim looks after.

:mod:`parkable` says before an operation what can be parked and what stands against it. One class for each verb does its
part beside the driver's steps, which then have little to carry: :mod:`moving`, :mod:`suspending`, :mod:`resuming`,
:mod:`saving` (checkpoint), :mod:`loading` (restore); :mod:`recovering` goes on where one was killed. What they share
are the gates, pieces of memory, who holds these, and where they lie in an arena.
"""
