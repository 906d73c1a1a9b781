"""The seats that a job wants to train, against those that an environment has: refused when it is loaded."""

from types import SimpleNamespace

import pytest

from rljob_api.errors import UserError
from rljob_service.worker.environments import LoadedEnvironment, check_seats
from rljob_service.worker.environments.base import Seat

SEATS = [Seat("white"), Seat("black"), Seat("judge", plays_policy=False), Seat("user", trains=False)]


def check(wanted, seats=SEATS):
    adapter = SimpleNamespace(seats=lambda environment: environment)
    check_seats(LoadedEnvironment(adapter, seats), "chess", wanted)


@pytest.mark.parametrize("wanted", [None, ("white",), ("black", "white")])
def test_seats_that_the_policy_plays_may_train(wanted):
    check(wanted)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("red",), "agent.seats: red is not a seat of the environment; its seats are white, black, judge, user"),
        (("judge",), "agent.seats: judge is played by another model; remove it, or remove its model and client"),
        (("user",), "agent.seats: the environment excludes user from training; remove it"),
    ],
)
def test_a_seat_that_cannot_train_is_refused_with_the_remedy(wanted, message):
    with pytest.raises(UserError, match=f"^{message}"):
        check(wanted)


def test_an_environment_without_a_seat_that_trains_is_refused():
    with pytest.raises(UserError, match=r"^agent\.environment: no seat trains: none of its seats \(judge, user\)"):
        check(None, SEATS[2:])


def test_frameworks_with_one_player_have_no_seats():
    check_seats(LoadedEnvironment(SimpleNamespace(), None), "gymnasium", None)
    with pytest.raises(UserError, match=r"^agent\.seats: environments of gymnasium have one player; remove it"):
        check_seats(LoadedEnvironment(SimpleNamespace(), None), "gymnasium", ("a",))
