"""The base classes of OpenRLHF's agents, for sources that import them where OpenRLHF is missing: its package needs a
GPU stack, which a runner does not. Standard library only.
"""

from typing import Any, Final

from rljob_service.worker.forms.stand_ins import provide_module

_MODULE: Final = "openrlhf.utils.agent"
_BASES: Final = ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor")


class _Base:
    """In the place of a base class of OpenRLHF."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states


def provide_base_classes() -> None:
    """Make `openrlhf.utils.agent` importable where OpenRLHF is missing."""
    provide_module(_MODULE, {name: type(name, (_Base,), {}) for name in _BASES})
