"""Whatever a program requests: trained tokens are those that were sampled, after the prompt that the engine got."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.wire.calls import ToolSchema
from rljob_trainer.conversation.template import ChatTemplate, TemplateError
from rljob_trainer.conversation.transcript import Conversation, Transcript
from rljob_trainer.conversation.turns import TurnTree
from rljob_trainer.episodes.types import NOT_SAMPLED, Completion
from tests.support.chat_templates import ENDS, FAMILIES, QWEN3, SMOLLM2, build_template, build_tokenizer
from tests.support.episodes import listed

ADD = ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {}})
MULTIPLY = ToolSchema(name="multiply", description="Multiplies.", parameters={"type": "object", "properties": {}})
ALL_FAMILIES = pytest.mark.parametrize("family", FAMILIES)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWERS = [
    *("4", " 4 ", "", "four\n", "Ünï 漢字 🙂", "<think>\nTwo and two.\n</think>\n\n4", "<think>no end", "{"),
    *(CALL, f"Let me see.\n{CALL}\n{CALL}", '<tool_call>{"arguments":{"b":1.0},"name":"x"}</tool_call> Done.'),
    *(f"<think>\nAdd.\n</think>\n\n{CALL}", '{"name": "add", "parameters": {"a":1}}', '<tool_call>{"name": "ad'),
]


def user(text):
    return {"role": "user", "content": text}


def complete(template, text, end, turn):
    """Return the completion as the engine returns it."""
    ending = [] if end == "cut" else template.encode(end)
    token_ids = template.encode(text) + ending or template.encode("4")
    decoded = build_tokenizer().decode(token_ids, skip_special_tokens=True)
    return Completion(token_ids, [-turn - i / 128 for i in range(len(token_ids))], [turn] * len(token_ids), decoded,
                      end == "cut", "g")  # fmt: skip


# How clients send back what they got.


def as_parts(message):
    parts = [{"type": "text", "text": message["content"]}] if message.get("content") else []
    return {**message, "content": parts}


def with_objects(message):
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls}


def without_reasoning(message):
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def with_reasoning_inline(message):
    if "reasoning_content" not in message:
        return message
    text = f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content'] or ''}"
    return {**without_reasoning(message), "content": text}


ECHOES = {
    "same": dict,
    "empty": lambda message: {**message, "content": message["content"] or ""},
    "none": lambda message: {**message, "content": message["content"] or None},
    "stripped": lambda message: {**message, "content": (message["content"] or "").strip()},
    "parts": as_parts,
    "objects": with_objects,
    "dropped": without_reasoning,
    "inline": with_reasoning_inline,
    "renamed": lambda message: {**without_reasoning(message), "reasoning": message.get("reasoning_content")},
    "keys": lambda message: {**message, "refusal": None, "annotations": [], "audio": None, "function_call": None},
    "spaced": lambda message: {**message, "tool_calls": [_respace(call) for call in message.get("tool_calls") or []]},
}


def _respace(call):
    arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    return {**call, "function": {"arguments": arguments, "name": call["function"]["name"]}}


def send_back(message, echo, *, renames=False, reverses=False, reply="Again"):
    """Return an answer as a client sends it back, and what follows it."""
    echoed = ECHOES[echo](message)
    calls = [{**call, "id": f"own_{call['id']}" if renames else call["id"]} for call in echoed.get("tool_calls") or []]
    if not calls:
        return [echoed, user(reply)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"{reply} {i}"} for i, call in enumerate(calls)]
    return [{**echoed, "tool_calls": calls}, *(reversed(results) if reverses else results)]


class Program:
    """Makes requests that hypothesis chooses, and keeps what the engine got and sampled."""

    def __init__(self, family, data, tool_sets):
        self.template, self.data, self.tool_sets = build_template(family), data, tool_sets
        self.family = family
        self.transcript = Transcript(self.template)
        self.histories = [[user("What is 2 + 2?")]]
        self.pending = []
        self.recorded = []
        """(prompt, completion) by turn."""

    def draw(self, *choices):
        return self.data.draw(st.sampled_from(choices))

    def request(self):
        """Plan a request with one of the histories, or with one that is changed."""
        history = self.draw(*[self.histories[-1]] * 3, *self.histories)
        change = self.draw(*["none"] * 10, "cut", "cut", "edit", "other-system", "compact", "few-shot")
        if change == "cut":
            history = history[: self.data.draw(st.integers(1, len(history)))]
        elif change == "edit":
            history = copy.deepcopy(history)
            self.draw(*history)["content"] = self.draw("Edited.", "4", "")
        elif change == "other-system":
            history = [{"role": "system", "content": "You are a critic."}, *history[-1:]]
        elif change == "compact":
            history = [history[0], {"role": "assistant", "content": "A summary."}, user("More")]
        elif change == "few-shot":
            history = [user("1 + 1?"), {"role": "assistant", "content": "4", "reasoning_content": "No."}, *history]
        try:
            pending = self.transcript.plan(history, self.draw(*self.tool_sets))
        except TemplateError:
            assert self.family == "llama3", "only its template refuses messages: two calls, or tools without a user"
            return
        self.pending.append((pending, history))
        position = 0
        for message in history:
            if message["role"] == "user":
                position = pending.text.index(message["content"], position) + len(message["content"])

    def request_tokens(self):
        choices = [prompt + completion.token_ids for prompt, completion in self.recorded] or [[]]
        token_ids = self.draw(*choices)
        token_ids = token_ids[: self.draw(len(token_ids), len(token_ids) // 2)]
        added = self.template.encode(self.draw("", "\nAgain: ", "4"))
        self.pending.append((self.transcript.plan_tokens(token_ids + added or [40]), None))

    def answer(self):
        """Record an answer of any pending request, or drop the request."""
        if not self.pending:
            return
        pending, history = self.pending.pop(self.data.draw(st.integers(0, len(self.pending) - 1)))
        if self.draw(*[False] * 9, True):
            return
        end = self.draw(*[ENDS[self.family] or "\n\n"] * 3, "cut", "<|endoftext|>")
        completion = complete(self.template, self.draw(*ANSWERS), end, len(self.recorded))
        message = self.transcript.read_answer(pending, completion)
        assert self.transcript.record(pending, completion, message) == len(self.recorded)
        self.recorded.append((pending.prompt, completion))
        if history is not None:
            kept = {"renames": self.draw(True, False), "reverses": self.draw(True, False)}
            sent = send_back(
                message, self.draw(*ECHOES), **kept, reply=self.draw("Again", f"Again {len(self.recorded)}")
            )
            self.histories.append([*history, *sent])

    def take_turn(self):
        self.request()
        self.answer()

    def run(self, num_steps=8):
        for _ in range(num_steps):
            self.draw(*[self.take_turn] * 5, self.request, self.request, self.answer, self.request_tokens)()
        while self.pending:
            self.answer()


TOOL_SETS = st.sampled_from([[[]], [[ADD]], [[], [ADD], [ADD, MULTIPLY]]])


@ALL_FAMILIES
@given(data=st.data(), tool_sets=TOOL_SETS)
def test_any_program_trains_its_sampled_tokens_after_prompts_of_their_own_history(family, data, tool_sets):
    """Both in one test: making the requests takes most of the time."""
    program = Program(family, data, tool_sets)
    program.run()
    check_segments(program)
    check_prompts(program)


def check_segments(program):
    """Trained tokens are exactly the sampled ones, after their prompts."""
    segments = listed(program.transcript.segments)
    assert sum(sum(segment.loss_mask) for segment in segments) == sum(len(c.token_ids) for _, c in program.recorded)
    for turn, (prompt, completion) in enumerate(program.recorded):
        [segment] = [segment for segment in segments if turn in segment.turns]
        start = segment.turns.index(turn)
        sampled = slice(start, start + len(completion.token_ids))
        assert segment.token_ids[:start] == prompt, "the segment is not what the engine saw"
        assert segment.token_ids[sampled] == completion.token_ids
        assert segment.logprobs[sampled] == completion.logprobs
        assert segment.versions[sampled] == completion.versions
        assert set(segment.turns[sampled]) == {turn}
        assert all(segment.loss_mask[sampled])
    for segment in segments:
        context = [i for i, is_sampled in enumerate(segment.loss_mask) if not is_sampled]
        assert {segment.logprobs[i] for i in context} <= {0.0}
        assert {segment.versions[i] for i in context} | {segment.turns[i] for i in context} <= {NOT_SAMPLED}
        assert segment.loss_mask[-1] == 1, "context after the last answer trains nothing"
    first_turns = [min(turn for turn in segment.turns if turn != NOT_SAMPLED) for segment in segments]
    assert [each.turn for each in program.transcript.breaks] == first_turns[1:]
    for turn, (_, completion) in enumerate(program.recorded):
        messages = program.transcript.messages_of(turn)
        assert messages[-1]["role"] == "assistant"
        assert "tool_calls" in messages[-1] or messages[-1]["content"] == completion.text


def check_prompts(program):
    """What other requests have recorded, and in which order, changes the segments, never a prompt."""
    for turn in program.transcript._tree.turns:
        path, alone, parent = [turn], TurnTree(program.template), None
        while path[0].parent is not None:
            path.insert(0, path[0].parent)
        for each in path:
            prompt, completion = program.recorded[each.number]
            plan = alone.plan_tokens(parent, prompt) if each.is_raw else alone.plan(parent, each.added, each.tools)
            assert alone.read_prompt(plan) == prompt
            parent = alone.record(plan, completion, each.message, each.opening)


@ALL_FAMILIES
@given(data=st.data())
@settings(max_examples=30)
def test_a_linear_program_gets_the_tokens_of_a_conversation(family, data):
    """However the client writes what it sends back."""
    template = build_template(family)
    transcript, history = Transcript(template), [user("What is 2 + 2?")]
    conversation = Conversation(template, history, [ADD])
    texts = [text for text in ANSWERS if text.count("<tool_call>") < 2]
    for turn in range(data.draw(st.integers(1, 4))):
        pending = transcript.plan(history, [ADD])
        assert pending.prompt == conversation.next_prompt()
        end = data.draw(st.sampled_from([ENDS[family] or "\n\n", "cut", "<|endoftext|>"]))
        completion = complete(template, data.draw(st.sampled_from(texts)), end, turn)
        message = transcript.read_answer(pending, completion)
        transcript.record(pending, completion, message)
        conversation.add_answer(completion, transcript.messages_of(turn)[-1])
        sent = send_back(message, data.draw(st.sampled_from(list(ECHOES))), renames=data.draw(st.booleans()))
        history += sent
        conversation.add(sent[1:])
    assert listed(transcript.segments) == listed(conversation.segments)
    assert transcript.breaks == conversation.breaks


class Played:
    """A transcript and what a client holds."""

    def __init__(self, template, tools=()):
        self.template, self.tools, self.transcript = template, list(tools), Transcript(template)

    def ask(self, history, text="4", end="<|im_end|>", tools=None):
        """Return the history with the answer."""
        pending = self.transcript.plan(history, self.tools if tools is None else tools)
        self.text = pending.text
        return [*history, self.reply(pending, text, end)]

    def reply(self, pending, text, end="<|im_end|>"):
        completion = complete(self.template, text, end, 0)
        self.message = self.transcript.read_answer(pending, completion)
        self.transcript.record(pending, completion, self.message)
        return self.message

    @property
    def causes(self):
        return [(each.turn, each.cause.value) for each in self.transcript.breaks]

    @property
    def turns(self):
        """Turns of each segment."""
        return [sorted(set(segment.turns.tolist()) - {NOT_SAMPLED}) for segment in self.transcript.segments]


FIRST = [user("What is 2 + 2?")]


def test_a_linear_program_has_one_segment():
    played, history = Played(build_template("smollm2")), FIRST
    for text in ("4", "5", "6"):
        history = [*played.ask(history, text), user("Again")]
    assert (played.turns, played.causes) == ([[0, 1, 2]], [])


def test_two_samples_of_a_prompt_are_a_branch():
    played = Played(build_template("smollm2"))
    played.ask(FIRST, "4")
    history = played.ask(FIRST, "5")
    played.ask([*history, user("Again")], "6")
    assert (played.turns, played.causes) == ([[0], [1, 2]], [(1, "branch")])
    [found] = played.transcript.breaks
    assert "assistant\n4<|im_end|>" in found.expected
    assert found.found.endswith("assistant\n")


def test_a_branch_begins_with_the_exact_tokens_before_it():
    template = build_template("smollm2")
    separate = [token_id for character in "Too high" for token_id in template.encode(character)]
    played = Played(template)
    pending = played.transcript.plan(FIRST)
    completion = Completion([*separate, *template.encode("<|im_end|>")], [-1.0] * 9, [0] * 9, "Too high", False, "g")
    message = played.transcript.read_answer(pending, completion)
    played.transcript.record(pending, completion, message)
    played.ask([*FIRST, message, user("Again")], "5")
    played.ask([*FIRST, message, user("No")], "6")
    assert (played.turns, played.causes) == ([[0, 1], [2]], [(2, "branch")])
    first, second = listed(played.transcript.segments)
    shared = len(pending.prompt) + 9
    assert second.token_ids[:shared] == first.token_ids[:shared] == pending.prompt + completion.token_ids
    assert sum(second.loss_mask[:shared]) == 0, "each token trains once"
    [found] = played.transcript.breaks
    assert found.difference == (
        "'|>\\n<|im_start|>user\\nAgain<|im_end|>\\n<|im_start|>assistant\\n5<|im_end|>' became "
        "'|>\\n<|im_start|>user\\nNo<|im_end|>\\n<|im_start|>assistant\\n'"
    )


def test_of_parallel_requests_the_first_that_is_recorded_continues_the_segment():
    played = Played(build_template("smollm2"))
    history = [*played.ask(FIRST, "4"), user("Again")]
    one, other = played.transcript.plan(history), played.transcript.plan(history)
    assert one.prompt == other.prompt
    played.reply(other, "5")
    played.reply(one, "6")
    assert (played.turns, played.causes) == ([[0, 1], [2]], [(2, "branch")])
    assert played.transcript.messages_of(2)[-1]["content"] == "6"


def test_each_sub_agent_continues_its_own_segment():
    played, critic = Played(build_template("qwen25")), [{"role": "system", "content": "Be a critic."}, *FIRST]
    history = FIRST
    for _ in range(2):
        history = [*played.ask(history, "4"), user("Again")]
        critic = [*played.ask(critic, "Wrong."), user("Why?")]
    assert (played.turns, played.causes) == ([[0, 2], [1, 3]], [(1, "unmatched")])
    [found] = played.transcript.breaks
    assert (found.expected[:29], found.found[:29]) == (
        "<|im_start|>system\nYou are Qw",
        "<|im_start|>system\nBe a criti",
    )


def test_an_edited_answer_is_unmatched():
    played = Played(build_template("smollm2"))
    played.ask(FIRST, "4")
    played.ask([*FIRST, {"role": "assistant", "content": "5"}, user("Again")], "6")
    assert played.causes == [(1, "unmatched")]
    [found] = played.transcript.breaks
    assert ("assistant\n4<|im_end|>" in found.expected, "assistant\n5<|im_end|>" in found.found) == (True, True)


def test_other_tools_begin_a_segment():
    played = Played(build_template("qwen25"), [ADD])
    history = [*played.ask(FIRST, "4"), user("Again")]
    played.ask(history, "5", tools=[])
    assert played.causes == [(1, "tools")]
    assert "# Tools" in played.transcript.breaks[0].expected


def test_history_that_the_template_rewrites_begins_a_segment():
    played, text = Played(build_template("qwen3")), "<think>\nTwo and two.\n</think>\n\n4"
    history = played.ask(FIRST, text)
    assert history[-1] == {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}
    played.ask([*FIRST, without_reasoning(history[-1]), user("Again")], text)
    assert played.causes == [(1, "history")]
    assert "assistant\n4<|im_end|>" in played.text, "the template drops reasoning"


def test_reasoning_stays_where_the_template_keeps_it():
    played, text = Played(build_template("qwen3"), [ADD]), f"<think>\nAdd.\n</think>\n\n{CALL}"
    for echo in ECHOES:
        history = played.ask(FIRST, text)
        assert played.message["reasoning_content"] == "Add."
        played.ask([*FIRST, *send_back(history[-1], echo)], "4")
        assert "<think>\nAdd.\n</think>\n\n" in played.text
    assert {cause for _, cause in played.causes} == {"branch"}
    assert all(len(turns) == 2 for turns in played.turns)


OPENS = QWEN3.replace(
    "<|im_start|>assistant\\n' }}\n{%- endif %}", "<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}"
)


def with_template(source):
    tokenizer = copy.deepcopy(build_tokenizer())
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


def test_a_prompt_that_opens_the_reasoning_continues_between_calls():
    assert OPENS != QWEN3
    played = Played(with_template(OPENS), [ADD])
    history = played.ask(FIRST, f"Add.\n</think>\n\n{CALL}")
    assert played.message["reasoning_content"] == "Add."
    assert [call["function"]["name"] for call in played.message["tool_calls"]] == ["add"]
    played.ask([*FIRST, *send_back(history[-1], "dropped")], "Two.</think>4")
    assert played.message == {"role": "assistant", "content": "4", "reasoning_content": "Two."}
    assert (played.turns, played.causes) == ([[0, 1]], [])
    assert played.transcript.messages_of(1)[-1]["content"] == "<think>\nTwo.</think>4"


def test_reasoning_that_the_template_does_not_know_is_content():
    played, text = Played(build_template("smollm2")), "<think>well</think>4"
    history = [*played.ask(FIRST, text), user("Again")]
    assert played.message == {"role": "assistant", "content": text}
    played.ask(history, "5")
    assert played.causes == []
    played.ask([*FIRST, {"role": "assistant", "content": "4"}, user("Again")], "6")
    assert played.causes == [(2, "unmatched")], "the client has edited what the policy said"


def test_results_of_tools_in_any_order_are_in_the_order_of_the_calls():
    text = f"{CALL}\n{CALL.replace('add', 'multiply')}"
    prompts = []
    for reverses in (False, True):
        played = Played(build_template("qwen25"), [ADD, MULTIPLY])
        history = played.ask(FIRST, text)
        played.ask([*FIRST, *send_back(history[-1], "same", renames=reverses, reverses=reverses)], "4")
        prompts.append(played.text)
        assert played.causes == []
    assert prompts[0] == prompts[1]
    assert prompts[0].index("Again 0") < prompts[0].index("Again 1")


IDS = "{{ tools[0].function.name if tools }}<tool_call>" + SMOLLM2.replace(
    "message['content']",
    "(message.tool_call_id or '') + (message.name or '') + message['content'] + (message.tool_calls or '')|string",
)


def test_the_template_gets_the_ids_of_the_recorded_calls():
    played = Played(with_template(IDS), [ADD])
    history = played.ask(FIRST, CALL)
    assert [call["id"] for call in played.message["tool_calls"]] == ["call_0_0"]
    played.ask([*FIRST, *send_back(history[-1], "same", renames=True)], "4")
    assert "tool\ncall_0_0addAgain 0<|im_end|>" in played.text


def test_unknown_ids_are_passed_on():
    played = Played(with_template(IDS), [ADD])
    history = played.ask(FIRST, f"{CALL}{CALL}")
    results = [{"role": "tool", "tool_call_id": each, "content": each} for each in ("other", "call_0_0")]
    played.ask([*history, *results], "4")
    assert "tool\notherother<|im_end|>\n<|im_start|>tool\ncall_0_0call_0_0<|im_end|>" in played.text
    assert played.causes == []


def test_of_samples_that_say_the_same_the_one_that_was_sent_back_is_continued():
    played = Played(build_template("qwen3"), [ADD])
    histories = [played.ask(FIRST, text) for text in (CALL, CALL, f"<think>\nAdd.\n</think>\n\n{CALL}")]
    for history in histories:
        played.ask([*FIRST, *send_back(history[-1], "same")], "4")
    assert played.turns == [[0, 3], [1, 4], [2, 5]]


def test_raw_tokens_continue_the_longest_recorded_tokens():
    played = Played(build_template("smollm2"))
    encode = played.template.encode
    played.ask(FIRST, "4")
    tokens = played.transcript.segments[0].token_ids.tolist()
    for text, turns in (("5", [[0, 1]]), ("6", [[0, 1], [2]])):
        pending = played.transcript.plan_tokens([*tokens[:], *encode("\nAgain: ")][: len(tokens) + 40])
        tokens = list(tokens)
        assert played.reply(pending, text) == {"role": "assistant", "content": text}
        assert played.turns == turns
    assert played.causes == [(2, "branch")]
    assert played.transcript.messages_of(2)[-2:] == [user("\nAgain: "), {"role": "assistant", "content": "6"}]
    played.reply(played.transcript.plan_tokens(encode("Once more")), "7")
    played.reply(played.transcript.plan_tokens(encode("Once more")), "8")
    assert played.causes[1:] == [(3, "unmatched"), (4, "branch")]


def test_calls_that_the_template_refuses_are_text():
    """Llama 3's template allows one call."""
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "multiply", "parameters": {}}'
    played = Played(build_template("llama3"), [ADD, MULTIPLY])
    history = played.ask(FIRST, text, "<|eot_id|>")
    assert len(played.message["tool_calls"]) == 2
    for reply in ("5", "6"):
        played.ask([*FIRST, *send_back(history[-1], "same", reply=reply)], "4", "<|eot_id|>")
        assert f"{text}<|eot_id|>" in played.text
    assert (played.turns, played.causes) == ([[0, 1], [2]], [(2, "branch")])
    assert len(played.transcript.messages_of(2)[1]["tool_calls"]) == 2, "the rewards see the calls"


def test_a_call_in_an_answer_that_was_cut_off_is_content():
    played, text = Played(build_template("qwen25"), [ADD]), CALL.removesuffix("</tool_call>")
    played.ask(FIRST, text, "cut")
    assert played.message == {"role": "assistant", "content": text}
    played.ask(FIRST, text)
    assert played.message["content"] is None


def test_only_ends_of_segments_keep_the_text_of_their_prompt():
    """Texts of whole histories at each turn would need more memory than the tokens."""
    played, history = Played(build_template("smollm2")), FIRST
    for text in ("4", "5", "6"):
        history = [*played.ask(history, text), user("Again")]
    assert [turn.prompt is None for turn in played.transcript._tree.turns] == [True, True, False]


def test_a_pending_answer_that_is_not_recorded_has_no_effect():
    played = Played(build_template("smollm2"))
    history = [*played.ask(FIRST, "4"), user("Again")]
    played.transcript.plan(history)
    played.ask(history, "5")
    assert (played.turns, played.causes) == ([[0, 1]], [])


def test_a_branch_of_a_template_that_writes_the_time_begins_with_what_it_writes_now():
    template, times = with_template(SMOLLM2.replace("<|im_start|>system", "<|im_start|>system TIME")), iter("11")
    render = template._render
    template._render = lambda *args, **kwargs: render(*args, **kwargs).replace("TIME", next(times, "2"))
    played = Played(template)
    history = [*played.ask(FIRST, "4"), user("Again")]
    played.ask(history, "5")
    played.ask([*history[:-1], user("No")], "6")
    assert played.causes == [(2, "prompt")]
    [found] = played.transcript.breaks
    assert ("system 1" in found.expected, "system 2" in found.found) == (True, True)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "has a part that is not text",
        ),
        ({"role": "user", "content": {"text": "x"}}, "must be text or a list of parts"),
        ({"content": "x"}, "must have a role"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "must have a function with a name"),
    ],
    ids=["image", "object", "role", "call"],
)
def test_messages_that_no_template_takes_are_typed_errors(message, match):
    with pytest.raises(TemplateError, match=match):
        Transcript(build_template("smollm2")).plan([message])
