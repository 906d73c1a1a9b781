"""An episode as user code and the adapters of environments see it, and how it ended. Standard library only."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
"""A chat message: role, content, perhaps tool_calls or tool_call_id."""


def model_of(name: str, seat: str) -> str:
    """Return the `model` of the requests of a seat that trains. `name`: that of the policy."""
    return f"{name}/{seat}"


class Access(NamedTuple):
    """How to call the policy during this episode: the fields of a ModelAccess."""

    url: str
    """Address of the gateway, without a path. Anthropic's clients take it."""
    api_key: str
    name: str
    """The `model` of requests that train."""

    @property
    def base_url(self) -> str:
        """The URL that OpenAI's clients take."""
        return f"{self.url.rstrip('/')}/v1"


class Episode(NamedTuple):
    """What a runner knows of an episode: the fields of an EpisodeCall."""

    id: str
    attempt: int
    access: Access
    prompt: list[Message]
    ground_truth: Any
    """Value of the answer column."""
    data_source: str
    columns: dict[str, Any]
    """The other columns of the row, with `index` and `split`."""
    seed: int
    max_turns: int
    """Answers of the policy, or of each trajectory in an episode with seats; the gateway refuses more."""
    deadline_seconds: float
    seats: tuple[str, ...] | None = None
    """Names of the seats that train. None: the environment decides."""

    @property
    def question(self) -> str:
        """The text of the last message of the user; empty without one."""
        users = [message for message in self.prompt if message.get("role") == "user"]
        content = users[-1].get("content") if users else ""
        if isinstance(content, list):
            return "".join(part.get("text", "") for part in content if isinstance(part, dict))
        return content or ""


class SeatResult(NamedTuple):
    """How one trajectory of an episode with several seats ended: the fields of a SeatReply."""

    seat: str
    session: str = ""
    """The header X-Session-ID of its requests. Empty: that without the header."""
    reward: Any = None
    rewards: Mapping[str, Any] = {}
    baseline: str = "group"
    """group or episode: with what its reward is compared, see SeatReply."""
    info: Mapping[str, Any] = {}


class Reply(NamedTuple):
    """How an episode ended: the fields of an EpisodeReply, with values as user code made them."""

    reward: Any = None
    """Reward of the whole episode. None: none, which is not 0."""
    rewards: Mapping[str, Any] = {}
    """Rewards of single answers, by the id of the completion, or by the number of the turn ("0" is the first)."""
    state: Mapping[str, Any] = {}
    """JSON. Rewards and the trajectory log get it."""
    info: Mapping[str, Any] = {}
    """For the trajectory log; what JSON does not have becomes text."""
    seats: Sequence[SeatResult] | Mapping[str, Any] = ()
    """Trajectories of an episode with several seats; or by the seat's name its reward, or the fields of a SeatResult
    as a dict."""
