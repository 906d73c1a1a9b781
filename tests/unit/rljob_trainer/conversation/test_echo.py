"""Messages as clients send them back: the same digest for all forms of one history, another for anything else."""

import copy
import json

import pytest

from rljob_trainer.conversation import echo
from rljob_trainer.conversation.template import TemplateError


def call(name, arguments, **others):
    return {"id": f"id_{name}", "type": "function", "function": {"name": name, "arguments": arguments}, **others}


def result(content, call_id=None):
    return {"role": "tool", "content": content} | ({"tool_call_id": call_id} if call_id else {})


def assistant(content, *calls, **others):
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {}) | others


def digest(*messages, has_reasoning=True):
    return list(echo.digest_prefixes(echo.normalize(messages), has_reasoning=has_reasoning))[-1]


ADD = call("add", '{"a": 1, "b": [2.0, null], "c": "ü"}')
PLAIN, CALLS = assistant("4"), assistant("So.", ADD, call("stop", "{}"))
USER = {"role": "user", "content": "What is 2 + 2?"}


@pytest.mark.parametrize(
    ("recorded", "echoed"),
    [
        (PLAIN, assistant([{"type": "text", "text": "4"}])),
        (PLAIN, assistant(["not a part", {"type": "refusal", "refusal": "x"}, {"text": "4"}])),
        (PLAIN, assistant(" 4\n")),
        (PLAIN, assistant("4", refusal=None, annotations=[], function_call=None, tool_calls=None)),
        (PLAIN, assistant("4", tool_calls=[])),
        (PLAIN, assistant("4", reasoning_content="Two and two.")),
        (PLAIN, assistant("4", reasoning="Two and two.")),
        (PLAIN, assistant("<think>\nTwo and two.\n</think>\n\n4")),
        (assistant(None, ADD), assistant("", ADD)),
        (assistant(None, ADD), assistant([], ADD)),
        (assistant(""), assistant(None)),
        (assistant(None, reasoning_content="no end"), assistant("<think>no end")),
        (CALLS, assistant("So.", ADD | {"id": "other"}, call("stop", ""))),
        (CALLS, assistant("So.", call("add", {"c": "ü", "b": [2, None], "a": 1}), call("stop", {}))),
        (CALLS, assistant("So.", call("add", '{"c":"\\u00fc","b":[2,null],"a":1.0}'), call("stop", None))),
        (CALLS, assistant("So.", ADD | {"index": 0, "type": None}, call("stop", " {} "))),
        (USER, {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}], "name": None}),
        ({"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be brief."}),
    ],
)
def test_forms_of_a_message_have_the_same_digest(recorded, echoed):
    kept = copy.deepcopy(echoed)
    assert digest(USER, recorded) == digest(USER, echoed)
    assert echoed == kept, "the message of the client does not change"


@pytest.mark.parametrize(
    "other",
    [
        assistant("5", ADD, call("stop", "{}")),
        assistant("", ADD, call("stop", "{}")),
        assistant("So.", call("stop", "{}"), ADD),
        assistant("So.", ADD),
        assistant("So.", call("add", '{"a": 2}'), call("stop", "{}")),
        assistant("So.", call("add", "not JSON"), call("stop", "{}")),
        assistant("So.", call("sub", ADD["function"]["arguments"]), call("stop", "{}")),
        assistant("So.add"),
        {"role": "user", "content": "So."},
    ],
)
def test_other_messages_have_another_digest(other):
    assert digest(USER, CALLS) != digest(USER, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([USER, PLAIN], [PLAIN, USER]),
        ([USER, USER], [USER]),
        ([{"role": "user", "content": "4"}], [{"role": "user", "content": " 4"}]),
        ([{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}],
         [{"role": "user", "content": "a"}, {"role": "user", "content": "bc"}]),
        ([CALLS, result("4", "id_add")], [CALLS, result("4", "id_stop")]),
        ([CALLS, result("4", "id_add")], [CALLS, result("5", "id_add")]),
    ],
)  # fmt: skip
def test_other_histories_have_another_digest(one, other):
    assert digest(*one) != digest(*other)


def test_reasoning_is_content_where_the_template_does_not_know_it():
    assert digest(assistant("<think>a</think>4")) == digest(assistant("4"))
    assert digest(assistant("<think>a</think>4"), has_reasoning=False) != digest(assistant("4"), has_reasoning=False)


def test_there_is_a_digest_for_each_beginning():
    messages = echo.normalize([USER, CALLS, result("4", "id_add"), PLAIN])
    digests = list(echo.digest_prefixes(messages, has_reasoning=True))
    assert digests[-1] == echo.extend(digests[2], PLAIN, has_reasoning=True)
    assert digests[:2] == list(echo.digest_prefixes(messages[:2], has_reasoning=True))
    assert len(set(digests)) == 4


def test_messages_are_as_templates_take_them():
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "?", "cache_control": {"type": "ephemeral"}, "name": 7},
        assistant(None, ADD, call("stop", "not JSON"), audio=None, reasoning="Well."),
    ]
    assert echo.normalize(given) == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "?"},
        assistant(
            "", call("add", {"a": 1, "b": [2.0, None], "c": "ü"}), call("stop", "not JSON"), reasoning_content="Well."
        ),
    ]


def contents(messages):
    return [message["content"] for message in messages if message["role"] == "tool"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["id_stop", "id_add"], "10"),
        (["id_add", "id_stop"], "01"),
        (["id_stop", "other"], "01"),
        (["id_stop", None], "01"),
        (["id_stop"], "0"),
        (["id_stop", "id_add", "id_stop"], "102"),
    ],
)
def test_results_are_in_the_order_of_the_calls(ids, expected):
    results = [result(str(i), call_id) for i, call_id in enumerate(ids)]
    assert "".join(contents(echo.normalize([USER, CALLS, *results, PLAIN]))) == expected


def test_results_get_the_name_of_their_function():
    ordered = echo.normalize([CALLS, result("x", "id_stop"), result("y", "id_add"), PLAIN, result("z", "id_add")])
    assert [message.get("name") for message in ordered] == [None, "add", "stop", None, None]


def test_results_get_the_ids_of_the_recorded_calls():
    recorded = assistant("", call("add", {}, id="call_0_0"), call("stop", {}, id="call_0_1"))
    later = [PLAIN, result("c", "id_add")]
    results = [result("a", "id_stop"), result("b", "unknown"), result("none")]
    relabelled = echo.relabel([*results, *later], CALLS, recorded)
    assert relabelled[:3] == [result("a", "call_0_1"), result("b", "unknown"), result("none")]
    assert relabelled[3:] == later, "only the results of this answer"


def test_details_tell_apart_answers_that_say_the_same():
    recorded = [USER, assistant("<think>\nWell.\n</think>\n\n4")]
    for_reasoning = echo.count_equal([USER, assistant("4", reasoning_content="Well.")], recorded)
    assert for_reasoning > echo.count_equal([USER, assistant("4", reasoning_content="No.")], recorded)
    inline = echo.count_equal([USER, assistant("<think>\nWell.\n</think>\n\n4")], recorded)
    assert inline > echo.count_equal([USER, assistant("<think>\nNo.\n</think>\n\n4")], recorded)
    [called] = echo.normalize([CALLS])
    assert echo.count_equal([called], [called]) > echo.count_equal(
        [called], [assistant("So.", *[each | {"id": "x"} for each in called["tool_calls"]])]
    )


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "role user has a part that is not text"),
        ({"role": "tool", "content": ["text"]}, "role tool has a part that is not text"),
        ({"role": "user", "content": 4}, "the content of a message with the role user must be text or a list of parts"),
        ({"role": ["user"], "content": "x"}, "each message must have a role"),
        (assistant("", {"id": "1", "function": {"name": None}}), "must have a function with a name"),
        (assistant("", "add"), "must have a function with a name"),
    ],
)
def test_what_templates_do_not_take_is_a_typed_error(message, match):
    with pytest.raises(TemplateError, match=match):
        echo.normalize([message])


def test_arguments_that_are_nested_too_deeply_are_a_typed_error():
    nested = {}
    for _ in range(100_000):
        nested = {"a": nested}
    with pytest.raises(TemplateError, match="nested too deeply"):
        digest(assistant("", call("add", nested)))


def test_any_json_text_has_a_digest():
    half = json.loads('"\\ud83d"')
    for arguments in ("[" * 100_000, '{"a": NaN}', '{"a": 1e999}', "9" * 10_000, f'"{half}"', "1.0", '"1.0"'):
        assert digest(assistant(half, call("add", arguments)))
