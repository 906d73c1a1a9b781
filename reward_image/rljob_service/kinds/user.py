"""A simulated user: the arguments of a call are the conversation, the reply is its next message. A function or a chat
model answers."""

from rljob_api.functions.plugins import SIGNATURES, find_plugins
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import UserModel
from rljob_api.wire.calls import UserCall
from rljob_service.kinds.calls import CallKind, reply_format
from rljob_service.results import UserCallReply
from rljob_service.worker.settings import USER, FunctionSettings


class User(CallKind):
    name = USER
    noun = "simulated user"
    arguments = UserCall
    replies = reply_format(UserCallReply)

    def find_model(self, settings: CallService) -> UserModel | None:
        return settings.user_model

    def complete(self, function: FunctionSettings, settings: CallService, framework: str) -> FunctionSettings:
        return function._replace(signatures=find_plugins(SIGNATURES))
