"""`jattn generate --chat`: prompts become conversations by the checkpoint's template."""

import pytest

from tests.jattn.harness.fake_llm import Delta, generate, run


@pytest.fixture
def chat_folder(tmp_path):
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    template += "{{ raise_exception('Too rude.') if 'rude' in messages[-1].content }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def chat(folder, *arguments):
    return run("generate", "--model", folder, "--chat", *arguments)


def test_chat_makes_each_prompt_a_conversation(llm, chat_folder):
    llm.deltas = [Delta(1, "b", "stop"), Delta(0, "a", "stop")]
    result = chat(chat_folder, "--prompt", "Hi", "--prompt", "Ho", "--system", "Be brief.")
    assert llm.prompts == [f"tokens of <system>Be brief.<user>{text}" for text in ("Hi", "Ho")]
    assert result.stdout == "==> 1 of 2 <==\nHi\n\na\n\n==> 2 of 2 <==\nHo\n\nb\n"


def test_chat_of_one_prompt_prints_the_answer_alone(llm, chat_folder):
    assert chat(chat_folder, "--prompt", "Hi").stdout == "one two\n"
    assert llm.prompts == ["tokens of <user>Hi"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "`--chat` needs a `--prompt` or a `--prompt-file`."),
        (["--prompt", "rude"], "The chat template cannot render these messages: Too rude."),
    ],
)
def test_chat_that_cannot_be_is_refused_before_the_model_loads(llm, chat_folder, arguments, sentence):
    result = chat(chat_folder, *arguments)
    assert (result.exit_code, result.stderr) == (2, f"error: {sentence}\n")
    assert not hasattr(llm, "path")


def test_chat_without_a_template_is_refused(llm, tmp_path):
    result = chat(tmp_path, "--prompt", "Hi")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: The checkpoint has no chat template")


def test_system_message_needs_chat(llm):
    result = generate("--prompt", "x", "--system", "y")
    assert (result.exit_code, result.stderr) == (2, "error: `--system` needs `--chat`.\n")
    assert not hasattr(llm, "path")
