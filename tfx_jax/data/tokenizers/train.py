"""Training of tokenizers, saved as Hugging Face folders: SentencePiece, WordPiece, BPE, characters and words.

train_or_load_folder("runs/gpt", lambda: [read_text(path)], kind="characters", family="gpt", vocab_size=256)
"""

import collections
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sentencepiece
import tokenizers
from etils import epath
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tfx_jax.data.files import write_file
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.data.tokenizers.hf_tokenizer import TOKENIZER_FILES, HFTokenizer, load_folder_tokenizer, read_json
from tfx_jax.errors import UserError

_NUM_SPECIALS = 4  # padding, BOS, EOS and unknown token


def vocabulary_size(lines: Sequence[str]) -> int:
    """Returns the size of a joint vocabulary: all characters plus 32 * sqrt(number of pairs of lines) subwords.

    A small text needs a small vocabulary (Sennrich and Zhang, 2019, https://arxiv.org/abs/1905.11901): otherwise most
    subwords are too rare to be learned. A vocabulary grows roughly with the square root of its text (Heaps' law). The
    factor 32 gives 32,000 subwords for a million pairs, as in published systems.

    Args:
      lines: lines of both languages, two for each pair.

    >>> vocabulary_size(["ein haus", "a house"] * 10_000)  # 8 letters, the space and 4 special tokens besides
    3213
    """
    num_characters = len(set().union(*lines))
    num_pairs = len(lines) / 2
    return _NUM_SPECIALS + num_characters + round(32 * math.sqrt(num_pairs))


# Invisible characters inside words, such as the soft hyphen. `tokenizers` drops them with a normalizer. SentencePiece's
# rule would keep them, so they are replaced by a control character, which it drops.
_DROPPED = "\xad\u061c\u180e" + "".join(map(chr, [*range(0x202A, 0x202F), *range(0x2060, 0x206A)]))
_SPACES = "\x85"  # white space that SentencePiece's rule does not turn into a space
_RULE = "nmt_nfkc"
_MARK = "##"  # WordPiece's prefix of pieces that continue a word
# Score of special tokens in Unigram, below that of any text: if normalization turns full-width letters into "</s>",
# they are text, not the token.
_NEVER = -1000.0
_ALL = 2**31  # stands for an unlimited number of pieces
_SIZED_BY_TEXT = ("sentencepiece", "words", "characters")  # kinds that allow vocab_size=0
# Files that are written first: a folder with only these has no vocabulary yet, and counts as without tokenizer.
_BEFORE_VOCABULARY = ("tokenizer_config.json", "source.spm", "target.spm")


class _Family(NamedTuple):
    """Requirements of a model family, independent of the kind of tokenizer.

    Attributes:
      roles: special tokens by role, in the order of their ids, from 0.
      last: special tokens with the highest ids, in the order of their ids.
      templates: templates of one text and of two texts with special tokens; None for no special tokens.
      has_types: whether the model has token types.
      is_plain: whether special tokens spelled in a text are ordinary text, and decoding shows unknown tokens.
    """

    roles: dict[str, str]
    last: tuple[str, ...] = ()
    templates: tuple[str, str] | None = None
    has_types: bool = False
    is_plain: bool = False


_FAMILIES = {
    "gpt": _Family({"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<unk>"}),
    "bert": _Family(
        {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
        templates=("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        has_types=True,
    ),
    "t5": _Family(
        {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
        last=tuple(f"<extra_id_{number}>" for number in reversed(range(100))),
        templates=("$A </s>", "$A </s> $B </s>"),
    ),
    "marian": _Family(
        {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"},
        templates=("$A </s>", "$A $B </s>"),
        is_plain=True,
    ),
}


class _Training(NamedTuple):
    """Inputs for training a tokenizer of any kind.

    Attributes:
      read: starts a new pass over the text, without spelled special tokens (unless the family `is_plain`).
      size: maximum number of pieces, without special tokens; `_ALL` for no limit.
      ids: returns the ids of pieces, given in order and cut to `size`, and of all special tokens.
      roles: special tokens by role.
    """

    read: Callable[[], Iterator[str]]
    size: int
    ids: Callable[[Iterable[str]], dict[str, int]]
    roles: Mapping[str, str]


def train_or_load_folder(
    folder: epath.PathLike, texts: Callable[[], Iterable[str]], *, kind: str, family: str, vocab_size: int
) -> HFTokenizer:
    """Loads the tokenizer of a folder; if it has none, trains one and writes it there.

    Each file (usually tokenizer.json and tokenizer_config.json) is written atomically, and the same texts always give
    the same files. transformers and the library `tokenizers` can read them too. A special token spelled in a text, such
    as "[MASK]" or "<unk>", is that token, and nothing is learned from its letters. In the family "marian" it is
    ordinary text instead, which cannot end or pad a sentence.

    Kinds:

    * "characters": every character, line breaks and spaces included, most frequent first.
    * "words": words separated by white space, most frequent first; decoding joins them with single spaces. Texts are
      normalized: NFC, without soft hyphens and other invisible characters inside words.
    * "wordpiece": BERT's (Devlin et al., 2019, https://arxiv.org/abs/1810.04805), cased: words and punctuation marks,
      split into the longest pieces from the left, after NFC.
    * "bpe": GPT-2's byte-level BPE (Radford et al., 2019, section 2.2), to which no text is unknown.
    * "unigram": T5's, the language model of Kudo (2018, https://arxiv.org/abs/1804.10959), as SentencePiece trains it,
      on text after NFKC.

    Kinds of the family "marian", with one vocabulary for two languages (Vaswani et al., 2017, section 5.1):

    * "sentencepiece": byte pairs (Sennrich et al., 2016) of raw text, as SentencePiece (Kudo and Richardson, 2018,
      https://arxiv.org/abs/1808.06226) learns them; each digit is a token. Texts are normalized by SentencePiece's
      default rule "nmt_nfkc", stored in the model files: NFKC, white space becomes a space, control characters are
      dropped. tokenizer_config.json adds to it: soft hyphens and similar characters are dropped
      ("dropped_characters"), and U+0085 is a space ("more_spaces"). The folder has Marian's format: the same model as
      source.spm and target.spm, and vocab.json. transformers reads ">>x<<" at the beginning of a text as one token; we
      read it as text.
    * "words": as above, but words of equal frequency in order of first appearance; decoding joins subwords marked by
      "@@".
    * "characters": as above, but in the order of code points, and normalized like "words".

    Families, which determine the special tokens:

    * "gpt": "<|endoftext|>" = 0 at the beginning and end of texts, "<unk>" = 1 (no such for "bpe").
    * "bert": "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]" = 0 to 4; texts become [CLS] A [SEP] B [SEP].
    * "t5": "<pad>", "</s>", "<unk>" = 0 to 2, and the sentinels "<extra_id_99>" to "<extra_id_0>" as the highest ids;
      each text ends with "</s>".
    * "marian": "<pad>", "<s>", "</s>", "<unk>" = 0 to 3; texts end with "</s>"; decoding shows unknown tokens.

    Args:
      folder: local or gs://; created if missing. A tokenizer made by other software is loaded without being changed.
      texts: starts a new pass over the training text, in parts such as lines or documents; called, possibly several
        times, only for training. A part is processed as a whole, which takes up to 200 times its size in memory.
      kind: see above.
      family: see above.
      vocab_size: maximum number of ids, special tokens included; a small text yields fewer. If not even all characters
        fit, the rarest become unknown ("sentencepiece" raises UserError instead). 0 means all words or characters, and
        for "sentencepiece" `vocabulary_size`; other kinds need a positive number.

    Raises:
      UserError: if the kind or family is unknown, there is no text, `vocab_size` has no room for anything but special
        tokens, or the folder's tokenizer is damaged, of another kind or family, or has more than `vocab_size` ids.
    """
    for name, value, known in (("family", family, _FAMILIES), ("kind", kind, _KINDS.get(family, _COMMON_KINDS))):
        if value not in known:
            raise UserError(f"unknown {name} of tokenizer {value!r}: use one of {', '.join(known)}")
    folder = epath.Path(folder)
    if not any((folder / file).exists() for file in TOKENIZER_FILES if file not in _BEFORE_VOCABULARY):
        files, options = _train(texts, kind, family, vocab_size)
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.dumps({**options, "made_as": f"{kind}, {family}"}, indent=2)
        write_file(folder / "tokenizer_config.json", settings.encode())
        for name, content in files.items():
            write_file(folder / name, content)
    return load_made_as(folder, kind=kind, family=family, vocab_size=vocab_size)


def load_made_as(folder: epath.PathLike, *, kind: str, family: str, vocab_size: int) -> HFTokenizer:
    """Loads the tokenizer of a folder and checks that its kind, family and size fit.

    Raises:
      UserError: if there is none, or it is damaged, of another kind or family, or has more than `vocab_size` ids.
    """
    folder = epath.Path(folder)
    made_as = f"{kind}, {family}"
    config = folder / "tokenizer_config.json"
    # Tokenizers of other programs lack this field and may be of any kind.
    recorded = read_json(config).get("made_as", made_as) if config.exists() else made_as
    if recorded != made_as:
        raise UserError(f"the tokenizer of {folder} was made as {recorded!r}, not {made_as!r}: name another folder")
    tokenizer = load_folder_tokenizer(folder)
    if tokenizer.vocab_size > (vocab_size or _ALL):
        raise UserError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} ids, but vocab_size is {vocab_size}: "
            "raise it, or name another folder"
        )
    return tokenizer


def _train(
    texts: Callable[[], Iterable[str]], kind: str, family: str, vocab_size: int
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Trains a tokenizer and returns its files without writing them.

    Returns:
      (content by name of the files of the vocabulary, in the order in which to write them;
      content of tokenizer_config.json).

    Raises:
      UserError: if `vocab_size` is too small, or there is no text.
    """
    roles, last, templates, has_types, is_plain = _FAMILIES[family]
    if kind == "bpe" and family == "gpt":
        roles = {role: token for role, token in roles.items() if role != "unk"}
    first = list(dict.fromkeys(roles.values()))  # without repetitions: GPT has one token for BOS and EOS
    special = [*first, *last]
    needed = len(special) + {"bpe": 256, "unigram": 2}.get(kind, 1)  # all bytes; "▁" and a character; one piece
    if vocab_size < needed and (vocab_size or kind not in _SIZED_BY_TEXT):
        raise UserError(f"vocab_size={vocab_size} must be at least {needed} for {kind} of the family {family}")
    size = vocab_size - len(special) if vocab_size else _ALL
    # Splits texts at special tokens that are spelled in them; "(?!)" matches nothing.
    special_pattern = re.compile("(?!)" if is_plain else "|".join(map(re.escape, special)))

    def read() -> Iterator[str]:
        """Starts a pass over the text between special tokens."""
        for text in texts():
            yield from filter(None, special_pattern.split(text))  # without empty parts

    def ids(pieces: Iterable[str]) -> dict[str, int]:
        """Numbers the special tokens and the first `size` pieces."""
        learned = [piece for piece in pieces if piece not in special][:size]
        if not learned:
            raise UserError("no text to train a tokenizer on: all its characters are invisible")
        return {token: index for index, token in enumerate([*first, *learned, *last])}

    if all(map(is_blank, read())):
        raise UserError("no text to train a tokenizer on: all of it is empty")
    trained = _KINDS.get(family, _COMMON_KINDS)[kind](_Training(read, size, ids, roles))
    options = {
        "tokenizer_class": "MarianTokenizer" if isinstance(trained, dict) else "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # No token types for GPT-2: it would add the word vectors of the ids 0 and 1.
        "model_input_names": ["input_ids", *["token_type_ids"] * has_types, "attention_mask"],
        **{f"{role}_token": token for role, token in roles.items()},
        **({"additional_special_tokens": list(last)} if last else {}),
        **({"split_special_tokens": True, "shows_unknown": True, "normalization": "nfc"} if is_plain else {}),
    }
    if isinstance(trained, dict):
        return trained, {**options, "normalization": _RULE, "dropped_characters": _DROPPED, "more_spaces": _SPACES}
    trained.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in special])
    if templates:
        single, pair = templates
        known = [(token, trained.token_to_id(token)) for token in first if token in single]
        trained.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=known)
    return {"tokenizer.json": trained.to_str(pretty=True).encode()}, options


def _characters(training: _Training) -> tokenizers.Tokenizer:
    """Returns BPE without merges: unlike a word-level model of characters, it can encode a whole book in one call."""
    return _tokens_of_characters(training, _by_frequency(training.read())[: training.size])


def _normalized_characters(training: _Training) -> tokenizers.Tokenizer:
    """Returns the "characters" of the family "marian": normalized, and in the order of code points."""
    pieces = _by_frequency(map(_plain().normalize_str, training.read()))[: training.size]
    pipeline = _tokens_of_characters(training, sorted(pieces))
    pipeline.normalizer = _plain()
    return pipeline


def _tokens_of_characters(training: _Training, pieces: list[str]) -> tokenizers.Tokenizer:
    """Returns BPE without merges, whose tokens are the characters `pieces`."""
    pipeline = tokenizers.Tokenizer(models.BPE(training.ids(pieces), [], unk_token=training.roles.get("unk")))
    pipeline.decoder = decoders.Fuse()
    return pipeline


def _words(training: _Training) -> tokenizers.Tokenizer:
    """Returns a word-level tokenizer of normalized words."""
    pipeline = _tokens_between_spaces(
        training, _by_frequency(_plain().normalize_str(part).split() for part in training.read())
    )
    pipeline.normalizer = _plain()
    return pipeline


def _joined_words(training: _Training) -> tokenizers.Tokenizer:
    """Returns a word-level tokenizer that joins "@@" subwords in decoding and encodes no special token from text."""
    counts = collections.Counter(word for part in training.read() for word in _plain().normalize_str(part).split())
    pipeline = _tokens_between_spaces(training, [word for word, _ in counts.most_common()])
    unk = training.roles["unk"]
    special_tokens = "|".join(re.escape(token) for token in training.roles.values() if token != unk)
    pipeline.normalizer = normalizers.Sequence(
        [
            _plain(),
            normalizers.Replace(tokenizers.Regex("[\x1c-\x1f]"), " "),  # spaces to Python, and not to `tokenizers`
            normalizers.Replace(tokenizers.Regex(rf"(?<!\S)({special_tokens})(?!\S)"), unk),  # as whole words only
        ]
    )
    # WordPiece's decoder joins words with spaces, except those that begin with `prefix`; no word begins with " ".
    spaces = decoders.WordPiece(prefix=" ", cleanup=False)
    joins = [decoders.Replace("@@ ", ""), decoders.Replace(tokenizers.Regex(r"@@\z"), "")]
    pipeline.decoder = decoders.Sequence([spaces, decoders.Fuse(), *joins])
    return pipeline


def _dropping() -> Any:
    """Returns a normalizer that drops invisible characters."""
    return normalizers.Replace(tokenizers.Regex(f"[{_DROPPED}]"), "")


def _plain() -> Any:
    """Returns a normalizer that drops invisible characters and applies NFC."""
    return normalizers.Sequence([_dropping(), normalizers.NFC()])


def _tokens_between_spaces(training: _Training, words: list[str]) -> tokenizers.Tokenizer:
    """Returns a word-level tokenizer of `words`, in the order of their ids."""
    pipeline = tokenizers.Tokenizer(models.WordLevel(training.ids(words), unk_token=training.roles["unk"]))
    pipeline.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return pipeline


def _word_pieces(training: _Training) -> tokenizers.Tokenizer:
    """Returns BERT's WordPiece, trained in two passes to be deterministic.

    The trainer numbers characters with "##" in random order and breaks ties by these numbers. So the first pass finds
    the characters in both forms ("a" and "##a"), and the second pass gets the marked ones in sorted order. Characters
    that do not fit into the vocabulary, the rarest ones, are replaced by spaces in the second pass.
    """

    def untrained(model: models.Model) -> tokenizers.Tokenizer:
        """Returns a pipeline with this model between BERT's normalization and WordPiece's decoding."""
        pipeline = tokenizers.Tokenizer(model)
        pipeline.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.BertNormalizer(lowercase=False)])
        pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        pipeline.decoder = decoders.WordPiece()
        return pipeline

    def text() -> Iterator[str]:
        return map(normalizers.NFC().normalize_str, training.read())

    alphabet_only = trainers.WordPieceTrainer(vocab_size=0, show_progress=False)
    alphabet = set(_learn(untrained(models.WordPiece()), text(), alphabet_only))
    num_free, marked, rare = training.size, [], []
    for character in filter(alphabet.__contains__, _by_frequency(text())):
        forms = [form for form in (character, _MARK + character) if form in alphabet]
        if len(forms) <= num_free:
            num_free -= len(forms)
            marked += forms[1:]  # the form with "##", if any
        else:
            rare.append(character)
    trainer = trainers.WordPieceTrainer(
        vocab_size=training.size,
        min_frequency=2,
        special_tokens=sorted(marked),  # numbered in this order; other characters by code point
        show_progress=False,
    )
    pieces = _learn(untrained(models.WordPiece()), _without(rare, text()), trainer)
    return untrained(models.WordPiece(training.ids(pieces), unk_token=training.roles["unk"]))


def _bytes(training: _Training) -> tokenizers.Tokenizer:
    """Returns GPT-2's byte-level BPE."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=training.size,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = _learn(pipeline, training.read(), trainer)
    # Replace the trained model by one with the same merges and our numbering.
    merges = json.loads(pipeline.to_str())["model"]["merges"]
    pipeline.model = models.BPE(training.ids(pieces), [tuple(pair) for pair in merges])
    return pipeline


def _unigram(training: _Training) -> tokenizers.Tokenizer:
    """Returns a Unigram tokenizer trained by SentencePiece.

    The trainer in `tokenizers` is not deterministic (order of summation).
    """
    normalizer = normalizers.Sequence([_dropping(), normalizers.Nmt(), normalizers.NFKC()])
    text = [" ".join(normalizer.normalize_str(part).split()) for part in training.read()]
    # One piece is "▁", the beginning of a word, so size - 1 characters fit and the rest is rare. SentencePiece skips
    # text with "▅", its symbol for unknown characters.
    rare = _by_frequency(part.replace(" ", "") for part in text)[training.size - 1 :]
    text = [part for part in _without([*rare, "▅"], text) if part.strip()]
    # The limit of a part's length is raised to the maximum, in bytes. SentencePiece needs its own unknown token, id 0,
    # which is one more piece; -1 means no BOS and no EOS.
    options: dict[str, Any] = {"max_sentence_length": 2**30, "unk_id": 0, "bos_id": -1, "eos_id": -1}
    model = _train_sentencepiece(text, "unigram", training.size + 1, normalization_rule_name="identity", **options)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    scores = {processor.id_to_piece(index): processor.get_score(index) for index in range(1, processor.vocab_size())}
    ids = training.ids(scores)
    model = models.Unigram([(piece, scores.get(piece, _NEVER)) for piece in ids], ids[training.roles["unk"]])
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = normalizer
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    pipeline.decoder = decoders.Metaspace()
    return pipeline


def _sentencepiece(training: _Training) -> dict[str, bytes]:
    """Trains BPE with SentencePiece, whose ids are used unchanged; returns the files of a Marian folder."""
    normalizer = sentencepiece.SentencePieceNormalizer(rule_name=_RULE, escape_whitespaces=False)
    table = str.maketrans(dict.fromkeys(_DROPPED, "") | dict.fromkeys(_SPACES, " "))
    lines = (normalizer.normalize(part.translate(table)).strip() for part in training.read())
    text = [line for line in lines if line]
    ids = {f"{role}_id": index for index, role in enumerate(training.roles)}  # arguments pad_id, bos_id, ...
    vocab_size = vocabulary_size(text) if training.size == _ALL else training.size + len(ids)
    model = _train_sentencepiece(text, "bpe", vocab_size, normalization_rule_name=_RULE, split_digits=True, **ids)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocabulary = {processor.id_to_piece(index): index for index in range(processor.vocab_size())}
    listed = json.dumps(vocabulary, ensure_ascii=False, indent=2).encode()
    return {"source.spm": model, "target.spm": model, "vocab.json": listed}


def _train_sentencepiece(text: list[str], kind: str, vocab_size: int, **options: Any) -> bytes:
    """Trains a model of the type `kind` and returns the content of its file.

    `text` is a list, because SentencePiece hides errors and Ctrl-C raised in an iterator.
    """
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=iter(text),
            model_writer=written,
            model_type=kind,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).rsplit("] ", 1)[-1].split())  # without the location in SentencePiece's code
        raise UserError(f"cannot train a {kind} tokenizer of {vocab_size} pieces on this text: {reason}") from None
    return written.getvalue()


_Kinds = dict[str, Callable[[_Training], tokenizers.Tokenizer | dict[str, bytes]]]
_COMMON_KINDS: _Kinds = {
    "characters": _characters,
    "words": _words,
    "wordpiece": _word_pieces,
    "bpe": _bytes,
    "unigram": _unigram,
}
_KINDS: dict[str, _Kinds] = {
    "marian": {
        "sentencepiece": _sentencepiece,
        "words": _joined_words,
        "characters": _normalized_characters,
    }
}


def _learn(pipeline: tokenizers.Tokenizer, text: Iterator[str], trainer: Any) -> list[str]:
    """Trains a pipeline and returns its pieces in the order of their ids."""
    pipeline.train_from_iterator(text, trainer)
    vocabulary = pipeline.get_vocab()
    return sorted(vocabulary, key=lambda piece: vocabulary[piece])


def _by_frequency(text: Iterable[Iterable[str]]) -> list[str]:
    """Returns the distinct items of all parts by descending frequency, and by code points if equal.

    Args:
      text: parts of a text, each a string (its items are characters) or a list of words.
    """
    counts = collections.Counter(itertools.chain.from_iterable(text))
    return sorted(counts, key=lambda token: (-counts[token], token))


def _without(rare: list[str], text: Iterable[str]) -> Iterator[str]:
    """Yields a text with the characters `rare` replaced by spaces."""
    table = str.maketrans(dict.fromkeys(rare, " "))
    return (part.translate(table) for part in text)
