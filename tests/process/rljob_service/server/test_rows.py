"""Rows of an environment or a program over HTTP: pages, and why there are none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rljob_api.wire.contract import READ_ROWS
from tests.support.reward_process import Server

StartServer = Callable[..., Server]
EPISODES = ["--serves", "episodes"]
ENVIRONMENT = [*EPISODES, "--framework", "skyrlGym"]
_numbers = itertools.count()


def read(server: Server, split: str, start: int = 0, count: int = 1000) -> Any:
    arguments = {"split": split, "start": start, "count": count}
    call = {"id": f"rows-{next(_numbers)}", "function": READ_ROWS, "arguments": arguments}
    status, result, _ = server.request("POST", "/v1/call", call)
    return result if status == 200 else (status, result)


PROGRAM = """
import random

def run(prompt):
    return 1.0

def rows(split):
    if split == "list":
        return [{"prompt": "a", "index": 7, "info": {"x": [1, 2.5, None]}}, {"prompt": "b"}, {"prompt": "c"}]
    if split == "set":
        return [{"prompt": "a"}, {"prompt": "b", "tags": {1}}]
    if split == "dict":
        return {"prompt": ["a"]}
    if split == "texts":
        return ["a"]
    if split == "none":
        return []
    if split == "large":
        return [{"prompt": "x" * (5 << 20)}]
    if split == "long":
        return [{"prompt": "x" * (3 << 20)} for _ in range(3)]
    if split != "train":
        raise ValueError(f"no split {split}; it has train")
    return endless()

def endless():
    draw = random.Random(0)
    while True:
        a = draw.randrange(100)
        yield {"prompt": f"{a} + 1?", "answer": a + 1}
"""


@pytest.fixture(scope="module")
def program(start_server: StartServer) -> Server:
    return start_server(PROGRAM, EPISODES, slots=1, retries=0, function={"spareWorkers": 0})


def test_pages_of_a_sequence_and_of_an_endless_generator_follow_each_other(program: Server) -> None:
    first, second = read(program, "list", 0, 2)["value"], read(program, "list", 2)["value"]
    assert first["rows"] == [
        {"prompt": "a", "index": 7, "info": {"x": [1, 2.5, None]}},
        {"prompt": "b", "index": 1},
    ], "a row arrives as it was made, with its number unless it has one"
    assert (first["total"], first["is_last"]) == (3, False)
    assert (second["rows"], second["is_last"]) == ([{"prompt": "c", "index": 2}], True)
    pages = [read(program, "train", start, 3)["value"] for start in (0, 3, 6)]
    assert [row["index"] for page in pages for row in page["rows"]] == list(range(9))
    assert not any(page["is_last"] or page["total"] for page in pages)
    again = read(program, "train", 4, 2)["value"]["rows"]
    assert again == [row for page in pages for row in page["rows"]][4:6], "rows out of turn are made again"


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("set", "row 1['tags'] is a set, which JSON does not have; return text, numbers, "),
        ("dict", "rows('dict') returned dict {'prompt': ['a']}; return a list of dicts, or yield them"),
        ("texts", "row 0 is str 'a'; it must be a dict, from columns to values"),
        ("large", "row 0 has 5120 KiB as JSON, at most 4096 KiB; shorten it"),
    ],
)
def test_what_cannot_be_a_row_is_refused_with_its_number(program: Server, split: str, message: str) -> None:
    result = read(program, split)
    assert (result["valid"], result["reason"]) == (False, "bad_request"), result
    assert result["message"].startswith(message)


def test_error_of_the_function_has_its_place(program: Server) -> None:
    result = read(program, "tset")
    assert result["reason"] == "exception"
    assert result["message"] == "function.inline:23: ValueError: no split tset; it has train"


def test_page_ends_by_its_size_and_a_split_may_be_empty(program: Server) -> None:
    page = read(program, "long")["value"]
    assert (len(page["rows"]), page["total"], page["is_last"]) == (2, 3, False)
    assert read(program, "none")["value"] == {"rows": [], "total": 0, "is_last": True}
    assert read(program, "list", count=0)[0] == 422


STEPS = """
class Echo:
    def __init__(self, env_config, extras): ...
    def init(self, prompt): return prompt, {}
    def step(self, action): return {"observations": [], "reward": 1.0, "done": True}
    def close(self): ...
"""


def test_environment_without_rows_says_where_they_belong(start_server: StartServer) -> None:
    server = start_server(STEPS, ENVIRONMENT, slots=1, function={"spareWorkers": 0, "factoryArgs": {}})
    result = read(server, "train")
    assert result["reason"] == "bad_request"
    assert result["message"].startswith("Echo has no rows of its own: add a function rows(split) to the file of agent.")


def test_rows_next_to_the_class_of_an_environment_are_its_rows(start_server: StartServer) -> None:
    source = f"{STEPS}\ndef rows(split):\n    return [{{'prompt': split}}]\n"
    server = start_server(source, ENVIRONMENT, slots=1, function={"spareWorkers": 0, "factoryArgs": {}})
    assert read(server, "eval")["value"]["rows"] == [{"prompt": "eval", "index": 0}]


SHARED = """
class Agent:
    async def run(self, prompt):
        return 1.0

    def rows(self, split):
        yield {"prompt": split}
"""


def test_process_of_many_episodes_has_rows_too(start_server: StartServer) -> None:
    server = start_server(SHARED, EPISODES, slots=2, episodesPerProcess=2, function={"spareWorkers": 0})
    assert read(server, "train")["value"] == {
        "rows": [{"prompt": "train", "index": 0}],
        "total": None,
        "is_last": True,
    }
