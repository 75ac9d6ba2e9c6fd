"""Tokenizers in Hugging Face's folder format, without transformers: reading, checking, encoding, decoding.

    tokenizer = load_folder_tokenizer("path/to/bert")
    ids, token_types = tokenizer.encode_with_specials("Where is Rome?", "Rome is in Italy.")

Nothing in a folder is executed.
"""

import abc
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import numpy as np
import sentencepiece
import tokenizers
from etils import epath
from sentencepiece import sentencepiece_model_pb2

from tfx_jax.data.files import write_file
from tfx_jax.data.sources.lines import list_of_texts
from tfx_jax.data.tokenizers.bpe_dropout import Merges
from tfx_jax.data.tokenizers.streaming import TextStream
from tfx_jax.errors import UserError
from tfx_jax.files import parse_json, read_small_file
from tfx_jax.hub import local_folder

# Names of special tokens by role, for folders that do not name a token for the role.
_USUAL_NAMES = {
    "pad": ("<pad>", "[PAD]"),
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}

# Tokens of languages: "de_DE" of mBART, "deu_Latn" of NLLB, "__de__" of M2M-100, "<|de|>" of Whisper.
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__([a-z]{2,3})__|<\|([a-z]{2,3})\|>")

# Languages of M2M-100 in the order of their ids.
_M2M100_LANGUAGES = """
af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy id ig
ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so
sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
"""

_ADDED_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")

_WORDS = re.compile("▁?[^▁]+|▁")  # of a text that SentencePiece has normalized

T = TypeVar("T")


class SpecialIds(NamedTuple):
    """Ids of special tokens by role; None if the tokenizer has none."""

    pad_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    mask_id: int | None = None
    cls_id: int | None = None
    sep_id: int | None = None


class TokenizerConfig:
    """The optional JSON files beside a vocabulary: tokenizer_config.json, special_tokens_map.json and others.

    Attributes:
      folder: folder of the files.
      options: content of tokenizer_config.json.
      names: names of special tokens by role ("pad", "bos", "eos", "unk", "mask", "cls", "sep").
      special: names of all special tokens, also of those without a role.
      added: added tokens by id: each with its name as "content" and options such as "lstrip", "normalized", "special".
    """

    def __init__(self, folder: epath.Path):
        """Reads the files that exist.

        Raises:
          UserError: if a file is damaged.
        """
        self.folder = folder
        self.options = self._read("tokenizer_config.json")
        self._configs = [self._read("config.json"), self._read("generation_config.json")]
        # tokenizer_config.json overrides special_tokens_map.json, except where it has null.
        set_options = {name: value for name, value in self.options.items() if value is not None}
        named = {**self._read("special_tokens_map.json"), **set_options}
        self.names = {role: self._name(named[f"{role}_token"]) for role in _USUAL_NAMES if named.get(f"{role}_token")}
        self._usual: Set[str] = set()  # roles whose names no file states
        others = named.get("additional_special_tokens") or named.get("extra_special_tokens") or []  # without a role
        if not isinstance(others, list | dict):
            raise UserError(f"{folder}: the additional special tokens are {others!r}, not a list or an object of them")
        self.added = self._added()
        self.special = {
            *self.names.values(),
            *(self._name(token) for token in (others.values() if isinstance(others, dict) else others)),
            *(token["content"] for token in self.added.values() if token.get("special")),
        }
        for token in self.added.values():
            token["special"] = token["content"] in self.special
            token.setdefault("normalized", not token["special"])

    @property
    def family(self) -> str | None:
        """The model family of the tokenizer, such as "gpt2" or "bert"; None if no file states it."""
        config = self._configs[0]
        name = str(self.options.get("tokenizer_class") or config.get("tokenizer_class") or "").lower()
        family = name.removesuffix("fast").removesuffix("tokenizer")
        if family in ("", "pretrained", "tokenizersbackend"):  # any tokenizer.json
            family = str(config.get("model_type") or "").lower().replace("-", "")
        return family or None

    def require_family(self, file: str, *families: str) -> None:
        """Raises UserError if the family is not one of `families`, whose tokenizers `file` fully describes."""
        if self.family not in (None, *families):
            raise UserError(
                f"{self.folder / file} belongs to a tokenizer of {self.family}, which is read from tokenizer.json only"
            )

    def option(self, name: str, default: T) -> T:
        """Returns a field of tokenizer_config.json, or `default` if it is missing or null; both have the same type."""
        value = self.options.get(name)
        if value is None:
            return default
        if type(value) is not type(default):
            raise UserError(
                f"{self.folder / 'tokenizer_config.json'}: {name} is {value!r}, not a {type(default).__name__}"
            )
        return value

    def name_by_default(self, **names: str) -> None:
        """Sets the family's default names for roles ("pad", ...) that no file names."""
        self._usual = names.keys() - self.names.keys()
        self.names = {**names, **self.names}
        self.special |= set(self.names.values())

    def special_ids(self, vocabulary: Mapping[str, int], special: Collection[str]) -> SpecialIds:
        """Finds the id of each role: by the token's name, by the id in config.json, or by one of the usual names.

        Args:
          vocabulary: ids of all tokens.
          special: tokens that may be found by a usual name.
        """
        ids = set(vocabulary.values())

        def find(role: str) -> int | None:
            """Returns the id of a role such as "eos": by its configured name, its configured id, or a usual name."""
            if role in self.names:
                if self.names[role] not in vocabulary and role not in self._usual:
                    logging.warning(
                        "%s: no token is the %s token, as the vocabulary lacks %r", self.folder, role, self.names[role]
                    )
                return vocabulary.get(self.names[role])
            for config in self._configs:
                token_id = config.get(f"{role}_token_id")  # an id, or a list of alternatives such as several EOS
                token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
                if type(token_id) is int and token_id in ids:
                    return token_id
            for name in _USUAL_NAMES[role]:
                if name in special and name in vocabulary:
                    return vocabulary[name]
            return None

        return SpecialIds(**{f"{role}_id": find(role) for role in _USUAL_NAMES})

    def _added(self) -> dict[int, dict[str, Any]]:
        """Reads the added tokens by id, see the attribute `added`; raises UserError if the file is damaged."""
        tokens = self.options.get("added_tokens_decoder")
        file = "added_tokens.json" if tokens is None else "tokenizer_config.json"
        if tokens is None:
            tokens = {index: {"content": name} for name, index in self._read(file).items()}
        added = {}
        try:
            for index, token in tokens.items():
                options = {name: token[name] for name in _ADDED_TOKEN_OPTIONS if name in token}
                if not all(type(value) is bool for value in options.values()):
                    raise ValueError
                added[int(index)] = {"content": self._name(token), **options}
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.folder / file} is damaged: its added tokens are no names with ids") from None
        return added

    def _name(self, token: Any) -> str:
        """Returns the name of a token, which files store as a string or as an object with a field "content"."""
        name = token.get("content") if isinstance(token, dict) else token
        if not isinstance(name, str) or not name:
            raise UserError(f"{self.folder}: the special token {token!r} has no name")
        return name

    def _read(self, name: str) -> dict[str, Any]:
        """Returns the content of a JSON file of the folder, {} if the file does not exist."""
        return read_json(self.folder / name) if (self.folder / name).exists() else {}


def read_json(path: epath.Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
      UserError: if the file cannot be read or does not hold an object.
    """
    values = read(path, parse_json)
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a JSON object, got a {type(values).__name__}: fetch it again")
    return values


def read(path: epath.Path, parse: Callable[[bytes], T]) -> T:
    """Returns `parse(content)` of a file.

    Raises:
      UserError: if the file cannot be read, or `parse` raises any exception.
    """
    try:
        return parse(read_small_file(path))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except BaseException as error:
        # Panics of Rust libraries are not subclasses of `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is damaged ({reason}): fetch it again") from None


_MAX_GROWTH = 1_000  # factor by which normalizers may lengthen a text; published ones turn a character into a few
_MAX_SPECIALS = 100  # special tokens of a template


def check_pipeline(values: Mapping[str, Any], path: Any) -> None:
    """Checks the parsed content of a tokenizer.json for settings that would exhaust the memory.

    Args:
      values: content of the file.
      path: name of the file, for messages.

    Raises:
      UserError: if normalizers would make a text more than 1,000 times longer, or a template has more than 100 parts.
    """
    growth = 1  # upper limit of the factor by which all steps so far lengthen a text
    for step in _steps(values.get("normalizer"), "normalizers"):
        content = step.get("content", step.get("prepend"))  # what a step writes for each match, or in front
        if isinstance(content, str):
            pattern = step.get("pattern")
            matched = pattern.get("String") if isinstance(pattern, dict) else None
            # The match of a regular expression may be a single character.
            matched_length = max(1, len(matched)) if isinstance(matched, str) else 1
            growth *= max(1, len(content) // matched_length)
        if growth > _MAX_GROWTH:
            raise UserError(
                f"{path}: its normalizers would make a text more than {_MAX_GROWTH:,} times as long: fetch the file "
                "again, or use another tokenizer"
            )
    for step in _steps(values.get("post_processor"), "processors"):
        for name in ("single", "pair"):
            template = step.get(name)
            if isinstance(template, Sequence) and len(template) > _MAX_SPECIALS:
                raise UserError(f"{path}: its template for a {name} has {len(template):,} parts: no model needs those")


def _steps(part: Any, name: str) -> list[Mapping[str, Any]]:
    """Returns all steps of a part of the pipeline; sequences of steps, listed under `name`, may be nested."""
    steps, unvisited = [], [part]
    while unvisited:
        step = unvisited.pop()
        if isinstance(step, Mapping):
            steps.append(step)
            if isinstance(inner := step.get(name), list):
                unvisited += inner
    return steps


_MORE_SPACES = "▁\N{ZERO WIDTH SPACE}"  # spaces for SentencePiece, but not in Unicode
_NO_SPACE = "\x85"  # a space in Unicode, but not for SentencePiece


class Inputs(NamedTuple):
    """Model inputs for one or two texts.

    Attributes:
      ids: tokens, special ones included.
      token_types: 0 for tokens of the first text and 1 for tokens of the second, if the model distinguishes them.
    """

    ids: list[int]
    token_types: list[int]


class HFTokenizer(abc.ABC):
    """Base class of the tokenizers of Hugging Face folders; `load_folder_tokenizer` makes them.

    A special token spelled in a text, such as "[MASK]", is encoded as that token. If tokenizer_config.json sets
    `split_special_tokens`, it is ordinary text instead.

    Attributes:
      vocab_size: one more than the highest id.
      pad_id: id of padding; this and the following ids are None if the tokenizer has no such token.
      bos_id: id of the beginning of a text.
      eos_id: id of the end of a text.
      unk_id: id of unknown tokens.
      mask_id: id of masked tokens.
      cls_id: id of the token before a text to classify.
      sep_id: id of the token after each text.
      normalization: name of the normalization rule, such as "nmt_nfkc", from tokenizer_config.json; "" if not stated.
        This field is our extension of the format.
    """

    def __init__(
        self, vocabulary: Mapping[str, int], config: TokenizerConfig, *, special: set[str], can_clean_up: bool = True
    ):
        """Checks that ids are unique and finds the special tokens.

        Args:
          vocabulary: ids of all tokens, added ones included.
          config: configuration of the folder.
          special: names of the special tokens, which `decode` omits.
          can_clean_up: whether `decode` removes spaces before punctuation if the configuration asks for it.

        Raises:
          UserError: if an id belongs to two tokens, or an added token has another id in the vocabulary.
        """
        for index, token in config.added.items():
            if vocabulary.get(token["content"]) != index:
                raise UserError(f"{config.folder} adds a token {token['content']!r} as {index}, which is not its id")
        self._pieces = {index: token for token, index in vocabulary.items()}
        if len(self._pieces) != len(vocabulary):
            # `_pieces` has only the last token of each id.
            duplicate = next(token for token, index in vocabulary.items() if self._pieces[index] != token)
            raise UserError(
                f"{config.folder}: the id {vocabulary[duplicate]} of {duplicate!r} belongs to another token too"
            )
        self.vocab_size = max(self._pieces, default=-1) + 1
        ids = config.special_ids(vocabulary, special)
        self.pad_id, self.bos_id, self.eos_id, self.unk_id, self.mask_id, self.cls_id, self.sep_id = ids
        self.normalization = config.option("normalization", "")
        self._cleans_up = can_clean_up and config.option("clean_up_tokenization_spaces", False)
        shown = config.names.get("unk") if config.option("shows_unknown", False) else None
        self._hidden = {vocabulary[token] for token in special & vocabulary.keys() - {shown}}  # ids that `decode` omits

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the ids of `encode` and their [begin, end) in characters, [number of ids, 2] int64."""

    @abc.abstractmethod
    def encode_with_specials(self, text: str, pair: str | None = None) -> Inputs:
        """Encodes one or two texts with the special tokens that the model was trained with."""

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by name."""
        return {self._pieces[index]: index for index in sorted(self._hidden)}

    @property
    def languages(self) -> dict[str, int]:
        """Ids of the tokens that name a language, by its code, such as "de_DE", "deu_Latn" or "de"."""
        matches = ((index, _LANGUAGE.fullmatch(name)) for name, index in self.special_tokens.items())
        # The code is the group that matched or, without one ("de_DE"), the whole name.
        return {match.group(match.lastindex or 0): index for index, match in matches if match}

    def language_id(self, language: str) -> int:
        """Returns the id of a language's token; raises UserError if there is none."""
        languages = self.languages
        if language not in languages:
            known = ", ".join(languages) or "none"
            raise UserError(f"the tokenizer has no language {language!r}; its languages are: {known}")
        return languages[language]

    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        """Encodes a text to translate: `encode_with_specials`, with the token of its language (None: the default).

        Raises:
          UserError: if the tokenizer has no such language, or marks texts with no language.
        """
        ids = self.encode_with_specials(text).ids
        if language is None:
            return ids
        language_id = self.language_id(language)
        special_ids = self.encode_with_specials("").ids  # those around any text
        for place in (0, -1):  # NLLB and M2M-100 have the language in front, mBART at the end
            if special_ids and special_ids[place] in self.languages.values():
                ids[place] = language_id  # replaces the default language
                return ids
        raise UserError(f"the tokenizer marks no language of a source, so there is no place for {language!r}")

    @abc.abstractmethod
    def _text(self, ids: Sequence[int]) -> str:
        """Decodes ids without the `_hidden` ones, before spaces are cleaned up."""

    @abc.abstractmethod
    def _normalized(self, text: str) -> str:
        """Applies the tokenizer's normalization."""

    def normalize(self, text: str) -> str:
        """Returns the text that `decode(encode(text))` can restore at best: normalized if `normalization` is stated."""
        return self._normalized(text) if self.normalization else text

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens around it."""
        ids, _ = self.encode_with_offsets(text)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a text to continue: with special tokens before it, such as Llama's BOS, but none after it.

        A text without ids becomes BOS or, if there is none, EOS.
        """
        ids, with_specials = self.encode(text), self.encode_with_specials(text).ids
        # The prefix is everything before the first occurrence of `ids`.
        starts = range(len(with_specials))
        prefix = next((with_specials[:start] for start in starts if with_specials[start : start + len(ids)] == ids), [])
        if not ids:
            start = self.eos_id if self.bos_id is None else self.bos_id
            prefix = [] if start is None else [start]
        return [*prefix, *ids]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode` of every text."""
        return [self.encode(text) for text in texts]

    def sample_batch(self, texts: Sequence[str], *, bpe_dropout: float, rng: np.random.Generator) -> list[list[int]]:
        """Returns the ids of every text, split at random by BPE-dropout.

        Each merge is left out with the probability `bpe_dropout` when its turn comes (Provilkov et al., 2020,
        https://arxiv.org/abs/1910.13267). The ids decode to the same text; 0 gives those of `encode_batch`.

        Args:
          texts: the texts.
          bpe_dropout: between 0 and 1.
          rng: random number generator.

        Raises:
          UserError: if the tokenizer is not a SentencePiece model all of whose pieces are made by merges within words.
        """
        raise UserError(
            'bpe_dropout needs a tokenizer of byte pairs from SentencePiece, such as tokenizer="sentencepiece" trains'
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, without special tokens and ids outside the vocabulary.

        The unknown token is kept if tokenizer_config.json sets `shows_unknown`, our extension of the format.
        """
        return self.clean_up(self._text([int(index) for index in ids]))

    def clean_up(self, text: str) -> str:
        """Removes spaces before punctuation marks if the configuration asks for it; `stream` leaves them."""
        return _clean_up(text) if self._cleans_up else text

    def stream(self, context: Sequence[int] = (), *, drops_space: bool = False) -> TextStream:
        """Returns an incremental decoder, whose parts together are `decode` of all ids, behind those of `context`.

        It keeps spaces before punctuation marks, which `decode` removes for some folders. With `drops_space` the text
        begins without a space.
        """
        return TextStream(self._text, context, drops_space=drops_space)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns each id's token as spelled in the vocabulary; "" for an id outside it."""
        return [self._pieces.get(int(index), "") for index in ids]


class PipelineTokenizer(HFTokenizer):
    """A tokenizer run by the library `tokenizers`: byte-level BPE, WordPiece, or any other tokenizer.json."""

    def __init__(self, pipeline: Any, config: TokenizerConfig):
        """Wraps a `tokenizers.Tokenizer`, which is modified.

        Raises:
          UserError: if an id belongs to two tokens.
        """
        for _, token in sorted(config.added.items()):
            pipeline.add_tokens([tokenizers.AddedToken(**token)])
        known_specials = {token.content for token in pipeline.get_added_tokens_decoder().values() if token.special}
        vocabulary = pipeline.get_vocab(with_added_tokens=True)
        pipeline.add_special_tokens(sorted((config.special & vocabulary.keys()) - known_specials))
        # A tokenizer.json may truncate and pad every text to a length used in training.
        pipeline.no_truncation()
        pipeline.no_padding()
        pipeline.encode_special_tokens = config.option("split_special_tokens", False)
        self._pipeline = pipeline
        can_clean_up = type(pipeline.model).__name__ != "BPE"  # BPE keeps the spaces of the text
        super().__init__(vocabulary, config, special=known_specials | config.special, can_clean_up=can_clean_up)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens around it."""
        return _guarded(self._pipeline.encode, text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode` of every text, computed on all cores."""
        texts = list_of_texts(texts, "texts")
        encodings = _guarded(self._pipeline.encode_batch_fast, texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the ids of `encode` and their [begin, end) in characters, [number of ids, 2] int64.

        In byte-level BPE, ids that are parts of one character each get the whole character, and the space before a word
        belongs to the word's first id.
        """
        encoding = _guarded(self._pipeline.encode, text, add_special_tokens=False)
        return encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def encode_with_specials(self, text: str, pair: str | None = None) -> Inputs:
        """Encodes one or two texts with the special tokens that the model was trained with."""
        encoding = _guarded(self._pipeline.encode, text, pair)
        return Inputs(encoding.ids, encoding.type_ids)

    def _normalized(self, text: str) -> str:
        return self._pipeline.normalizer.normalize_str(text) if self._pipeline.normalizer else text

    def _text(self, ids: Sequence[int]) -> str:
        return self._pipeline.decode([index for index in ids if index not in self._hidden], skip_special_tokens=False)


def _guarded(encode: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls `encode` of the library and turns its panics, which are not an `Exception`, into UserError.

    It panics if a regular expression of the tokenizer fails on a text.
    """
    try:
        return encode(*arguments, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer cannot read a text: {error}") from None


class PieceTokenizer(HFTokenizer):
    """SentencePiece model with ids from a vocabulary: its own (T5) or a separate one (Marian).

    A *whole* token, such as a special or added token, is never split; the text between whole tokens is split by
    SentencePiece. A *number* is SentencePiece's index of a piece, which may differ from the piece's id.
    """

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        vocabulary: Mapping[str, int],
        config: TokenizerConfig,
        *,
        text_of: Callable[[list[str]], str],
        front: str | None = None,
        more_spaces: str = "",
        dropped: str = "",
        first: str | None = None,
        languages: Sequence[str] = (),
        is_pair_separated: bool,
    ):
        """Combines model and vocabulary.

        Args:
          processor: the SentencePiece model, which splits texts.
          vocabulary: ids of the pieces; other pieces are unknown.
          config: configuration of the folder.
          text_of: joins pieces to text.
          front: regular expression of a single token at the beginning of a text.
          more_spaces: characters to be replaced by spaces, because the model does not know them as spaces.
          dropped: characters to be dropped, by replacing them with a control character, which the model drops.
          first: name of a special token that `encode_with_specials` writes before the text.
          languages: names of tokens that decoding leaves out, and that a text spells without meaning them.
          is_pair_separated: whether the first of two texts ends with EOS.

        Raises:
          UserError: if an id belongs to two tokens, or the EOS or the unknown token has no id.
        """
        vocabulary = {**{token["content"]: index for index, token in config.added.items()}, **vocabulary}
        special = config.special & vocabulary.keys()
        super().__init__(vocabulary, config, special={*special, *languages})
        if self.eos_id is None or self.unk_id is None:
            raise UserError(f"{config.folder}: the vocabulary lacks the end of sentence or the unknown token")
        self._eos, self._unk = self.eos_id, self.unk_id
        self._processor, self._text_of = processor, text_of
        self._first = [] if first is None else [vocabulary[first]]
        self._front = re.compile(front or "(?!)", re.DOTALL)  # a token at the beginning; "(?!)" matches nothing
        # Each character is replaced by one character, so that offsets do not change.
        self._replaced = str.maketrans(more_spaces + dropped, " " * len(more_spaces) + "\x01" * len(dropped))
        self._is_pair_separated = is_pair_separated
        self._visible = {index: token for index, token in self._pieces.items() if index not in self._hidden}
        # SentencePiece returns a run of unknown characters as one piece, which may spell a special token. With
        # `split_special_tokens` such a piece is ordinary text, so special tokens have no id in `_ids`.
        spelled = special if config.option("split_special_tokens", False) else set()
        self._ids = {token: index for token, index in vocabulary.items() if token not in spelled}
        self._id_by_number = [
            self._ids.get(processor.id_to_piece(number), self._unk) for number in range(processor.vocab_size())
        ]
        self._unknown_number = processor.unk_id()
        whole_tokens = {*special, *(token["content"] for token in config.added.values())} - spelled
        # Longest first, because a regular expression takes the first alternative that matches.
        pattern = "|".join(map(re.escape, sorted(whole_tokens, key=len, reverse=True))) or "(?!)"
        self._whole = re.compile(f"({pattern})")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode` of every text, computed on all cores."""
        texts = list_of_texts(texts, "texts")
        texts = [text.translate(self._replaced) for text in texts] if self._replaced else texts
        # Usual case: no whole tokens, so one call splits all texts.
        if not any(map(self._whole.search, texts)) and not any(map(self._front.match, texts)):
            return list(map(self._ids_of, texts, self._processor.encode(texts, out_type=int)))
        return self._encode_parts(
            texts, lambda rests: map(self._ids_of, rests, self._processor.encode(rests, out_type=int))
        )

    def sample_batch(self, texts: Sequence[str], *, bpe_dropout: float, rng: np.random.Generator) -> list[list[int]]:
        if (merges := self._merges) is None:
            return super().sample_batch(texts, bpe_dropout=bpe_dropout, rng=rng)
        texts = [text.translate(self._replaced) for text in list_of_texts(texts, "texts")]

        def sample(rests: list[str]) -> Iterator[list[int]]:
            words = [_WORDS.findall(self._processor.normalize(rest)) for rest in rests]
            split = iter(merges.split([word for part in words for word in part], dropout=bpe_dropout, rng=rng))
            for part in words:
                numbers = itertools.chain.from_iterable(itertools.islice(split, len(part)))
                yield self._ids_of_symbols(merges, numbers)

        return self._encode_parts(texts, sample)

    @functools.cached_property
    def _merges(self) -> Merges | None:
        """The merges of a model of byte pairs; None for other models, and for pieces that no merge makes."""
        proto = self._processor.serialized_model_proto()
        model = sentencepiece_model_pb2.ModelProto.FromString(proto)  # pyright: ignore[reportAttributeAccessIssue]
        pieces = [piece for piece in model.pieces if piece.type not in (piece.UNKNOWN, piece.CONTROL)]
        is_merged = all(piece.type == piece.NORMAL and "▁" not in piece.piece[1:] for piece in pieces)
        if model.trainer_spec.model_type != model.trainer_spec.BPE or not is_merged:
            return None
        return Merges({piece.piece: piece.score for piece in pieces})

    def _ids_of_symbols(self, merges: Merges, numbers: Iterable[int]) -> list[int]:
        """Returns the ids of symbols of `merges`; a run of unknown characters is one piece, as SentencePiece has it."""
        ids: list[int] = []
        for is_known, run in itertools.groupby(numbers, lambda number: 0 <= number < merges.num_pieces):
            pieces = [merges.symbols[number] if number >= 0 else chr(-1 - number) for number in run]
            ids += (self._ids.get(piece, self._unk) for piece in (pieces if is_known else ["".join(pieces)]))
        return ids

    def _encode_parts(
        self, texts: Sequence[str], encode: Callable[[list[str]], Iterator[list[int]]]
    ) -> list[list[int]]:
        """Splits the text between whole tokens by one call of `encode`, and puts these back in front of it."""
        parts_by_text = [list(self._parts(text)) for text in texts]
        ids_of_rests = encode([rest for parts in parts_by_text for _, rest in parts])
        ids_by_text: list[list[int]] = []
        for parts in parts_by_text:
            ids: list[int] = []
            for whole, _ in parts:
                if whole:
                    ids.append(self._ids.get(whole, self._unk))
                ids += next(ids_of_rests)
            ids_by_text.append(ids)
        return ids_by_text

    def _ids_of(self, text: str, numbers: list[int]) -> list[int]:
        """Returns ids from SentencePiece's own numbers; texts with unknown pieces are encoded again as strings."""
        if self._unknown_number in numbers:
            return [self._ids.get(piece, self._unk) for piece in self._processor.encode(text, out_type=str)]
        return list(map(self._id_by_number.__getitem__, numbers))

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the ids of `encode` and their [begin, end) in characters, [number of ids, 2] int64.

        The space before a word belongs to no id. An id without characters, such as a lone "▁", gets the next one.
        """
        text = text.translate(self._replaced)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for whole, rest in self._parts(text):
            if whole:
                ids.append(self._ids.get(whole, self._unk))
                offsets.append((start, start + len(whole)))
            encoding = self._processor.encode(rest, return_type="offset_mapping")
            ids += (self._ids.get(piece, self._unk) for piece in encoding["pieces"])
            start += len(whole)
            # SentencePiece's offsets count from the beginning of `rest`.
            offsets += (_without_space(text, start + begin, start + end) for begin, end in encoding["offsets"])
            start += len(rest)
        return ids, np.array(offsets, np.int64).reshape(-1, 2)

    def encode_with_specials(self, text: str, pair: str | None = None) -> Inputs:
        """Encodes one or two texts, with EOS at the end."""
        ids = [*self._first, *self.encode(text)]
        if pair is not None:
            ids += [self._eos] * self._is_pair_separated + self.encode(pair)
        return Inputs([*ids, self._eos], [0] * (len(ids) + 1))

    def _parts(self, text: str) -> Iterator[tuple[str, str]]:
        """Yields (text of one whole token or "", text after it that is to be split)."""
        for number, part in enumerate(self._whole.split(text)):
            match = self._front.match(part)
            is_whole = number % 2 == 1  # `split` returns text and matched tokens alternately
            token_at_front = match.group() if match else ""
            whole = part if is_whole else token_at_front
            yield whole, part[len(whole) :]

    def _normalized(self, text: str) -> str:
        return self._processor.normalize(text.translate(self._replaced)).replace("▁", " ").strip()

    def _text(self, ids: Sequence[int]) -> str:
        return self._text_of([self._visible[index] for index in ids if index in self._visible])


def _without_space(text: str, begin: int, end: int) -> tuple[int, int]:
    """Returns [begin, end) without leading white space, at least one character long."""
    while begin < len(text) and text[begin] != _NO_SPACE and (text[begin].isspace() or text[begin] in _MORE_SPACES):
        begin += 1
    return begin, max(end, min(begin + 1, len(text)))


def _clean_up(text: str) -> str:
    """Removes spaces before English punctuation and contractions, in the same order as transformers."""
    for spaced in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced.strip())
    return text


TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# Files of the tokenizers of all families, which have to be copied with a model.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "source.spm",
    "target.spm",
    "sentencepiece.bpe.model",
)


def load_folder_tokenizer(folder: epath.PathLike) -> HFTokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    Files, in this order of preference: tokenizer.json of any family; vocab.json and merges.txt of GPT-2 or GPT;
    vocab.txt of BERT; spiece.model of T5; source.spm, target.spm and vocab.json of Marian, where `encode` uses the
    source language and `decode` the target language; sentencepiece.bpe.model and vocab.json of M2M-100.

    Args:
      folder: local or gs://, or the name of a model on the Hugging Face hub.

    Raises:
      UserError: if the folder has no tokenizer, or a file is damaged.
    """
    folder = local_folder(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    config = TokenizerConfig(folder)
    for files, make in (
        (["tokenizer.json"], _from_tokenizer_json),
        (["vocab.json", "merges.txt"], _from_merges),
        (["vocab.txt"], _from_word_pieces),
        (["spiece.model"], _from_t5),
        (["source.spm", "target.spm", "vocab.json"], _from_marian),
        (["sentencepiece.bpe.model", "vocab.json"], _from_m2m100),
    ):
        if all((folder / file).exists() for file in files):
            return make(config)
    raise UserError(
        f"{folder} has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt, nor vocab.txt, nor "
        "spiece.model, nor source.spm, target.spm and vocab.json, nor sentencepiece.bpe.model and vocab.json"
    )


def _from_tokenizer_json(config: TokenizerConfig) -> HFTokenizer:
    """Returns the tokenizer of a tokenizer.json, of any family, without its truncation and padding."""
    path = config.folder / "tokenizer.json"

    def make(data: bytes) -> Any:
        """Builds the pipeline from the bytes of a tokenizer.json."""
        text = data.decode("utf-8-sig")
        values = json.loads(text)
        check_pipeline(values, path)
        options = {"padding": None, "truncation": None}  # batching does both
        options |= _stated_options(values, config)
        if any(values.get(name) != value for name, value in options.items()):  # else it need not be written again
            text = json.dumps(values | options)
        pipeline = tokenizers.Tokenizer.from_str(text)
        pipeline.encode("a 本")  # incompatible parts of a pipeline fail only at the first use
        return pipeline

    return PipelineTokenizer(read(path, make), config)


def _stated_options(pipeline: dict[str, Any], config: TokenizerConfig) -> dict[str, Any]:
    """Returns the parts of a tokenizer.json that have options, with those of tokenizer_config.json.

    These override the others in transformers. Only classes of a family have them: `PreTrainedTokenizerFast` takes the
    tokenizer.json as it is.
    """
    name = str(config.options.get("tokenizer_class") or "").removesuffix("Fast")
    if name in ("PreTrainedTokenizer", "TokenizersBackend") or config.family in (None, "bloom"):
        return {}

    def with_options(part: Any) -> Any:
        """Returns a part, or a sequence of parts, with the stated options of its kind."""
        if not isinstance(part, dict):
            return part
        steps = {
            key: [with_options(step) for step in part[key]] for key in ("normalizers", "pretokenizers") if key in part
        }
        names = _PART_OPTIONS.get(part.get("type"), {})
        stated = {
            theirs: config.option(name, False) for name, theirs in names.items() if config.options.get(name) is not None
        }
        return {**part, **steps, **stated}

    return {name: with_options(pipeline.get(name)) for name in ("normalizer", "pre_tokenizer")}


# Names of options in tokenizer_config.json and in the parts of a tokenizer.json, by kind.
_PART_OPTIONS: dict[Any, dict[str, str]] = {
    "BertNormalizer": {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    },
    "ByteLevel": {"add_prefix_space": "add_prefix_space"},
}


def _from_merges(config: TokenizerConfig) -> HFTokenizer:
    """Returns GPT-2's byte-level BPE (Radford et al., 2019, section 2.2), or GPT's BPE with "</w>" at ends of words."""
    config.require_family("vocab.json", "gpt2", "openaigpt")
    vocabulary = _read_vocabulary(config)
    # Without a stated family, only GPT's vocabulary has tokens that end with "</w>".
    is_gpt1 = config.family == "openaigpt" or (
        config.family is None and any(token.endswith("</w>") for token in vocabulary)
    )
    if is_gpt1:
        config.name_by_default(unk="<unk>")
    else:
        config.name_by_default(**dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"))

    def make(data: bytes) -> Any:
        """Builds the pipeline from the bytes of a merges.txt, one merge of two pieces a line."""
        lines = [line.removesuffix("\r") for line in data.decode("utf-8-sig").split("\n")]
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        options = {"unk_token": config.names["unk"], "end_of_word_suffix": "</w>"} if is_gpt1 else {}
        return tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, **options))

    pipeline = read(config.folder / "merges.txt", make)
    if is_gpt1:
        pipeline.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        pipeline.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        pipeline.decoder = tokenizers.decoders.BPEDecoder(suffix="</w>")
    else:
        pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=config.option("add_prefix_space", False)
        )
        pipeline.decoder = tokenizers.decoders.ByteLevel()
        bos = config.names["bos"]
        if config.option("add_bos_token", False) and bos in vocabulary:
            pipeline.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, vocabulary[bos])]
            )
    return PipelineTokenizer(pipeline, config)


def _from_word_pieces(config: TokenizerConfig) -> HFTokenizer:
    """Returns BERT's WordPiece (Devlin et al., 2019): words and punctuation, split greedily into the longest pieces."""
    config.require_family("vocab.txt", "bert", "distilbert", "electra")
    config.name_by_default(pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]")
    path = config.folder / "vocab.txt"
    lines = read(path, lambda data: data.decode("utf-8-sig")).removesuffix("\n").split("\n")
    vocabulary = {line.removesuffix("\r"): index for index, line in enumerate(lines)}
    unk, cls, sep = (config.names[role] for role in ("unk", "cls", "sep"))
    for token in (unk, cls, sep):
        if token not in vocabulary:
            raise UserError(f"{path} has no {token}, which every BERT needs: fetch it again")
    pipeline = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token=unk))
    lowercase = config.option("do_lower_case", True)
    pipeline.normalizer = tokenizers.normalizers.BertNormalizer(
        lowercase=lowercase,
        handle_chinese_chars=config.option("tokenize_chinese_chars", True),
        strip_accents=config.option("strip_accents", lowercase),
    )
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = tokenizers.decoders.WordPiece()
    pipeline.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
    )
    return PipelineTokenizer(pipeline, config)


def _from_t5(config: TokenizerConfig) -> HFTokenizer:
    """Returns T5's tokenizer (Raffel et al., 2020): SentencePiece, with sentinels as the last ids in reverse order."""
    config.require_family("spiece.model", "t5", "mt5", "umt5")
    processor = _read_sentencepiece(config, "spiece.model")
    vocabulary = {processor.id_to_piece(index): index for index in range(processor.vocab_size())}
    num_sentinels = config.option("extra_ids", 100)
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(num_sentinels))]
    vocabulary |= {token: index for index, token in enumerate(sentinels, start=processor.vocab_size())}
    config.name_by_default(pad="<pad>", eos="</s>", unk="<unk>")
    config.special.update(sentinels)
    return PieceTokenizer(
        processor,
        vocabulary,
        config,
        text_of=processor.decode_pieces,
        more_spaces="\x85",  # transformers splits here too; SentencePiece knows all other white space
        is_pair_separated=True,
    )


def _from_marian(config: TokenizerConfig) -> HFTokenizer:
    """Returns Marian's tokenizer: one SentencePiece model for each language, and one vocabulary for both."""
    config.require_family("source.spm", "marian")
    if config.option("separate_vocabs", False):
        raise UserError(
            f"{config.folder}: separate_vocabs is true, but only one vocabulary for both sides is supported"
        )
    source, target = (_read_sentencepiece(config, f"{side}.spm") for side in ("source", "target"))
    config.name_by_default(pad="<pad>", eos="</s>", unk="<unk>")
    vocabulary = _read_vocabulary(config)
    has_codes = any(token.startswith(">>") and token.endswith("<<") for token in vocabulary)
    return PieceTokenizer(
        source,
        vocabulary,
        config,
        text_of=lambda pieces: target.decode_pieces(pieces).replace("▁", " ").strip(),
        more_spaces=config.option("more_spaces", ""),
        dropped=config.option("dropped_characters", ""),
        front=">>.*?<<" if has_codes else None,  # the language to translate into
        is_pair_separated=False,
    )


def _from_m2m100(config: TokenizerConfig) -> HFTokenizer:
    """Returns the tokenizer of M2M-100 (Fan et al., 2020): SentencePiece, a vocabulary, and behind it the languages.

    No file of the folder names the languages; their ids follow those of the vocabulary.
    """
    config.require_family("sentencepiece.bpe.model", "m2m100", "m2m_100")
    if (codes := config.option("language_codes", "m2m100")) != "m2m100":
        raise UserError(
            f"{config.folder / 'tokenizer_config.json'}: language_codes is {codes!r}, but only 'm2m100' is supported"
        )
    processor = _read_sentencepiece(config, "sentencepiece.bpe.model")
    config.name_by_default(bos="<s>", pad="<pad>", eos="</s>", unk="<unk>")
    vocabulary = _read_vocabulary(config)
    languages = [f"__{code}__" for code in _M2M100_LANGUAGES.split()]
    vocabulary |= {name: index for index, name in enumerate(languages, start=len(vocabulary))}
    first = f"__{config.option('src_lang', 'en')}__"
    if first not in vocabulary:
        raise UserError(f"{config.folder / 'tokenizer_config.json'}: src_lang has no token {first}")
    return PieceTokenizer(
        processor,
        vocabulary,
        config,
        text_of=lambda pieces: processor.decode_pieces(pieces).strip(),
        first=first,
        languages=languages,
        is_pair_separated=False,
    )


def _read_vocabulary(config: TokenizerConfig) -> dict[str, int]:
    """Returns the ids of tokens from vocab.json; raises UserError if one is not an int in 0 .. 2^31 - 1."""
    path = config.folder / "vocab.json"
    vocabulary = read_json(path)
    for token, index in vocabulary.items():
        if type(index) is not int or not 0 <= index < 2**31:
            raise UserError(f"{path}: the id of {token!r} is {index!r}, not a number")
    return vocabulary


def _read_sentencepiece(config: TokenizerConfig, file: str) -> sentencepiece.SentencePieceProcessor:
    """Returns the SentencePiece model in a file of the folder; raises UserError if it is damaged."""
    # SentencePiece accepts an empty file and fails at the first use, but it rejects b"\0" at once.
    return read(config.folder / file, lambda data: sentencepiece.SentencePieceProcessor(model_proto=data or b"\0"))


def write_template(folder: epath.PathLike, tokenizer: HFTokenizer, *, first: int | None, last: int) -> bool:
    """Changes the tokenizer.json of a folder so that it adds special tokens around texts, unless it already does.

    Args:
      folder: folder of the file. Without a tokenizer.json nothing is done, because other tokenizers always add them.
      tokenizer: the result of `load_folder_tokenizer` for the folder.
      first: id of the token before the first text, or None.
      last: id of the token after each text.

    Returns:
      Whether the file was changed.
    """
    path = epath.Path(folder) / "tokenizer.json"
    before = [] if first is None else [first]
    if not path.exists() or tokenizer.encode_with_specials("a").ids == [*before, *tokenizer.encode("a"), last]:
        return False
    pipeline = tokenizers.Tokenizer.from_file(str(path))
    name_by_id = dict(zip([*before, last], tokenizer.pieces([*before, last]), strict=True))
    start, end = "".join(f"{name_by_id[index]} " for index in before), name_by_id[last]
    # In a template, $A and $B are the texts, and ":1" is the token type. Only models with a token before the first text
    # (BERT) have token types.
    pipeline.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start}$A {end}",
        pair=f"{start}$A {end} $B:1 {end}:1" if before else f"$A {end} $B {end}",
        special_tokens=[(name, index) for index, name in name_by_id.items()],
    )
    write_file(path, pipeline.to_str(pretty=True).encode())
    return True
