"""The check of a job's inputs before it starts."""

import json

import pytest

from rljob_api.manifest.job import RLJob
from rljob_inputs.check import check_inputs, find_access
from tests.support.hub import run_hub
from tests.support.model_folder import CHAT_TEMPLATE, write_model, write_weights

JUDGE = {"name": "j", "judge": {"template": "x", "parser": {"regex": "(.)"}}}


def make_job(model_source, data_source, *, model=None, train=None, data=None, rollout=None, **sections):
    spec = {
        "model": {"source": str(model_source)} | (model or {}),
        "data": {"train": {"source": str(data_source)} | (train or {})} | (data or {}),
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "rollout": {"sampling": {"maxTokens": 4}} | (rollout or {}),
    }
    return RLJob.model_validate({"metadata": {"name": "j"}, "spec": {**spec, **sections}})


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", {"prompt": "12345678", "answer": "1"}, {"prompt": "1", "answer": None})
    return tmp_path


def check(folder, **sections):
    return check_inputs(make_job(folder / "model", folder / "train.jsonl", **sections), str, {})


def errors(report):
    return {finding.path: finding.message for finding in report.findings if not finding.is_warning}


def warnings(report):
    return {finding.path: finding.message for finding in report.findings if finding.is_warning}


def test_each_source_of_prompts_is_checked_at_its_own_field(folder):
    write_rows(folder / "other.jsonl", {"question": "1", "answer": "1"})
    mix = [{"name": name, "source": str(folder / "other.jsonl"), "prompt": name} for name in ("question", "prompt")]
    report = check(folder, data={"mix": mix})
    assert list(errors(report)) == ["spec.data.mix[1].prompt"]
    assert [table.path for table in report.lengths] == ["spec.data.train", "spec.data.mix[0]"]
    assert report.first_prompt.ground_truth == "1"
    assert report.first_prompt.prompt == [{"role": "user", "content": "12345678"}]


def test_prompts_that_are_both_trained_and_held_out_are_named(folder):
    held_out = write_rows(
        folder / "eval.jsonl", {"prompt": "new", "answer": "1"}, {"prompt": "12345678", "answer": "1"}
    )
    report = check(folder, data={"eval": {"source": str(held_out)}})
    message = warnings(report)["spec.data.eval"]
    assert message.startswith("1 of 2 prompts are trained, too")
    assert f"{held_out}:2 is {folder / 'train.jsonl'}:1" in message
    write_rows(held_out, {"prompt": "new", "answer": "1"})
    assert "spec.data.eval" not in warnings(check(folder, data={"eval": {"source": str(held_out)}}))


def test_prompts_that_a_chat_template_takes_by_mistake_are_warnings(folder):
    rows = [{"prompt": "x"}, {"prompt": " \n"}, {"prompt": [{"role": "usr", "content": "x"}]}, {"prompt": ""}]
    write_rows(folder / "train.jsonl", *(row | {"answer": "1"} for row in rows))
    report = check(folder)
    assert not errors(report)
    file = folder / "train.jsonl"
    assert warnings(report)["spec.data.train.prompt"] == (
        f"{file}:2: the prompt is empty, in 2 of 4 rows; {file}:3: a message has the role usr; did you mean user?"
    )
    assert "spec.data.train.prompt" not in warnings(check(folder, train={"limit": 1}))
    template = check(folder, train={"offset": 3}, data={"template": "{answer}: {prompt}"})
    assert "spec.data.train.prompt" not in warnings(template), "it is not empty after rendering"


def test_without_rows_the_model_is_checked_and_no_data_is_read(folder):
    (folder / "train.jsonl").unlink()
    report = check_inputs(make_job(folder / "model", folder / "train.jsonl"), str, {}, reads_rows=False)
    assert errors(report) == {}
    assert report.lengths == []
    assert report.num_parameters


def test_a_good_job_has_lengths_parameters_and_a_first_prompt(folder):
    report = check(folder)
    assert not errors(report)
    assert "the answer is null, in 1 of 2 rows" in warnings(report)["spec.data.train.answer"]
    (table,) = report.lengths
    template = len("<user>") + 1 + len("<assistant>")  # </s> is one token
    assert (table.min, table.max, table.limit) == (template + 1, template + 8, 60)
    assert report.num_parameters == {"spec.model.source": 602}
    assert report.first_prompt.ground_truth == "1"
    assert report.first_prompt.prompt == [{"role": "user", "content": "12345678"}]


def test_prompts_that_are_too_long_are_a_warning_and_an_error_if_all_are(folder):
    write_rows(folder / "train.jsonl", {"prompt": "x" * 60, "answer": 1}, {"prompt": "x", "answer": 1})
    message = warnings(check(folder))["spec.data.train.source"]
    assert message == (
        "1 of 2 prompts have more than 60 tokens (the model's context 64 - rollout.sampling.maxTokens 4) and are left "
        "out; the longest has 78"
    )
    write_rows(folder / "train.jsonl", {"prompt": "x" * 60, "answer": 1})
    assert "all 1 prompts are too long" in errors(check(folder))["spec.data.train.source"]


def test_conversations_of_a_warm_start_are_measured_with_their_answers(folder):
    given = write_rows(folder / "given.jsonl", {"prompt": "1", "answer": "22"}, {"prompt": "1", "answer": "x" * 60})
    sections = {"data": {"warmStart": {"source": str(given)}}, "schedule": {"warmStart": {"steps": 1}}}
    report = check(folder, **sections)
    table = report.lengths[1]
    assert (table.path, table.limit, table.num_too_long) == ("spec.data.warmStart", 63, 1)
    assert table.max - table.min == 58
    write_rows(given, {"prompt": "1", "answer": "22"}, {"prompt": "1", "answer": None})
    message = errors(check(folder, **sections))["spec.data.warmStart.answer"]
    assert message.startswith(f"{given}:2: the answer must be a text, or messages that end with the assistant's")


@pytest.mark.parametrize("limit", ["_MAX_ROWS", "_MAX_CHARACTERS"])
def test_only_the_beginning_of_large_data_is_read(folder, monkeypatch, limit):
    monkeypatch.setattr(f"rljob_inputs.check.{limit}", 3)
    write_rows(folder / "train.jsonl", *({"prompt": str(i), "answer": "1"} for i in range(9)), {"no": "prompt"})
    report = check(folder)
    assert not errors(report)
    (table,) = report.lengths
    assert (table.num_rows, table.is_whole) == ({"_MAX_ROWS": 3, "_MAX_CHARACTERS": 1}[limit], False)


@pytest.mark.parametrize(
    ("sections", "path", "message"),
    [
        ({"rollout": {"maxModelLen": 128}}, "spec.rollout.maxModelLen", "is 128, but the model's context is 64 tokens"),
        ({"rollout": {"sampling": {"maxTokens": 64}}}, "spec.rollout.sampling.maxTokens", "leaves no room"),
        ({"train": {"prompt": "promt"}}, "spec.data.train.prompt", "has no column promt; .* did you mean prompt?"),
        ({"data": {"template": "{x}"}}, "spec.data.template", "{x} is not a column"),
        ({"train": {"source": "/no"}}, "spec.data.train.source", "file /no not found"),
        ({"model": {"source": "/no"}}, "spec.model.source", "folder /no not found"),
    ],
)
def test_errors_are_at_their_field(folder, sections, path, message):
    found = errors(check(folder, **sections))
    assert list(found) == [path]
    assert all(part in found[path] for part in message.split(" .* "))


def test_what_the_job_leaves_to_its_model_is_resolved_and_reported(folder):
    write_model(folder / "model", {"max_position_embeddings": 128})
    (folder / "model/generation_config.json").write_text('{"max_new_tokens": 50}')
    report = check(folder, rollout={"sampling": {}})
    assert report.lengths[0].limit == 78
    shown = {each.field: each.value for each in report.from_model}
    assert shown == {
        "spec.rollout.maxModelLen": 128,
        "spec.rollout.sampling.maxTokens": 50,
        "spec.rollout.sampling.stop": ["</s>"],
    }
    job = make_job(folder / "model", folder / "train.jsonl", rollout={"sampling": {}})
    assert report.resolve(job).spec.rollout.sampling.max_tokens == 50
    assert job.spec.rollout.sampling.max_tokens is None, "the manifest stays as it is"


def test_without_a_model_the_length_of_answers_is_that_of_any_model(folder):
    report = check_inputs(make_job("/m", folder / "train.jsonl", rollout={"sampling": {}}), lambda source: None, {})
    assert report.from_model == []
    assert report.resolve(make_job("/m", "/t", rollout={"sampling": {}})).spec.rollout.sampling.max_tokens == 512


THINKS = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_variables_that_others_set_are_reported_by_the_operators_checks_alone(folder):
    report = check(folder, data={"chatTemplateArguments": {"tools": 1, "add_generation_prompt": False}})
    assert not errors(report)
    assert not warnings(report).keys() - {"spec.data.train.answer"}


def test_variables_of_the_chat_template_change_the_prompts(folder):
    write_model(folder / "model", {"max_position_embeddings": 4096}, chat_template=THINKS)
    before, after = (
        check(folder, rollout={"sampling": {}}, data={"chatTemplateArguments": arguments})
        for arguments in ({}, {"enable_thinking": False})
    )
    assert after.lengths[0].min - before.lengths[0].min == len("<think></think>")
    limits = [report.resolve(make_job("/m", "/t")).spec.rollout.sampling.max_tokens for report in (before, after)]
    assert limits == [2048, 512]
    assert not warnings(after).keys() - {"spec.data.train.answer"}


def test_variables_without_an_effect_are_a_warning(folder):
    write_model(folder / "model", chat_template=THINKS)
    message = warnings(check(folder, data={"chatTemplateArguments": {"enable_thinkin": 1}}))
    assert "did you mean enable_thinking?" in message["spec.data.chatTemplateArguments"]


def test_a_served_model_has_its_own_variables(folder):
    model = {"source": str(folder / "model"), "chatTemplateArguments": {"thinking": False}}
    report = check(folder, rewards=[JUDGE | {"judge": {**JUDGE["judge"], "model": model}}])
    message = warnings(report)["spec.rewards[0].judge.model.chatTemplateArguments"]
    assert message.endswith("(chat_template.jinja) does not read; it reads none")


def test_the_jobs_template_is_that_of_a_base_model(folder):
    (folder / "model/chat_template.jinja").unlink()
    remedy = "the model has no chat template; set it to text, or set spec.model.chatTemplate"
    assert remedy in errors(check(folder))["spec.data.format"]
    template = {"chatTemplate": {"inline": "{{ messages[0].content }}:"}}
    report = check(folder, model=template)
    assert not errors(report)
    assert (report.lengths[0].min, report.lengths[0].max) == (2, 9)
    broken = check(folder, model={"chatTemplate": {"inline": "{{ messages"}})
    assert "is not a Jinja template: line 1" in errors(broken)["spec.model.chatTemplate"]


def test_settings_that_change_the_config_are_not_second_guessed(folder):
    assert not errors(check(folder, rollout={"maxModelLen": 128, "env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}))
    report = check(folder, rollout={"extraArgs": ["--max-model-len=128"]})
    assert not errors(report)
    assert report.lengths[0].limit is None


@pytest.mark.parametrize(
    ("config", "sections", "path", "message"),
    [
        ({"architectures": ["BertForMaskedLM"]}, {}, "spec.model.source", "which is not among the language models"),
        ({"model_type": None}, {}, "spec.model.source", "has no model_type"),
        ({"model_type": "gemma2"}, {"trainer": {"dtype": "float16"}}, "spec.trainer.dtype", "is float16"),
    ],
)
def test_models_that_cannot_be_used_are_found_by_their_config(folder, config, sections, path, message):
    write_model(folder / "model", config)
    assert message in errors(check(folder, **sections))[path]


def test_adapters_that_vllm_cannot_add_are_refused_and_a_silent_merge_is_reported(folder):
    write_model(folder / "model", {"architectures": ["Zamba2ForCausalLM"]})
    asked = errors(check(folder, trainer={"lora": {"publish": "adapter"}}))["spec.trainer.lora.publish"]
    assert asked == "is adapter, and vLLM cannot add adapters to Zamba2ForCausalLM; remove it, or set merged"
    reported = warnings(check(folder, trainer={"lora": {}}))["spec.trainer.lora.publish"]
    assert "rollouts get merged weights" in reported
    assert "spec.trainer.lora.publish" not in warnings(check(folder, trainer={"lora": {"publish": "merged"}}))


def test_modules_for_lora_that_the_model_lacks_are_a_warning(folder):
    write_weights(folder / "model/model.safetensors", {"model.0.q_proj.weight": [2, 2]})
    assert "spec.trainer.lora.targetModules" not in warnings(check(folder, trainer={"lora": {}}))
    report = check(folder, trainer={"lora": {"targetModules": ["q_proj", "q_prj"]}})
    assert "no module called q_prj; did you mean q_proj?" in warnings(report)["spec.trainer.lora.targetModules"]


def test_embeddings_and_the_head_cannot_have_an_adapter(folder):
    shapes = {"model.embed_tokens.weight": [4, 2], "model.0.q_proj.weight": [2, 2]}
    write_weights(folder / "model/model.safetensors", shapes)
    report = check(folder, trainer={"lora": {"targetModules": ["embed_tokens"]}})
    assert errors(report)["spec.trainer.lora.targetModules"].endswith("cannot have an adapter; set some of q_proj")


def test_weights_that_modelopt_has_quantized_are_refused(folder):
    (folder / "model/hf_quant_config.json").write_text("{}")
    assert "weights are quantized" in errors(check(folder))["spec.model.source"]


def test_broken_folders_are_found(folder):
    model = folder / "model"
    write_weights(model / "model.safetensors", {"embed": [300, 2]}, 300)
    assert "is truncated: it has 300 of" in errors(check(folder))["spec.model.source"]
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    (model / "model.safetensors").unlink()
    messages = [finding.message for finding in check(folder).findings if finding.path == "spec.model.source"]
    assert [message.removeprefix(f"{model} ") for message in messages] == [
        "has no tokenizer (tokenizer.json)",
        "has no weights (*.safetensors)",
    ]
    (model / "config.json").write_text("{")
    assert "config.json is not JSON" in errors(check(folder))["spec.model.source"]
    (model / "config.json").unlink()
    assert "config.json is missing; set a Hugging Face folder" in errors(check(folder))["spec.model.source"]


def test_chat_without_a_template_is_an_error(folder):
    (folder / "model" / "chat_template.jinja").unlink()
    assert "the model has no chat template; set it to text" in errors(check(folder))["spec.data.format"]
    assert not errors(check(folder, data={"format": "text"}))
    (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert not errors(check(folder))


def test_served_models_are_checked_for_length_but_need_not_be_causal(folder):
    write_model(folder / "rm", {"architectures": ["Qwen3ForSequenceClassification"]})
    reward = {"name": "rm", "model": {"source": str(folder / "rm"), "maxModelLen": 65}}
    report = check(folder, rewards=[reward])
    assert list(errors(report)) == ["spec.rewards[0].model.maxModelLen"]
    assert report.num_parameters["spec.rewards[0].model.source"] == 602
    judge = {"name": "j", "judge": JUDGE["judge"] | {"model": {"source": "/no"}}}
    assert list(errors(check(folder, rewards=[judge]))) == ["spec.rewards[0].judge.model.source"]
    user = {"type": "loop", "user": {"model": {"model": {"source": "/no"}, "persona": "x"}}}
    assert "spec.agent.user.model.model.source" in errors(check(folder, agent=user, data={"format": "chat"}))


def test_sources_that_are_elsewhere_are_skipped(folder):
    report = check_inputs(make_job("pvc://c/m", "pvc://c/d"), lambda source: None, {})
    assert (report.findings, report.lengths, report.first_prompt) == ([], [], None)


def test_the_jobs_hub_and_token_take_precedence_over_the_shells():
    hub = {"endpoint": "http://mirror", "tokenSecretRef": {"name": "s", "key": "MY_TOKEN"}}
    environment = {"HF_ENDPOINT": "http://shell/", "HF_TOKEN": "shell", "MY_TOKEN": "mine"}
    access = find_access(make_job("/m", "/d", hub=hub), environment)
    assert (access.endpoint, access.token) == ("http://mirror", "mine")
    assert find_access(make_job("/m", "/d"), environment).endpoint == "http://shell"
    job = make_job("/m", "/d", hub=hub, head={"env": {"HF_ENDPOINT": "http://head"}})
    assert find_access(job, environment).endpoint == "http://head", "as in the head's container"


def test_token_of_a_secret_must_be_set_only_where_the_job_runs(folder):
    job = make_job(folder / "model", folder / "train.jsonl", hub={"tokenSecretRef": {"name": "s", "key": "MY_TOKEN"}})
    assert "$MY_TOKEN replaces on this machine" in errors(check_inputs(job, str, {}))["spec.hub.tokenSecretRef.key"]
    assert not errors(check_inputs(job, str, {"MY_TOKEN": "x"}))
    assert not errors(check_inputs(job, str, {}, runs_here=False))


def test_what_the_hub_refuses_is_a_warning_for_a_job_that_runs_elsewhere(folder):
    job = make_job("hf://org/model", "hf://org/data", hub={"endpoint": "http://127.0.0.1:1"})
    fields = ["spec.model.source", "spec.data.train.source"]
    assert list(errors(check_inputs(job, str, {}))) == fields
    report = check_inputs(job, str, {}, runs_here=False)
    assert (list(errors(report)), list(warnings(report))) == ([], fields)
    job = make_job("/no", folder / "train.jsonl")
    assert errors(check_inputs(job, str, {}, runs_here=False)), "a folder that is missing here is an error"


def test_models_and_datasets_of_a_hub_are_checked_without_their_weights(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "no-token"))
    with run_hub(folder / "hub") as hub:
        hub.add("models/org/model", folder / "model")
        write_rows(hub.add("datasets/org/data") / "train.jsonl", {"prompt": "12345678", "answer": "1"})
        report = check_inputs(make_job("hf://org/model", "hf://org/data"), str, {"HF_ENDPOINT": hub.url})
        assert not report.findings
        assert report.lengths[0].num_rows == 1
        assert not [request for request in hub.requests if "GET" in request and "safetensors" in request]
        job = make_job("hf://org/model", "hf://org/data", train={"split": "nope", "prompt": "x"})
        assert "has no split nope" in errors(check_inputs(job, str, {"HF_ENDPOINT": hub.url}))["spec.data.train.split"]
        job = make_job("hf://org/none", "hf://org/none")
        assert list(errors(check_inputs(job, str, {"HF_ENDPOINT": hub.url}))) == [
            "spec.model.source", "spec.data.train.source",
        ]  # fmt: skip


def teach(folder, when=None, **model):
    teacher = {"model": {"source": str(folder / "teacher"), **model}, "when": when or {}}
    write_model(folder / "teacher")
    return {"rewards": [{"name": "t", "teacher": teacher, "use": "training"}]}


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({"topic": ["math", "x"], "data_source": ["train.jsonl"]}, ""),
        ({"topic": ["Math"]}, "correct the values"),
        ({"topics": ["math"]}, "no row has a column topics; did you mean topic?"),
    ],
)
def test_a_teacher_of_no_row_is_a_warning(folder, when, expected):
    write_rows(folder / "train.jsonl", *({"prompt": "1", "answer": "1", "topic": each} for each in ("code", "math")))
    report = check(folder, **teach(folder, when))
    message = warnings(report).get("spec.rewards[0].teacher.when", "")
    before, _, hint = message.partition(": ")
    assert hint == expected
    assert before == "matches none of 2 training rows, so this teacher teaches nothing" * bool(expected)


def test_a_teacher_with_another_tokenizer_is_an_error(folder):
    sections = teach(folder)
    assert not errors(check(folder, **sections))
    file = folder / "teacher" / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["T"], vocabulary["w"] = vocabulary["w"], vocabulary["T"]
    file.write_text(json.dumps(text))
    message = errors(check(folder, **sections))["spec.rewards[0].teacher.model.source"]
    assert "reads the policy's token ids of 'Two times 21" in message


@pytest.mark.parametrize(
    ("hint", "row", "message"),
    [
        ("{answer}", {}, ""),
        ("{way}", {"way": "1 = 1"}, ""),
        ("{way}", {}, "{way} is not a column; row 1 of train.jsonl has "),
        ("{way}", {"way": ""}, "row 1 of train.jsonl has nothing in way; fill it in"),
    ],
)
def test_a_hint_needs_its_columns_in_the_rows_that_it_is_for(folder, hint, row, message):
    write_rows(folder / "train.jsonl", {"prompt": "1", "answer": "1", **row}, {"prompt": "2", "answer": "2", "no": "x"})
    teacher = {"hint": hint, "when": {"index": ["0"]}}
    found = errors(check(folder, rewards=[{"name": "t", "teacher": teacher, "use": "training"}]))
    assert [*found] == ["spec.rewards[0].teacher.hint"] * bool(message)
    assert "".join(found.values()).startswith(message)
