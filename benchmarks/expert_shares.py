r"""Which experts the tokens of each group of sentences are sent to, in each mixture of a trained translation model.

    python benchmarks/expert_shares.py --workdir=runs/sparse

prints, for every mixture, a row for each group with the percentage of its tokens that go to each expert. The last
column is the distance of the groups: half the sum of the differences of their percentages. It is 0 if all groups are
routed alike, and 100 if no expert has tokens of two groups. The group of a sentence is its first word, such as the
language to translate into. The model must route each token to one expert (Switch).
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from tfx_jax.data.sources import PairSource
from tfx_jax.errors import UserError
from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.nn import MixtureOfExperts
from tfx_jax.tasks import TranslationTask
from tfx_jax.training import load_run
from tfx_jax.training.checkpoint import load_best_params

_ROWS = 64

Observer = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""Called with a mixture's router, [D, E], the expert of each token and whether the token is real, both [T]."""


class _Observed(MixtureOfExperts):
    """A mixture that passes the expert of each token to an observer; in evaluation no expert has a capacity limit."""

    found: Observer

    def __call__(self, x: Any, *, token_mask: Any = None, rngs: nnx.Rngs | None = None) -> Any:
        router = self.router[...].astype(jnp.float32)
        expert = (x.astype(jnp.float32) @ router).argmax(axis=-1)
        jax.debug.callback(
            self.found, router, expert, jnp.ones(expert.shape, bool) if token_mask is None else token_mask
        )
        return super().__call__(x, token_mask=token_mask, rngs=rngs)


def expert_shares(workdir: str) -> dict[str, dict[str, np.ndarray]]:
    """Runs the best checkpoint of a training on the validation pairs.

    Returns:
      For each mixture, such as "decoder layer 2", and each group of sentences, the share of tokens of each expert, [E],
      which sums to 1.

    Raises:
      UserError: if there is no such training, it has no mixtures of experts, or a token goes to several experts.
    """
    run = load_run(epath.Path(workdir), TranslationTask)
    params = load_best_params(workdir)
    model = nnx.merge(run.graphdef, jax.tree.map(jnp.asarray, params))
    mixtures = {_side(path): part for path, part in nnx.iter_modules(model) if isinstance(part, MixtureOfExperts)}
    if not mixtures:
        raise UserError(f"{workdir} holds no model with experts: config.model.experts.num_experts is 0")
    experts = cast(TransformerConfig, run.config.model).experts
    if experts.experts_per_token != 1:
        raise UserError("expert_shares.py is for mixtures of which a token meets one expert")
    routers = {
        f"{side} layer {(1 + index) * experts.every}": np.asarray(router, np.float32)
        for side, mixture in mixtures.items()
        for index, router in enumerate(mixture.router[...])
    }
    counts = {name: dict[str, np.ndarray]() for name in routers}
    group = ""

    def found(router: np.ndarray, expert: np.ndarray, mask: np.ndarray) -> None:
        """Adds the tokens of a batch to the counts of a mixture, which is recognized by its router."""
        name = next(name for name, other in routers.items() if np.array_equal(other, router))
        tokens = np.bincount(np.asarray(expert)[np.asarray(mask)], minlength=router.shape[1])
        counts[name][group] = counts[name].get(group, 0) + tokens

    for mixture in mixtures.values():
        mixture.__class__ = _Observed
        cast(_Observed, mixture).found = found
    read = jax.jit(lambda model, source, target: model(source, target).sum())
    for group, source, target in _batches(run.task, run.config.task.splits()["validation"]):  # noqa: B007, `found` reads
        read(model, source, target).block_until_ready()
        jax.effects_barrier()
    return {name: {group: x / x.sum() for group, x in groups.items()} for name, groups in counts.items()}


def _side(path: tuple[Any, ...]) -> str:
    """Returns "encoder" or "decoder" from the path of a module."""
    return str(path[0]).removesuffix("_layers")


def _batches(task: TranslationTask, pairs: PairSource) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields (group, source tokens, target tokens) of batches with sentences of one group; tokens are [64, length]."""
    groups: dict[str, list[int]] = {}
    for index in range(len(pairs)):
        groups.setdefault(pairs[index]["source"].partition(" ")[0], []).append(index)
    length = task.config.data.max_length
    for group, indices in groups.items():
        for start in range(0, len(indices), _ROWS):
            sides = []
            for side in ("source", "target"):
                tokens = np.full((_ROWS, length), task.tokenizer.pad_id, np.int32)
                for row, index in zip(tokens, indices[start : start + _ROWS], strict=False):
                    ids = task.tokenizer.encode_with_specials(pairs[index][side]).ids[:length]
                    row[: len(ids)] = ids
                sides.append(tokens)
            yield group, *sides


def distance(shares: Mapping[str, np.ndarray]) -> float:
    """Returns half the sum of the differences between the shares of two groups, in percent.

    With more groups, the mean over all pairs of groups. `shares` are [E] by group.

    >>> distance({"de": np.array([1.0, 0.0]), "fr": np.array([0.25, 0.75])})
    75.0
    """
    groups = list(shares.values())
    pairs = [(one, other) for index, one in enumerate(groups) for other in groups[index + 1 :]]
    return float(np.mean([50 * np.abs(one - other).sum() for one, other in pairs])) if pairs else 0.0


def table(shares: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Returns a Markdown table with a row for each mixture and group."""
    (first, *_) = (group for groups in shares.values() for group in groups.values())
    numbers = [str(number) for number in range(1, 1 + len(first))]
    lines = [f"| mixture | group | {' | '.join(numbers)} | distance |", "|---" * (3 + len(numbers)) + "|"]
    for name, groups in shares.items():
        for group, values in groups.items():
            cells = " | ".join(f"{100 * value:.0f}" for value in values)
            lines.append(f"| {name} | {group} | {cells} | {distance(groups):.0f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("expert_shares.py", allow_abbrev=False)
    parser.add_argument("--workdir", required=True, help="of a training with experts")
    arguments = parser.parse_args(argv)
    try:
        print(table(expert_shares(arguments.workdir)))
    except UserError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
