"""Chat templates of Hugging Face folders: a conversation becomes the text that the model was trained on."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer, TokenizerConfig, read, read_json
from tfx_jax.errors import UserError, install_command, one_line
from tfx_jax.hub import local_folder

Message = Mapping[str, Any]
"""A message of a conversation: {"role": "user", "content": "Hello"}; templates may read further entries."""

_FILE = "chat_template.jinja"


class ChatTemplate:
    """A chat template, which needs the package jinja2.

    A template is a program that its author wrote. It runs in Jinja's sandbox, which gives it no access to files, to
    the network or to Python's internals. It does not limit time or memory.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, where: str = "the chat template"):
        """Compiles a template.

        Args:
          source: the template, in Jinja's language.
          special_tokens: what the template can read besides the messages, such as "bos_token" and "eos_token".
          where: file of the template, for errors in it.

        Raises:
          UserError: if jinja2 is missing or the template has an error.
        """
        self._special_tokens = dict(special_tokens)
        try:
            import jinja2
        except ImportError as error:
            raise UserError(f"{where} needs jinja2 ({one_line(error)}): {install_command('chat')}") from None
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:  # the last two of deep nesting
            raise UserError(f"{where} is no valid template ({one_line(error)}): fetch it again") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Returns the text of a conversation.

        A special token spelled in a message is that token for the tokenizer, as in transformers.

        Args:
          messages: the messages, first to last, each with "role" and "content".
          add_generation_prompt: whether the text ends with the beginning of the model's reply.

        Raises:
          UserError: if a message has no role or no content, or the template refuses the conversation.
        """
        check_messages(messages)
        options: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(messages=[dict(m) for m in messages], **options, **self._special_tokens)
        except Exception as error:  # of the template's own program: any
            # Without the file of the template: clients of `tfx-jax serve` see this.
            raise UserError(f"the chat template refuses the conversation: {one_line(error)}") from None

    def encode(self, tokenizer: HFTokenizer, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of a conversation, up to the beginning of the model's reply.

        Raises:
          UserError: as `render`.
        """
        return tokenizer.encode(self.render(messages))


def check_messages(messages: Any) -> None:
    """Raises UserError unless `messages` is a list of objects with a role and a content, each a string."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UserError(f'a conversation is a list of messages {{"role": ..., "content": ...}}, got {messages!r:.80}')
    for number, message in enumerate(messages, 1):
        for name in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(name), str):
                raise UserError(f'message {number} must have a string "{name}", got {message!r:.80}')


def load_chat_template(folder: epath.PathLike) -> ChatTemplate:
    """Reads the chat template of a Hugging Face folder.

    It is chat_template.jinja or, if there is no such file, `chat_template` of chat_template.json or
    tokenizer_config.json; of several templates in tokenizer_config.json, the one named "default".

    Args:
      folder: local or gs://, or the name of a model on the Hugging Face hub.

    Raises:
      UserError: if the folder has no template, or it is damaged.
    """
    folder = local_folder(folder)
    config = TokenizerConfig(folder)
    tokens = {f"{role}_token": token for role, token in config.names.items()}
    path = folder / _FILE
    if path.exists():
        return ChatTemplate(read(path, lambda data: data.decode("utf-8")), tokens, where=str(path))
    path = folder / "chat_template.json"
    values = read_json(path) if path.exists() else {}
    if "chat_template" not in values:
        path, values = folder / "tokenizer_config.json", config.options
    source = values.get("chat_template")
    if isinstance(source, list):  # of objects with a name and a template
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        source = named.get("default")
    if source is None:
        raise UserError(
            f"{folder} has no chat template, neither {_FILE} nor chat_template in tokenizer_config.json: it is no chat "
            "model; leave out --chat, or copy the template of the model that it was made from"
        )
    if not isinstance(source, str):
        raise UserError(f"{path}: chat_template is {source!r:.80}, not a string")
    return ChatTemplate(source, tokens, where=str(path))


def _environment() -> Any:
    """Returns Jinja's sandbox with the filters and functions that transformers offers to chat templates."""
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import exceptions, nodes

    class Generation(jinja2.ext.Extension):
        """The block {% generation %}, which marks a reply for training and renders what is in it."""

        tags = {"generation"}  # noqa: RUF012  pyright: as the base class declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno  # consumes the word "generation"
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """A namespace without names that Python reserves, through which a template could leave the sandbox."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise exceptions.SecurityError(f"a namespace may not have the name {name!r}")
            super().__setitem__(name, value)

    def namespace(*arguments: Any, **values: Any) -> Namespace:
        """Returns an object with the given values, which a template may change: Jinja's `namespace`."""
        result = Namespace()
        for name, value in dict(*arguments, **values).items():
            result[name] = value
        return result

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # No further options of `json.dumps`, some of which are functions or classes that it calls.
        options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals |= {
        "namespace": namespace,
        "raise_exception": raise_exception,
        "strftime_now": lambda pattern: datetime.datetime.now().strftime(pattern),
    }
    return environment
