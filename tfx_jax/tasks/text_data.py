"""Plain text, as the tasks of pre-training read it."""

import dataclasses

from etils import epath

from tfx_jax.data.splits import Split
from tfx_jax.data.text import read_text
from tfx_jax.data.wikitext import read_articles
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, fraction, one_of
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.text_files import check_files, file_names, has_file
from tfx_jax.toy_grammar import grammar_documents

_GRAMMAR_DOCUMENTS = {"train": 2_000, "validation": 100, "test": 100}


@dataclasses.dataclass
class TextData:
    """Where plain text comes from, and how much of it makes an example and a batch."""

    dataset: str = one_of(("grammar", "files"), "grammar")  # the grammar is built in
    data_dir: str = ""  # files: the folder that the names below are relative to
    train_file: str = ""  # UTF-8, plain or .gz; several with commas between
    validation_file: str = ""
    test_file: str = ""
    validation_share: float = fraction(0.0)  # without a file of its own, validation is this part of the training text
    # A document is a whole "file" (for BERT, what stands between its empty lines), each of its "lines" or, in WikiText,
    # each of its "articles".
    documents: str = one_of(("file", "lines", "articles"), "file")
    tokenizer: str = "wordpiece"  # or another of `tfx_jax.data.train_tokenizer.KINDS`; without effect with init_from
    max_length: int = at_least(1, 256)  # tokens of an example
    tokens_per_batch: int = at_least(1, 16_384)  # positions of a global batch

    def has_split(self, split: Split) -> bool:
        """Tells whether the configuration names a split, or takes it from the end of the training text."""
        return has_file(self, split) or (split == "validation" and self.validation_share > 0)

    def load(self, split: Split) -> list[str]:
        """Reads the documents of a split; lines, empty ones too, are without their line breaks.

        Raises:
          UserError: if it cannot be read.
        """
        if self.dataset == "grammar":
            documents = ["\n".join(sentences) for sentences in grammar_documents(split, _GRAMMAR_DOCUMENTS[split])]
            between = "\n" if self.documents == "lines" else "\n\n"
            return documents if self.documents == "articles" else _documents(between.join(documents), self.documents)
        if self.validation_share and split != "test":
            train, validation = self._divide()
            return validation if split == "validation" else train
        return self._read(getattr(self, f"{split}_file"))

    def validate(self, model: ModelConfig) -> None:
        """Checks how fields go together.

        Raises:
          UserError: if they do not.
        """
        check_files(self, model, what="row")
        if self.validation_file and self.validation_share:
            raise UserError("config.task.data.validation_file and validation_share exclude each other: set one")

    def tiny(self) -> None:
        """Sets a little built-in text."""
        self.dataset, self.max_length, self.tokens_per_batch = "grammar", 64, 512
        self.documents = "lines" if self.documents == "lines" else "file"

    def _divide(self) -> tuple[list[str], list[str]]:
        """Divides the training text into what is before its end, and its end, for validation."""
        documents, share = self._read(self.train_file), self.validation_share
        if self.documents == "file":
            middles = [int(len(text) * (1 - share)) for text in documents]
            parts = [(text[:middle], text[middle:]) for text, middle in zip(documents, middles, strict=True)]
            return [before for before, _ in parts], [after for _, after in parts]
        middle = int(len(documents) * (1 - share))
        return documents[:middle], documents[middle:]

    def _read(self, file: str) -> list[str]:
        # One file even if its name is empty: then the error says what cannot be read.
        paths = [epath.Path(self.data_dir) / name for name in file_names(file) or [""]]
        if self.documents == "articles":
            return ["\n".join(article.lines) for path in paths for article in read_articles(path)]
        return [document for path in paths for document in _documents(read_text(path), self.documents)]


def _documents(text: str, documents: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if documents == "lines" else [text]
