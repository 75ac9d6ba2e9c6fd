"""Loading a trained or pretrained model for predictions and text generation."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast

import jax
from etils import epath
from flax import nnx

from tfx_jax.data.sources.columns import is_table, table_kind
from tfx_jax.data.sources.lines import is_blank, list_of_texts
from tfx_jax.data.tokenizers.chat import ChatTemplate, load_chat_template
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer, load_folder_tokenizer
from tfx_jax.errors import UserError, check_text
from tfx_jax.generation import generate
from tfx_jax.generation.text import check_is_loaded
from tfx_jax.hub import local_folder
from tfx_jax.models import hf
from tfx_jax.nn.decoding import DecodingModel
from tfx_jax.tasks.prediction import ImageAttention, OnBatch, PairAttention, TrainedModel
from tfx_jax.tasks.text.answers import AnsweringTask, Prediction
from tfx_jax.tasks.text.text_attention import text_attention
from tfx_jax.tasks.vision.captioning import CaptioningTask
from tfx_jax.training.checkpoint.checkpoints import load_best_params
from tfx_jax.training.run import Run, load_run
from tfx_jax.training.workdir import is_workdir

_Answer = Callable[[Sequence[Sequence[Any]]], list[Prediction]]


def read_inputs(task: Any, path: str) -> Iterable[Sequence[str]] | None:
    """Returns the inputs of a text file that has the format of the run's training files; see `FileData.read_inputs`.

    Returns None if each line of the file is an input.

    Raises:
      UserError: now or while iterating, if the file cannot be read or lacks a column, or if it is a table but the model
        was trained without names of columns.
    """
    data = task.config.data
    rows = None
    if getattr(data, "dataset", "") == "files" and hasattr(data, "read_inputs"):
        rows = data.read_inputs(path, getattr(task, "labels", ()))
    if rows is None and is_table(path) and table_kind(path) != "tsv":
        raise UserError(
            f"{path} is a table, but the run names no column of text: write a text file with one input per line"
        )
    return rows


def _text_predictions(answer: _Answer, inputs: Any, parts: Sequence[str], empty_answer: Prediction) -> list[Prediction]:
    """Returns the answers to inputs of text, after checking them; see `LoadedModel.predict`.

    Args:
      answer: returns the answer to each row of strings; it gets no blank ones.
      inputs: what the user gave.
      parts: names of the strings of a row.
      empty_answer: answer to a row with a blank string.
    """
    names = " and ".join(parts)
    rows: list[Any] = [(row,) if isinstance(row, str) else row for row in list_of_texts(inputs, "inputs")]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Sequence) or not all(isinstance(part, str) for part in row):
            raise UserError(f"input {number} must be {names}, each a string, got {row!r}")
        if len(row) != len(parts):
            raise UserError(f"input {number} must have {len(parts)} parts, {names}, got {len(row)}")
        for part in row:
            check_text(part, f"input {number}")
    with_text = [index for index, row in enumerate(rows) if not any(map(is_blank, row))]
    answers = answer([rows[index] for index in with_text]) if with_text else []
    answer_by_index = dict(zip(with_text, answers, strict=True))
    return [answer_by_index.get(index, dict(empty_answer)) for index in range(len(rows))]


def files_of(paths: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Returns paths with each folder replaced by the files in it that end with one of `suffixes`, sorted.

    Raises:
      UserError: if a folder has no such file.
    """
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            files.append(os.fspath(path))
            continue
        names = sorted(name for name in os.listdir(path) if name.lower().endswith(tuple(suffixes)))
        if not names:
            raise UserError(
                f"{path} has no file that ends with {' or '.join(suffixes)}; folders in it are not searched: name "
                f"them, as {os.path.join(path, '*')}"
            )
        files += [os.path.join(path, name) for name in names]
    return files


class LoadedModel:
    """A trained or pretrained model for predictions and text generation.

    Attributes:
      model: the module with its parameters.
      tokenizer: its tokenizer; None for a model that takes no text.
      eos_ids: tokens that end a generated text.
      first_ids: tokens that every generated text begins with.
      task: the task that the model was trained on; None for a pretrained model.
      trained: the model as the methods of the task take it; None without a task.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: HFTokenizer | None = None,
        *,
        eos_ids: Sequence[int] = (),
        first_ids: Sequence[int] = (),
        task: Any = None,
        trained: TrainedModel | None = None,
        reason: str = "",
        source: epath.PathLike | None = None,
    ):
        """Combines the parts, see the attributes of the class.

        Args:
          model: the module.
          tokenizer: its tokenizer.
          eos_ids: tokens that end a generated text.
          first_ids: tokens that every generated text begins with.
          task: the task.
          trained: the model for the task.
          reason: error message of `predict` without a task.
          source: folder of the chat template; None if there is none.
        """
        self.model, self.tokenizer, self.eos_ids = model, tokenizer, tuple(eos_ids)
        self.first_ids = tuple(first_ids)
        self.task, self.trained = task, trained
        self._reason, self._source = reason, source

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the parts of an input of `predict`, such as ("text",) or ("question", "context") or ("image",).

        () for a model that only generates text, or has no task that takes text or files.
        """
        return self.task.inputs if isinstance(self.task, AnsweringTask) else ()

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Ends of the names of files that are inputs of `predict`, such as (".wav",); () for a model of text."""
        return getattr(self.task, "suffixes", ())

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The template that turns a conversation into a prompt.

        Raises:
          UserError: if the model was not loaded from a folder, or the folder has none, see `load_chat_template`.
        """
        if self._source is None:
            raise UserError("the model was loaded without a folder, so it has no chat template: use tfx_jax.load")
        return load_chat_template(self._source)

    def predict(self, inputs: Any) -> list[Prediction]:
        """Returns the prediction for each input, in order.

        Args:
          inputs: a list with one string per input, or a sequence of strings for inputs of several parts. For images and
            sound, a list of paths or arrays (images [Y, X, C] uint8 of the model's size, recordings [samples] int16 at
            the model's rate), or the path of one file or of a folder, all of whose files are inputs.

        Returns:
          A dictionary per input, whose keys depend on the task: "label", "probability" and "probabilities" of a
          classifier, "tags" and "words", "answer", "translation", "tree", "caption", "transcript", "continuation" (by
          greedy search, up to 64 tokens or half of the model's positions), and "file" if the input is a file. An input
          with a string without visible characters (see `tfx_jax.data.sources.lines.is_blank`) has an empty answer.

        Raises:
          UserError: for a model whose task takes neither text nor files and that generates no text; for a single string
            instead of a list; and for an input that has the wrong number of strings, is not text, or has half of a
            surrogate pair; the message gives the number of the input, from 1.
        """
        if self.task is None:
            raise UserError(self._reason)
        task: Any = self.task if isinstance(self.task, AnsweringTask) else _Continuing(self)
        answer: _Answer = functools.partial(task.answer, self.trained)
        if self.suffixes:
            return self._predict_files(answer, inputs)
        return _text_predictions(answer, inputs, task.inputs, task.empty_answer)

    def _predict_files(self, answer: _Answer, inputs: Any) -> list[Prediction]:
        """Returns the predictions for files or arrays; see `predict`."""
        if isinstance(inputs, str | os.PathLike):
            inputs = files_of([cast(str, inputs)], self.suffixes)
        sources: list[Any] = list(inputs)
        for number, source in enumerate(sources, 1):
            if not isinstance(source, str | os.PathLike) and not hasattr(source, "shape"):
                raise UserError(f"input {number} must be {self.inputs[0]}, a path or an array, got {source!r:.100}")
        answers = answer([(source,) for source in sources]) if sources else []
        return [
            answer if hasattr(source, "shape") else answer | {"file": os.fspath(source)}
            for source, answer in zip(sources, answers, strict=True)
        ]


class _Continuing:
    """Continues texts with a model that generates text, in the form of an `AnsweringTask`."""

    inputs: ClassVar[tuple[str, ...]] = ("text",)
    empty_answer: ClassVar[Prediction] = {"continuation": ""}

    def __init__(self, model: LoadedModel):
        """Raises UserError if the model does not generate text."""
        if model.tokenizer is None or not isinstance(model.model, DecodingModel):
            raise UserError("the model's task takes neither lines of text nor files, and the model writes no text")
        self._model = model

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[str]]) -> list[Prediction]:
        """Returns the continuation of each text."""
        decoder = nnx.eval_shape(lambda model: model.decoder(), self._model.model)  # rearranges no weights
        num_positions = decoder.max_input_length(0)  # None: not limited
        length = 64 if num_positions is None else min(64, max(1, num_positions // 2))
        texts = generate(cast(Any, self._model), [text for (text,) in rows], max_new_tokens=length, temperature=0)
        return [{"continuation": text} for text in texts]


def attention(model: LoadedModel, source: Any, target: str | None = None) -> PairAttention | ImageAttention:
    """Computes the attention maps of a loaded model for one input.

        maps, source, target = tfx_jax.attention(tfx_jax.load("bert-base-uncased"), "The dog runs.")
        maps["encoder/0/self"].shape  # [heads, queries, keys]

    Args:
      model: the result of `tfx_jax.load`.
      source: a text; or, for a model of images, [Y, X, C] uint8.
      target: second text of a pair, or what the model should have written; None means what it writes.

    Returns:
      Maps by name, and the tokens of both sequences. The tokens of an encoder are `source`, those of a language model
      `target`. Of images an `ImageAttention`.

    Raises:
      UserError: if the model has no attention maps, or the input does not fit it.
    """
    check_is_loaded(model)
    task: Any = model.task
    trained = model.trained if hasattr(task, "attention") else None
    if trained is not None and getattr(task, "inputs", ()) == ("image",):
        if not hasattr(source, "shape"):
            raise UserError(f"source must be an image, an array [Y, X, C] of uint8, got {source!r:.100}")
        if target is None:
            return task.attention(trained, source)
        if not isinstance(task, CaptioningTask):
            raise UserError("target is a caption, but this model classifies images: leave it out")
        return task.attention(trained, source, target)
    if trained is None and (model.tokenizer is None or not hasattr(model.model, "config")):
        raise UserError(f"{type(model.model).__name__} does not read text: there are no maps to draw")
    for name, text in (("source", source), ("target", target)):
        if not isinstance(text, str) and not (name == "target" and text is None):
            raise UserError(f"{name} must be a text, got {text!r:.100}")
    if trained is not None:
        return task.attention(trained, source, target)
    graphdef, params = nnx.split(model.model)
    trained = TrainedModel(graphdef, nnx.to_pure_dict(params))
    return text_attention(trained, model.model.config, cast(HFTokenizer, model.tokenizer), source, target)


def load_from_run(
    run: Run[Any], params: Any, *, source: epath.PathLike | None = None, on_batch: OnBatch | None = None
) -> LoadedModel:
    """Returns the model of a run, with the parameters of one of its checkpoints.

    Args:
      run: the run.
      params: parameters of the model.
      source: folder of the chat template; None if there is none.
      on_batch: called with the number of inputs done and their total in `predict`; translation does not call it.
    """
    tokenizer = getattr(run.task, "tokenizer", None)
    params = jax.device_put(params)
    return LoadedModel(
        nnx.merge(run.graphdef, params),
        tokenizer,
        eos_ids=() if tokenizer is None or tokenizer.eos_id is None else (tokenizer.eos_id,),
        task=run.task,
        trained=run.trained(params, on_batch),
        source=source,
    )


def load(source: epath.PathLike, *, allow_nonfinite: bool = False, **options: Any) -> LoadedModel:
    """Loads the best checkpoint of a run, or a pretrained model.

        tfx_jax.load("runs/topics").predict(["The market fell.", "They won."])
        tfx_jax.generate(tfx_jax.load("gpt2"), "Once upon")
        tfx_jax.load("meta-llama/Llama-3.2-1B", dtype="bfloat16", keep_bfloat16=True)  # in half of the memory

    Args:
      source: the workdir of a run, a Hugging Face folder, or the name of a model on the hub.
      allow_nonfinite: load parameters even if some are NaN or infinite.
      options: of a pretrained model, those of `tfx_jax.models.hf.load`, such as `dtype`.

    Raises:
      UserError: if there is no model, or it is damaged, or there are options for a workdir.
    """
    folder = local_folder(source)
    if is_workdir(folder):
        if options:
            raise UserError(f"{next(iter(options))} is for pretrained models, but {source} is a workdir: leave it out")
        run, params = load_run(folder), load_best_params(folder, allow_nonfinite=allow_nonfinite)
        run.check_params(params)
        return load_from_run(run, params, source=folder / "tokenizer")
    model = hf.load(folder, allow_nonfinite=allow_nonfinite, **options)
    reason = f"{source} is a pretrained model without a task: fine-tune it, or use generate"
    try:
        tokenizer = load_folder_tokenizer(folder)
    except UserError:
        if isinstance(model, DecodingModel):  # cannot generate text without a tokenizer
            raise
        tokenizer = None
    eos_ids, first_ids = hf.output_ids(folder)
    return LoadedModel(model, tokenizer, eos_ids=eos_ids, first_ids=first_ids, reason=reason, source=folder)
