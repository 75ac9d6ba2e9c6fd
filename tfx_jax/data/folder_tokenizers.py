"""The two kinds of tokenizers in Hugging Face folders: pipelines, which `tokenizers` runs, and SentencePiece models."""

import abc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import tokenizers

from tfx_jax.data.lines import list_of_texts
from tfx_jax.data.streaming import TextStream
from tfx_jax.data.tokenizer_config import TokenizerConfig
from tfx_jax.errors import UserError

_MORE_SPACES = "▁\N{ZERO WIDTH SPACE}"  # what SentencePiece takes for spaces, beside Unicode's
_NO_SPACE = "\x85"  # which Unicode has, but SentencePiece has not


class Inputs(NamedTuple):
    """A text, or two, as a model is trained to see them.

    Attributes:
      ids: tokens, special ones included.
      token_types: 0 for each token of the first text and 1 for each of the second, if the model tells them apart.
    """

    ids: list[int]
    token_types: list[int]


class HFTokenizer(abc.ABC):
    """What every tokenizer of a folder can do; `load_folder_tokenizer` makes them.

    A special token that a text spells, such as "[MASK]", becomes that token, unless tokenizer_config.json says
    `split_special_tokens`: then it is text like any other, and can neither end nor pad anything.

    Attributes:
      vocab_size: one more than the highest id.
      pad_id: of padding; this and the following are None where there is none.
      bos_id: of the beginning of a text.
      eos_id: of its end.
      unk_id: of what the vocabulary does not have.
      mask_id: of a token to guess.
      cls_id: of what stands before a text that is classified.
      sep_id: of what stands behind each text.
      normalization: the rule by which texts are normalized, such as "nmt_nfkc", where tokenizer_config.json states it,
        which only we write and read; "" otherwise.
    """

    def __init__(
        self, vocabulary: Mapping[str, int], config: TokenizerConfig, *, special: set[str], can_clean_up: bool = True
    ):
        """Takes the ids of all tokens, and which tokens are special."""
        for index, token in config.added.items():
            if vocabulary.get(token["content"]) != index:
                raise UserError(f"{config.folder} adds a token {token['content']!r} as {index}, which is not its id")
        self._pieces = {index: token for token, index in vocabulary.items()}
        if len(self._pieces) != len(vocabulary):
            twice = next(token for token, index in vocabulary.items() if self._pieces[index] != token)
            raise UserError(f"{config.folder}: the id {vocabulary[twice]} of {twice!r} has another token too")
        self.vocab_size = max(self._pieces, default=-1) + 1
        ids = config.special_ids(vocabulary, special)
        self.pad_id, self.bos_id, self.eos_id, self.unk_id, self.mask_id, self.cls_id, self.sep_id = ids
        self.normalization = config.option("normalization", "")
        self._cleans_up = can_clean_up and config.option("clean_up_tokenization_spaces", False)
        shown = config.names.get("unk") if config.option("shows_unknown", False) else None
        self._hidden = {vocabulary[token] for token in special & vocabulary.keys() - {shown}}

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """`encode`, and the first character of each id and the one behind its last, [number of ids, 2] int64."""

    @abc.abstractmethod
    def encode_with_specials(self, text: str, pair: str | None = None) -> Inputs:
        """A text, or two, among the special tokens that the model was trained with."""

    @abc.abstractmethod
    def _text(self, ids: Sequence[int]) -> str:
        """The text of ids, `_hidden` ones left out, before spaces are cleaned up."""

    @abc.abstractmethod
    def _normalized(self, text: str) -> str:
        """A text as the model sees it, before it is split."""

    def normalize(self, text: str) -> str:
        """The text that `decode` can give back at best: normalized, where `normalization` states a rule."""
        return self._normalized(text) if self.normalization else text

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        return self.encode_with_offsets(text)[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all ids; special tokens, and ids that the vocabulary does not have, are left out.

        The unknown token remains where tokenizer_config.json says `shows_unknown`, which only we write and read.
        """
        text = self._text([int(index) for index in ids])
        return _clean_up(text) if self._cleans_up else text

    def stream(self) -> TextStream:
        """The text of ids that are still being generated, in parts; together they are what `decode` gives.

        Spaces before punctuation marks, which some folders want removed, remain.
        """
        return TextStream(self._text)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id stands for, spelt as in the vocabulary; "" for an id that it does not have."""
        return [self._pieces.get(int(index), "") for index in ids]


class PipelineTokenizer(HFTokenizer):
    """A tokenizer that the library `tokenizers` runs: byte-level BPE, WordPiece, or whatever a tokenizer.json says."""

    def __init__(self, pipeline: Any, config: TokenizerConfig):
        """Takes a `tokenizers.Tokenizer`, which becomes this object's own.

        Raises:
          UserError: if an id belongs to two tokens.
        """
        for _, token in sorted(config.added.items()):
            pipeline.add_tokens([tokenizers.AddedToken(**token)])
        known = {token.content for token in pipeline.get_added_tokens_decoder().values() if token.special}
        vocabulary = pipeline.get_vocab(with_added_tokens=True)
        pipeline.add_special_tokens(sorted((config.special & vocabulary.keys()) - known))
        # A tokenizer.json may cut and fill every text to the length of some training.
        pipeline.no_truncation()
        pipeline.no_padding()
        pipeline.encode_special_tokens = config.option("split_special_tokens", False)
        self._pipeline = pipeline
        can_clean_up = type(pipeline.model).__name__ != "BPE"  # whose spaces are those of the text
        super().__init__(vocabulary, config, special=known | config.special, can_clean_up=can_clean_up)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        return _guarded(self._pipeline.encode, text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text, on all cores."""
        texts = list_of_texts(texts, "texts")
        found = _guarded(self._pipeline.encode_batch_fast, texts, add_special_tokens=False)
        return [text.ids for text in found]

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """`encode`, and the first character of each id and the one behind its last, [number of ids, 2] int64.

        Ids that share a character, as parts of it in byte-level BPE, all have the whole of it. There, the space before
        a word belongs to the word's first id.
        """
        found = _guarded(self._pipeline.encode, text, add_special_tokens=False)
        return found.ids, np.array(found.offsets, np.int64).reshape(-1, 2)

    def encode_with_specials(self, text: str, pair: str | None = None) -> Inputs:
        """A text, or two, among the special tokens that the model was trained with."""
        found = _guarded(self._pipeline.encode, text, pair)
        return Inputs(found.ids, found.type_ids)

    def _normalized(self, text: str) -> str:
        return self._pipeline.normalizer.normalize_str(text) if self._pipeline.normalizer else text

    def _text(self, ids: Sequence[int]) -> str:
        return self._pipeline.decode([index for index in ids if index not in self._hidden], skip_special_tokens=False)


def _guarded(encode: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls the library, whose panics are no `Exception`: a pattern of a stranger may give up on some text."""
    try:
        return encode(*arguments, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer cannot read a text: {error}") from None


class PieceTokenizer(HFTokenizer):
    """A SentencePiece model whose pieces have their ids in a vocabulary: T5's is its own, Marian's another."""

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
        is_pair_separated: bool,
    ):
        """Binds them.

        Args:
          processor: splits texts.
          vocabulary: ids of the pieces; those that it lacks are unknown.
          config: of the folder.
          text_of: joins pieces.
          front: pattern of what at the beginning of a text is one token.
          more_spaces: characters to take for spaces that the model does not know.
          dropped: characters to leave out that the model does not know, which leaves out control characters.
          is_pair_separated: whether the first of two texts has an end of its own.

        Raises:
          UserError: if an id belongs to two tokens, or the end of sentence or the unknown token has none.
        """
        vocabulary = {**{token["content"]: index for index, token in config.added.items()}, **vocabulary}
        special = config.special & vocabulary.keys()
        super().__init__(vocabulary, config, special=special)
        if self.eos_id is None or self.unk_id is None:
            raise UserError(f"{config.folder}: the vocabulary lacks the end of sentence or the unknown token")
        self._eos, self._unk = self.eos_id, self.unk_id
        self._processor, self._text_of = processor, text_of
        self._front = re.compile(front or "(?!)", re.DOTALL)
        # One character for another: offsets stay those of the text.
        self._replaced = str.maketrans(more_spaces + dropped, " " * len(more_spaces) + "\x01" * len(dropped))
        self._is_pair_separated = is_pair_separated
        self._visible = {index: token for index, token in self._pieces.items() if index not in self._hidden}
        # A run of characters that SentencePiece does not know is a piece to it, which may spell a special token.
        spelt = special if config.option("split_special_tokens", False) else set()
        self._ids = {token: index for token, index in vocabulary.items() if token not in spelt}
        self._id_by_number = [
            self._ids.get(processor.id_to_piece(number), self._unk) for number in range(processor.vocab_size())
        ]
        self._unknown_number = processor.unk_id()
        whole = {*special, *(token["content"] for token in config.added.values())} - spelt
        pattern = "|".join(map(re.escape, sorted(whole, key=len, reverse=True))) or "(?!)"
        self._whole = re.compile(f"({pattern})")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text, on all cores."""
        texts = list_of_texts(texts, "texts")
        texts = [text.translate(self._replaced) for text in texts] if self._replaced else texts
        if not any(map(self._whole.search, texts)) and not any(map(self._front.match, texts)):
            return list(map(self._ids_of, texts, self._processor.encode(texts, out_type=int)))
        parts = [list(self._parts(text)) for text in texts]
        rests = [rest for found in parts for _, rest in found]
        ids = map(self._ids_of, rests, self._processor.encode(rests, out_type=int))
        return [
            [
                index
                for whole, _ in found
                for index in ([self._ids.get(whole, self._unk), *next(ids)] if whole else next(ids))
            ]
            for found in parts
        ]

    def _ids_of(self, text: str, numbers: list[int]) -> list[int]:
        """The ids of a text's pieces, given their numbers in the model; only what it does not know has to be spelt."""
        if self._unknown_number in numbers:
            return [self._ids.get(piece, self._unk) for piece in self._processor.encode(text, out_type=str)]
        return list(map(self._id_by_number.__getitem__, numbers))

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """`encode`, and the first character of each id and the one behind its last, [number of ids, 2] int64.

        The space before a word belongs to no id. One without a character, such as a lone "▁", has that of the next.
        """
        text = text.translate(self._replaced)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for whole, rest in self._parts(text):
            if whole:
                ids.append(self._ids.get(whole, self._unk))
                offsets.append((start, start + len(whole)))
            found = self._processor.encode(rest, return_type="offset_mapping")
            ids += (self._ids.get(piece, self._unk) for piece in found["pieces"])
            start += len(whole)
            offsets += (_shown(text, start + first, start + end) for first, end in found["offsets"])
            start += len(rest)
        return ids, np.array(offsets, np.int64).reshape(-1, 2)

    def encode_with_specials(self, text: str, pair: str | None = None) -> Inputs:
        """A text, or two, and the end of sentence."""
        ids = self.encode(text)
        if pair is not None:
            ids += [self._eos] * self._is_pair_separated + self.encode(pair)
        return Inputs([*ids, self._eos], [0] * (len(ids) + 1))

    def _parts(self, text: str) -> Iterator[tuple[str, str]]:
        """Yields what is one token, or "", and the text behind it."""
        for number, part in enumerate(self._whole.split(text)):
            match = self._front.match(part)
            whole = part if number % 2 else match.group() if match else ""
            yield whole, part[len(whole) :]

    def _normalized(self, text: str) -> str:
        return self._processor.normalize(text.translate(self._replaced)).replace("▁", " ").strip()

    def _text(self, ids: Sequence[int]) -> str:
        return self._text_of([self._visible[index] for index in ids if index in self._visible])


def _shown(text: str, begin: int, end: int) -> tuple[int, int]:
    """A stretch of characters without the white space before it, of one character at least."""
    while begin < len(text) and text[begin] != _NO_SPACE and (text[begin].isspace() or text[begin] in _MORE_SPACES):
        begin += 1
    return begin, max(end, min(begin + 1, len(text)))


def _clean_up(text: str) -> str:
    """Removes the spaces that splitting English has left, in the order in which transformers does."""
    for spaced in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced.strip())
    return text
