"""Loading a trained or pretrained model for predictions and text generation."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath
from flax import nnx

from tfx_jax.data.sources.lines import is_blank, list_of_texts
from tfx_jax.data.tokenizers.chat import ChatTemplate, load_chat_template
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer, load_folder_tokenizer
from tfx_jax.errors import UserError, check_text
from tfx_jax.hub import local_folder
from tfx_jax.models import hf
from tfx_jax.nn.decoding import DecodingModel
from tfx_jax.tasks.prediction import OnBatch
from tfx_jax.tasks.text.answers import AnsweringTask, Prediction
from tfx_jax.training.checkpoint.checkpoints import load_best_params
from tfx_jax.training.run import Run, load_run
from tfx_jax.training.workdir import is_workdir


class Predictor:
    """Predicts the outputs of a trained model for new inputs.

    Attributes:
      inputs: names of the strings of an input, such as ("text",) or ("question", "context").
    """

    def __init__(self, run: Run[Any], params: Any, *, on_batch: OnBatch | None = None):
        """Stores a run and the parameters of one of its checkpoints.

        Args:
          run: the run.
          params: parameters of the model.
          on_batch: called with the number of inputs done and their total in `predict`; translation does not call it.

        Raises:
          UserError: if the run's task does not take lines of text.
        """
        if not isinstance(run.task, AnsweringTask):
            kind = type(run.task).__name__
            raise UserError(
                f"{kind} takes no lines of text, so there is nothing to predict: use the verbs generate, attend or "
                "transcribe"
            )
        self._task: AnsweringTask = run.task
        self._model = run.trained(params, on_batch)
        self.inputs = run.task.inputs

    def predict(self, inputs: Sequence[str | Sequence[str]]) -> list[Prediction]:
        """Returns the prediction for each input, in order.

        Args:
          inputs: a list with one string per input, or a sequence of strings for inputs of several parts.

        Returns:
          A dictionary per input, whose keys depend on the task: "label", "probability" and "probabilities" of a
          classifier, "tags" and "words", "answer", "translation", "tree". An input with a string without visible
          characters (see `tfx_jax.data.sources.lines.is_blank`) has an empty answer.

        Raises:
          UserError: for a single string instead of a list, and for an input that has the wrong number of strings, is
            not text, or has half of a surrogate pair; the message gives the number of the input, from 1.
        """
        parts = " and ".join(self.inputs)
        rows: list[Any] = [(row,) if isinstance(row, str) else row for row in list_of_texts(inputs, "inputs")]
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Sequence) or not all(isinstance(part, str) for part in row):
                raise UserError(f"input {number} must be {parts}, each a string, got {row!r}")
            if len(row) != len(self.inputs):
                raise UserError(f"input {number} must have {len(self.inputs)} parts, {parts}, got {len(row)}")
            for part in row:
                check_text(part, f"input {number}")
        visible = [index for index, row in enumerate(rows) if not any(map(is_blank, row))]
        answers = self._task.answer(self._model, [rows[index] for index in visible]) if visible else []
        answer_at = dict(zip(visible, answers, strict=True))
        return [answer_at.get(index, dict(self._task.empty_answer)) for index in range(len(rows))]


class LoadedModel:
    """A trained or pretrained model for predictions and text generation.

    Attributes:
      model: the module with its parameters.
      tokenizer: its tokenizer; None for a model that takes no text.
      eos_ids: tokens that end a generated text.
      first_ids: tokens that every generated text begins with.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: HFTokenizer | None = None,
        *,
        eos_ids: Sequence[int] = (),
        first_ids: Sequence[int] = (),
        predictor: Predictor | None = None,
        reason: str = "",
        source: epath.PathLike = "the model",
    ):
        """Combines the parts.

        Args:
          model: the module.
          tokenizer: its tokenizer.
          eos_ids: tokens that end a generated text.
          first_ids: tokens that every generated text begins with.
          predictor: computes predictions; None if the model has no task that takes text.
          reason: error message for `predict` if there is no predictor.
          source: folder of the chat template.
        """
        self.model, self.tokenizer, self.eos_ids = model, tokenizer, tuple(eos_ids)
        self.first_ids = tuple(first_ids)
        self._predictor, self._reason, self._source = predictor, reason, source

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The template that turns a conversation into a prompt.

        Raises:
          UserError: if the folder has none, see `load_chat_template`.
        """
        return load_chat_template(self._source)

    def predict(self, inputs: Sequence[str | Sequence[str]]) -> list[Prediction]:
        """Returns labels, tags, answers or translations; see `Predictor.predict`.

        Raises:
          UserError: as `Predictor.predict`, and if the model has no task that takes text.
        """
        if self._predictor is None:
            raise UserError(self._reason)
        return self._predictor.predict(inputs)


def load(source: epath.PathLike) -> LoadedModel:
    """Loads the best checkpoint of a run, or a pretrained model.

        tfx_jax.load("runs/topics").predict(["The market fell.", "They won."])
        tfx_jax.generate(tfx_jax.load("gpt2"), "Once upon")

    Args:
      source: the workdir of a run, a Hugging Face folder, or the name of a model on the hub.

    Raises:
      UserError: if there is no model, or it is damaged.
    """
    folder = local_folder(source)
    if is_workdir(folder):
        run, params = load_run(folder), load_best_params(folder)
        run.check_params(params)
        tokenizer = getattr(run.task, "tokenizer", None)
        is_answering = isinstance(run.task, AnsweringTask)
        return LoadedModel(
            nnx.merge(run.graphdef, jax.device_put(params)),
            tokenizer,
            eos_ids=() if tokenizer is None or tokenizer.eos_id is None else (tokenizer.eos_id,),
            predictor=Predictor(run, params) if is_answering else None,
            source=folder,
            reason=f"{source} was trained as a {type(run.task).__name__}, which answers no text: use tfx_jax.generate",
        )
    model, reason = hf.load(folder), f"{source} is a pretrained model without a task: fine-tune it, or use generate"
    try:
        tokenizer = load_folder_tokenizer(folder)
    except UserError:
        if isinstance(model, DecodingModel):  # cannot generate without a tokenizer
            raise
        tokenizer = None
    ids = {"eos_ids": hf.end_ids(folder), "first_ids": hf.first_ids(folder)}
    return LoadedModel(model, tokenizer, **ids, reason=reason, source=folder)
