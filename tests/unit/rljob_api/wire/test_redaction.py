"""Secrets in jobs and in lines of logs."""

import json

import pytest

from rljob_api.wire.redaction import HIDDEN, Redactor, find_values, redact_environment
from rljob_api.wire.redaction import redact_job as redact


def test_values_of_secret_names_are_hidden():
    container = {"name": "c", "env": [{"name": "API_KEY", "value": "abc"}, {"name": "DEBUG", "value": "1"}]}
    job = {"spec": {"trainer": {"env": {"HF_TOKEN": "abc", "OMP": "2"}}, "template": {"containers": [container]}}}
    shown = redact(job)
    assert shown["spec"]["trainer"]["env"] == {"HF_TOKEN": HIDDEN, "OMP": "2"}
    assert shown["spec"]["template"]["containers"][0]["env"][0] == {"name": "API_KEY", "value": HIDDEN}
    assert shown["spec"]["template"]["containers"][0]["env"][1] == {"name": "DEBUG", "value": "1"}
    assert job["spec"]["trainer"]["env"]["HF_TOKEN"] == "abc", "the job itself is unchanged"


def test_references_to_secrets_and_other_fields_stay():
    reference = {"secretKeyRef": {"name": "s", "key": "k"}}
    job = {"env": [{"name": "TOKEN", "valueFrom": reference}], "maxTokens": 16, "apiKeySecretRef": {"name": "s"}}
    assert redact(job) == job
    assert redact({"env": {"TOKEN": ""}}) == {"env": {"TOKEN": ""}}
    harmless = {"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN_PATH": "/hf/token", "SSH_AUTH_SOCK": "/tmp/agent.1"}
    assert redact({"env": harmless}) == {"env": harmless}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://bob:hunter2@mlflow.example/api?x=1", "https://(hidden)@mlflow.example/api?x=1"),
        ("postgres://u:p@db:5432/x and redis://:pw@r", "postgres://(hidden)@db:5432/x and redis://(hidden)@r"),
        ("https://abc123@o1.ingest.sentry.io/42", "https://(hidden)@o1.ingest.sentry.io/42"),
        ("https://j.example/v1?a=1&key=abc&b=2", "https://j.example/v1?a=1&key=(hidden)&b=2"),
        ("https://b.s3/x?X-Amz-Signature=ab12&X-Amz-Date=1", "https://b.s3/x?X-Amz-Signature=(hidden)&X-Amz-Date=1"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/services/(hidden)"),
        ("https://j.example/v1?a=1&amp;key=abc&amp;b=2", "https://j.example/v1?a=1&amp;key=(hidden)&amp;b=2"),
        ('{"at":"https://j.example/?a=1\\u0026key=abc"}', '{"at":"https://j.example/?a=1\\u0026key=(hidden)"}'),
        ("AccountName=a;AccountKey=ab+/12==;Suffix=x", "AccountName=a;AccountKey=(hidden);Suffix=x"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer (hidden)"),
        ("{'Authorization': 'abcdefghij'}", "{'Authorization': '(hidden)'}"),
        ("refused Bearer abc123-x.y", "refused Bearer (hidden)"),
        ("Basic dXNlcjpwYXNz", "Basic (hidden)"),
        ("vllm serve --api-key abc --port 1", "vllm serve --api-key (hidden) --port 1"),
        ("--api-key=abc", "--api-key=(hidden)"),
        ("hf_" + "aB3" * 9, HIDDEN),
        ("nvapi-" + "aB3-" * 9, HIDDEN),
        ("Cookie: session=abc; theme=dark", "Cookie: (hidden)"),
        ('{"Cookie": "session=abc"}', '{"Cookie": "(hidden)"}'),
        ("key sk-proj-abcdefghijkl1234 is wrong", "key (hidden) is wrong"),
        ("AKIAIOSFODNN7EXAMPLE", HIDDEN),
        ("-----BEGIN RSA PRIVATE KEY-----\nab\n-----END RSA PRIVATE KEY-----\nx", f"{HIDDEN}\nx"),
    ],
)
def test_what_has_the_form_of_a_secret_is_hidden(text, shown):
    assert Redactor().hide(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "hf://org/model@main",
        "spec.model.source: job://sums@20 needs an export",
        "mail bob@example.com, https://example.com/@user, git@github.com:a/b.git",
        "step 3: 128 tokens, key=value, --max-num-tokens 5, --tokenizer x, task-sk-1",
        "http://10.0.0.1:8000/v1/completions?want=3:5",
        "Basic arithmetic, basic problem-solving, BASIC OPERATIONS, and a bearer certificate.",
        "401: Authorization required",
        "sorted(rows);key=5, a &quot;token=x&quot;, --eos-token </s> --max-token 5",
        "git+https://git@github.com/org/rewards.git, sk-learn-something-longer",
        "def compute_score(data_source, solution_str, ground_truth): return basic + 1",
    ],
)
def test_other_texts_stay(text):
    assert Redactor().hide(text) == text


def test_arguments_and_free_fields_are_hidden_by_their_name():
    job = {"extraArgs": ["--api-key", "abc", "--port", "1"], "args": {"api_key": "abc", "max_tokens": "5"}}
    shown = {"extraArgs": ["--api-key", HIDDEN, "--port", "1"], "args": {"api_key": HIDDEN, "max_tokens": "5"}}
    assert redact(job) == shown


def test_a_secret_is_hidden_wherever_its_value_stands():
    job = {"spec": {"head": {"env": {"MY_TOKEN": "correct-horse"}}, "rollout": {"command": ["x --t=correct-horse"]}}}
    assert redact(job)["spec"]["rollout"]["command"] == ["x --t=(hidden)"]
    assert Redactor(find_values(job)).hide("401: correct-horse is unknown") == "401: (hidden) is unknown"
    environment = {"MY_TOKEN": "correct-horse", "HOME": "/home/correct", "SHORT_KEY": "true"}
    assert redact_environment(environment).hide("correct-horse true /home/correct") == "(hidden) true /home/correct"


def test_options_and_fields_that_are_secret_are_hidden_in_other_texts():
    job = {"extraArgs": ["--api-key", "correct-horse", "--port", "8000"], "headers": {"X-Api-Key": "battery-staple"}}
    assert redact(job)["extraArgs"][1] == redact(job)["headers"]["X-Api-Key"] == HIDDEN
    assert Redactor(find_values(job)).hide("correct-horse, battery-staple, 8000") == "(hidden), (hidden), 8000"


@pytest.mark.parametrize("name", ["PASSPHRASE", "MY_PAT", "PIN", "X_CRED", "github_pat"])
def test_short_names_of_secrets_are_known_as_words(name):
    env = {name: "correct-horse", "PATTERN": "a-pattern", "SPIN_RATE": "fast-spin", "PYTHONPATH": "/home/user"}
    assert redact({"env": env}) == {"env": env | {name: HIDDEN}}


def test_words_of_other_texts_stay_unless_they_are_passwords():
    env = {"SORT_KEY": "question", "ID_KEY": "user_name", "DB_PASSWORD": "hunterhunter"}
    job = {"spec": {"head": {"env": env}}, "text": "question of user_name: hunterhunter"}
    assert redact(job)["text"] == "question of user_name: (hidden)"
    assert redact(job)["spec"]["head"]["env"] == dict.fromkeys(env, HIDDEN)
    assert redact_environment(env).hide(job["text"]) == "question of user_name: (hidden)"


def test_values_are_hidden_as_json_writes_them_too():
    value = 'a"b\\c-ä-1234'
    redactor = redact_environment({"A_PASSWORD": value})
    for text in (value, json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert redactor.hide(text).strip('"') == HIDDEN


@pytest.mark.parametrize("part", ["-", "&key", ";a.", "-----BEGIN ", "basic ", "basic-", "Authorization "])
def test_long_texts_of_repeated_parts_take_no_time(part):
    """Models repeat themselves. The time of `--[\\w-]*token` would grow with the third power: minutes for this text."""
    text = part * (60_000 // len(part))
    assert Redactor().hide(text) == text


def test_the_shells_working_directory_is_no_secret():
    hide = redact_environment({"PWD": "/home/user/job", "OLDPWD": "/home/user", "DB_PWD": "s3cretword"}).hide
    assert hide("/home/user/job/reward.py, s3cretword") == f"/home/user/job/reward.py, {HIDDEN}"
