"""Sentence pairs, as translation reads them."""

import dataclasses
import re

from tfx_jax.data.splits import Split
from tfx_jax.data.text import PairSource, join_pairs, read_pairs, read_tsv, split_pairs
from tfx_jax.data.tfds import tfds_pairs
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, one_of
from tfx_jax.tasks.text_files import named_paths
from tfx_jax.toy_grammar import GrammarPairs


@documented
@dataclasses.dataclass
class PairData:
    """Where sentence pairs come from and how they become batches."""

    dataset: str = "grammar"  # "grammar" (built in), "files", or a TFDS name such as "wmt14_translate/de-en"
    # TFDS: where the data set was prepared; files: the folder of those below, of which each may be several, "a.en,b.en"
    # or "part-*.en" in their order, and their targets as many
    data_dir: str = ""
    train_source: str = ""  # files: one sentence a line, plain or .gz; a .tsv holds both sides and needs no target
    train_target: str = ""
    validation_source: str = ""
    validation_target: str = ""
    test_source: str = ""
    test_target: str = ""
    # files: without a validation file, up to so many pairs, and a tenth, are set aside for it
    validation_pairs: int = at_least(0, 0)
    source_language: str = ""  # codes such as "de", which files and TFDS need; the grammar is English to Japanese
    target_language: str = ""  # decides how translations are tokenised and scored
    is_tokenised: bool = False  # files and TFDS: the text is tokens with spaces between them, as the grammar's is
    # "words": text is segmented, as with "@@ "; a model to start from brings its own, which should be of the same kind
    tokenizer: str = one_of(("sentencepiece", "words", "characters"), "sentencepiece")
    max_length: int = at_least(1, 256)  # tokens of a sentence, its end included; longer training pairs are left out
    tokens_per_batch: int = at_least(1, 25_000)  # positions of each side of a global batch, padding included (paper)
    sort_buffer: int = at_least(1, 65_536)  # pairs that are sorted by length together

    def has_split(self, split: Split) -> bool:
        """Tells whether the configuration names a split; files need not have one for validation or test."""
        return self.dataset != "files" or bool(getattr(self, f"{split}_source")) or self._is_set_aside(split)

    def load(self, split: Split) -> PairSource:
        """Opens a split. Evaluation splits keep their empty lines, as every line counts there.

        Raises:
          UserError: if it cannot be read.
        """
        if self.dataset == "grammar":
            return GrammarPairs(split)
        if self.dataset == "files":
            return self._open_files(split)
        return tfds_pairs(
            self.dataset,
            split,
            data_dir=self.data_dir,
            source_language=self.source_language,
            target_language=self.target_language,
        )

    @property
    def scored_as(self) -> tuple[str, bool]:
        """The code of the language translated into, without its region, and whether its text is tokens already."""
        if self.dataset == "grammar":
            return "ja", True
        return self.target_language.replace("_", "-").partition("-")[0], self.is_tokenised

    def validate(self) -> None:
        """Checks the languages: what a target is in decides how it is tokenised and scored, so it is said.

        Raises:
          UserError: if one is missing, is no code, or contradicts the names of files.
        """
        languages = {"source": self.source_language, "target": self.target_language}
        said = self.source_language or "en", self.target_language or "ja"
        if self.dataset == "grammar" and said != ("en", "ja"):
            raise UserError(
                f'config.task.data.dataset="grammar" is English to Japanese, not {said[0]} to {said[1]}: '
                "leave its languages out, or name another dataset"
            )
        if self.dataset != "files":  # TFDS knows what languages a data set has
            return
        for side, language in languages.items():
            if not re.fullmatch("[a-z]{2,3}([-_][A-Za-z0-9]+)*", language):
                given = f", got {language!r}" if language else ""
                raise UserError(
                    f'config.task.data.{side}_language must be the code of a language, such as "en" or "de"{given}: it '
                    f"says what the {side} side of the files is"
                )
        if languages["source"] != languages["target"]:
            self._check_file_names(languages)

    def tiny(self) -> None:
        """Sets a little built-in text."""
        self.dataset, self.tokenizer, self.is_tokenised = "grammar", "sentencepiece", False
        self.source_language = self.target_language = ""
        self.max_length, self.tokens_per_batch, self.sort_buffer = 64, 512, 256

    def _check_file_names(self, languages: dict[str, str]) -> None:
        for side, other in (("source", "target"), ("target", "source")):
            for split in ("train", "validation", "test"):
                file = getattr(self, f"{split}_{side}")
                names = (name.strip().removesuffix(".gz") for name in file.split(","))
                if any(name.endswith(f".{languages[other]}") for name in names):
                    raise UserError(
                        f"config.task.data.{split}_{side}={file} looks like the {other} side, whose language is "
                        f"{languages[other]}: exchange files or languages"
                    )

    def _is_set_aside(self, split: Split) -> bool:
        return split == "validation" and not self.validation_source and self.validation_pairs > 0

    def _open_files(self, split: Split) -> PairSource:
        if split == "test" or not self._is_set_aside("validation"):
            return self._read_files(split)
        pairs = self._read_files("train")
        if len(pairs) < 10:  # a tenth would be none
            raise UserError(
                f"{self.train_source} has too few pairs to set some aside: name config.task.data.validation_source"
            )
        return split_pairs(pairs, self.validation_pairs)[split == "validation"]

    def _read_files(self, split: Split) -> PairSource:
        source, target = getattr(self, f"{split}_source"), getattr(self, f"{split}_target")
        keep_empty, sources = split != "train", named_paths(self.data_dir, source)
        if not target:
            if not all(path.name.removesuffix(".gz").endswith(".tsv") for path in sources):
                raise UserError(f"config.task.data.{split}_target names no file; only a .tsv holds both sides")
            return join_pairs([read_tsv(path, keep_empty=keep_empty) for path in sources])
        targets = named_paths(self.data_dir, target)
        if len(sources) != len(targets):
            raise UserError(
                f"config.task.data.{split}_source names {len(sources)} files and {split}_target {len(targets)}: each "
                "file of one must be the translation of the file of the other in the same place"
            )
        files = zip(sources, targets, strict=True)
        return join_pairs([read_pairs(*sides, keep_empty=keep_empty) for sides in files])
