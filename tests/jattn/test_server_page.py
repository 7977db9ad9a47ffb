"""The page at `/`: one file that names no other host; and in a browser, as a person uses it."""

import json
import re
import shutil

import pytest

from tests.jattn.harness.browser import browser
from tests.jattn.harness.http_server import PROMPT

ENTER, SHIFT, ESCAPE = "\ue007", "\ue008", "\ue00c"


def test_the_page_is_one_file_that_names_no_other_host(http_server):
    status, headers, content = http_server.call("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = content.decode()
    assert not re.search(r"//\S", text)  # no address, with a scheme or without; in a comment a space follows
    assert re.findall(r"""(?:src|href|action|url)\s*[=(]\s*["']?([^"')>]*)""", text) == ["data:,"]
    assert "@import" not in text
    policy = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"], policy["img-src"]) == ("'none'", "'self'", "data:")
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text)  # a model's text is text


def test_the_page_reads_metrics_that_there_are(http_server):
    _, _, page = http_server.call("GET", "/")
    _, _, metrics = http_server.call("GET", "/metrics")
    names = set(re.findall(r"found\.(\w+)", page.decode()))
    assert len(names) == 6
    assert names <= set(re.findall(r"^vllm:(\w+)\{", metrics.decode(), re.MULTILINE))


@pytest.fixture(scope="module")
def window():
    chromedriver = shutil.which("chromedriver")
    if chromedriver is None:
        pytest.skip("`chromedriver` must be on PATH, with Chromium: Debian has both as chromium and chromium-driver.")
    with browser(chromedriver) as one:
        yield one


@pytest.fixture
def opened(window):
    """Opens a server's page, with greedy answers of a few tokens; it must load nothing that its policy forbids."""

    def opened(server):
        window.open(f"http://127.0.0.1:{server.port}/")
        window.run("document.querySelector('#temperature').value = 0; document.querySelector('#max_tokens').value = 10")
        return window

    window.complaints()
    yield opened
    assert not [line for line in window.complaints() if "Failed to load resource" not in line]  # of 4xx answers


def sent(window, text):
    """Sends a text, and gives the answer once it is whole."""
    window.type("#input", text.replace("\n", SHIFT + ENTER + SHIFT) + ENTER)
    window.wait_for("!running && document.querySelector('article:last-of-type small')")
    return window.run("return [...document.querySelectorAll('.assistant .said')].at(-1).textContent")


@pytest.mark.slow
def test_the_page_chats(http_server, opened):
    window = opened(http_server)
    window.wait_for("document.querySelector('.hint')")
    assert window.text("h1") == ["jattn stdlib-llama"]
    messages = []
    for words in ("import os", "import\nsys"):
        messages.append({"role": "user", "content": words})
        asked = {"messages": messages, "temperature": 0, "max_tokens": 10}
        expected = http_server.post("/v1/chat/completions", asked)
        answer = sent(window, words)
        assert answer == expected["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
        told = window.text("small")[-1]
        assert f"{expected['usage']['prompt_tokens']} tokens in" in told
        assert f" {expected['usage']['completion_tokens']} out" in told
    assert window.text(".user") == ["import os", "import\nsys"]
    window.click("#anew")
    assert window.text("article") == []


@pytest.mark.slow
def test_the_page_continues_a_text_where_there_is_no_chat_template(second_server, opened):
    server = second_server({"chat_template": None})
    window = opened(server)
    window.wait_for("document.querySelector('.hint')")
    assert window.run("return document.querySelector('#mode').value") == "text"
    assert window.run("return document.querySelector('#mode').options[0].disabled")
    asked = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0}
    (first,) = server.post("/v1/completions", asked)["choices"]
    assert sent(window, PROMPT) == first["text"]
    (second,) = server.post("/v1/completions", asked | {"prompt": PROMPT + first["text"]})["choices"]
    assert sent(window, "") == second["text"]
    (seen,), (told,) = window.text("#log"), window.text("small")
    assert seen.split() == [*(PROMPT + first["text"] + second["text"]).split(), *told.split()]
    assert seen.split("\n")[1] == (first["text"] + second["text"]).split("\n")[0]  # no line is broken


@pytest.mark.slow
@pytest.mark.parametrize("by", ["button", "escape", "new"])
def test_the_page_stops_an_answer(http_server, slow_steps, opened, by):
    window = opened(http_server)
    window.wait_for("document.querySelector('.hint')")
    window.run("document.querySelector('#max_tokens').value = 200")
    window.type("#input", "import os" + ENTER)
    window.wait_for("document.querySelector('.assistant')?.innerText")
    assert window.text("#send") == ["Stop"]
    (request,) = http_server.service._streams
    if by == "escape":
        window.type("#input", ESCAPE)
    else:
        window.click("#send" if by == "button" else "#anew")
    window.wait_for("document.querySelector('#send').innerText === 'Send'")
    http_server.wait_until_idle()
    assert request.finish_reason == "abort"
    assert len(window.text("article")) == (0 if by == "new" else 2)
    assert window.text(".error") == []
    if by != "new":
        assert window.text("small")[-1].startswith("stopped")


@pytest.mark.slow
def test_the_page_asks_for_the_key(second_server, opened):
    server = second_server({"api_keys": ("secret",)})
    window = opened(server)
    for key, label in (("wrong", "This server asks"), ("secret", "This API key is not")):
        told = "document.querySelector('#why').innerText"
        window.wait_for(f"document.querySelector('dialog').open && {told}.startsWith({label!r})")
        window.run("document.querySelector('#key').value = ''")
        window.type("#key", key + ENTER)
    window.wait_for("document.querySelector('.hint')")
    assert sent(window, "import os")


@pytest.mark.slow
def test_the_page_tells_what_is_wrong_and_keeps_the_words(http_server, opened):
    window = opened(http_server)
    window.wait_for("document.querySelector('.hint')")
    window.run("document.querySelector('#temperature').value = -1")
    window.type("#input", "import os" + ENTER)
    window.wait_for("document.querySelector('.error')")
    assert window.text(".error")[0].startswith("`temperature` must be finite and at least 0")
    assert (window.text("article"), window.run("return document.querySelector('#input').value")) == ([], "import os")


def answering(window, *events):
    """Chats are answered by these events, whatever is asked."""
    content = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    window.run(
        "const [real, content] = [window.fetch, arguments[0]];"
        "window.fetch = (path, options) => path.startsWith('v1/chat') ? new Response(content) : real(path, options)",
        content,
    )


def delta(**fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


@pytest.mark.slow
def test_the_page_shows_reasoning_apart(http_server, opened):
    window = opened(http_server)
    window.wait_for("document.querySelector('.hint')")
    events = [{"role": "assistant", "content": ""}, {"reasoning": "Hm"}, {"reasoning": "."}, {"content": "<b>4</b>"}]
    answering(window, *(delta(**fields) for fields in events))
    assert sent(window, "2 + 2") == "<b>4</b>"
    assert window.text(".assistant .thought") == ["Hm."]
    assert window.run("return turns.at(-1).content") == "<b>4</b>"


@pytest.mark.slow
def test_the_page_keeps_what_came_before_an_error(http_server, opened):
    window = opened(http_server)
    window.wait_for("document.querySelector('.hint')")
    answering(window, delta(content="So far"), {"error": {"message": "The server is shutting down."}})
    window.type("#input", "x" + ENTER)
    window.wait_for("document.querySelector('.error')")
    assert window.text(".said") == ["x", "So far"]
    assert window.text(".error") == ["The server is shutting down."]


@pytest.mark.slow
def test_the_page_watches_what_the_server_does(http_server, slow_steps, opened):
    window = opened(http_server)
    window.wait_for("document.querySelector('.hint')")
    window.run("document.querySelector('#max_tokens').value = 200")
    window.type("#input", "import os" + ENTER)
    window.wait_for("document.querySelector('#running').innerText === '1'")
    window.wait_for("Number(document.querySelector('#rate').innerText) > 5")
    assert len(window.run("return document.querySelector('#curve').getAttribute('points')").split()) == 60
    window.click("#send")
    window.wait_for("document.querySelector('#running').innerText === '0'")
    assert window.text("#hits")[0].endswith("%")
