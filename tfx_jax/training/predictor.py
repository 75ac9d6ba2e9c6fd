"""A trained model in one call, for whoever wants its answers and nothing else."""

from collections.abc import Sequence
from typing import Any

from etils import epath

from tfx_jax.data.sources.lines import is_blank, list_of_texts
from tfx_jax.errors import UserError, check_text
from tfx_jax.tasks.prediction import OnBatch
from tfx_jax.tasks.text.answers import AnsweringTask, Prediction
from tfx_jax.training.checkpoint.checkpoints import load_best_params
from tfx_jax.training.run import Run, load_run


class Predictor:
    """Answers inputs with what was learned.

    Attributes:
      inputs: what an input consists of, such as ("text",) or ("question", "context").
    """

    def __init__(self, run: Run[Any], params: Any, *, on_batch: OnBatch | None = None):
        """Takes a run and the parameters of one of its checkpoints.

        Args:
          run: what was trained.
          params: its parameters.
          on_batch: is told how many inputs of a `predict` are done and how many there are, but where the task
            translates.

        Raises:
          UserError: if the task of the run does not answer lines of text.
        """
        if not isinstance(run.task, AnsweringTask):
            kind = type(run.task).__name__
            raise UserError(
                f"a model of a {kind} answers no lines of text: there are the verbs generate, attend and transcribe"
            )
        self._task: AnsweringTask = run.task
        self._model = run.trained(params, on_batch)
        self.inputs = run.task.inputs

    def predict(self, inputs: Sequence[str | Sequence[str]]) -> list[Prediction]:
        """Answers inputs, in their order.

        Args:
          inputs: a list, each element a string, or where an input consists of several, so many strings.

        Returns:
          For each a dictionary, whose keys depend on the task: "label", "probability" and "probabilities" of a
          classifier, "tags" and "words", "answer", "translation", "tree". An input of which a string shows nothing, see
          `tfx_jax.data.sources.lines.is_blank`, has an empty answer.

        Raises:
          UserError: for a single string instead of a list, and for an input of another number of strings, of anything
            else, or with half of a surrogate pair, named by its place from 1.
        """
        parts = " and ".join(self.inputs)
        rows: list[Any] = [(row,) if isinstance(row, str) else row for row in list_of_texts(inputs, "inputs")]
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Sequence) or not all(isinstance(part, str) for part in row):
                raise UserError(f"input {number} is {row!r}, but must be {parts}, each a string")
            if len(row) != len(self.inputs):
                raise UserError(f"input {number} has {len(row)} parts, but there must be {parts}")
            for part in row:
                check_text(part, f"input {number}")
        shown = [index for index, row in enumerate(rows) if not any(map(is_blank, row))]
        found = dict(zip(shown, self._task.answer(self._model, [rows[i] for i in shown]) if shown else [], strict=True))
        return [found.get(index, dict(self._task.empty_answer)) for index in range(len(rows))]


def load(workdir: epath.PathLike) -> Predictor:
    """Opens what was trained in a folder, with the parameters of its best checkpoint.

        answers = tfx_jax.training.predictor.load("runs/topics").predict(["The market fell.", "They won."])

    Raises:
      UserError: if there is none, it is damaged, or its task does not answer lines of text.
    """
    return Predictor(load_run(workdir), load_best_params(workdir))
