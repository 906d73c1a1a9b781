"""Reading what a program or an environment returned: the fields of an EpisodeReply, or a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rljob_api.wire.contract import MAX_EPISODE_REPLY_BYTES
from rljob_service.worker.forms.json_values import to_json, to_log
from rljob_service.worker.forms.outcome import CallOutcome, describe, encodable, read_number
from rljob_service.worker.forms.reply_fields import WrongReplyError, build_reply, read_mapping, read_reward
from rljob_service.worker.forms.results import fields_of

KEYS: Final = ("reward", "rewards", "state", "info")
_EXPECTED: Final = (
    "None, a number, (number or None, info), a dict with reward, rewards, state and info, or the rewards of single "
    "answers by the id of their completion"
)


def read(value: Any, name: str) -> CallOutcome:
    """Return an EpisodeReply of what `name` returned."""

    def build() -> dict[str, Any]:
        fields = _find_fields(value)
        return {
            "reward": read_reward(fields.get("reward"), "reward"),
            "rewards": _read_rewards(fields.get("rewards")),
            "state": to_json(read_mapping(fields.get("state"), "state"), "state"),
            "info": to_log(read_mapping(fields.get("info"), "info")),
        }

    return build_reply(build, name, MAX_EPISODE_REPLY_BYTES)


def _find_fields(value: Any) -> Mapping[Any, Any]:
    """Return the parts of a reply by name."""
    if value is None:
        return {}
    fields = fields_of(value)
    if fields is not None:
        if not any(key in fields for key in KEYS):
            return {"rewards": fields}
        unknown = [str(key) for key in fields if key not in KEYS]
        if unknown:
            raise WrongReplyError(f"the reply has the unknown key {unknown[0]}; its keys may be {', '.join(KEYS)}")
        return fields
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], Mapping | None):
        return {"reward": value[0], "info": value[1]}
    if read_number(value) is None:
        raise WrongReplyError(f"returned {describe(value)}; expected {_EXPECTED}")
    return {"reward": value}


def _read_rewards(value: Any) -> dict[str, float | None]:
    rewards = read_mapping(value, "rewards")
    wrong = next((key for key in rewards if not isinstance(key, str | int)), None)
    if wrong is not None:
        what = "keys are ids of completions or numbers of turns"
        raise WrongReplyError(f"rewards has the key {describe(wrong)}; its {what}")
    return {encodable(str(key)): read_reward(each, f"rewards[{key!r}]") for key, each in rewards.items()}
