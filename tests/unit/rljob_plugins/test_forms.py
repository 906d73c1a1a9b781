"""Every form of reward functions, through a worker's loader.

A taken form must get its arguments as its project passes them. Sources have the
signatures of the projects; tests/integration/packaged_rewards runs the packaged functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_api.functions.conventions import SignaturePlugin
from rljob_api.functions.plugins import load_reference
from rljob_api.functions.values import COLUMNS
from rljob_api.manifest.services.reward import FunctionReward
from rljob_service.worker.forms.outcome import Outcome
from rljob_service.worker.load.loading import load
from rljob_service.worker.main import Executor
from rljob_service.worker.settings import FunctionSettings
from tests.support.plugins import KNOWN, REFERENCES

CHAT = [{"role": "user", "content": "2+2?"}]
REPLY = [{"role": "assistant", "content": "4"}]
QUERY = "<user>2+2?<end><policy>4<end>"
SAMPLE = {
    "id": "1",
    "prompt": CHAT,
    "completion": "4",
    "ground_truth": "4",
    "data_source": "sums",
    "extra_info": {
        "level": 2,
        "index": 7,
        "num_tokens": 3,
        "truncated": False,
        "info": {"unit": "m"},
        "state": {"score": 0.5},
    },
    "prompt_ids": [1, 2],
    "completion_ids": [3, 4, 5],
    "answer_column": "",
    "finished_steps": 4,
    "total_steps": 9,
    "rendered": {"prompt": "<user>2+2?<end><policy>", "query": QUERY},
}
"""A sample with every field. Its completion has three tokens."""


class Form(NamedTuple):
    name: str
    source: str
    settings: Mapping[str, Any] = {}
    scope: str = "sample"
    expected: Outcome | str = Outcome(1.0, {})
    """The outcome of SAMPLE, or of each of two with scope group; or a part of the error, without its place."""
    reads_tokens: bool = False


def seen(parameters: str, condition: str, result: str = "float({})", before: str = "def compute_score") -> str:
    """Return a function that scores 1 if the condition on its arguments holds."""
    return f"{before}({parameters}):\n    return {result.format(condition)}\n"


ORM = """
class ORM:
    def __init__(self, args=None, **kwargs):
        self.args = args
    def __call__(self, **kwargs):
        raise NotImplementedError
class Match(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [float(c == s) for c, s in zip(completions, solution)]
class Overlong(ORM):
    def __call__(self, completions, **kwargs):
        return [float(len(ids) > self.args.max_length) for ids in kwargs.get("response_token_ids")]
class Late(ORM):
    def __call__(self, completions, **kwargs):
        return [kwargs.get("trainer_state").global_step / 4 for _ in completions]
class LastTurn(ORM):
    def __call__(self, completions, **kwargs):
        rows = [kwargs["trajectory_inputs"][id][-1] for id in kwargs["request_id"]]
        return [float(row["messages"][-1]["content"] == row["solution"]) for row in rows]
"""
RUBRIC = """
class Rubric:
    def __init__(self, funcs, weights):
        self.funcs, self.weights, self.class_objects = funcs, weights, {"parser": str.strip}
    def _get_reward_funcs(self):
        return self.funcs
    def _get_reward_weights(self):
        return self.weights
async def right(parser, completion, answer, state, info, **kwargs):
    return parser(completion[-1]["content"]) == answer == state["answer"] and info == {"unit": "m"}
def level(completion, level):
    return level
def rank(completions, answers):
    return list(range(len(completions)))
"""
TASK = """
def reward(function):
    function.reward = True
    return function
class Task: ...
class SumTask(Task):
    @reward
"""
FACTORY = """
def get_punishment(limit, soft=1):
    def punishment(completion_ids, **kwargs):
        return [float(len(ids) > limit) - soft for ids in completion_ids]
    return punishment
"""
WRAPPED = """
def logged(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
def positional(function):
    return lambda *args: function(*args)
"""

OLD_VERL = f"""
def find_answer(text):
    if "Assistant:" in text:
        text = text.split("Assistant:")[1]
    return text if text.startswith("<user>") else None
def compute_score(solution_str, ground_truth, method='strict', score=1.0):
    return score if find_answer(solution_str) == {QUERY!r} else 0
"""
CONVERSATION = {"columns": {"solution_str": "conversation"}}

STATE = "(trainer_state.global_step, trainer_state.max_steps) == (4, 9)"

FORMS = [
    # verl
    Form(
        "verl",
        seen(
            "data_source, solution_str, ground_truth, extra_info=None",
            "(data_source, solution_str, ground_truth, extra_info['level']) == ('sums', '4', '4', 2)",
        ),
    ),
    Form(
        "verl async",
        seen("solution_str, ground_truth", "solution_str == ground_truth", before="async def compute_score"),
    ),
    Form(
        "verl with **kwargs",
        seen("solution_str, **kwargs", "set(kwargs) == {'data_source', 'ground_truth', 'extra_info'}"),
    ),
    Form("verl before 0.3", OLD_VERL),
    Form("verl before 0.3 by signature", seen("solution_str", f"solution_str == {QUERY!r}"), {"signature": "verl0.2"}),
    Form("verl before 0.3 as verl now", OLD_VERL, {"signature": "verl"}, expected=Outcome(0.0, {})),
    Form(
        "verl before 0.3 with the step",  # which it counts from 1
        "A = 'Assistant:'\n" + seen("solution_str, ground_truth, step=0", "step == 5", "({0}, 0.5, 'x')"),
        expected=Outcome(1.0, {"value_2": 0.5}),
    ),
    Form(
        "verl before 0.3 by columns",
        seen("solution_str, ground_truth, score=1", f"(solution_str, ground_truth) == ({QUERY!r}, '4')"),
        CONVERSATION,
    ),
    Form(
        "trl with texts by columns",
        seen("completions, answer, **kwargs", "(completions, answer) == (['4'], ['4'])", "[float({})]", "def reward"),
        {"columns": {"completions": "completion"}},
    ),
    Form(
        "verl batch",
        seen("data_sources, solution_strs, ground_truths, extra_infos", "solution_strs == ground_truths", "[{}]"),
    ),
    Form(
        "verl batch of a group",
        seen("data_sources, solution_strs, ground_truths, extra_infos", "1.0", "[{}] * len(solution_strs)"),
        scope="group",
    ),
    Form(
        "verl with a reward model",
        seen("solution_str, reward_router_address, reward_model_tokenizer", "1"),
        expected="set function.kwargs: {reward_router_address:",
    ),
    Form(
        "verl with its own reward model",
        seen("solution_str, reward_router_address, reward_model_tokenizer", "reward_router_address == 'rm:80'"),
        {"kwargs": {"reward_router_address": "rm:80", "reward_model_tokenizer": ""}},
    ),
    Form(
        "verl manager",
        "class Manager:\n    async def run_single(self, data): ...\nreward = Manager()",
        expected="is a reward manager of verl and is an object; name the class, or write",
    ),
    Form("verl by signature", seen("**kwargs", "kwargs['solution_str'] == '4'"), {"signature": "verl"}),
    Form(
        "a sample for a group",
        seen("solution_str, ground_truth", "1"),
        scope="group",
        expected="takes one sample, but scope: group passes lists",
    ),
    # TRL
    Form(
        "trl",
        seen(
            "prompts, completions, **columns",
            "(prompts, completions, columns['answer'], columns['level']) == ([CHAT], [REPLY], ['4'], [2])",
            "[float({})]",
            f"CHAT, REPLY = {CHAT}, {REPLY}\ndef reward",
        ),
    ),
    Form("trl with a column", seen("completions, level", "level == [2]", "[{}]", "def reward")),
    Form(
        "trl does not send ids unasked",
        seen("completions, **columns", "not any(name.endswith('ids') for name in columns)", "[{}]"),
    ),
    Form(
        "trl with ids", seen("completions, completion_ids", "completion_ids == [[3, 4, 5]]", "[{}]"), reads_tokens=True
    ),
    Form(
        "trl with only ids",
        seen("completion_ids, **kwargs", "completion_ids == [[3, 4, 5]]", "[{}]"),
        reads_tokens=True,
    ),
    Form(
        "trl that reads ids from kwargs",
        seen("completions, **kwargs", "kwargs['completion_ids'] == [[3, 4, 5]]", "[{}]"),
        reads_tokens=True,
    ),
    Form(
        "trl factory",
        FACTORY,
        {"entrypoint": "get_punishment", "factory_args": {"limit": 2, "soft": 0}},
        reads_tokens=True,
    ),
    Form(
        "trl factory with a wrong argument",
        FACTORY,
        {"entrypoint": "get_punishment", "factory_args": {"limits": 2}},
        expected="get_punishment(limit, soft) requires limit; set function.factoryArgs",
    ),
    Form(
        "trl factory with an unknown argument",
        FACTORY,
        {"entrypoint": "get_punishment", "factory_args": {"limit": 1, "x": 2}},
        expected="does not accept x; remove it from function.factoryArgs",
    ),
    Form(
        "a factory without factoryArgs",
        FACTORY,
        {"entrypoint": "get_punishment"},
        expected="get_punishment(limit, soft) does not match a convention",
    ),
    Form(
        "trl callable object",
        "class Made:\n    def __call__(self, completions, **kwargs):\n        return [1.0]\nreward = Made()",
    ),
    Form(
        "trl partial",
        "import functools\ndef inner(completions, factor, **kwargs):\n    return [factor]\n"
        "reward = functools.partial(inner, factor=1)",
    ),
    Form(
        "trl with environments",
        "def reward_score(environments, **kwargs):\n    return [environment.score for environment in environments]",
        expected=Outcome(0.5, {}),
    ),
    Form("trl with steps", seen("completions, trainer_state", STATE, "[float({})]", "def reward")),
    Form(
        "trl with steps in kwargs",
        seen("completions, **kwargs", f"(trainer_state := kwargs['trainer_state']) and {STATE}", "[float({})]"),
    ),
    Form(
        "steps by columns",
        seen("done, end", "(done, end) == (4, 9)"),
        {"columns": {"done": "step", "end": "total_steps"}},
    ),
    Form(
        "a list of functions",
        "def right(completions, answer, **kwargs):\n    return [1.0]\n"
        "def short(completions, **kwargs):\n    return [0.5]\nreward_funcs = [right, short]",
        expected=Outcome(1.5, {"right": 1.0, "short": 0.5}),
    ),
    Form(
        "a list with an abstention",
        "def right(completions, **kwargs): return [1]\ndef code(completions, **kwargs): return [None]\n"
        "reward_funcs = [right, code]",
        expected=Outcome(1.0, {"right": 1.0}, abstained=("code",)),
    ),
    Form(
        "a list that abstains",
        "def right(completions, **kwargs): return [None]\nreward_funcs = [right, right]",
        expected=Outcome(None, {}, "abstained", "right: the function returned None for this sample"),
    ),
    Form(
        "a list with an unknown form",
        "def a(completions): return [1]\ndef b(x, y): return 1\nreward_funcs = [a, b]",
        expected="b(x, y) does not match a convention",
    ),
    Form("an empty list", "reward_funcs = []", expected="reward_funcs is an empty list"),
    # OpenRLHF
    Form(
        "openrlhf",
        seen(
            "queries, prompts, labels",
            "(queries, prompts, labels) == (['<user>2+2?<end><policy>4<end>'], ['<user>2+2?<end><policy>'], ['4'])",
            "{{'rewards': [float({})], 'extra_logs': {{'n': [3]}}}}",
            "def reward_func",
        ),
        expected=Outcome(1.0, {"n": 3.0}),
    ),
    # slime, miles
    Form(
        "slime",
        seen(
            "args, sample, **kwargs",
            "(sample.prompt, sample.response, sample.label, sample.tokens, "
            "sample.response_length, sample.metadata['level'], args.scale) == ('<user>2+2?<end><policy>', '4', '4', "
            "[1, 2, 3, 4, 5], 3, 2, 10)",
            before="async def reward_func",
        ),
        {"kwargs": {"scale": 10}},
        reads_tokens=True,
    ),
    Form(
        "slime with a dict",
        seen("args, sample", "{'score': 0.0, 'acc': 1.0}", "{}"),
        {"kwargs": {"reward_key": "acc"}},
        expected=Outcome(1.0, {"score": 0.0}),
        reads_tokens=True,
    ),
    Form(
        "slime group",
        seen(
            "args, samples, **kwargs", "1", "[float(s.response == s.label) for s in samples]", "async def reward_func"
        ),
        scope="group",
        reads_tokens=True,
    ),
    # verifiers
    Form(
        "verifiers",
        seen(
            "completion, answer, **kwargs",
            "completion == [{'role': 'assistant', 'content': '4'}] and answer == '4' and kwargs['level'] == 2",
            before="def reward",
        ),
    ),
    Form(
        "verifiers with a state",
        seen(
            "prompt, completion, answer, state, info",
            "(state['prompt'], state['completion'], info) == (prompt, completion, {'unit': 'm'})",
            before="async def reward",
        ),
    ),
    Form(
        "verifiers of a group",
        seen(
            "completions, answers, states",
            "1",
            "[float(s['answer'] == a) for s, a in zip(states, answers)]",
            "def reward",
        ),
        scope="group",
    ),
    Form(
        "verifiers with a parser", seen("parser, completion, answer", "1"), expected="in verifiers a Rubric passes it"
    ),
    Form(
        "Rubric",
        f"{RUBRIC}rubric = Rubric([right, level], [2.0, 0.5])",
        expected=Outcome(3.0, {"right": 1.0, "level": 2.0}),
    ),
    Form(
        "Rubric with a function of groups",
        f"{RUBRIC}rubric = Rubric([right, rank], [1.0, 1.0])",
        expected="rank(completions, answers) of the Rubric takes a group; set scope: group",
    ),
    Form(
        "Rubric without functions",
        f"{RUBRIC}rubric = Rubric([], [])",
        expected="has no reward functions",
    ),
    Form(
        "Task",
        TASK + "    async def right(self, trace, runtime): ...\n",
        {"entrypoint": "SumTask"},
        expected="requires runtime, which exists only in a rollout of verifiers; write runtime=None",
    ),
    Form(
        "Task without a reward",
        TASK.replace("    @reward\n", "    answer = 1"),
        {"entrypoint": "SumTask"},
        expected="SumTask has no method marked with @reward; add one",
    ),
    # ms-swift
    Form("ms-swift", ORM, {"entrypoint": "Match"}),
    Form(
        "ms-swift with options", ORM, {"entrypoint": "Overlong", "factory_args": {"max_length": 2}}, reads_tokens=True
    ),
    Form("ms-swift with steps", ORM, {"entrypoint": "Late"}),
    Form("ms-swift with its requests", ORM, {"entrypoint": "LastTurn"}),
    Form("ms-swift object", f"{ORM}reward = Match()"),
    # anyone
    Form("plain", seen("prompt: str, response: str", "(prompt, response) == ('2+2?', '4')", before="def reward")),
    Form(
        "plain with annotations",
        seen(
            "prompt: str, completion: str, answer: str",
            "(prompt, completion, answer) == ('2+2?', '4', '4')",
            before="def reward",
        ),
    ),
    Form(
        "plain with ground_truth", seen("completion, ground_truth", "completion == ground_truth", before="def reward")
    ),
    Form(
        "plain NamedTuple",
        "import typing\nclass Result(typing.NamedTuple):\n    acc: int\n    score: int\n"
        + seen("response, ground_truth", "Result(acc=0, score=1)", "{}", "def reward"),
        expected=Outcome(1.0, {"acc": 0.0}),
    ),
    Form(
        "plain NamedTuple without a score",
        "import collections\nResult = collections.namedtuple('Result', 'acc why')\n"
        + seen("response", "Result(0, 'x')", "{}", "def reward"),
        expected=Outcome(None, {}, "bad_return", 'the function returned a Result without "score" (its keys: acc, why)'),
    ),
    # by hand
    Form(
        "columns",
        seen("text, gold, level", "(text, gold, level) == ('4', '4', 2)", before="def grade"),
        {"entrypoint": "grade", "columns": {"text": "completion", "gold": "ground_truth", "level": "extra_info.level"}},
    ),
    Form(
        "columns with a convention",
        seen("solution_str, gold", "solution_str == gold"),
        {"columns": {"gold": "ground_truth"}},
    ),
    Form(
        "columns with ids", seen("ids", "ids == [3, 4, 5]"), {"columns": {"ids": "completion_ids"}}, reads_tokens=True
    ),
    Form(
        "columns of a group",
        seen("texts, golds", "1", "[float(a == b) for a, b in zip(texts, golds)]"),
        {"columns": {"texts": "completion", "golds": "ground_truth"}},
        "group",
    ),
    Form(
        "columns of a nested key",
        seen("solution_str, unit", "unit == 'm'"),
        {"columns": {"unit": "extra_info.info.unit"}},
    ),
    Form(
        "columns that no parameter has",
        seen("solution_str", "1"),
        {"columns": {"gold": "ground_truth"}},
        expected="does not accept gold; remove it from function.columns",
    ),
    Form(
        "an unknown form",
        seen("text, gold", "1"),
        expected="function.columns: {PARAMETER: completion, OTHER: ground_truth}",
    ),
    # wrappers
    Form(
        "wrapper without functools.wraps",
        f"{WRAPPED}@logged\n" + seen("solution_str, ground_truth", "solution_str == ground_truth"),
    ),
    Form("wrapper of *args", f"{WRAPPED}@positional\n" + seen("ground_truth, solution_str", "solution_str == '4'")),
    Form(
        "ray.remote",
        "class RemoteFunction:\n    def __init__(self, function): self._function = function\n"
        "    def __call__(self, *args, **kwargs): raise TypeError\nremote = RemoteFunction\n@remote\n"
        + seen("queries, prompts, labels", "1", "[{}]", "def reward_func"),
    ),
    Form("only **kwargs", seen("**kwargs", "1"), expected="has no named parameters, so its convention is unknown"),
    Form("lambda", "reward = lambda completions, **kwargs: [1.0]"),
    Form("alias", seen("solution_str", "1", before="def grade") + "compute_score = grade"),
    Form("imported", "from functools import reduce as compute_score", expected="compute_score"),
    # not functions
    Form("a number", "compute_score = 3", expected="compute_score is a int, not a function"),
    Form("a dict", "compute_score = {'a': 1}", expected="compute_score is a dict, not a function"),
    Form(
        "a class without __call__",
        "class Grader:\n    def grade(self, text, gold): ...",
        {"entrypoint": "Grader"},
        expected="scorer = Grader()\n    def compute_score(response, ground_truth, **_):\n        return scorer.grade(",
    ),
    Form(
        "an object without __call__",
        "class Grader:\n    def grade(self, text): ...\nreward = Grader()",
        expected="is an object without __call__",
    ),
    Form(
        "a class with required options",
        "class Grader:\n    def __init__(self, limit): ...\n    def __call__(self, response): ...",
        {"entrypoint": "Grader"},
        expected="Grader(limit) requires limit; set function.factoryArgs: {limit: ...}",
    ),
    Form(
        "factoryArgs of a number",
        "reward = 3",
        {"factory_args": {}},
        expected="reward is a int, but function.factoryArgs calls it",
    ),
    Form("positional-only", seen("solution_str, /", "1"), expected="positional-only parameters"),
    Form(
        "unknown kwargs",
        seen("solution_str", "1"),
        {"kwargs": {"x": 1}},
        expected="does not accept x; remove it from function.kwargs",
    ),
    Form(
        "no entry point",
        seen("solution_str", "1", before="def other(): ...\ndef grade"),
        expected="was found (it defines other, grade); set function.entrypoint",
    ),
    Form(
        "a misspelt entry point",
        seen("solution_str", "1", before="def grade"),
        {"entrypoint": "grad"},
        expected="did you mean grade?",
    ),
    Form(
        "a scorer class",
        "class A:\n    def compute_score(self, solution_str): ...\n    def post_process_scores(self, group): ...",
        expected="A is a class that scores samples and groups; set scope: sampleThenGroup",
    ),
    Form(
        "a function for sampleThenGroup",
        seen("solution_str", "1"),
        scope="sampleThenGroup",
        expected="no class with compute_score",
    ),
    Form(
        "a scorer of an unknown form",
        "class A:\n    def compute_score(self, text, gold): ...\n    def post_process_scores(self, group): ...",
        scope="sampleThenGroup",
        expected="A.compute_score(text, gold) does not match",
    ),
    Form(
        "a scorer with a wrong second step",
        "class A:\n    def compute_score(self, solution_str): ...\n    def post_process_scores(self): ...",
        scope="sampleThenGroup",
        expected="write post_process_scores(self, group)",
    ),
    Form("a byte order mark", "\ufeff" + seen("solution_str", "1")),
]


def settings_of(form: Form) -> FunctionSettings:
    fields: dict[str, Any] = {"entrypoint": None, "signature": "auto", "kwargs": {}, **form.settings}
    return FunctionSettings(
        source=form.source,
        path="reward.py",
        max_memory_bytes=2 << 30,
        scope=form.scope,
        signatures=REFERENCES,
        **fields,
    )


def load_error(form: Form) -> str | None:
    try:
        load(settings_of(form))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("form", [f for f in FORMS if isinstance(f.expected, str)], ids=lambda form: form.name)
def test_form_that_cannot_be_called_is_refused_with_the_fix(form: Form) -> None:
    error = load_error(form)
    assert error is not None
    assert error.startswith("reward.py:")
    assert form.expected in error


@pytest.mark.parametrize("form", [f for f in FORMS if not isinstance(f.expected, str)], ids=lambda form: form.name)
def test_form_gets_its_arguments_and_its_result_is_read(form: Form) -> None:
    settings = settings_of(form)
    bound = load(settings)
    request = {"id": "g", "samples": [SAMPLE, SAMPLE]} if form.scope == "group" else SAMPLE
    outcomes = Executor(bound, settings).execute(json.dumps(request).encode())
    assert outcomes == [form.expected] * (2 if form.scope == "group" else 1)
    assert ("tokens" in bound.reads) == form.reads_tokens


@pytest.mark.parametrize("form", [f for f in FORMS if f.reads_tokens], ids=lambda form: form.name)
def test_form_that_reads_tokens_reports_that_they_are_missing(form: Form) -> None:
    settings = settings_of(form)
    sample = {name: value for name, value in SAMPLE.items() if not name.endswith("_ids")}
    request = {"id": "g", "samples": [sample, sample]} if form.scope == "group" else sample
    [outcome] = Executor(load(settings), settings).execute(json.dumps(request).encode())
    assert outcome.reason == "exception"
    assert "_ids, which the function reads; the trainer sends it" in outcome.message


def test_rubric_in_a_group_scores_functions_of_samples_and_of_groups() -> None:
    form = Form("", f"{RUBRIC}rubric = Rubric([right, rank], [1.0, 0.5])", scope="group")
    settings = settings_of(form)
    outcomes = Executor(load(settings), settings).execute(json.dumps({"id": "g", "samples": [SAMPLE, SAMPLE]}).encode())
    assert outcomes == [Outcome(1.0, {"right": 1.0, "rank": 0.0}), Outcome(1.5, {"right": 1.0, "rank": 1.0})]


def test_rubric_whose_function_raises_is_invalid_and_not_a_zero() -> None:
    form = Form("", f"{RUBRIC}def bad(completion, answer):\n    1 / 0\nrubric = Rubric([right, bad], [1.0, 1.0])")
    settings = settings_of(form)
    [outcome] = Executor(load(settings), settings).execute(json.dumps(SAMPLE).encode())
    assert (outcome.score, outcome.reason) == (None, "exception")
    assert "ZeroDivisionError" in outcome.message


def test_entry_points_have_the_names_of_their_forms() -> None:
    assert KNOWN.broken == {}
    for name, reference in REFERENCES.items():
        plugin: SignaturePlugin = load_reference(reference)
        assert {convention.name.rstrip(".0123456789") for convention in plugin.conventions} == {name}
    assert KNOWN.names == ["auto", *sorted(["plain", "verl0.2", *REFERENCES])]


def test_every_standard_name_is_a_valid_column() -> None:
    columns = {name: name for name in COLUMNS} | {"level": "extra_info.level", "nested": "extra_info.a.b"}
    assert FunctionReward.model_validate({"inline": "#", "columns": columns}).columns == columns
    for wrong in ("answer", "extra_info.", "completions"):
        with pytest.raises(ValueError, match="columns"):
            FunctionReward.model_validate({"inline": "#", "columns": {"x": wrong}})


NAMES = st.sampled_from(
    sorted(
        {name for convention in KNOWN.conventions for name in convention.arguments} | {"args", "text", "gold", "parser"}
    )
)


@st.composite
def functions(draw: st.DrawFn) -> str:
    """Return a function with any parameters of any projects, with and without defaults, annotations and decorators."""
    names = draw(st.lists(NAMES, max_size=5, unique=True))
    num_required = draw(st.integers(0, len(names)))
    annotated = [f"{name}: str" if draw(st.booleans()) else name for name in names]
    parameters = annotated[:num_required] + [f"{name}=None" for name in annotated[num_required:]]
    if parameters and draw(st.booleans()):
        parameters.insert(draw(st.integers(0, len(parameters))), "*")
        if parameters[-1] == "*":
            parameters[-1] = "*rest"
    parameters += ["**other"] if draw(st.booleans()) else []
    decorator = draw(st.sampled_from(["", "@logged\n"]))
    return f"{WRAPPED}{decorator}def reward({', '.join(parameters)}): ...\n"


@given(functions(), st.sampled_from(["sample", "group"]), st.sampled_from(KNOWN.names))
def test_function_of_any_parameters_is_taken_or_refused_at_its_line(source: str, scope: str, signature: str) -> None:
    error = load_error(Form("", source, {"signature": signature}, scope))
    assert error is None or re.match(r"reward\.py:\d+: reward\(", error)
