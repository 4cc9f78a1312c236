"""Every stage by name. A file holds a family of stages; an entry holds code, cost, argument and source."""

from moatlab.methods.entry import StageEntry
from moatlab.methods.stages import adversarial, mixing, regularised

STAGES: dict[str, StageEntry] = {**mixing.STAGES, **adversarial.STAGES, **regularised.STAGES}
