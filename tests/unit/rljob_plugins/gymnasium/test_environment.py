"""gymnasium: which spaces have a text form, actions by text, number and label, and what is shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_plugins.gymnasium.environment import find_observation_problem, read_action
from rljob_service.worker import environments
from rljob_service.worker.environments.stepping import NotAnActionError
from tests.support.environments import GivenAnswers, build_episode, load_adapter, play


def space(kind: str, **fields: Any) -> Any:
    return type(kind, (SimpleNamespace,), {})(**fields)


MOVES = space("Discrete", n=3, start=1)
WORDS = space(
    "Text", min_length=1, max_length=5, characters="abc", contains=lambda text: set(text) <= set("abc") and text != ""
)


class Corridor:
    """Three steps to the right."""

    action_space, observation_space = MOVES, space("Discrete", n=9, start=0)
    closed = 0

    def __init__(self, length: int = 3, render_mode: str | None = None) -> None:
        self.length, self.render_mode, self.place = length, render_mode, 0

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.place = 0
        return 0, {"seed": seed, "answer": options["row"]["answer"]}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += {1: -1, 2: 0, 3: 1}[action]
        return self.place, -0.1, self.place == self.length, self.place < 0, {"place": self.place}

    def render(self) -> str:
        return "." * self.place + "X\n"

    def close(self) -> None:
        type(self).closed += 1


OPTIONS = {"rljob": {"labels": ["left", "stay", "right"], "invalid_reward": -1.0}}


def test_labels_are_actions_and_other_answers_get_the_invalid_reward() -> None:
    model = GivenAnswers("I go right.", "jump", "left, no: RIGHT", "right")
    reply = play("gymnasium", Corridor, model, build_episode("x", seed=5), OPTIONS)
    assert reply.rewards == {"c0": -0.1, "c1": -1.0, "c2": -0.1, "c3": -0.1}
    assert [each[-1]["content"] for each in model.conversations] == [
        "Play.\n\n0", "1", "Reply with one of left, stay, right.", "2",
    ]  # fmt: skip
    assert reply.info == {"seed": 5, "answer": "x", "place": 3}


def test_rows_of_a_split_are_seeds_that_no_other_split_trains_on() -> None:
    loaded = environments.adopt(load_adapter("gymnasium"), Corridor, OPTIONS)
    assert loaded.list_rows is not None
    train, held_out = ([next(rows) for _ in range(3)] for rows in map(loaded.list_rows, ("train", "eval")))
    assert train == [{"prompt": "", "answer": None, "seed": seed} for seed in range(3)]
    assert [row["seed"] for row in held_out] == [1_000_000_000 + number for number in range(3)]
    reply = play("gymnasium", Corridor, GivenAnswers("right"), build_episode(index=2, **held_out[1]), OPTIONS)
    assert reply.info["seed"] == 1_000_000_001, "an episode is reset with the row's seed"


def test_rendered_text_replaces_the_observation() -> None:
    model = GivenAnswers("3", "1", "1")
    reply = play("gymnasium", Corridor, model, args={"render_mode": "ansi", "length": 9})
    assert [each[-1]["content"] for each in model.conversations] == ["Play.\n\nX", ".X", "X"]
    assert reply.state == {"end": "done", "turns": 3}, "truncated is an end, too"


def test_environment_is_closed_after_the_check_and_each_episode() -> None:
    before = Corridor.closed
    play("gymnasium", Corridor, GivenAnswers("1"))
    assert Corridor.closed == before + 2


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"rljob": {"labels": ["a"]}}, "1 labels do not fit"),
        ({"rljob": {"label": []}}, "unknown key label; its keys may be labels, invalid_reward"),
    ],
)
def test_options_are_checked_at_the_start(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        play("gymnasium", Corridor, GivenAnswers(), args=args)


def test_spaces_without_text_are_refused_at_the_start() -> None:
    class Pole(Corridor):
        observation_space = space("Box")

    class Arm(Corridor):
        action_space = space("Box")

    with pytest.raises(UserError, match=r"the observation space Box.* has no text form.*render_mode: ansi"):
        play("gymnasium", Pole, GivenAnswers())
    with pytest.raises(UserError, match=r"the action space Box.* only Text and Discrete"):
        play("gymnasium", Arm, GivenAnswers(), args={"render_mode": "ansi"})
    assert play("gymnasium", Pole, GivenAnswers("1"), args={"render_mode": "ansi"}).rewards == {"c0": -0.1}


def test_parts_of_composed_observations_are_checked() -> None:
    cards = space("Tuple", spaces=(MOVES, MOVES))
    assert find_observation_problem(cards) == ""
    assert find_observation_problem(space("Dict", spaces={"a": cards, "b": WORDS})) == ""
    assert find_observation_problem(space("Sequence", feature_space=WORDS)) == ""
    assert "has no text form" in find_observation_problem(space("Tuple", spaces=(MOVES, space("Box"))))
    assert "has no text form" in find_observation_problem(space("Sequence", feature_space=space("Box")))


@pytest.mark.parametrize(
    ("text", "action"), [("2", 2), ("not 1 but 3", 3), ("7 or 2", 2), ("-1", None), ("two", None), ("0", None)]
)
def test_last_number_that_is_an_action_is_taken(text: str, action: int | None) -> None:
    if action is None:
        with pytest.raises(NotAnActionError, match="one number from 1 to 3"):
            read_action(MOVES, text, ())
    else:
        assert read_action(MOVES, text, ()) == action


def test_labels_match_whole_words_and_the_longest() -> None:
    labels = ["up", "up left", "down"]
    assert read_action(MOVES, "Up left", labels) == 2
    assert read_action(MOVES, "supper, then up", labels) == 1


def test_text_must_be_in_its_space() -> None:
    assert read_action(WORDS, "abc", ()) == "abc"
    with pytest.raises(NotAnActionError, match="1 to 5 characters of: abc"):
        read_action(WORDS, "xyz", ())
