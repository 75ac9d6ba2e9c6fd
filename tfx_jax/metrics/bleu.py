"""BLEU in the three dialects that papers print, from one call.

A BLEU figure means nothing without its tokenization (Post, 2018, "A Call for Clarity in Reporting BLEU Scores",
https://arxiv.org/abs/1804.08771). The same translations score differently under each of these:

* sacreBLEU: plain text in, a fixed tokenizer inside, and a signature to print beside the figure.
* tokenized BLEU: `multi-bleu.perl` over Moses-tokenized text, as papers before 2018 give it.
* compound-split BLEU: the same after hyphenated words are cut in three, which is how the English-German figures of
  "Attention Is All You Need" (27.3 and 28.4) were computed; usually the highest of the three.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfx_jax.data.sources.lines import list_of_texts
from tfx_jax.errors import UserError

# What sacreBLEU should do with languages written without spaces between words, by their codes of ISO 639-1 and 639-3;
# "13a" reads all the others, such as Korean, whose spaces stand between phrases. sacreBLEU's tokenizers of words for
# Japanese and Korean need further packages, and for the others it has none.
_UNSPACED = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "wuu", "nan", "hak", "gan", "hsn", "lzh"), "zh"),
    **dict.fromkeys(("ja", "jpn", "ojp"), "char"),
    **dict.fromkeys(("th", "tha", "nod", "sou", "tts", "lo", "lao"), "char"),  # Thai and Lao scripts
    **dict.fromkeys(("km", "khm", "my", "mya", "bur", "shn", "mnw", "ksw", "rki"), "char"),  # Khmer and Burmese scripts
    **dict.fromkeys(("bo", "bod", "tib", "dz", "dzo", "khb", "tdd", "blt"), "char"),  # Tibetan, Dzongkha, Tai
}

_Sides = tuple[list[str], list[str]]  # hypotheses, references


class BleuScores(NamedTuple):
    """What one set of translations scores.

    Attributes:
      sacrebleu: sacreBLEU, 0 to 100.
      signature: sacreBLEU's signature, which says how `sacrebleu` was computed and with which version.
      tokenized: BLEU of Moses tokens without smoothing, 0 to 100.
      compound_split: `tokenized` with hyphenated compounds split, 0 to 100.
      exact_match: percentage of translations equal to their reference, white space aside.
    """

    sacrebleu: float
    signature: str
    tokenized: float
    compound_split: float
    exact_match: float


def bleu_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    language: str = "de",
    is_tokenized: bool = False,
    sacrebleu_tokenizer: str | None = None,
) -> BleuScores:
    """Scores translations against one reference each, over the whole set (Papineni et al., 2002).

    Both sides are compared in Unicode's form NFC. Plain text is tokenized by Moses' rules for `language`, or into
    characters where the language is written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan).
    Tokenized text (of Multi30k as it is published, say, with the marks of BPE removed) is taken as it is for the
    tokenized figures, and detokenized for sacreBLEU, which is defined on plain text alone.

    Args:
      hypotheses: translations, one string each.
      references: what each should be, in the same order.
      language: ISO 639 code of the language translated into, of two or three letters.
      is_tokenized: whether both sides are Moses tokens separated by spaces already.
      sacrebleu_tokenizer: a name sacreBLEU knows; None means "zh" for Chinese, "char" for the other languages
        without spaces, "13a" for all others. The signature says which it was.

    Returns:
      The figures, see `BleuScores`.

    Raises:
      ValueError: if there is nothing to score or the two sides differ in length.
      UserError: if sacreBLEU does not have the tokenizer.

    >>> scores = bleu_scores(["Er mag sein rot-weißes Fahrrad."], ["Sie mag sein rot-weißes Fahrrad."])
    >>> f"{scores.tokenized:.1f}, with compounds split {scores.compound_split:.1f}, exact {scores.exact_match:.1f} %"
    '76.0, with compounds split 84.1, exact 0.0 %'
    """
    hypotheses, references = list_of_texts(hypotheses, "hypotheses"), list_of_texts(references, "references")
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses but {len(references)} references: each needs exactly one")
    if not hypotheses:
        raise ValueError("no hypotheses to score")
    hypotheses, references = (
        [unicodedata.normalize("NFC", text) for text in side] for side in (hypotheses, references)
    )
    if is_tokenized:
        tokens = hypotheses, references
        plain = _both_sides(lambda line: _detokenize(line, language), tokens)
    else:
        plain = hypotheses, references
        tokens = _both_sides(lambda line: _tokenize(line, language), plain)
    score, signature = _corpus_bleu(plain, sacrebleu_tokenizer or _UNSPACED.get(language, "13a"), smoothing="exp")
    tokenized, _ = _corpus_bleu(tokens, "none", smoothing="none")
    compound_split, _ = _corpus_bleu(_both_sides(split_compounds, tokens), "none", smoothing="none")
    num_exact = sum(
        hypothesis.split() == reference.split() for hypothesis, reference in zip(hypotheses, references, strict=True)
    )
    return BleuScores(score, signature, tokenized, compound_split, 100 * num_exact / len(hypotheses))


def split_compounds(tokens: str) -> str:
    """Splits hyphenated words as tensor2tensor's get_ende_bleu.sh does, the script behind the paper's figures.

    The substitution is that script's, so it shares its quirk: a single letter between two hyphens is used up by the
    first, and the second stays.

    >>> split_compounds("eine rot-weiße U-Bahn - neu")
    'eine rot ##AT##-##AT## weiße U ##AT##-##AT## Bahn - neu'
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokens)


def _both_sides(change: Callable[[str], str], sides: _Sides) -> _Sides:
    hypotheses, references = sides
    return [change(line) for line in hypotheses], [change(line) for line in references]


def _corpus_bleu(sides: _Sides, tokenizer: str, *, smoothing: str) -> tuple[float, str]:
    """Gives sacreBLEU's corpus score and signature; with "none" and "none", the score of multi-bleu.perl."""
    from sacrebleu.metrics.bleu import BLEU  # a sixth of a second, paid by those who score

    try:
        # All that `force` does is to keep quiet about text that looks tokenized, which here it may well be.
        metric = BLEU(tokenize=tokenizer, smooth_method=smoothing, force=True)
    except (KeyError, RuntimeError) as error:
        known = ", ".join(BLEU.TOKENIZERS)
        message = f"sacreBLEU cannot tokenize by {tokenizer!r}: choose from {known}, or install what it needs"
        raise UserError(message) from error
    hypotheses, references = sides
    score = metric.corpus_score(hypotheses, [references]).score
    return min(score, 100.0), str(metric.get_signature())  # exp of a sum of logs can round to just above 100


def _tokenize(line: str, language: str) -> str:
    """Moses tokens separated by spaces, as `tokenizer.perl -l LANGUAGE` prints them."""
    if language in _UNSPACED:  # Moses would leave a whole clause as one token
        return " ".join("".join(line.split()))
    tokenizer, _ = _moses(language)
    return " ".join(tokenizer.tokenize(line))


def _detokenize(line: str, language: str) -> str:
    """Undoes `_tokenize`, as far as Moses can."""
    _, detokenizer = _moses(language)
    return str(detokenizer.detokenize(line.split()))


@functools.cache
def _moses(language: str):
    """Moses' tokenizer and detokenizer for a language; English rules for one it does not know."""
    from sacremoses import MosesDetokenizer, MosesTokenizer  # a third of a second: paid by those who score

    return MosesTokenizer(language), MosesDetokenizer(language)
