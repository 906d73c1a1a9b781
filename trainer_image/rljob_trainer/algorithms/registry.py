"""The algorithm of a job: one class for each `spec.algorithm.type`."""

from typing import Final

from rljob_api.manifest.algorithm import AlgorithmType
from rljob_api.manifest.job import RLJobSpec
from rljob_trainer.algorithms.base import AlgorithmCode, resolve
from rljob_trainer.algorithms.cispo import Cispo
from rljob_trainer.algorithms.dapo import Dapo
from rljob_trainer.algorithms.dr_grpo import DrGrpo
from rljob_trainer.algorithms.grpo import Grpo
from rljob_trainer.algorithms.gspo import Gspo
from rljob_trainer.algorithms.ppo import Ppo
from rljob_trainer.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rljob_trainer.algorithms.rloo import Rloo

ALGORITHMS: Final[dict[AlgorithmType, type[AlgorithmCode]]] = {
    "grpo": Grpo,
    "drGrpo": DrGrpo,
    "dapo": Dapo,
    "rloo": Rloo,
    "reinforcePlusPlus": ReinforcePlusPlus,
    "reinforcePlusPlusBaseline": ReinforcePlusPlusBaseline,
    "gspo": Gspo,
    "cispo": Cispo,
    "ppo": Ppo,
}


def build_algorithm(spec: RLJobSpec) -> AlgorithmCode:
    """Return the job's algorithm, with its settings resolved. Call it once per job and process."""
    code = ALGORITHMS[spec.algorithm.type]
    return code(resolve(spec, code.DEFAULTS))
