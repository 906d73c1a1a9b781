"""Token ids for test-reward: of the job's model, for samples that have none."""

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.sources import ChatTemplate
from rljob_api.wire.scores import ScoreRequest
from rljob_cli.check.token_ids import add_token_ids, are_missing
from tests.support.job_simulation import make_job
from tests.support.model_folder import write_model


def job_with(folder):
    return make_job(model={"source": str(folder)})


def sample(**fields) -> ScoreRequest:
    return ScoreRequest(id="1", prompt="2+2?", completion="four", **fields)


def test_ids_are_those_of_the_models_tokenizer(tmp_path):
    groups = [[sample(), sample(completion_ids=[7])]]
    assert are_missing(groups)
    [[first, second]] = add_token_ids(job_with(write_model(tmp_path)), groups)
    assert (len(first.prompt_ids), len(first.completion_ids)) == (4, 5), "a token per byte, and eos_token"
    assert second.completion_ids == [7], "given ids are kept"
    assert not are_missing([[first, second]])


def test_chat_prompt_is_rendered_by_the_models_template(tmp_path):
    chat = ScoreRequest(id="1", prompt=[{"role": "user", "content": "2+2?"}], completion="4")
    [[found]] = add_token_ids(job_with(write_model(tmp_path)), [[chat]])
    assert len(found.prompt_ids) == len("<user>2+2?") + 1 + len("<assistant>"), "</s> is one token"
    assert len(found.completion_ids) == len("4") + 1, "as the rollout has it: </s> ends the answer"


def test_chat_prompt_has_the_jobs_template_and_its_variables(tmp_path):
    job = job_with(write_model(tmp_path))
    job.spec.model.chat_template = ChatTemplate(inline="{{ messages[0].content }}{{ end }}")
    job.spec.data.chat_template_arguments = {"end": "!!"}
    chat = ScoreRequest(id="1", prompt=[{"role": "user", "content": "2+2?"}], completion="4")
    [[found]] = add_token_ids(job, [[chat]])
    assert len(found.prompt_ids) == len("2+2?!!")


def test_model_without_a_readable_tokenizer_is_an_error_with_the_remedy(tmp_path):
    folder = write_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="add the columns prompt_ids and completion_ids"):
        add_token_ids(job_with(folder), [[sample()]])
