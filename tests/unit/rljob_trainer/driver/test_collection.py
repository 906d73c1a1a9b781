"""Requests of a collection to its rewards."""

from rljob_api.manifest.roles import Sampling
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.collection import CollectionPlan, build_request
from tests.support.episodes import episode


def test_request_has_the_token_ids_of_the_prompt_and_of_the_completion():
    prompt = Prompt(7, "2+2?", [1, 2], ground_truth="4", extra_info={"level": 3})
    ended = episode([1, 2, 8, 9], [0, 0, 1, 1], text="4", index=(7, 0, 1))
    request = build_request(prompt, ended, CollectionPlan("train", 1, 2, Sampling(), 0, "g"))
    assert (request.prompt_ids, request.completion_ids) == ([1, 2], [8, 9])
    assert request.extra_info == {"level": 3, "truncated": False, "num_tokens": 2}
