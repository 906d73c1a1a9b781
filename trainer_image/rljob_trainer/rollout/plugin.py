"""Entry point `vllm.general_plugins`: vLLM calls `register` once in each of its processes.

Every vLLM process pays for it, so it does not import the weight-transfer engine.
"""

from rljob_trainer.liveness.stacks import register_stacks
from rljob_trainer.rollout.startup import install_recorder

BACKEND = "rljob-http"
WORKER_EXTENSION = "rljob_trainer.rollout.engine.WorkerExtension"
SLEEPING_CPU_WORKER = "rljob_trainer.rollout.sleeping_cpu.SleepingCPUWorker"


def register() -> None:
    """Make `--weight-transfer-config {"backend": "rljob-http"}` known, record why this process fails to start, and
    let it write its stacks on request. May be called more than once."""
    install_recorder()
    register_stacks()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rljob_trainer.rollout.engine", "PublishedWeightTransferEngine"
        )
