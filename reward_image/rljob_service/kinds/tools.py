"""Tools: a call names a function and has the arguments that the policy wrote, the reply is text. Their schemas are
public, because the policy sees them."""

from typing import Any

from rljob_api.manifest.services.calls import CallService
from rljob_service.kinds.calls import CallKind, reply_format
from rljob_service.results import StartupReport, ToolCallReply
from rljob_service.worker.settings import TOOLS


class Tools(CallKind):
    name = TOOLS
    noun = "tools"
    replies = reply_format(ToolCallReply)

    def facts(self, settings: CallService, report: StartupReport) -> dict[str, Any]:
        return {"tools": [tool.model_dump() for tool in report.tools]}
