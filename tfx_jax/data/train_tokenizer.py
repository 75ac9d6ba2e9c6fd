"""Tokenizers of our own in Hugging Face folders, so that what is trained here is read like what is downloaded.

tokenizer = train_or_load_folder("runs/gpt", lambda: [read_text(path)], kind="characters", family="gpt", vocab_size=256)
"""

import collections
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import sentencepiece
import tokenizers
from etils import epath
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tfx_jax.data.files import write_file
from tfx_jax.data.folder_tokenizers import HFTokenizer
from tfx_jax.data.hf_tokenizer import TOKENIZER_FILES, load_folder_tokenizer
from tfx_jax.data.tokenizer_config import read_json
from tfx_jax.errors import UserError

_MARK = "##"  # WordPiece's, of what continues a word
# Below any text's in Unigram: where normalization turns full-width letters into "</s>", they are text, not the token.
_NEVER = -1000.0


class _Family(NamedTuple):
    """What the models of a family expect of a tokenizer, whatever its kind.

    Attributes:
      roles: special tokens by role, in the order of their ids, from 0.
      last: special tokens that have the highest ids, in the order of these.
      around: templates of one text and of two, as a model sees them; none if they stand alone.
      has_types: whether the model tells the first text from the second.
    """

    roles: dict[str, str]
    last: tuple[str, ...] = ()
    around: tuple[str, str] | None = None
    has_types: bool = False


_FAMILIES = {
    "gpt": _Family({"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<unk>"}),
    "bert": _Family(
        {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
        around=("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        has_types=True,
    ),
    "t5": _Family(
        {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
        last=tuple(f"<extra_id_{number}>" for number in reversed(range(100))),
        around=("$A </s>", "$A </s> $B </s>"),
    ),
}


class _Training(NamedTuple):
    """What a kind of tokenizer is made of.

    Attributes:
      read: begins the text anew, without any special tokens that it spells.
      size: how many pieces there may be, beside special tokens.
      ids: of pieces in their order and of all special tokens.
      unk: the unknown token, or None.
    """

    read: Callable[[], Iterator[str]]
    size: int
    ids: Callable[[Iterable[str]], dict[str, int]]
    unk: str | None


def train_or_load_folder(
    folder: epath.PathLike, texts: Callable[[], Iterable[str]], *, kind: str, family: str, vocab_size: int
) -> HFTokenizer:
    """Loads the tokenizer of a folder; at first use it is trained and written there.

    tokenizer.json and tokenizer_config.json are written each at once or not at all, and the same texts always give the
    same files. `tfx_jax.data.hf_tokenizer` reads them, and so do transformers and the library `tokenizers`. A special
    token that a text spells, such as "[MASK]" or "<unk>", is that token, and nothing is learnt from its letters.

    Kinds:

    * "characters": each one, line breaks and spaces too, the most frequent first.
    * "words": what stands between white space, the most frequent first; decoding joins them with single spaces.
    * "wordpiece": BERT's (Devlin et al., 2019, https://arxiv.org/abs/1810.04805), cased: words and punctuation marks,
      split into the longest pieces from the left.
    * "bpe": GPT-2's byte-level BPE (Radford et al., 2019, section 2.2), which has no unknown text.
    * "unigram": T5's, the language model of Kudo (2018, https://arxiv.org/abs/1804.10959), as SentencePiece trains it,
      on text after NFKC.

    Families, which decide the special tokens:

    * "gpt": "<|endoftext|>" = 0 at the beginning and end of texts, "<unk>" = 1 (no such for "bpe").
    * "bert": "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]" = 0 to 4; texts become [CLS] A [SEP] B [SEP].
    * "t5": "<pad>", "</s>", "<unk>" = 0 to 2, and the sentinels "<extra_id_99>" to "<extra_id_0>" as the highest ids;
      each text ends with "</s>".

    Args:
      folder: local or gs://; made if missing. One with a tokenizer from elsewhere is taken as it is.
      texts: begins the training text anew, in parts such as lines or documents; called, perhaps more than once, only if
        there is something to train. A part is read as a whole, which takes up to some 200 times its size in memory.
      kind: see above.
      family: see above.
      vocab_size: how many ids at most, the special ones included; a small text yields fewer. Where not even all
        characters fit, the rarest become unknown.

    Raises:
      UserError: for an unknown kind or family, no text, a vocabulary too small for anything but special tokens, and a
        folder whose tokenizer is another one, has more ids than that, or is damaged.
    """
    for name, value, known in (("kind", kind, _KINDS), ("family", family, _FAMILIES)):
        if value not in known:
            raise UserError(f"unknown {name} of tokenizer {value!r}: use one of {', '.join(known)}")
    folder, made_as = epath.Path(folder), f"{kind}, {family}"
    if not any((folder / file).exists() for file in TOKENIZER_FILES if file != "tokenizer_config.json"):
        pipeline, options = _train(texts, kind, family, vocab_size)
        folder.mkdir(parents=True, exist_ok=True)
        # In this order: the vocabulary is what makes a folder one with a tokenizer.
        settings = json.dumps({**options, "made_as": made_as}, indent=2)
        write_file(folder / "tokenizer_config.json", settings.encode())
        write_file(folder / "tokenizer.json", pipeline.to_str(pretty=True).encode())
    config = folder / "tokenizer_config.json"
    found = read_json(config).get("made_as", made_as) if config.exists() else made_as
    if found != made_as:
        raise UserError(f"the tokenizer of {folder} was made as {found!r}, not {made_as!r}: name another folder")
    tokenizer = load_folder_tokenizer(folder)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} ids, but vocab_size is {vocab_size}: "
            "raise it, or name another folder"
        )
    return tokenizer


def _train(
    texts: Callable[[], Iterable[str]], kind: str, family: str, vocab_size: int
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The pipeline, and what tokenizer_config.json says of it."""
    roles, last, around, has_types = _FAMILIES[family]
    if kind == "bpe" and family == "gpt":
        roles = {role: token for role, token in roles.items() if role != "unk"}
    first = list(dict.fromkeys(roles.values()))
    special = [*first, *last]
    needed = len(special) + {"bpe": 256, "unigram": 2}.get(kind, 1)
    if vocab_size < needed:
        raise UserError(f"vocab_size is {vocab_size}, but {kind} for {family} need {needed} at least")
    spelt = re.compile("|".join(map(re.escape, special)))

    def read() -> Iterator[str]:
        for text in texts():
            yield from filter(None, spelt.split(text))

    def ids(pieces: Iterable[str]) -> dict[str, int]:
        learnt = [piece for piece in pieces if piece not in special]
        if not learnt:
            raise UserError("no text to train a tokenizer on: all its characters are invisible")
        return {token: index for index, token in enumerate([*first, *learnt, *last])}

    if not any(text.strip() for text in read()):
        raise UserError("no text to train a tokenizer on: all of it is empty")
    pipeline = _KINDS[kind](_Training(read, vocab_size - len(special), ids, roles.get("unk")))
    pipeline.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in special])
    if around:
        single, pair = around
        known = [(token, pipeline.token_to_id(token)) for token in first if token in single]
        pipeline.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=known)
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # GPT-2 would take types for words.
        "model_input_names": ["input_ids", *["token_type_ids"] * has_types, "attention_mask"],
        **{f"{role}_token": token for role, token in roles.items()},
        **({"additional_special_tokens": list(last)} if last else {}),
    }
    return pipeline, options


def _characters(training: _Training) -> tokenizers.Tokenizer:
    """BPE that merges nothing: unlike one word for each character, it can take a whole book at once."""
    pieces = _by_frequency(training.read())[: training.size]
    pipeline = tokenizers.Tokenizer(models.BPE(training.ids(pieces), [], unk_token=training.unk))
    pipeline.decoder = decoders.Fuse()
    return pipeline


def _words(training: _Training) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(models.WordLevel())
    pipeline.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pieces = _learn(pipeline, training.read(), trainers.WordLevelTrainer(vocab_size=training.size, show_progress=False))
    pipeline.model = models.WordLevel(training.ids(pieces), unk_token=str(training.unk))
    return pipeline


def _word_pieces(training: _Training) -> tokenizers.Tokenizer:
    """In two passes, because the trainer numbers marked characters by chance, and breaks ties by these numbers."""

    def untrained(model: models.Model) -> tokenizers.Tokenizer:
        pipeline = tokenizers.Tokenizer(model)
        pipeline.normalizer = normalizers.BertNormalizer(lowercase=False)
        pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        pipeline.decoder = decoders.WordPiece()
        return pipeline

    alphabet_only = trainers.WordPieceTrainer(vocab_size=0, show_progress=False)
    alphabet = set(_learn(untrained(models.WordPiece()), training.read(), alphabet_only))
    room, marked, rare = training.size, [], []
    for character in filter(alphabet.__contains__, _by_frequency(training.read())):
        forms = [form for form in (character, _MARK + character) if form in alphabet]
        if len(forms) <= room:
            room -= len(forms)
            marked += forms[1:]
        else:
            rare.append(character)
    trainer = trainers.WordPieceTrainer(
        vocab_size=training.size,
        min_frequency=2,
        special_tokens=sorted(marked),  # these it numbers in this order, and the others by code point
        show_progress=False,
    )
    pieces = _learn(untrained(models.WordPiece()), _without(rare, training.read()), trainer)
    return untrained(models.WordPiece(training.ids(pieces), unk_token=str(training.unk)))


def _bytes(training: _Training) -> tokenizers.Tokenizer:
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
    merges = json.loads(pipeline.to_str())["model"]["merges"]
    pipeline.model = models.BPE(training.ids(pieces), [tuple(pair) for pair in merges])
    return pipeline


def _unigram(training: _Training) -> tokenizers.Tokenizer:
    """By SentencePiece, because the sums of the trainer in `tokenizers` have another order each time."""
    normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    # A list: SentencePiece would turn an error of an iterator, or Ctrl-C, into one of its own.
    text = [" ".join(normalizer.normalize_str(part).split()) for part in training.read()]
    # One place is for the mark of a word's beginning. SentencePiece skips whatever has the character that it puts for
    # unknown ones.
    rare = _by_frequency(part.replace(" ", "") for part in text)[training.size - 1 :]
    text = [part for part in _without([*rare, "▅"], text) if part.strip()]
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=iter(text),
            model_writer=written,
            model_type="unigram",
            vocab_size=training.size + 1,  # it has an unknown token of its own
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name="identity",
            max_sentence_length=2**30,  # bytes, the most that it allows; longer parts would be left out
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot train a unigram model of {training.size} pieces on this text: {reason}") from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    scores = {processor.id_to_piece(index): processor.get_score(index) for index in range(1, processor.vocab_size())}
    ids = training.ids(scores)
    model = models.Unigram([(piece, scores.get(piece, _NEVER)) for piece in ids], ids[str(training.unk)])
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = normalizer
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    pipeline.decoder = decoders.Metaspace()
    return pipeline


_KINDS: dict[str, Callable[[_Training], tokenizers.Tokenizer]] = {
    "characters": _characters,
    "words": _words,
    "wordpiece": _word_pieces,
    "bpe": _bytes,
    "unigram": _unigram,
}


def _learn(pipeline: tokenizers.Tokenizer, text: Iterator[str], trainer: Any) -> list[str]:
    """Trains; returns the pieces in the order of their ids."""
    pipeline.train_from_iterator(text, trainer)
    vocabulary = pipeline.get_vocab()
    return sorted(vocabulary, key=lambda piece: vocabulary[piece])


def _by_frequency(text: Iterable[str]) -> list[str]:
    """The characters of a text, the most frequent first, those of the same frequency in the order of code points."""
    counts: collections.Counter[str] = collections.Counter()
    for part in text:
        counts.update(part)
    return sorted(counts, key=lambda character: (-counts[character], character))


def _without(rare: list[str], text: Iterable[str]) -> Iterator[str]:
    """A text with spaces for some characters."""
    table = str.maketrans(dict.fromkeys(rare, " "))
    return (part.translate(table) for part in text)
