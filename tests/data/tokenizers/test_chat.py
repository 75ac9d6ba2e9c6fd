"""Chat templates: where a folder has them, what they may do, and the text of transformers for published ones."""

import json
import sys

import pytest

from tests.data.tokenizers.chat_templates import CONVERSATIONS, TEMPLATES
from tfx_jax.data.tokenizers import ChatTemplate, load_chat_template
from tfx_jax.errors import UserError

HELLO = [{"role": "user", "content": "Hello"}]
NAMES = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m.content }}\n{% endfor %}"


def test_a_template_reads_messages_and_special_tokens():
    template = ChatTemplate(NAMES + "{% if add_generation_prompt %}assistant:{% endif %}", {"bos_token": "<s>"})
    assert template.render(HELLO) == "<s>user:Hello\nassistant:"
    assert template.render(HELLO, add_generation_prompt=False) == "<s>user:Hello\n"


@pytest.mark.parametrize("place", ["jinja", "json", "config", "named"])
def test_where_a_folder_has_its_template(tmp_path, place):
    """The file wins over tokenizer_config.json."""
    files = {"tokenizer_config.json": {"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}config"}}
    if place == "json":
        files["chat_template.json"] = {"chat_template": "{{ bos_token }}json"}
    if place == "named":
        entries = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}named"}]
        files["tokenizer_config.json"]["chat_template"] = entries
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}jinja")
    assert load_chat_template(tmp_path).render(HELLO) == f"<b>{place}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses the conversation: access to attribute '__class__'"),
        ("{% set n = namespace(__init__=1) %}", "may not have the name '__init__'"),
        ("{{ messages.append(1) }}", "refuses the conversation: .*append"),
        ("{{ 1 / 0 }}", "refuses the conversation: division by zero"),
        ("{% for %}", "is no valid template"),
        ("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "is no valid template"),
        (
            "{{ [namespace]|tojson(default=namespace) }}",
            "refuses the conversation: .*unexpected keyword argument 'default'",
        ),
    ],
)
def test_what_a_template_may_not_do(source, message):
    with pytest.raises(UserError, match=message) as caught:
        ChatTemplate(source, {}).render(HELLO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "a conversation is a list of messages"),
        ("hello", "a conversation is a list of messages"),
        ([{"role": "user"}], 'message 1 must have a string "content"'),
        ([*HELLO, {"role": 1, "content": "x"}], 'message 2 must have a string "role"'),
        (["x"], 'message 1 must have a string "role"'),
    ],
)
def test_what_is_no_conversation(messages, message):
    with pytest.raises(UserError, match=message):
        ChatTemplate(NAMES, {}).render(messages)


def test_folders_without_a_template(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"has no chat template, neither chat_template.jinja nor"):
        load_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(UserError, match=r"tokenizer_config.json: chat_template is 3, not a string"):
        load_chat_template(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r'needs jinja2 .*: pip install "tfx-jax\[chat\] @ '):
        ChatTemplate("", {})


@pytest.mark.parity
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_those_of_transformers(name):
    """The text of every conversation, or that both refuse it."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    template, texts = ChatTemplate(TEMPLATES[name], tokens), []
    for messages in CONVERSATIONS:
        for add in (True, False):
            try:
                options = {"chat_template": TEMPLATES[name], "add_generation_prompt": add, **tokens}
                (expected,), _ = utils.render_jinja_template([messages], **options)
            except Exception:
                with pytest.raises(UserError, match="refuses the conversation"):
                    template.render(messages, add_generation_prompt=add)
                continue
            texts.append(expected)
            assert template.render(messages, add_generation_prompt=add) == expected
    assert len(set(texts)) > 1
