"""Reading what a program or an environment returned: the fields of an EpisodeReply, or a reason."""

from collections.abc import Mapping
from typing import Any

from rljob_api.wire.contract import MAX_EPISODE_REPLY_BYTES
from rljob_service.worker.forms.json_values import to_json, to_log
from rljob_service.worker.forms.outcome import CallOutcome, describe, encodable, read_number
from rljob_service.worker.forms.reply_fields import WrongReplyError, build_reply, read_mapping, read_reward
from rljob_service.worker.forms.results import fields_of

KEYS = ("reward", "rewards", "state", "info", "seats")
_SEAT_KEYS = ("seat", "session", "reward", "rewards", "baseline", "info")
_EXPECTED = (
    "None, a number, (number or None, info), a dict with reward, rewards, state, info and seats, or the rewards of "
    "single answers by the id of their completion"
)


def read(value: Any, name: str) -> CallOutcome:
    """Return an EpisodeReply of what `name` returned."""

    def build() -> dict[str, Any]:
        fields = _find_fields(value)
        return {
            "reward": read_reward(fields.get("reward"), "reward"),
            "rewards": _read_rewards(fields.get("rewards"), "rewards"),
            "state": to_json(read_mapping(fields.get("state"), "state"), "state"),
            "info": to_log(read_mapping(fields.get("info"), "info")),
            "seats": [_read_seat(*each) for each in _list_seats(fields.get("seats"))],
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


def _read_rewards(value: Any, place: str) -> dict[str, float | None]:
    rewards = read_mapping(value, place)
    wrong = next((key for key in rewards if not isinstance(key, str | int)), None)
    if wrong is not None:
        what = "keys are ids of completions or numbers of turns"
        raise WrongReplyError(f"{place} has the key {describe(wrong)}; its {what}")
    return {encodable(str(key)): read_reward(each, f"{place}[{key!r}]") for key, each in rewards.items()}


def _list_seats(value: Any) -> list[tuple[str, Any]]:
    """Return each trajectory with its place in the reply: those of a list, or by the seat's name one for each."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [(f"seats[{name!r}]", _name_seat(name, each)) for name, each in value.items()]
    if not isinstance(value, (list, tuple)):
        raise WrongReplyError(f"seats is {describe(value)}; expected a dict by the seat's name, or a list")
    return [(f"seats[{index}]", fields_of(each)) for index, each in enumerate(value)]


def _name_seat(name: Any, value: Any) -> Mapping[Any, Any]:
    fields = fields_of(value)
    return {"reward": value, "seat": name} if fields is None else {**fields, "seat": name}


def _read_seat(place: str, fields: Mapping[Any, Any] | None) -> dict[str, Any]:
    """Return a SeatReply."""
    if fields is None or not isinstance(fields.get("seat"), str):
        raise WrongReplyError(f"{place} must be a dict with seat, the name of a seat, and reward")
    unknown = [str(key) for key in fields if key not in _SEAT_KEYS]
    if unknown:
        raise WrongReplyError(f"{place} has the unknown key {unknown[0]}; its keys may be {', '.join(_SEAT_KEYS)}")
    baseline = fields.get("baseline", "group")
    if baseline not in ("group", "episode"):
        raise WrongReplyError(f"{place}.baseline is {describe(baseline)}; it must be group or episode")
    return {
        "seat": encodable(fields["seat"]),
        "session": encodable(str(fields.get("session") or "")),
        "reward": read_reward(fields.get("reward"), f"{place}.reward"),
        "rewards": _read_rewards(fields.get("rewards"), f"{place}.rewards"),
        "baseline": baseline,
        "info": to_log(read_mapping(fields.get("info"), f"{place}.info")),
    }
