"""The page as text. tests/integration/report opens it in a browser."""

import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from rljob_cli.report.collect import add_agent, collect_run
from rljob_cli.report.page import embed_json, render_page
from tests.paths import DATA

NOW = datetime(2026, 11, 22, tzinfo=UTC)
_VOID = {"meta", "input", "br", "link", "img"}


class Outline(HTMLParser):
    """The open elements, the texts of headings, and what each address points to."""

    def __init__(self):
        super().__init__()
        self.stack, self.addresses, self.headings = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in _VOID:
            self.stack.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag in ("h1", "h2", "h3"):
            self.headings.append(int(tag[1]))

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        pass


def outline(page):
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.stack == []
    return parser


@pytest.fixture(scope="module")
def run():
    return collect_run(DATA / "report")


def test_page_has_no_secret_of_the_job_in_any_form(run):
    secrets = ["correct-horse", "a&b<c>'d\"e"]
    spec = {"rollout": {"env": {"A_TOKEN": secrets[0], "B_KEY": secrets[1]}, "extraArgs": ["--api-key", "k77k"]}}
    rewards = [{"name": "j", "judge": {"endpoint": {"url": "https://bob:hunter2@judge.example/v1?a=1&key=k88k"}}}]
    [[row, *_], *_] = run.samples
    sample = row.model_copy(update={"completion": f"said {secrets[0]} and {secrets[1]}", "failure": secrets[1]})
    page = render_page(replace(run, job={"spec": spec | {"rewards": rewards}}, samples=[[sample]]), NOW)
    for secret in ("correct-horse", "hunter2", "k77k", "k88k"):
        assert secret not in page
    assert not re.search(r"a(&|&amp;|\\u0026)b", page)
    assert page.count("(hidden)") >= 6
    found = re.search(r"'sha256-([^']+)'", page)[1]
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() == found, "the program is unchanged"


def test_value_that_stands_in_the_page_itself_does_not_break_it(run):
    page = render_page(
        replace(run, job={"spec": {"head": {"env": {"A_KEY": "max-width", "B_PASSWORD": "function"}}}}), NOW
    )
    assert page.count("(hidden)") == 2, "in the job"
    assert "function" in re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]


@pytest.mark.parametrize("word", ["completion", "components", "textContent", "font-family"])
def test_a_secret_that_is_a_word_of_the_page_leaves_the_page_whole(run, word):
    job = {"spec": {"rewards": [{"env": {"ANSWER_PASSWORD": word}}]}}
    [[row, *_], *_] = run.samples
    sample = row.model_copy(update={"completion": f"said {word}"})
    pages = [render_page(replace(run, job=each, samples=[[sample]]), NOW) for each in (job, None)]
    programs = [re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1] for page in pages]
    styles = [re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1] for page in pages]
    assert (programs[0], styles[0]) == (programs[1], styles[1])
    [shown] = json.loads(re.search(r'id="data">(.*?)</script>', pages[0])[1])["samples"]
    assert shown["completion"] == "said (hidden)"
    assert shown["rewards"][0]["components"] == row.rewards[0].components


def test_elements_are_balanced_and_no_address_leaves_the_page(run):
    found = outline(render_page(run, NOW))
    assert found.addresses
    assert all(address.startswith("#") for address in found.addresses)
    assert found.headings[0] == 1
    assert all(after - before <= 1 for before, after in zip(found.headings, found.headings[1:], strict=False))


def test_policy_allows_only_the_pages_own_script(run):
    page = render_page(run, NOW)
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_samples_are_data_that_ends_where_it_should(run):
    page = render_page(run, NOW)
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    samples = json.loads(data)["samples"]
    assert len(samples) == 152
    assert samples[0]["rewards"][0]["name"] == "letters"


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "&amp;", "\u2028", "\u0000", "\\u003c", '"'])
def test_embedded_text_is_the_same_after_parsing(text):
    embedded = str(embed_json([text]))
    assert json.loads(embedded) == [text]
    assert not set(embedded) & set("<>&\u2028\u0000")


def test_run_without_anything_but_a_job_has_a_page(run, tmp_path):
    shutil.copy(DATA / "report" / "job.yaml", tmp_path)
    page = render_page(collect_run(tmp_path), NOW)
    outline(page)
    for text in ("No step or evaluation has ended", "0 of 0 samples", "no session is recorded"):
        assert text in page
    for text in ("every result was valid", "The whole run"):
        assert text not in page


def test_versions_of_the_driver_and_the_models_commit_are_shown(run):
    versions = {"torch": "9.9.9", "new-part": "1.2"}
    summary = run.summary.model_copy(update={"versions": versions, "model_commit": "c0ffee"})
    page = render_page(replace(run, summary=summary), NOW)
    assert "9.9.9" in page
    assert "new-part" in page
    assert "revision not set, commit c0ffee" in page


def test_page_of_a_small_run_is_small(run):
    assert len(render_page(run, NOW)) < 300_000


def test_run_without_reward_functions_has_the_results_of_its_agent(run):
    own = add_agent(run.samples[0][0].model_copy(update={"rewards": [], "own_reward": 0.5}))
    page = render_page(replace(run, samples=[[own]]), NOW)
    outline(page)
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    [sample] = json.loads(data)["samples"]
    assert [(result["name"], result["score"]) for result in sample["rewards"]] == [("runner", 0.5)]
    assert "reward runner" not in page, "an agent's reward has no version"
