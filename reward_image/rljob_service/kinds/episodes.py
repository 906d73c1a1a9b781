"""A runner: a call is an episode, which an environment or a program plays against the policy, or asks for rows that it
has. An episode may release what it holds before it ends, and its workers reach the model's gateway."""

from typing import ClassVar

from rljob_api.errors import UserError
from rljob_api.functions.plugins import ENVIRONMENTS, describe_unknown, find_plugins
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.runner import COMMAND_MODULE
from rljob_api.wire.calls import EpisodeCall, RowsCall
from rljob_api.wire.contract import READ_ROWS
from rljob_service.kinds.calls import CallKind, reply_format
from rljob_service.results import RunnerCallReply
from rljob_service.worker.settings import EPISODES, FunctionSettings


class Episodes(CallKind):
    name = EPISODES
    noun = "runner"
    arguments = EpisodeCall
    arguments_of: ClassVar = {READ_ROWS: RowsCall}
    replies = reply_format(RunnerCallReply)
    has_teardown = True

    def complete(self, function: FunctionSettings, settings: CallService, framework: str) -> FunctionSettings:
        # Only the network policy of its Pod says what else it reaches.
        folder = (function.factory_args or {}).get("working_dir") if function.module == COMMAND_MODULE else None
        adapter = _find_adapter(framework) if framework else ""
        folders = (folder,) if folder else ()
        seats = None if settings.seats is None else tuple(settings.seats)
        function = function._replace(network=True, folders=folders, framework=framework, adapter=adapter, seats=seats)
        return function._replace(per_process=settings.episodes_per_process)


def _find_adapter(framework: str) -> str:
    adapters = find_plugins(ENVIRONMENTS)
    if framework not in adapters:
        raise UserError(f"agent.environment.framework: {describe_unknown(framework, adapters)}")
    return adapters[framework]
