"""Writes tests/jattn/golden/chat.json: chat templates, conversations, and the texts that transformers makes of them.

Needs transformers, which the tests do not: `python tests/jattn/harness/make_chat_golden.py`.
"""

import json
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template

FILE = pathlib.Path(__file__).parents[1] / "golden" / "chat.json"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TURNS = [
    {"role": "system", "content": "Be brief.\n  Always."},
    {"role": "user", "content": " What's <b>2 & 2</b>? "},
    {"role": "assistant", "content": "Café: 4 🙂"},
    {"role": "user", "content": "And 3?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_naïve", "parameters": {"type": "object", "properties": {"x<y": {"type": "string"}}}},
    }
]
TEMPLATES = {
    "marks": """{{ bos_token }}
{% for message in messages %}
    {% if message['role'] == 'assistant' %}
    {% generation %}
{{ '[' + message.role + ']' }} {{ message.content | trim }}{{ eos_token }}
    {% endgeneration %}
    {% else %}
{{ '[' + message.role + ']' }} {{ message.content | trim }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
[assistant]
{%- endif %}
""",
    "one_line": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 1) %}"
        "{{ raise_exception('Roles must alternate.') }}{% endif %}<{{ message['role'] }}>{{ message['content'] }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "loop_controls": """{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- message.role ~ ": " ~ message.content ~ "\\n" }}
{%- endfor %}
{%- set ns = namespace(total=0) %}
{%- for message in messages %}{% set ns.total = ns.total + message.content | length %}{% endfor %}
{{- ns.total }}{{ " (thinking)" if enable_thinking is defined and enable_thinking }}""",
    "tools": """{%- if tools %}{{ tools | tojson }}
{{ tools | tojson(indent=2) }}
{% endif %}{% for message in messages %}{{ message | tojson }}{% endfor %}{{ missing }}{{ pad_token }}""",
}
CASES = [
    ("marks", TURNS, {}),
    ("marks", TURNS[:2], {"add_generation_prompt": False}),
    ("one_line", TURNS, {}),
    ("one_line", TURNS[:1], {"add_generation_prompt": False}),
    ("loop_controls", TURNS, {}),
    ("loop_controls", TURNS, {"enable_thinking": True}),
    ("tools", TURNS[1:2], {"tools": TOOLS}),
    ("tools", TURNS[1:3], {}),
]


def main() -> None:
    rows = []
    for name, messages, options in CASES:
        (text,), _ = render_jinja_template(
            [messages], chat_template=TEMPLATES[name], **TOKENS, **{"add_generation_prompt": True} | options
        )
        rows.append({"template": TEMPLATES[name], "messages": messages, "options": options, "text": text})
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({"tokens": TOKENS, "cases": rows}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
