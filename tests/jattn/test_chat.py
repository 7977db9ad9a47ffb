"""Conversations become the text that transformers makes of them; a template reaches nothing and fails in a sentence."""

import datetime
import json
from pathlib import Path

import pytest

from jattn.serving.frontend.chat import ChatTemplate

GOLDEN = json.loads((Path(__file__).parent / "golden" / "chat.json").read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "Hello"}]


def folder_with(folder, **tokenizer_config):
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    return folder


def render(folder, template, messages=HELLO, **options):
    return ChatTemplate(folder_with(folder, chat_template=template)).render(messages, **options)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=range(len(GOLDEN["cases"])))
@pytest.mark.parametrize("as_objects", [False, True])
def test_render_agrees_with_transformers(tmp_path, case, as_objects):
    tokens = {
        name: {"content": text, "special": True} if as_objects else text for name, text in GOLDEN["tokens"].items()
    }
    chat = ChatTemplate(folder_with(tmp_path, chat_template=case["template"], **tokens))
    assert chat.render(case["messages"], **case["options"]) == case["text"]


def test_template_file_comes_before_the_configuration(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("né", encoding="utf-8")
    assert render(tmp_path, "other") == "né"


def test_special_tokens_may_stand_in_their_own_file(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<old>", "eos_token": {"content": "<end>"}}')
    folder_with(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}", bos_token="<new>")
    assert ChatTemplate(tmp_path).render(HELLO) == "<new><end>"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "a"),
        ({"tools": [{"name": "f"}]}, "b"),
        ({"chat_template": "rag"}, "c"),
        ({"chat_template": "more"}, "d"),
        ({"chat_template": "{{ messages | length }}"}, "1"),
    ],
)
def test_named_templates_are_chosen(tmp_path, options, expected):
    named = [{"name": name, "template": text} for name, text in [("default", "a"), ("tool_use", "b"), ("rag", "c")]]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "more.jinja").write_text("d")
    assert render(tmp_path, named, **options) == expected


def test_strftime_now_gives_the_time(tmp_path):
    before = datetime.date.today()
    text = render(tmp_path, "{{ strftime_now('%Y-%m-%d') }}")
    assert before <= datetime.date.fromisoformat(text) <= datetime.date.today()


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "cannot render these messages: Roles must alternate."),
        ("{{ messages[0].nothing.more }}", "cannot render these messages: .* has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "cannot render these messages: division by zero"),
        ("{{ messages.append(1) }}", "cannot render these messages: .*append"),
        ("{{ ''.__class__.__mro__ }}", "cannot render these messages: .*__class__.* unsafe"),
        ("{{ range(10 ** 9) | list }}", "cannot render these messages: Range too big"),
        ("{% include '/etc/passwd' %}", "cannot render these messages: "),
        ("\n{% if %}", r"must be a jinja template: line 2: "),
        ("{% for x in y %}", r"must be a jinja template: line 1: "),
    ],
)
def test_template_that_fails_is_a_sentence(tmp_path, template, sentence):
    with pytest.raises(ValueError, match=f"^The chat template {sentence}"):
        render(tmp_path, template)


@pytest.mark.parametrize(
    ("messages", "got"),
    [
        ("Hello", "'Hello'"),
        ([], r"\[\]"),
        (None, "None"),
        (["Hello"], "'Hello'"),
        ([{"content": "x"}], "{'content': 'x'}"),
    ],
)
def test_messages_that_are_none_are_refused(tmp_path, messages, got):
    with pytest.raises(ValueError, match=rf"`messages` must be .*\. Got {got}\.$"):
        render(tmp_path, "x", messages)


def test_checkpoint_without_a_template_says_so(tmp_path):
    with pytest.raises(ValueError, match=rf"^The checkpoint has no chat template, .* Got '{tmp_path}'\.$"):
        ChatTemplate(tmp_path).render(HELLO)


def test_template_without_a_default_lists_the_names(tmp_path):
    with pytest.raises(ValueError, match=r"^`chat_template` must name one of .*: rag, tool_use\. Got None\.$"):
        render(tmp_path, [{"name": "tool_use", "template": "b"}, {"name": "rag", "template": "c"}])


@pytest.mark.parametrize("template", [3, {"default": "x"}, [3], [{"name": "x"}], [{"name": 1, "template": "x"}]])
def test_configuration_that_holds_no_template_is_refused(tmp_path, template):
    with pytest.raises(ValueError, match=r"^`chat_template` of .*tokenizer_config.json must be a text, or a list"):
        render(tmp_path, template)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_configuration_is_refused(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer_config.json must be "):
        ChatTemplate(tmp_path)


def test_template_that_is_no_utf8_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"must be UTF-8 text. Got .*chat_template.jinja"):
        ChatTemplate(tmp_path)


def test_special_tokens_and_variables_may_be_given(tmp_path):
    folder_with(tmp_path, chat_template="{{ bos_token }}{{ mood }}", bos_token="<s>")
    chat = ChatTemplate(tmp_path)
    assert chat.render(HELLO, bos_token="<t>", chat_template_kwargs={"mood": "calm"}) == "<t>calm"


@pytest.mark.parametrize("option", ["add_generation_promt", "continue_final_message"])
def test_variable_that_the_template_does_not_know_is_refused(tmp_path, option):
    with pytest.raises(ValueError, match=f"no variable `{option}`"):
        render(tmp_path, "{{ messages[0].content }}", **{option: True})


def test_template_of_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"or name one of the checkpoint's: default\. Got 'nosuch'"):
        render(tmp_path, "x", chat_template="nosuch")


TEXT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Both branches, as in the templates of Llama 4 and Gemma 3; parts alone; by other names, from the second message on.
BRANCHES = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}<{{ part['text'] | trim }}>{% endfor %}{% endif %}{% endfor %}"
)
PARTS = "{% for message in messages %}{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
RENAMED = (
    "{% set turns = messages[0:] %}{% for turn in turns %}{% set content = turn.content | list %}"
    "{% for part in content %}<{{ part.text }}>{% endfor %}{% endfor %}"
)
LETTERS = "{% for message in messages %}{% for key in message.keys() %}{% endfor %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (TEXT, [{"type": "text", "text": "hi"}], "hi"),
        (TEXT, [{"type": "text", "text": "a"}, {"text": "b"}, "c"], "a\nb\nc"),
        (TEXT, [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "a\nno"),
        (LETTERS, ("a", "b"), "a\nb"),
        (TEXT, [], ""),
        (TEXT, "hi", "hi"),
        (TEXT, None, "None"),
        (BRANCHES, [{"type": "text", "text": " a "}, "b"], "<a><b>"),
        (BRANCHES, "hi", "hi"),
        (PARTS, [{"type": "output_text", "text": "a"}], "<a>"),
        (PARTS, "hi", "<hi>"),
        (RENAMED, ["a", "b"], "<a><b>"),
    ],
)
def test_content_has_the_form_that_the_template_expects(tmp_path, template, content, expected):
    assert render(tmp_path, template, [{"role": "user", "content": content}]) == expected


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"type": "text", "text": 1}, 5]
)
@pytest.mark.parametrize("template", [TEXT, PARTS])
def test_part_that_is_no_text_is_refused(tmp_path, template, part):
    with pytest.raises(ValueError, match=r"^Each part of a `content` must be a text: .* Got "):
        render(tmp_path, template, [{"role": "user", "content": [part]}])


@pytest.mark.parametrize("content", [5, 2.5, True, {"type": "text"}])
@pytest.mark.parametrize("template", [TEXT, PARTS])
def test_content_that_is_no_text_is_refused(tmp_path, template, content):
    with pytest.raises(ValueError, match=rf"^A message's `content` must be a text or .* Got {content!r}\.$"):
        render(tmp_path, template, [{"role": "user", "content": content}])
