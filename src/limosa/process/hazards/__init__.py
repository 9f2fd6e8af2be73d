"""What speaks against moving or checkpointing a job: pure functions from an observation to reasons.

Every id is explained in ``docs/refusals.md``. A reason with exit code 0 is a warning: something that cannot be known
from outside, or that will be different afterwards.
"""

from limosa.process.hazards.common import common_hazards
from limosa.process.hazards.cuda import cuda_hazards, has_nccl, is_rank, late_ranks
from limosa.process.hazards.descriptors import SEMAPHORE_LIMIT, renamed_files
from limosa.process.hazards.dump import GHOST_LIMIT, CheckpointNeeds, checkpoint_hazards, checkpoint_needs
from limosa.process.memory import memory_hazards

__all__ = [
    "GHOST_LIMIT",
    "SEMAPHORE_LIMIT",
    "CheckpointNeeds",
    "checkpoint_hazards",
    "checkpoint_needs",
    "common_hazards",
    "cuda_hazards",
    "has_nccl",
    "is_rank",
    "late_ranks",
    "memory_hazards",
    "renamed_files",
]
