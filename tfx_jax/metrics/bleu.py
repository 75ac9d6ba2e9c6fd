"""BLEU in the three variants that papers report, from one call.

A BLEU figure means nothing without its tokenization (Post, 2018, "A Call for Clarity in Reporting BLEU Scores",
https://arxiv.org/abs/1804.08771). The same translations score differently under each of these:

* sacreBLEU: plain text in, a fixed tokenizer inside, and a signature to print beside the figure.
* tokenized BLEU: `multi-bleu.perl` over Moses-tokenized text, as papers before 2018 give it.
* compound-split BLEU: tokenized BLEU after hyphenated words are split in three, which is how the English-German figures
  of "Attention Is All You Need" (27.3 and 28.4) were computed; usually the highest of the three.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfx_jax.data.sources.lines import list_of_texts
from tfx_jax.errors import UserError

# sacreBLEU's tokenizers for languages written without spaces between words, by ISO 639-1 and 639-3 code. All other
# languages use "13a", also Korean, which has spaces between phrases. sacreBLEU's word tokenizers for Japanese and
# Korean need further packages; it has none for the other languages.
_UNSPACED = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "wuu", "nan", "hak", "gan", "hsn", "lzh"), "zh"),
    **dict.fromkeys(("ja", "jpn", "ojp"), "char"),
    **dict.fromkeys(("th", "tha", "nod", "sou", "tts", "lo", "lao"), "char"),  # Thai and Lao scripts
    **dict.fromkeys(("km", "khm", "my", "mya", "bur", "shn", "mnw", "ksw", "rki"), "char"),  # Khmer and Burmese scripts
    **dict.fromkeys(("bo", "bod", "tib", "dz", "dzo", "khb", "tdd", "blt"), "char"),  # Tibetan, Dzongkha, Tai
}

_Sides = tuple[list[str], list[list[str]]]  # hypotheses, references of each


class BleuScores(NamedTuple):
    """Scores of one set of translations.

    Attributes:
      sacrebleu: corpus BLEU as sacreBLEU computes it, 0 to 100.
      signature: sacreBLEU's signature, which says how `sacrebleu` was computed and with which version.
      tokenized: BLEU of Moses tokens without smoothing, 0 to 100.
      compound_split: `tokenized` with hyphenated compounds split, 0 to 100.
      exact_match: percentage of translations equal to a reference of theirs, white space aside.
    """

    sacrebleu: float
    signature: str
    tokenized: float
    compound_split: float
    exact_match: float


def bleu_scores(
    hypotheses: Sequence[str],
    references: Sequence[str | Sequence[str]],
    *,
    language: str = "de",
    is_tokenized: bool = False,
    sacrebleu_tokenizer: str | None = None,
) -> BleuScores:
    """Computes corpus BLEU of translations with one reference or several (Papineni et al., 2002).

    Both sides are compared in Unicode's form NFC. Plain text is tokenized by Moses' rules for `language`, or into
    characters if the language is written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan).
    Tokenized text, such as the published Multi30k after removal of BPE marks, is used unchanged for the tokenized
    figures and detokenized for sacreBLEU, which is defined on plain text only.

    Args:
      hypotheses: translations, one string each.
      references: reference translations in the same order; of a translation with several, a list. Numbers of them may
        differ. An n-gram counts as often as in the reference that has most of it, and the length that counts is that
        of the reference closest in length.
      language: ISO 639 code of the target language, two or three letters; what follows, as in "zh-CN", is ignored.
      is_tokenized: whether both sides already are Moses tokens separated by spaces.
      sacrebleu_tokenizer: name of one of sacreBLEU's tokenizers; None means "zh" for Chinese, "char" for the other
        languages without spaces, "13a" for all others. The signature states it.

    Raises:
      ValueError: if there are no hypotheses, the numbers of hypotheses and references differ, or one has no reference.
      UserError: if sacreBLEU does not have the tokenizer.

    >>> scores = bleu_scores(["Er mag sein rot-weißes Fahrrad."], ["Sie mag sein rot-weißes Fahrrad."])
    >>> f"{scores.tokenized:.1f}, with compounds split {scores.compound_split:.1f}, exact {scores.exact_match:.1f} %"
    '76.0, with compounds split 84.1, exact 0.0 %'
    """
    hypotheses = list_of_texts(hypotheses, "hypotheses")
    several = [[texts] if isinstance(texts, str) else list(texts) for texts in list_of_texts(references, "references")]
    if len(hypotheses) != len(several):
        raise ValueError(f"{len(hypotheses)} hypotheses but {len(several)} references: each needs one, or a list")
    if not hypotheses:
        raise ValueError("no hypotheses to score")
    if not all(several):
        raise ValueError(f"hypothesis {several.index([])} has no reference")
    language = language.replace("_", "-").partition("-")[0].lower()
    given = _both_sides(lambda line: unicodedata.normalize("NFC", line), (hypotheses, several))
    if is_tokenized:
        tokens, plain = given, _both_sides(lambda line: _detokenize(line, language), given)
    else:
        tokens, plain = _both_sides(lambda line: _tokenize(line, language), given), given
    score, signature = _corpus_bleu(plain, sacrebleu_tokenizer or _UNSPACED.get(language, "13a"), smoothing="exp")
    tokenized, _ = _corpus_bleu(tokens, "none", smoothing="none")
    compound_split, _ = _corpus_bleu(_both_sides(split_compounds, tokens), "none", smoothing="none")
    num_exact = sum(
        hypothesis.split() in [reference.split() for reference in references]
        for hypothesis, references in zip(*given, strict=True)
    )
    return BleuScores(score, signature, tokenized, compound_split, 100 * num_exact / len(hypotheses))


def split_compounds(tokens: str) -> str:
    """Splits hyphenated words like tensor2tensor's get_ende_bleu.sh, which computed the paper's figures.

    It also has that script's quirk: of two hyphens around a single letter, only the first is split.

    >>> split_compounds("eine rot-weiße U-Bahn - neu")
    'eine rot ##AT##-##AT## weiße U ##AT##-##AT## Bahn - neu'
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokens)


def _both_sides(change: Callable[[str], str], sides: _Sides) -> _Sides:
    """Applies a function to each line of hypotheses and references."""
    hypotheses, references = sides
    return [change(line) for line in hypotheses], [[change(line) for line in lines] for lines in references]


def _corpus_bleu(sides: _Sides, tokenizer: str, *, smoothing: str) -> tuple[float, str]:
    """Returns (corpus score, signature) of sacreBLEU.

    With tokenizer "none" and smoothing "none", the score is that of multi-bleu.perl.
    """
    from sacrebleu.metrics.bleu import BLEU  # a late import, because it takes a sixth of a second

    try:
        # `force` only silences the warning about text that looks tokenized, which may be intended here.
        metric = BLEU(tokenize=tokenizer, smooth_method=smoothing, force=True)
    except (KeyError, RuntimeError) as error:
        known = ", ".join(BLEU.TOKENIZERS)
        message = f"sacreBLEU cannot tokenize by {tokenizer!r}: choose from {known}, or install what it needs"
        raise UserError(message) from error
    hypotheses, references = sides
    score = metric.corpus_score(hypotheses, list(itertools.zip_longest(*references))).score  # None: no further one
    return min(score, 100.0), str(metric.get_signature())  # rounding can give slightly more than 100


def _tokenize(line: str, language: str) -> str:
    """Returns Moses tokens separated by spaces, like `tokenizer.perl -l LANGUAGE`."""
    if language in _UNSPACED:  # Moses would leave a whole clause as one token
        return " ".join("".join(line.split()))
    tokenizer, _ = _moses(language)
    return " ".join(tokenizer.tokenize(line))


def _detokenize(line: str, language: str) -> str:
    """Returns plain text from Moses tokens, as far as Moses can restore it."""
    _, detokenizer = _moses(language)
    return str(detokenizer.detokenize(line.split()))


@functools.cache
def _moses(language: str):
    """Returns (tokenizer, detokenizer) of Moses for a language; for unknown languages, Moses uses English rules."""
    from sacremoses import MosesDetokenizer, MosesTokenizer  # a late import, because it takes a third of a second

    return MosesTokenizer(language), MosesDetokenizer(language)
