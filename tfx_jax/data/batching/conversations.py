"""Tokens of conversations, of which only the replies of the assistant are predicted."""

from typing import NamedTuple

import numpy as np

from tfx_jax.data.batching.documents import TextDocuments, TokenDocuments
from tfx_jax.data.sources.bad_rows import BadRows
from tfx_jax.data.sources.disk_array import DiskArray
from tfx_jax.data.tokenizers.chat import ChatTemplate, Message, check_messages
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.files import parse_json


class TokenConversations(NamedTuple):
    """The concatenated tokens of conversations, on disk.

    Attributes:
      documents: tokens of all conversations.
      is_reply: whether a token belongs to a reply, [number of tokens] bool.
    """

    documents: TokenDocuments
    is_reply: np.ndarray


def encode_conversations(
    tokenizer: HFTokenizer, template: ChatTemplate, conversations: TextDocuments
) -> TokenConversations:
    """Tokenizes conversations onto disk as the chat template writes them.

    Args:
      tokenizer: any tokenizer.
      template: its chat template.
      conversations: each is a JSON list of messages {"role": ..., "content": ...}, or an object with such a list as
        "messages".

    Raises:
      UserError: if a conversation is not of this form or cannot be written by the template, or no reply has
        tokens; the message has the files and lines of the first bad conversations, or their numbers, from 1.
    """
    tokens, ends, is_reply = DiskArray(np.int32), DiskArray(np.int64), DiskArray(np.bool_)
    num_tokens, has_reply = 0, False
    bad_rows = BadRows()
    for number, pieces in enumerate(conversations.by_document(), start=1):
        try:
            text, replies = _rendered(template, _messages("".join(pieces)))
        except UserError as error:
            bad_rows.add(number, error)
        if bad_rows:  # only the others are checked
            continue
        ids, offsets = tokenizer.encode_with_offsets(text)
        starts = offsets[:, 0]  # index in `text` of each token's first character
        is_in_reply = np.zeros(len(ids), np.bool_)
        for begin, end in replies:
            is_in_reply |= (starts >= begin) & (starts < end)
        num_tokens += len(ids)
        has_reply = has_reply or bool(is_in_reply.any())
        tokens.append(np.array(ids, np.int32))
        ends.append(np.array([num_tokens], np.int64))
        is_reply.append(is_in_reply)
    if bad_rows:
        raise UserError(bad_rows.describe(lambda number: conversations.locate(number, "conversation"), "conversation"))
    if not has_reply:
        raise UserError(
            'no conversation has a reply with tokens, a message of the role "assistant": there is nothing to learn'
        )
    return TokenConversations(TokenDocuments(tokens.mapped(), ends.mapped()), is_reply.mapped())


def _messages(text: str) -> list[Message]:
    """Parses the messages of a conversation in JSON; raises UserError if it has another form."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"not JSON ({error})") from None
    if isinstance(values, dict):
        if "messages" not in values:
            raise UserError(f"no field 'messages'; there are {', '.join(values)}")
        values = values["messages"]
    check_messages(values)
    return values


def _rendered(template: ChatTemplate, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
    """Renders a conversation and locates the assistant's replies in its text.

    Returns:
      (text, [begin, end) in characters of each reply, which includes the end of its turn).

    Raises:
      UserError: if the template writes a reply in a way that generation would not continue to.
    """
    text = template.render(messages, add_generation_prompt=False)
    replies = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not index:
            raise UserError("the first message is a reply: begin with the message that it answers")
        # The reply is what the template adds to the prompt, from which the model would generate it.
        before = template.render(messages[:index], add_generation_prompt=True)
        through = template.render(messages[: index + 1], add_generation_prompt=False)
        if not through.startswith(before):
            raise UserError(
                f"the chat template's generation prompt differs from how it begins message {index + 1}, a stored "
                "reply: use a template that writes both alike"
            )
        if not text.startswith(through):
            raise UserError(
                f"the chat template writes message {index + 1} in another way when messages follow it: end the "
                "conversation with that message"
            )
        replies.append((len(before), len(through)))
    return text, replies
