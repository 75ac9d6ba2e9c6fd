"""Conversations as tokens: which are replies, how they are packed, and what is wrong in one line."""

import json

import numpy as np
import pytest

from tests.data.tokenizers_made_here import make_tokenizer
from tfx_jax.data.batching.conversations import encode_conversations
from tfx_jax.data.batching.documents import TextDocuments
from tfx_jax.data.batching.packing import PackedDocuments
from tfx_jax.data.tokenizers.chat import ChatTemplate
from tfx_jax.errors import UserError

TEMPLATE = (
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TALK = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "ha"},
    {"role": "assistant", "content": "hu"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(["<abcdefghijklmnopqrstuvwxyz>;"], "characters")


def encode(tokenizer, *texts, template=TEMPLATE):
    documents = TextDocuments(lambda: ([text[:7], text[7:]] for text in texts))  # in pieces, as of long rows
    return encode_conversations(tokenizer, ChatTemplate(template, {}), documents)


def test_replies_and_the_ends_of_their_turns_are_predicted(tokenizer):
    (tokens, ends), is_reply = encode(tokenizer, json.dumps({"messages": TALK}), json.dumps(TALK[:3]))
    text = "<s>be;<u>hi;<a>ho;<u>ha;<a>hu;" + "<s>be;<u>hi;<a>ho;"
    assert tokenizer.decode(tokens.tolist()) == text
    assert ends.tolist() == [30, 48]
    predicted = "".join(letter if reply else " " for letter, reply in zip(text, is_reply, strict=True))
    assert predicted == " " * 15 + "ho;" + " " * 9 + "hu;" + " " * 15 + "ho;"


def test_packed_conversations_predict_replies_only_and_do_not_see_each_other(tokenizer):
    """Rows of 20: the first conversation is cut, and its second reply begins in another row than its question."""
    (tokens, ends), is_reply = encode(tokenizer, json.dumps(TALK), json.dumps(TALK[:3]))
    rows = PackedDocuments(tokens, ends, 20, pad_id=0, is_target=is_reply)
    seen = []
    for row in rows:
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == segment
            np.testing.assert_array_equal(row["positions"][inside], np.arange(inside.sum()))
        targets = row["targets"][row["weights"] > 0]
        seen += tokenizer.decode(targets.tolist()).removesuffix(";").split(";")
    assert sorted(seen) == ["ho", "ho", "hu"]


THINKING = (  # of replies, only the last keeps its thoughts
    "{% for message in messages %}<{{ message.role[0] }}>{{ 'think' if loop.last and message.role == 'assistant' }}"
    "{{ message.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.parametrize(
    ("texts", "template", "message"),
    [
        (["["], TEMPLATE, r"^conversation 1: not JSON \("),
        (
            [json.dumps(TALK), '{"text": "a", "id": 1}'],
            TEMPLATE,
            "^conversation 2: no field 'messages'; there are text, id",
        ),
        (["[]"], TEMPLATE, "^conversation 1: a conversation is a list of messages"),
        (['[{"role": "user"}]'], TEMPLATE, '^conversation 1: message 1 must have a string "content"'),
        ([json.dumps(TALK[2:])], TEMPLATE, "^conversation 1: the first message is a reply: begin with the message"),
        ([json.dumps(TALK[:2])], TEMPLATE, "^no conversation has a reply with tokens, a message of the"),
        (
            [json.dumps(TALK)],
            THINKING,
            "^conversation 1: the chat template writes message 3 in another way when messages",
        ),
        (
            [json.dumps(TALK[:3])],
            TEMPLATE.replace("<a>", "<a><"),
            "^conversation 1: the chat template's generation prompt differs from how it begins message 3, a stored",
        ),
    ],
)
def test_mistakes_are_one_line(tokenizer, texts, template, message):
    with pytest.raises(UserError, match=message) as raised:
        encode(tokenizer, *texts, template=template)
    assert "\n" not in str(raised.value)
