"""Text to token ids and back: SentencePiece for raw text, a word list for text that comes segmented, or characters.

One joint vocabulary serves both languages, as in "Attention Is All You Need" (Vaswani et al., 2017, section 5.1), so
that the embeddings can be shared. The first four ids are the same for every tokenizer.
"""

import collections
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import sentencepiece
from etils import epath

from tfx_jax.data.files import write_file
from tfx_jax.data.vocabulary import vocabulary_size
from tfx_jax.errors import UserError

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
_SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")

T = TypeVar("T")


class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, the four special ones included."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without beginning and end of sentence."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text, faster than one at a time."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, up to the first end of sentence."""
        ...

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id stands for, to label a figure."""
        ...

    def save(self, path: epath.PathLike) -> None:
        """Writes the tokenizer to a file that `load` reads."""
        ...


class SentencePieceTokenizer:
    """Subwords learnt from raw text (Kudo and Richardson, 2018, https://arxiv.org/abs/1808.06226)."""

    filename = "tokenizer.model"

    def __init__(self, model: bytes):
        """Takes a serialized SentencePiece model.

        Raises:
          UserError: if `model` is not one, or was trained with other ids for padding, beginning, end and unknown.
        """
        try:
            # Empty bytes would pass for a model here and fail at the first use.
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model or b"\0")
        except RuntimeError:
            raise UserError("not a SentencePiece model") from None
        self._model = model
        processor = self._processor
        ids = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
        if ids != (PAD_ID, BOS_ID, EOS_ID, UNK_ID):
            raise UserError(f"SentencePiece model with pad, bos, eos, unk = {ids}; train it with 0, 1, 2, 3")

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        *,
        vocab_size: int | None = None,
        model_type: str = "bpe",
        character_coverage: float = 1.0,
        split_digits: bool = True,
        normalization: str = "identity",
    ) -> Self:
        """Learns a vocabulary; the same lines give the same vocabulary.

        Args:
          lines: the text of both languages.
          vocab_size: how many ids at most, the special ones included; a small text may yield fewer. None: by the size
            of the text.
          model_type: "bpe" (Sennrich et al., 2016), as in the paper, or "unigram" (Kudo, 2018).
          character_coverage: share of the characters that get an id of their own; 0.9995 suits Japanese and Chinese.
          split_digits: makes each digit a token, so that numbers are spelt out.
          normalization: "identity" keeps the characters, so that decoding gives the text back; "nmt_nfkc" folds
            full-width letters, punctuation marks and exotic spaces.

        Raises:
          UserError: if the lines hold no text, or more different characters than `vocab_size` allows.
        """
        written = io.BytesIO()
        # A list, not an iterator: SentencePiece would turn an error of the iterator, or Ctrl-C, into one of its own.
        text = [line for line in lines if line.strip()]
        if not text:
            raise UserError("no text to train a tokenizer on: every line is empty")
        if vocab_size is None:
            vocab_size = vocabulary_size(text)
        try:
            sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
                sentence_iterator=iter(text),
                model_writer=written,
                vocab_size=vocab_size,
                model_type=model_type,
                character_coverage=character_coverage,
                split_digits=split_digits,
                normalization_rule_name=normalization,
                hard_vocab_limit=False,
                pad_id=PAD_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                unk_id=UNK_ID,
                minloglevel=2,
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(f"cannot train a SentencePiece model of {vocab_size} tokens: {_reason(error)}") from None
        return cls(written.getvalue())

    @classmethod
    def load(cls, path: epath.PathLike) -> Self:
        """Reads what `save` wrote, or a model trained elsewhere with the ids of this module.

        Raises:
          UserError: if the file is missing or not such a model.
        """
        return _load(path, cls)

    def save(self, path: epath.PathLike) -> None:
        """Writes the model in SentencePiece's own format."""
        write_file(epath.Path(path), self._model)

    @property
    def vocab_size(self) -> int:
        """The number of ids, the four special ones included."""
        return self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without beginning and end of sentence."""
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text, on all cores."""
        return self._processor.encode(list(texts))

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """`encode`, and where the characters of each id begin and end, [number of ids, 2] int64.

        The space before a word belongs to it, so that the ids of a text cover it all.
        """
        found = self._processor.encode(text, return_type="offset_mapping")
        return found["ids"], np.array(found["offsets"], np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, up to the first end of sentence."""
        return self._processor.decode(list(_until_end(ids)))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id stands for; "▁" marks the beginning of a word."""
        return self._processor.id_to_piece([int(index) for index in ids])


class WordTokenizer:
    """White-space separated tokens looked up in a list: words, or subwords with "@@ " marks (Sennrich et al., 2016).

    >>> tokenizer = WordTokenizer.train(["ein spiel@@ haus", "ein haus"])
    >>> tokenizer.encode("ein spiel@@ haus im")
    [4, 6, 5, 3]
    >>> tokenizer.decode([4, 6, 5, 2, 4])
    'ein spielhaus'
    """

    filename = "vocab.txt"

    def __init__(self, vocabulary: Sequence[str]):
        """Takes the tokens in the order of their ids, the special ones first.

        Raises:
          UserError: if they do not begin with <pad> <s> </s> <unk>, or one occurs twice.
        """
        if tuple(vocabulary[: len(_SPECIALS)]) != _SPECIALS:
            raise UserError(f"not a vocabulary: its first lines must be {' '.join(_SPECIALS)}")
        self._vocabulary = list(vocabulary)
        self._ids = {token: index for index, token in enumerate(self._vocabulary)}
        if len(self._ids) != len(self._vocabulary):
            twice = next(token for index, token in enumerate(vocabulary) if self._ids[token] != index)
            raise UserError(f"not a vocabulary: {twice!r} occurs twice")
        # A text that spells a special token must not be able to end or pad a sentence.
        self._ids.update(dict.fromkeys(_SPECIALS, UNK_ID))

    @classmethod
    def train(cls, lines: Iterable[str], *, vocab_size: int | None = None, min_count: int = 1) -> Self:
        """Lists the tokens of a text, the most frequent first; ties in the order of their first appearance.

        Args:
          lines: the text of both languages.
          vocab_size: how many ids at most, the special ones included; None keeps every token.
          min_count: tokens seen less often become unknown.

        Raises:
          UserError: if the lines hold no token, or none that may be kept.
        """
        counts = collections.Counter(token for line in lines for token in line.split())
        if not counts:
            raise UserError("no text to make a vocabulary from: every line is empty")
        limit = None if vocab_size is None else max(0, vocab_size - len(_SPECIALS))
        tokens = (token for token, count in counts.most_common() if count >= min_count and token not in _SPECIALS)
        vocabulary = list(tokens)[:limit]
        if not vocabulary:
            raise UserError(f"vocab_size={vocab_size} and min_count={min_count} leave no token: allow more")
        return cls([*_SPECIALS, *vocabulary])

    @classmethod
    def load(cls, path: epath.PathLike) -> Self:
        """Reads a vocabulary, one token a line.

        Raises:
          UserError: if the file is missing or not a vocabulary.
        """
        return _load(path, lambda data: cls(data.decode().removesuffix("\n").split("\n")))

    def save(self, path: epath.PathLike) -> None:
        """Writes the vocabulary, one token a line."""
        write_file(epath.Path(path), "".join(f"{token}\n" for token in self._vocabulary).encode())

    @property
    def vocab_size(self) -> int:
        """The number of ids, the four special ones included."""
        return len(self._vocabulary)

    def encode(self, text: str) -> list[int]:
        """The ids of the tokens between white space; unknown ones become UNK_ID."""
        find = self._ids.get
        return [find(token, UNK_ID) for token in text.split()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, up to the first end of sentence, its subwords joined to words."""
        return join_subwords(" ".join(self.pieces(_until_end(ids))))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id stands for, "@@" marks included."""
        return [self._vocabulary[index] for index in ids]


class CharacterTokenizer:
    """Characters, line ends and spaces too, as tokens of their own.

    >>> tokenizer = CharacterTokenizer.train(["to be"])
    >>> tokenizer.encode("beat")
    [5, 6, 3, 8]
    >>> tokenizer.decode([8, 7, 4, 2, 5])
    'to '
    """

    filename = "characters.txt"

    def __init__(self, characters: Sequence[str]):
        """Takes the characters in the order of their ids; the first gets the id behind the special ones.

        Raises:
          UserError: if there is none, or one occurs twice.
        """
        self._characters = list(characters)
        self._ids = {character: index for index, character in enumerate(self._characters, start=len(_SPECIALS))}
        if not self._ids or len(self._ids) != len(self._characters):
            raise UserError("not a list of characters: it is empty, or one occurs twice")

    @classmethod
    def train(cls, lines: Iterable[str]) -> Self:
        """Lists the characters of a text in the order of their code points.

        Raises:
          UserError: if there is no character.
        """
        return cls(sorted(set(itertools.chain.from_iterable(lines))))

    @classmethod
    def load(cls, path: epath.PathLike) -> Self:
        """Reads what `save` wrote.

        Raises:
          UserError: if the file is missing or not such a list.
        """
        return _load(path, lambda data: cls(data.decode()))

    def save(self, path: epath.PathLike) -> None:
        """Writes the characters in the order of their ids, with nothing between them."""
        write_file(epath.Path(path), "".join(self._characters).encode())

    @property
    def vocab_size(self) -> int:
        """The number of ids, the four special ones included."""
        return len(_SPECIALS) + len(self._characters)

    def encode(self, text: str) -> list[int]:
        """The ids of the characters; unknown ones become UNK_ID."""
        find = self._ids.get
        return [find(character, UNK_ID) for character in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, up to the first end of sentence."""
        return "".join(self.pieces(_until_end(ids)))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id stands for."""
        names = [*_SPECIALS, *self._characters]
        return [names[index] for index in ids]


_KINDS = {"sentencepiece": SentencePieceTokenizer, "words": WordTokenizer, "characters": CharacterTokenizer}


def train_or_load(
    workdir: epath.PathLike, make_lines: Callable[[], Iterable[str]], *, kind: str, **train_options: Any
) -> SentencePieceTokenizer | WordTokenizer | CharacterTokenizer:
    """Loads the tokenizer of a working directory; at first use it is trained and saved there.

    Args:
      workdir: where `tokenizer.model`, `vocab.txt` or `characters.txt` is kept; made if missing.
      make_lines: gives the training text, both languages; called only if there is something to train.
      kind: "sentencepiece" for raw text, "words" for text whose tokens are separated by white space, or "characters".
      **train_options: arguments of the `train` of that class.

    Raises:
      UserError: for an unknown kind, a damaged file, or a text that nothing can be trained on.
    """
    path = epath.Path(workdir) / tokenizer_file(kind)
    if path.exists():
        return load_tokenizer(workdir, kind)
    tokenizer = _KINDS[kind].train(make_lines(), **train_options)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(path)
    return tokenizer


def load_tokenizer(workdir: epath.PathLike, kind: str) -> SentencePieceTokenizer | WordTokenizer | CharacterTokenizer:
    """Loads the tokenizer of a working directory; errors as for `train_or_load`, and if there is none."""
    return _KINDS[kind].load(epath.Path(workdir) / tokenizer_file(kind))


def tokenizer_file(kind: str) -> str:
    """What the file of such a tokenizer is called; UserError for an unknown kind."""
    if kind not in _KINDS:
        raise UserError(f"unknown kind of tokenizer {kind!r}: use one of {', '.join(_KINDS)}")
    return _KINDS[kind].filename


def join_subwords(text: str) -> str:
    """Joins subwords marked with "@@" to words; a mark at the very end is dropped.

    >>> join_subwords("ein spiel@@ haus aus h@@")
    'ein spielhaus aus h'
    """
    return text.replace("@@ ", "").removesuffix("@@")


def _until_end(ids: Iterable[int]) -> Iterator[int]:
    """The ids before the first end of sentence, without padding and beginning of sentence."""
    for index in ids:
        if index == EOS_ID:
            return
        if index not in (PAD_ID, BOS_ID):
            yield int(index)


def _reason(error: Exception) -> str:
    """The readable end, on one line, of a SentencePiece error: "INTERNAL: file(line) [condition] reason"."""
    return " ".join((str(error).rsplit("] ", 1)[-1].strip() or str(error)).split())


def _load(path: epath.PathLike, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(epath.Path(path).read_bytes())
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; put a good copy in its place") from None
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror or error}") from None
