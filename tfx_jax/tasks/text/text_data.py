"""Plain text for the pre-training tasks."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from etils import epath

from tfx_jax.data.batching.documents import TextDocuments, count_characters, cut_pieces, read_pieces
from tfx_jax.data.sources.columns import read_columns
from tfx_jax.data.sources.lines import is_blank, read_lines
from tfx_jax.data.sources.parquet import is_columnar, read_columnar
from tfx_jax.data.sources.splits import Split
from tfx_jax.data.sources.wikitext import read_articles
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.models.config import ModelConfig
from tfx_jax.synthetic.grammar import grammar_documents
from tfx_jax.tasks.files import FileData, check_files, check_share, empty_split, split_paths

_GRAMMAR_DOCUMENTS = {"train": 2_000, "validation": 100, "test": 100}


@documented
@dataclasses.dataclass
class TextData(FileData):
    """Source of plain text, and size of examples and batches."""

    dataset: str = one_of(("grammar", "files"), "grammar")  # grammar: built-in text
    # files: folder of the files below; each field may list several, as "a.txt,b.txt" or "part-*.txt" (sorted)
    data_dir: str = ""
    train_file: str = ""  # files: UTF-8 text, plain or .gz; or .parquet or .arrow: each row is a document
    validation_file: str = ""
    test_file: str = ""
    validation_share: float = fraction(
        0.0
    )  # without validation_file: fraction at the end of the training text used for validation
    # A document is a whole "file" (for BERT, the text between empty lines of it), each of its "lines" or, in WikiText,
    # each of its "articles". Of Parquet and Arrow files it is a row, with "file" and "lines" alike. "messages": a JSON
    # line or a row is a conversation: in its "messages", a list of {"role": ..., "content": ...}; for language modeling
    # only.
    documents: str = one_of(("file", "lines", "articles", "messages"), "file")
    text_column: str = "text"  # of a Parquet or Arrow file: the column of the documents
    tokenizer: str = "wordpiece"  # characters, words, wordpiece, bpe or unigram; ignored with init_from
    max_length: int = at_least(1, 256)  # tokens of an example
    tokens_per_batch: int = at_least(1, 16_384)  # positions of a global batch

    def load(self, split: Split) -> TextDocuments:
        """Opens the documents of a split; lines, including empty ones, come without line breaks.

        Raises:
          UserError: if it cannot be read, now or while iterating.
        """
        if self.dataset == "grammar":
            return _grammar_documents(split, self.documents)
        if self.validation_share and split != "test":
            texts = self._open("train", is_held_out=split == "validation")
        else:
            texts = self._open(split)
        if all(map(is_blank, texts)):
            raise UserError(f"the {split} split has no text, only blank lines: name another file")
        return texts

    def read_inputs(self, path: epath.PathLike, labels: Collection[str]) -> Iterable[Sequence[str]] | None:
        return read_columns(path, [self.text_column]) if is_columnar(path) else None

    def train_sources(self) -> list[TextDocuments]:
        """Opens each entry of `train_file`, a file or a pattern, as a separate source of documents.

        Raises:
          UserError: as `load`.
        """
        entries = self.train_file.split(",")
        return [dataclasses.replace(self, train_file=entry.strip())._open("train") for entry in entries]

    def validate(self, model: ModelConfig, *, may_have_messages: bool = False) -> None:
        """Checks that the fields are consistent; only some tasks accept conversations.

        Raises:
          UserError: if they are not.
        """
        check_files(self, model, what="row")
        check_share(self)
        if self.documents == "messages" and not may_have_messages:
            raise UserError(
                'config.task.data.documents="messages" is for language modeling only: choose other documents'
            )
        if self.documents == "messages" and self.dataset != "files":
            raise UserError(
                f'config.task.data.documents="messages" needs config.task.data.dataset="files", got {self.dataset!r}'
            )

    def tiny(self) -> None:
        """Sets a small built-in text."""
        self.dataset, self.max_length, self.tokens_per_batch = "grammar", 64, 512
        self.documents = "lines" if self.documents == "lines" else "file"

    def _open(self, split: Split, *, is_held_out: bool | None = None) -> TextDocuments:
        """Returns documents in the files of a split.

        `is_held_out` selects them: None, all; True, the end that is held out for validation; False, those before it.
        Everything is read once here, so that unreadable data is an error before training.
        """
        paths = split_paths(self, split)
        num_tables = sum(map(is_columnar, paths))
        if num_tables and self.documents == "articles":
            raise UserError(
                'config.task.data.documents="articles" is for the text of WikiText, but each row of a Parquet or Arrow '
                'file is a document: set documents="lines"'
            )
        if self.documents == "file" and 0 < num_tables < len(paths):
            raise UserError(
                f"config.task.data.{split}_file names Parquet or Arrow files and files of text: name files of one "
                'kind, or set documents="lines", so that each row and each line is a document'
            )
        if self.documents == "file" and not num_tables:
            sizes = [count_characters(path) for path in paths]
            begin, end = self._bounds(sum(sizes), is_held_out)
            return TextDocuments(lambda: _files(paths, sizes, begin, end))
        column = "messages" if self.documents == "messages" else self.text_column
        read = functools.partial(_documents, paths, self.documents, column)
        begin, end = self._bounds(sum(1 for _ in read()), is_held_out)
        locate = functools.partial(_location, paths, self.documents, column, begin)
        return TextDocuments(
            lambda: itertools.islice(read(), begin, end), locate=None if self.documents == "articles" else locate
        )

    def _bounds(self, size: int, is_held_out: bool | None) -> tuple[int, int]:
        """Returns the (begin, end) of the selected units, documents or characters, of `size`; see `_open`."""
        if is_held_out is None:
            return 0, size
        boundary = int(size * (1 - self.validation_share))
        if not 0 < boundary < size:
            raise empty_split(self.validation_share, size, "characters" if self.documents == "file" else "documents")
        return (boundary, size) if is_held_out else (0, boundary)


def _grammar_documents(split: Split, kind: str) -> TextDocuments:
    """Returns the built-in documents of a split; `kind` is the field `documents`."""
    texts = ["\n".join(sentences) for sentences in grammar_documents(split, _GRAMMAR_DOCUMENTS[split])]
    if kind == "lines":  # each sentence is a document
        texts = "\n".join(texts).split("\n")
    elif kind != "articles":  # all texts are one document, with blank lines between them
        texts = ["\n\n".join(texts)]
    return TextDocuments(lambda: ([text] for text in texts))  # each document has one piece


def _files(paths: Sequence[epath.Path], sizes: Sequence[int], begin: int, end: int) -> Iterator[Iterable[str]]:
    """Yields the files as iterators of pieces, limited to characters `begin` to `end` of all files together."""
    for path, size in zip(paths, sizes, strict=True):
        if begin < size and end > 0:
            yield read_pieces(path, max(0, begin), end)
        begin, end = begin - size, end - size  # positions relative to the next file


def _location(paths: Sequence[epath.Path], kind: str, column: str, begin: int, number: int) -> str:
    """Returns the file and line or row of a document, the `number`-th after the first `begin` ones."""
    remaining = begin + number
    for path in paths:
        size = sum(1 for _ in _documents([path], kind, column))
        if remaining <= size:
            return f"{path}, {'row' if is_columnar(path) else 'line'} {remaining}"
        remaining -= size
    return f"document {number}"


def _documents(paths: Sequence[epath.Path], kind: str, column: str) -> Iterator[Iterable[str]]:
    """Yields rows of Parquet and Arrow files, and articles or lines of others, each as an iterable of pieces."""
    for path in paths:
        if is_columnar(path):
            rows = read_columnar(path, [column], kinds=("text", "lists") if kind == "messages" else ("text",))
            yield from (cut_pieces([text.replace("\r\n", "\n")]) for _, (text,) in rows)
        elif kind == "articles":
            yield from (["\n".join(article.lines)] for article in read_articles(path))
        else:
            yield from ([line] for line in read_lines(path))
