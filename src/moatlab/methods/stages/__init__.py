"""Every stage by its name. A family of stages is a file; an entry holds its code, cost, argument and source."""

from moatlab.methods.entry import StageEntry
from moatlab.methods.stages import mixing, multi_step, regularised, single_step

STAGES: dict[str, StageEntry] = {**mixing.STAGES, **single_step.STAGES, **multi_step.STAGES, **regularised.STAGES}
