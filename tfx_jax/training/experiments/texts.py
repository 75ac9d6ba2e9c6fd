"""Plain text for pre-training: its documents, and the tokenizer that is made of them."""

from collections.abc import Callable, Iterable

from etils import epath

from tfx_jax.data.grammar import Split, grammar_documents
from tfx_jax.data.hf_tokenizer import TOKENIZER_FILES, FolderTokenizer, load_folder_tokenizer
from tfx_jax.data.make_tokenizer import train_or_load_folder
from tfx_jax.data.text import read_text
from tfx_jax.data.wikitext import read_articles
from tfx_jax.errors import UserError
from tfx_jax.training.config import ExperimentConfig, TextConfig
from tfx_jax.training.distributed import primary_first
from tfx_jax.training.initial import tokenizer_folder

_GRAMMAR_DOCUMENTS = {"train": 2_000, "validation": 100, "test": 100}


def read_documents(data: TextConfig, split: Split) -> list[str]:
    """The documents of a part; lines, empty ones too, are without their line breaks.

    Raises:
      UserError: if the configuration names no such part, or it cannot be read.
    """
    if data.dataset == "grammar":
        documents = ["\n".join(sentences) for sentences in grammar_documents(split, _GRAMMAR_DOCUMENTS[split])]
        between = "\n" if data.documents == "lines" else "\n\n"
        return documents if data.documents == "articles" else _documents_of(between.join(documents), data.documents)
    if data.dataset != "files":
        raise UserError(f'config.data.dataset must be "grammar" or "files", got {data.dataset!r}')
    if split == "validation" and data.validation_share:
        return _split_off(data)[1]
    if not has_text(data, split):
        raise UserError(f"config.data.{split}_file names no file for the {split} part")
    if split == "train" and data.validation_share:
        return _split_off(data)[0]
    return _read(data, getattr(data, f"{split}_file"))


def has_text(data: TextConfig, split: str) -> bool:
    """Whether the configuration names such a part."""
    share = split == "validation" and data.validation_share > 0
    return data.dataset == "grammar" or share or bool(getattr(data, f"{split}_file"))


def _split_off(data: TextConfig) -> tuple[list[str], list[str]]:
    """The training text without its end, and its end, for validation."""
    documents = _read(data, data.train_file)
    share = data.validation_share
    if data.documents == "file":
        (text,) = documents
        place = int(len(text) * (1 - share))
        return [text[:place]], [text[place:]]
    place = int(len(documents) * (1 - share))
    return documents[:place], documents[place:]


def _read(data: TextConfig, file: str) -> list[str]:
    path = epath.Path(data.data_dir) / file
    if data.documents == "articles":
        return ["\n".join(article.lines) for article in read_articles(path)]
    return _documents_of(read_text(path), data.documents)


def _documents_of(text: str, documents: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if documents == "lines" else [text]


def open_tokenizer(
    config: ExperimentConfig, workdir: epath.PathLike, texts: Callable[[], Iterable[str]], *, family: str
) -> FolderTokenizer:
    """The tokenizer of a workdir, in its folder "tokenizer": there already, or that of `init_from`, or trained.

    Args:
      config: of the experiment.
      workdir: of the training.
      texts: what to train it on.
      family: which special tokens there are, see `tfx_jax.data.make_tokenizer`.
    """
    folder = epath.Path(workdir) / "tokenizer"
    with primary_first("tokenizer"):
        if config.init_from:
            _copy(tokenizer_folder(config.init_from), folder)
            return load_folder_tokenizer(folder)
        return train_or_load_folder(
            folder, texts, kind=config.data.tokenizer, family=family, vocab_size=config.model.vocab_size
        )


def _copy(source: epath.Path, folder: epath.Path) -> None:
    """Copies a tokenizer, unless that was done before."""
    names = [name for name in TOKENIZER_FILES if (source / name).exists()]
    if not names:
        raise UserError(f"{source} has no tokenizer: config.init_from takes a workdir or Hugging Face folder with one")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / name).exists():
            partial = folder / f"{name}.partial"
            partial.write_bytes((source / name).read_bytes())
            partial.replace(folder / name)
