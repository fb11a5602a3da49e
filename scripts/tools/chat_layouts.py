"""Chats and chat templates, for make_tokenizer_goldens.py and tests/models/test_chat_templates.py.

This module needs only the standard library, because the script runs in an environment without jax. The templates have
the constructs of published templates: roles, system prompts, tools, calls and results of tools, reasoning.
"""

from __future__ import annotations

from typing import Any

from scripts.tools.tokenizer_layouts import Files, added, byte_level

Chat = dict[str, Any]
"""Arguments of `Tokenizer.render_chat` and of `apply_chat_template` of transformers."""

SYSTEM = {"role": "system", "content": "Answer in one word."}
HELLO = {"role": "user", "content": "hello \U0001f600 <b>"}
ANSWER = {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nhi"}
AGAIN = {"role": "user", "content": "  and again\n"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city, in \u00b0C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Gen\u00e8ve"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 21}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": " now?"}]}

CHATS: dict[str, Chat] = {
    "one message": {"messages": [HELLO]},
    "system prompt": {"messages": [SYSTEM, HELLO]},
    "several turns": {"messages": [SYSTEM, HELLO, ANSWER, AGAIN]},
    "without generation prompt": {"messages": [HELLO, ANSWER], "add_generation_prompt": False},
    "tools": {"messages": [SYSTEM, HELLO], "tools": [WEATHER]},
    "tool call and result": {"messages": [HELLO, CALL, RESULT], "tools": [WEATHER, WEATHER]},
    "variables": {"messages": [HELLO], "enable_thinking": False, "date_string": "1 Jan 2026", "bos_token": "<bos>"},
    "documents": {"messages": [HELLO], "documents": [{"title": "a", "text": "b"}]},
    "content parts": {"messages": [PARTS]},
    "system prompt later": {"messages": [HELLO, SYSTEM]},
    "other template": {"messages": [SYSTEM, HELLO], "chat_template": "{{ bos_token }}{{ messages[0].content }}\n"},
}
"""Chats that each template renders."""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content and loop.index0 <= ns.last_query_index %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + eos_token }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if message['content'] is string %}{{- message['content'] | trim }}
        {%- else %}{%- for part in message['content'] %}{{- part['text'] }}{%- endfor %}{%- endif %}
        {{- eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool call at once") }}{%- endif %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson(indent=4) }}
        {{- "}" + eos_token }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + eos_token }}
    {%- endif %}
{%- endfor %}
{%- for document in documents or [] %}
    {{- "[" ~ loop.index ~ "] " ~ document.title ~ ": " ~ document.text }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

STRICT = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ message['content'] + eos_token }}{% endif %}
{% endfor %}"""

GEMMA = """{%- macro declared(tool) -%}
    {{- tool['function']['name'] -}}{description:{{ quoted(tool['function']['description']) }}
    {%- for key, value in tool['function']['parameters'] | dictsort -%}
        ,{{ key }}:{{ quoted(value | upper if value is string else value, names=False) }}
    {%- endfor -%}
    }
{%- endmacro -%}
{%- macro quoted(value, names=True) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {%- set ns = namespace(found=false) -%}
        {{- '{' -}}
        {%- for key, part in value | dictsort -%}
            {%- if ns.found %},{% endif -%}
            {%- set ns.found = true -%}
            {{- quoted(key) if names else key -}}:{{- quoted(part, names=names) -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        [{%- for part in value -%}{{- quoted(part) -}}{{- ',' if not loop.last -}}{%- endfor -%}]
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- macro answer(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('</think>') -%}{%- set ns.result = ns.result + part.split('<think>')[0] -%}{%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
{%- set ns = namespace(last=None) -%}
{%- set turns = messages -%}
{{- bos_token -}}
{%- if (enable_thinking is defined and enable_thinking) or tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\n' -}}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}
        {%- set turns = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] %}{{- '<|tool>' + (declared(tool) | trim) + '<tool|>' -}}{%- endfor %}
    {{- '<turn|>\n' -}}
{%- endif %}
{%- for message in turns -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {%- set before = namespace(role=None) -%}
    {%- for i in range(loop.index0 - 1, -1, -1) -%}
        {%- if before.role is none and turns[i]['role'] != 'tool' -%}
            {%- set before.role = turns[i]['role'] -%}
        {%- endif -%}
    {%- endfor -%}
    {%- if role == 'tool' -%}
        {{- '<|tool_response>response:' + (message.get('name') or 'unknown') -}}
        {{- '{value:' + quoted(message['content']) + '}<tool_response|>' -}}
        {%- set ns.last = 'result' -%}
    {%- else -%}
        {%- if not (role == 'model' and before.role == 'assistant') -%}{{- '<|turn>' + role + '\n' }}{%- endif -%}
        {%- set ns.last = None -%}
        {%- for call in message['tool_calls'] or [] -%}
            {{- '<|tool_call>call:' + call['function']['name'] + quoted(call['function']['arguments'], names=False) -}}
            {{- '<tool_call|>' -}}
            {%- set ns.last = 'call' -%}
        {%- endfor -%}
        {%- if message['content'] is string -%}
            {{- answer(message['content']) if role == 'model' else message['content'] | trim -}}
        {%- else -%}
            {%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endfor -%}
        {%- endif -%}
        {%- if ns.last != 'call' -%}{{- '<turn|>\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.last is none -%}{{- '<|turn>model\n' -}}{%- endif -%}"""

_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_VOCABULARY = byte_level(added("<s>", len(byte_level()["model"]["vocab"])))


def _with_template(template: Any) -> Files:
    return {"tokenizer.json": _VOCABULARY, "tokenizer_config.json": {**_TOKENS, "chat_template": template}}


TEMPLATES: dict[str, Files] = {
    "Qwen": _with_template(QWEN),
    "Llama": _with_template(LLAMA),
    "Gemma": _with_template(GEMMA),
    "alternating roles": _with_template(STRICT),
    "template of tools": _with_template(
        [{"name": "default", "template": STRICT}, {"name": "tool_use", "template": LLAMA}]
    ),
    "only a template of tools": _with_template(
        [{"name": "tool_use", "template": LLAMA}, {"name": "rag", "template": QWEN}]
    ),
    "files": {
        "tokenizer.json": _VOCABULARY,
        "tokenizer_config.json": _TOKENS,
        "chat_template.jinja": QWEN,
        "additional_chat_templates/tool_use.jinja": LLAMA,
    },
    "no template": {"tokenizer.json": _VOCABULARY, "tokenizer_config.json": _TOKENS},
}
"""Directories with chat templates. chat_templates.json has the rendered chats by the name of the directory."""
