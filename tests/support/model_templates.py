"""Chat templates with the control flow of published models, as far as it concerns reasoning and the end of an answer.

The files of those models, in short: what they say about lengths, sampling and end tokens. Written for these tests.
"""

from __future__ import annotations

HYBRID_QWEN3 = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""Qwen 3: thinks unless enable_thinking is false."""

DEEPSEEK_R1 = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|Assistant|>' + "
    "message.content.split('</think>')[-1] + '<|end_of_sentence|>' }}{% else %}{{ '<|User|>' + message.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)
"""DeepSeek-R1's distilled models: the prompt opens the reasoning."""

SMOLLM3 = """\
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' if enable_thinking else '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}
{%- endif %}"""

GEMMA4 = """\
{%- if enable_thinking is defined and enable_thinking %}{{- '<|turn>system\\n<|think|><turn|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|turn>' + message.role + '\\n' + message.content + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' }}
    {%- if not enable_thinking | default(false) %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}
{%- endif %}"""
"""Thinks only if it is asked to."""

GPT_OSS = """\
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""The harmony format: <|return|> ends an answer, <|end|> only one of its parts."""

GEMMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else "
    "message.role) + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
