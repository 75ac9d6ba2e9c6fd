"""README.md of a folder that `tfx-jax convert` writes: a model card, with the metadata that the Hugging Face hub reads.

It says what the files say, and nothing else: no language, no license and no intended use that no one has named.
"""

import contextlib
import pathlib
import re
import shlex
from collections.abc import Sequence

import yaml
from etils import epath

import tfx_jax
from tfx_jax.errors import UserError
from tfx_jax.files import read_small_file
from tfx_jax.hub import was_downloaded

NAME = "README.md"
# The hub's name of what a model does, by the end of its architecture's name.
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
}
_SECTIONS = ("Evaluations", "How to repeat it")  # of report.md, besides the facts above the first section
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/`'\"]+/)+")  # of an absolute path, but not of a URL


def run_card(
    title: str,
    weights: str,
    workdir: epath.PathLike,
    *,
    checkpoint: str,
    init_from: str,
    architecture: str,
    argv: Sequence[str],
) -> str:
    """Returns the card of a model trained with tfx_jax.

    Args:
      title: name of the model.
      weights: result of `weights_line`.
      workdir: folder of the run; figures, data and command are those of its report.md, if there is one.
      checkpoint: step, or kind of the checkpoint, that the weights are of.
      init_from: `config.init_from` of the run.
      architecture: class of transformers that reads the folder; "" for adapters, which PEFT reads.
      argv: arguments of `tfx-jax convert`.
    """
    lines = [
        weights,
        f"Trained with [tfx_jax](https://github.com/tfx-jax/tfx-jax), checkpoint: {checkpoint}.",
        "No license is stated: add `license` to the metadata above before you share the model.",
    ]
    return (
        "\n\n".join([_metadata(init_from, architecture), f"# {title}", *lines, *_report(workdir), _conversion(argv)])
        + "\n"
    )


def folder_card(
    title: str, weights: str, *, source: epath.PathLike | None, name: str, architecture: str, argv: Sequence[str]
) -> str:
    """Returns the card of a rewritten Hugging Face folder: that of the folder if it has one.

    Args:
      title: name of the model.
      weights: result of `weights_line`, which replaces that of a card that `tfx-jax convert` wrote.
      source: the folder; None for adapters that are merged, whose card describes something else.
      name: what `--model` names, perhaps a name on the hub.
      architecture: class of transformers that reads the folder.
      argv: arguments of `tfx-jax convert`.
    """
    if source is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError, UserError):  # no card, or one that is no text
            card = read_small_file(epath.Path(source) / NAME).decode("utf-8")
            return re.sub(r"^Weights: `\w+`, .*$", lambda _: weights, card, count=1, flags=re.MULTILINE)
    origin = "Adapters, merged into their model" if source is None else "A folder without a model card, rewritten"
    lines = [weights, f"{origin}. No license is stated: see that of the original before you share the model."]
    return "\n\n".join([_metadata(name, architecture), f"# {title}", *lines, _conversion(argv)]) + "\n"


def weights_line(architecture: str, num_parameters: int, dtype: str) -> str:
    """Returns the line of a card that describes the weights."""
    return f"Weights: `{architecture}`, {num_parameters:,} parameters, {dtype}."


def write_card(output: pathlib.Path, card: str) -> None:
    """Writes the card into a folder.

    Raises:
      UserError: if it cannot be written.
    """
    try:
        (output / NAME).write_text(card, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {output}: {error}") from None


def _metadata(base: str, architecture: str) -> str:
    """Returns the front matter; `base` is what this model was made of, which is named if it is a model of the hub."""
    fields = {"library_name": "transformers" if architecture else "peft", "tags": ["jax", "tfx_jax"]}
    if was_downloaded(base):
        fields["base_model"] = base
    for end, pipeline in _PIPELINES.items():
        if architecture.endswith(end):
            fields["pipeline_tag"] = pipeline
    return f"---\n{yaml.safe_dump(fields)}---"


def _report(workdir: epath.PathLike) -> list[str]:
    """Returns the facts, evaluations and origin of report.md as sections; [] without one. Paths lose their folders."""
    try:
        report = read_small_file(epath.Path(workdir) / "report.md").decode("utf-8")
    except (OSError, UnicodeDecodeError, UserError):
        return []
    facts, *sections = report.split("\n## ")
    facts = re.sub(r"^(# Training report|!\[.*)\n*", "", facts, flags=re.MULTILINE)
    kept = [section for section in sections if section.startswith(_SECTIONS)]
    return [_FOLDERS.sub("", part.strip()) for part in (f"## Training\n\n{facts}", *(f"## {part}" for part in kept))]


def _conversion(argv: Sequence[str]) -> str:
    """Returns the section with the command that wrote the folder."""
    command = _FOLDERS.sub("", shlex.join(["tfx-jax", "convert", *argv]))
    return f"## Conversion\n\n`{command}`, tfx_jax {tfx_jax.__version__}"
