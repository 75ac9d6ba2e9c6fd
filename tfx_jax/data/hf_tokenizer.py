"""The tokenizers of Hugging Face folders, without transformers; nothing that a folder holds is executed.

tokenizer = load_folder_tokenizer("path/to/bert")
ids, token_types = tokenizer.encode_with_specials("Where is Rome?", "Rome is in Italy.")
"""

import json
from typing import Any

import sentencepiece
import tokenizers
from etils import epath

from tfx_jax.data.folder_tokenizers import HFTokenizer, PieceTokenizer, PipelineTokenizer
from tfx_jax.data.tokenizer_checks import check_pipeline
from tfx_jax.data.tokenizer_config import TokenizerConfig, read, read_json
from tfx_jax.errors import UserError
from tfx_jax.hub import local_folder

# Of all families: what has to be copied with a model.
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
)


def load_folder_tokenizer(folder: epath.PathLike) -> HFTokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    It is tokenizer.json, of any family; or else vocab.json and merges.txt of GPT-2 or GPT; vocab.txt of BERT;
    spiece.model of T5; source.spm, target.spm and vocab.json of Marian, where `encode` splits the source language and
    `decode` joins the target language.

    Args:
      folder: local or gs://, or the name of a model on the Hugging Face hub.

    Raises:
      UserError: if there is none, or a file is damaged.
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
    ):
        if all((folder / file).exists() for file in files):
            return make(config)
    raise UserError(
        f"{folder} has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt, nor vocab.txt, nor "
        "spiece.model, nor source.spm, target.spm and vocab.json"
    )


def _from_tokenizer_json(config: TokenizerConfig) -> HFTokenizer:
    path = config.folder / "tokenizer.json"

    def make(data: bytes) -> Any:
        text = data.decode("utf-8-sig")
        values = json.loads(text)
        check_pipeline(values, path)
        if values.get("padding") or values.get("truncation"):  # whoever makes batches does both
            text = json.dumps({**values, "padding": None, "truncation": None})
        pipeline = tokenizers.Tokenizer.from_str(text)
        pipeline.encode("a 本")  # one whose parts do not fit together fails only here
        return pipeline

    return PipelineTokenizer(read(path, make), config)


def _from_merges(config: TokenizerConfig) -> HFTokenizer:
    """GPT-2's byte-level BPE (Radford et al., 2019, section 2.2), or GPT's, whose pieces say where a word ends."""
    config.require_family("vocab.json", "gpt2", "openaigpt")
    vocabulary = _read_vocabulary(config)
    is_gpt1 = config.family == "openaigpt" or (
        config.family is None and any(token.endswith("</w>") for token in vocabulary)
    )
    if is_gpt1:
        config.name_by_default(unk="<unk>")
    else:
        config.name_by_default(**dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"))

    def make(data: bytes) -> Any:
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
    return PipelineTokenizer(pipeline, config)


def _from_word_pieces(config: TokenizerConfig) -> HFTokenizer:
    """BERT's (Devlin et al., 2019): words and punctuation marks, split into the longest pieces from the left."""
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
    """T5's (Raffel et al., 2020): SentencePiece, and sentinels that count down from the end of the vocabulary."""
    config.require_family("spiece.model", "t5", "mt5", "umt5")
    processor = _read_sentencepiece(config, "spiece.model")
    vocabulary = {processor.id_to_piece(index): index for index in range(processor.vocab_size())}
    num_sentinels = config.option("extra_ids", 100)
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(num_sentinels))]
    vocabulary |= {token: processor.vocab_size() + place for place, token in enumerate(sentinels)}
    config.name_by_default(pad="<pad>", eos="</s>", unk="<unk>")
    config.special.update(sentinels)
    return PieceTokenizer(
        processor,
        vocabulary,
        config,
        text_of=processor.decode_pieces,
        more_spaces="\x85",  # at which transformers splits: of all white space SentencePiece lacks it alone
        is_pair_separated=True,
    )


def _from_marian(config: TokenizerConfig) -> HFTokenizer:
    """Marian's: one SentencePiece model for each language, and one vocabulary for both."""
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


def _read_vocabulary(config: TokenizerConfig) -> dict[str, int]:
    path = config.folder / "vocab.json"
    vocabulary = read_json(path)
    for token, index in vocabulary.items():
        if type(index) is not int or not 0 <= index < 2**31:
            raise UserError(f"{path}: the id of {token!r} is {index!r}, not a number")
    return vocabulary


def _read_sentencepiece(config: TokenizerConfig, file: str) -> sentencepiece.SentencePieceProcessor:
    # Empty bytes would pass for a model here and fail at the first use.
    return read(config.folder / file, lambda data: sentencepiece.SentencePieceProcessor(model_proto=data or b"\0"))
