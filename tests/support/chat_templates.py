"""Chat templates with the formats of SmolLM2, Qwen 2.5, Qwen 3 and Llama 3, and a small tokenizer for them.

The tokenizer is a byte-level BPE whose merges cross words and lines, so that a text which is decoded and encoded again
gets other tokens, and a text of two parts other tokens than the parts.
"""

from __future__ import annotations

from functools import cache

from rljob_trainer.conversation.template import ChatTemplate

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
NUM_TOKENS = 700

SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

_QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\nReturn a json object within <tool_call></tool_call> tags.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_QWEN_CALLS = """\
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
"""
_QWEN_RESULTS = """\
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

QWEN25 = f"""\
{_QWEN_TOOLS}
{{%- if not tools and messages[0].role != 'system' %}}
    {{{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- for message in messages %}}
    {{%- if message.role == "user" or (message.role == "system" and not loop.first)
            or (message.role == "assistant" and not message.tool_calls) %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}}}
    {{%- elif message.role == "assistant" %}}
        {{{{- '<|im_start|>' + message.role }}}}
        {{%- if message.content %}}
            {{{{- '\\n' + message.content }}}}
        {{%- endif %}}
{_QWEN_CALLS}
        {{{{- '<|im_end|>\\n' }}}}
{_QWEN_RESULTS}"""

QWEN3 = f"""\
{_QWEN_TOOLS}
{{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}}
{{%- for message in messages[::-1] %}}
    {{%- set index = (messages|length - 1) - loop.index0 %}}
    {{%- if ns.multi_step_tool and message.role == "user" and not (message.content.startswith('<tool_response>')
            and message.content.endswith('</tool_response>')) %}}
        {{%- set ns.multi_step_tool = false %}}
        {{%- set ns.last_query_index = index %}}
    {{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- set content = message.content if message.content is string else '' %}}
    {{%- if (message.role == "user") or (message.role == "system" and not loop.first) %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}}}
    {{%- elif message.role == "assistant" %}}
        {{%- set reasoning = '' %}}
        {{%- if '</think>' in content %}}
            {{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}}
            {{%- set content = content.split('</think>')[-1].lstrip('\\n') %}}
        {{%- endif %}}
        {{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}}
            {{{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}}}
            {{{{- content.lstrip('\\n') }}}}
        {{%- else %}}
            {{{{- '<|im_start|>' + message.role + '\\n' + content }}}}
        {{%- endif %}}
{_QWEN_CALLS}
        {{{{- '<|im_end|>\\n' }}}}
{_QWEN_RESULTS}"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none and tools %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none and tools %}
    {%- set first_user_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and value}.\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}{{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

PLAIN = """\
{% for message in messages %}{{ message.role + ': ' + message.content + '\\n\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""Without special tokens: the text around an answer could merge with it."""

FAMILIES = {"smollm2": SMOLLM2, "qwen25": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "plain": PLAIN}
ENDS = {"smollm2": "<|im_end|>", "qwen25": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "plain": ""}
"""The token with which the template ends an answer. Empty: text ends it."""

_CORPUS = [
    *('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "<think>\nwell\n</think>\n\n42"),
    *("user\n\n", "assistant: The sum is 4.\n\n", "user: and 2 + 3?\n\nassistant: ", " 4\n", "4\n\n", "  Ünï 漢字 🙂"),
    *("\nuser\nWhat is 2 + 2?", "\n\nassistant\n\n", "Too high. Try again.", "answer:\n", ': {"a": "b"}'),
]


@cache
def build_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=[*CHATML, *LLAMA],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in _CORPUS for _ in range(3)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=LLAMA[0])


@cache
def build_template(family: str) -> ChatTemplate:
    import copy

    tokenizer = copy.deepcopy(build_tokenizer())
    tokenizer.chat_template = FAMILIES[family]
    return ChatTemplate(tokenizer)
