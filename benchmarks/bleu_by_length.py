r"""BLEU by the length of the source, of several trained translation models: Figure 2 of Bahdanau et al. (2015).

    python benchmarks/bleu_by_length.py --output=runs/bleu_by_length.png \
        --workdirs no-attention=runs/fixed Bahdanau=runs/bahdanau Luong=runs/luong

prints a table, writes it beside the figure (runs/bleu_by_length.md), and draws a line for each model. All models must
have the same sentences. Words are separated by spaces, and `--groups` divides the sentences by their number of words
into groups of similar size. BLEU is tokenized, with the search that each configuration names. The paper
(https://arxiv.org/abs/1409.0473) shows that a fixed context falls behind as sentences grow.
"""

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath
from matplotlib.figure import Figure

from tfx_jax.data.sources import Split
from tfx_jax.errors import UserError
from tfx_jax.metrics import bleu_scores
from tfx_jax.tasks import TranslationTask
from tfx_jax.training import load_run
from tfx_jax.training.checkpoint import load_best_params, load_params


class Translated(NamedTuple):
    """A model's translations of a split, with one item per sentence."""

    sources: list[str]
    hypotheses: list[str]
    references: list[str]
    scored_as: tuple[str, bool]
    """(language, whether the text is tokenized), as `bleu_scores` takes them."""


class Group(NamedTuple):
    """Sentences of similar length.

    Attributes:
      shortest: words of the shortest sentence.
      longest: words of the longest sentence.
      indices: indices of the sentences, [number of sentences] int.
    """

    shortest: int
    longest: int
    indices: np.ndarray

    @property
    def title(self) -> str:
        """The range of lengths, such as "2 to 3"."""
        return f"{self.shortest}" if self.shortest == self.longest else f"{self.shortest} to {self.longest}"


def translate(workdir: str, step: str | None, split: Split) -> Translated:
    """Translates a split with the best checkpoint of a training, or with the one named by `step`, such as "average".

    Raises:
      UserError: if there is no such training, checkpoint or split.
    """
    run = load_run(epath.Path(workdir), TranslationTask)
    params = load_best_params(workdir) if step is None else load_params(workdir, step)
    pairs = run.config.task.splits()[split]
    _, hypotheses, references = run.task.score(run.task.translator(run.graphdef), run.trained(params), pairs)
    sources = [pairs[index]["source"] for index in range(len(pairs))]
    return Translated(sources, hypotheses, references, run.task.config.data.scored_as)


def groups_by_length(sources: Sequence[str], num_groups: int) -> list[Group]:
    """Divides sentences into at most `num_groups` groups of increasing length; equal lengths are in one group.

    >>> [(group.title, group.indices.tolist()) for group in groups_by_length(["a b c", "a", "b", "a b", "c"], 2)]
    [('1', [1, 2, 4]), ('2 to 3', [0, 3])]
    """
    lengths = np.array([len(source.split()) for source in sources])
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, num_groups + 1)[1:], method="lower"))
    group_of_sentence = np.searchsorted(edges, lengths)
    members = [np.flatnonzero(group_of_sentence == group) for group in range(len(edges))]
    return [Group(int(lengths[indices].min()), int(lengths[indices].max()), indices) for indices in members]


def bleu_of_groups(translated: Translated, groups: Sequence[Group]) -> list[float]:
    """Returns the tokenized BLEU of each group."""
    language, is_tokenized = translated.scored_as
    hypotheses, references = (np.array(side, dtype=object) for side in (translated.hypotheses, translated.references))
    return [
        bleu_scores(
            hypotheses[group.indices].tolist(),
            references[group.indices].tolist(),
            language=language,
            is_tokenized=is_tokenized,
        ).tokenized
        for group in groups
    ]


def table(groups: Sequence[Group], scores: Mapping[str, Sequence[float]]) -> str:
    """Returns a Markdown table with a row for each group; `scores` has the BLEU of each group by model."""
    lines = [f"| words | sentences | {' | '.join(scores)} |", "|---" * (2 + len(scores)) + "|"]
    for index, group in enumerate(groups):
        cells = " | ".join(f"{values[index]:.2f}" for values in scores.values())
        lines.append(f"| {group.title} | {len(group.indices)} | {cells} |")
    return "\n".join(lines) + "\n"


def draw(groups: Sequence[Group], scores: Mapping[str, Sequence[float]], path: pathlib.Path) -> None:
    """Draws a line for each model, as in the paper's figure; `scores` has the BLEU of each group by model."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for (name, values), line in zip(scores.items(), ("-", "--", ":", "-.") * len(scores), strict=False):
        axes.plot(range(len(groups)), values, line, marker="o", label=name)
    axes.set_xticks(range(len(groups)), [group.title for group in groups])
    axes.set(xlabel="words of the source", ylabel="BLEU", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bleu_by_length.py", allow_abbrev=False)
    parser.add_argument("--workdirs", nargs="+", required=True, metavar="NAME=DIR", help="trainings to compare")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the figure: .png, .pdf or .svg")
    parser.add_argument("--step", help='checkpoint, such as "average"; left out: the best')
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--groups", type=int, default=5, help="how many groups of sentences")
    arguments = parser.parse_args(argv)
    if arguments.groups < 1:
        parser.error("--groups must be at least 1")
    workdirs = dict(each.partition("=")[::2] for each in arguments.workdirs)
    if "" in workdirs.values():
        parser.error("--workdirs takes NAME=DIR, such as Luong=runs/luong")
    try:
        translated = {name: translate(workdir, arguments.step, arguments.split) for name, workdir in workdirs.items()}
        first = next(iter(translated.values()))
        if any(each.sources != first.sources for each in translated.values()):
            raise UserError("the trainings do not have the same sentences: compare those of one data set")
    except UserError as error:
        parser.error(str(error))
    groups = groups_by_length(first.sources, arguments.groups)
    scores = {name: bleu_of_groups(each, groups) for name, each in translated.items()}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".md").write_text(table(groups, scores), encoding="utf-8")
    draw(groups, scores, arguments.output)
    print(table(groups, scores), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
