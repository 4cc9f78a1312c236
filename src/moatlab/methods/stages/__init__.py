"""Every stage by name. A file holds a family of stages; an entry holds code, cost, arguments and source."""

from moatlab.methods.entry import StageEntry
from moatlab.methods.stages import adversarial, initialised, mixing, paired, regularised, replayed

FAMILIES = (mixing, adversarial, regularised, paired, initialised, replayed)
STAGES: dict[str, StageEntry] = {name: entry for family in FAMILIES for name, entry in family.STAGES.items()}
