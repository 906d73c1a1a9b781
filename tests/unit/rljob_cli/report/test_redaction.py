"""Secrets in a job."""

from rljob_cli.report.redaction import HIDDEN, redact


def test_values_of_secret_names_are_hidden():
    container = {"name": "c", "env": [{"name": "API_KEY", "value": "abc"}, {"name": "DEBUG", "value": "1"}]}
    job = {"spec": {"trainer": {"env": {"HF_TOKEN": "abc", "OMP": "2"}}, "template": {"containers": [container]}}}
    shown = redact(job)
    assert shown["spec"]["trainer"]["env"] == {"HF_TOKEN": HIDDEN, "OMP": "2"}
    assert shown["spec"]["template"]["containers"][0]["env"][0] == {"name": "API_KEY", "value": HIDDEN}
    assert shown["spec"]["template"]["containers"][0]["env"][1] == {"name": "DEBUG", "value": "1"}
    assert job["spec"]["trainer"]["env"]["HF_TOKEN"] == "abc", "the job itself is unchanged"


def test_references_to_secrets_and_other_fields_stay():
    job = {"env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}], "maxTokens": 16}
    assert redact(job) == job
    assert redact({"env": {"TOKEN": ""}}) == {"env": {"TOKEN": ""}}
