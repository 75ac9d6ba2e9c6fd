r"""Table 1 of "Attention Is All You Need", measured instead of copied, and with every attention for long contexts.

    python benchmarks/table1.py --output=runs/table1

Section 4 of Vaswani et al. (2017, https://arxiv.org/abs/1706.03762) compares layers that map n vectors of size d to n
vectors of size d by three numbers. Nothing is copied from there but the column of theory:

- **Complexity**: the floating-point operations that XLA's cost analysis finds in the lowered program, which is never
  run. XLA counts the body of a loop once, so a loop adds its remaining rounds here. Attention is one head without its
  projections, as in the paper, and the slopes are least squares on log-log axes.
- **Sequential operations**: rounds of loops along the longest chain of dependencies in the jaxpr, loops inside loops
  multiplied; 1 without loops. What runs in parallel in principle (products, sums, sorting) counts as one.
- **Maximum path length**: how many layers, each with its residual connection, until every output depends on every input
  (for causal rows, on every input up to it). A layer connects the positions where its Jacobian at random inputs is not
  zero. The recurrence connects all of them within a layer, one step at a time: there, steps are counted.

Measured (jax 0.10.2, CPU, in 5 minutes at the lowest priority of two shared cores; sizes are those of `Sizes`, where
the leading terms rule): every exponent within 0.02 of theory; the farthest are causal linear attention, d^1.99, and
routing, n^1.49. Rounds of loops at n = 4,096 and 65,536: as many as n in the recurrence, n / 64 in
causal linear attention, (n / 64)^2 in chunked attention, which pays for its memory here, and always 4 in LSH, one for
each hash. Paths at n = 64 and 256: recurrent 63 and 255; convolutional and separable 21 and 85; dilated 3 and 3; window
16 and 64; BigBird 2 and 2; LSH 3 and 4; routing 12 and 14, because a layer leaves some tokens to no cluster; local
blocks never meet; 1 for all others.
"""

import argparse
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun, jaxprs_in_params
from jaxtyping import Array, Bool, Float

from tfx_jax import functional

KERNEL = 7
"""Width of the convolutions, the paper's k."""

Layer = Callable[[Float[Array, "n d"], tuple[Array, ...], Array], Float[Array, "n d"]]
"""Maps n vectors to n vectors, given weights and a PRNG key."""


def recurrent(x: Float[Array, "n d"], weights: tuple[Array, ...], rng: Array) -> Float[Array, "n d"]:
    def step(state: Array, x: Array) -> tuple[Array, Array]:
        state = _cell(state, x, weights)
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]


def recurrent_step(x: Float[Array, "n d"], weights: tuple[Array, ...], rng: Array) -> Float[Array, "n d"]:
    """Returns one step of the recurrence for all positions at once; the state is the input of the previous position."""
    return _cell(jnp.pad(x, ((1, 0), (0, 0)))[:-1], x, weights)


def _cell(state: Array, x: Array, weights: tuple[Array, ...]) -> Array:
    input_weights, state_weights = weights
    return jnp.tanh(x @ input_weights + state @ state_weights)


def convolution(
    x: Float[Array, "n d"], weights: tuple[Array, ...], rng: Array, dilation: int = 0, groups: int = 1
) -> Float[Array, "n d"]:
    """Returns a convolution over KERNEL inputs.

    Args:
      x: inputs.
      weights: the kernel.
      rng: unused.
      dilation: distance of the inputs of a causal convolution; 0 for a centered convolution of neighbors.
      groups: number of groups of dimensions; outputs of a group depend on its inputs only.
    """
    padding = [((KERNEL - 1) * dilation, 0)] if dilation else "SAME"
    layout = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": groups}
    return jax.lax.conv_general_dilated(x[None], weights[0], (1,), padding, rhs_dilation=(dilation or 1,), **layout)[0]


def separable(x: Float[Array, "n d"], weights: tuple[Array, ...], rng: Array) -> Float[Array, "n d"]:
    """Returns a separable convolution: over positions in each dimension, then over dimensions at each position."""
    depthwise, pointwise = weights
    return convolution(x, (depthwise,), rng, groups=x.shape[1]) @ pointwise


def dilated(depth: int) -> Layer:
    """Returns a causal convolution with dilation KERNEL**depth.

    Centered windows would be cut at both ends of the sequence, which would lengthen paths.
    """
    return functools.partial(convolution, dilation=KERNEL**depth)


def self_attention(attention_fn: Callable[..., Any], *weight_names: str, **options: Any) -> Layer:
    """Returns a layer of one attention head whose queries, keys and values are its inputs.

    Args:
      attention_fn: attention function.
      weight_names: names of the arguments of `attention_fn` that get the layer's weights.
      options: further arguments of `attention_fn`.
    """

    def layer(x: Array, weights: Any, rng: Array) -> Array:
        heads = x[None, :, None]  # [n, d] -> [B=1, T=n, N=1, H=d]
        named_weights = dict(zip(weight_names, weights, strict=True))
        return attention_fn(heads, heads, heads, **named_weights, **options)[0, :, 0]

    return layer


class Row(NamedTuple):
    """A row of the table: a layer and its theoretical figures."""

    name: str
    layer: Layer
    theory: tuple[str, str, str]
    """(complexity, sequential operations, maximum path length)."""
    slopes: tuple[float, float]
    """(exponent of n, exponent of d) in the complexity for large d."""
    weights: Callable[[int, int], list[tuple[int, ...]]] = lambda n, d: []
    """The shapes of the weights for n vectors of size d."""
    hop: Callable[[int], Layer] | None = None
    """Returns the layer at a depth of the stack, for measuring paths; None means `layer` at every depth."""
    is_causal: bool = False


def rows(r: int) -> list[Row]:
    """Returns the rows of the table; r is the number of neighbors, of features, or the size of blocks of a layer."""

    def lsh(x: Array, weights: Any, rng: Array) -> Array:
        halvings = round(math.log2(2 * x.shape[0] / r))  # buckets of half a chunk, found at a cost of log n
        options = {"num_hashes": 4, "num_buckets": (2,) * halvings, "chunk_size": r}
        return self_attention(functional.lsh_attention, rng=rng, **options)(x, weights, rng)

    window = self_attention(functional.sliding_window_attention, window=r // 2)
    local = self_attention(functional.local_attention, block_size=r)
    blocks = {"num_global_blocks": 1, "num_window_blocks": 3, "num_random_blocks": 3}
    bigbird = self_attention(functional.bigbird_attention, block_size=r, **blocks)

    def routing(x: Array, weights: Any, rng: Array) -> Array:
        window = -(-x.shape[0] // weights[0].shape[1])
        return self_attention(functional.routing_attention, "centroids", window=window)(x, weights, rng)

    favor = self_attention(functional.favor_attention, "projection")
    linear = self_attention(functional.linear_attention)
    causal = self_attention(functional.linear_attention, is_causal=True, block_size=r)
    chunked = self_attention(functional.chunked_attention, chunk_size=r)
    return [
        Row("Self-attention", self_attention(functional.dot_product_attention), ("n² d", "1", "1"), (2, 1)),
        Row(
            "Recurrent",
            recurrent,
            ("n d²", "n", "n"),
            (1, 2),
            lambda n, d: 2 * [(d, d)],
            lambda _: recurrent_step,
            True,
        ),
        Row("Convolutional", convolution, ("k n d²", "1", "n / k"), (1, 2), lambda n, d: [(KERNEL, d, d)]),
        Row(
            "Dilated, causal",
            dilated(0),
            ("k n d²", "1", "log_k n"),
            (1, 2),
            lambda n, d: [(KERNEL, d, d)],
            dilated,
            True,
        ),
        Row("Separable", separable, ("k n d + n d²", "1", "n / k"), (1, 2), lambda n, d: [(KERNEL, 1, d), (d, d)]),
        Row("Restricted (sliding window)", window, ("r n d", "1", "n / r"), (1, 1)),
        Row("Local blocks", local, ("r n d", "1", "∞"), (1, 1)),
        Row("BigBird", bigbird, ("r n d", "1", "1"), (1, 1)),
        Row("LSH (Reformer)", lsh, ("r n d + n d log n", "1", "log n"), (1, 1)),
        Row("Routing, √n clusters", routing, ("n^1.5 d", "1", "log n"), (1.5, 1), lambda n, d: [(1, math.isqrt(n), d)]),
        Row("FAVOR+ (Performer)", favor, ("r n d", "1", "1"), (1, 1), lambda n, d: [(r, d)]),
        Row("Linear", linear, ("n d²", "1", "1"), (1, 2)),
        Row("Linear, causal", causal, ("r n d + n d²", "n / r", "1"), (1, 2), is_causal=True),
        Row("Chunked", chunked, ("n² d", "(n / r)²", "1"), (2, 1)),
    ]


def traced(row: Row, n: int, d: int) -> ClosedJaxpr:
    """Returns the program of a layer for n vectors of size d, traced from shapes only."""
    x, *weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, d), *row.weights(n, d)))
    return jax.make_jaxpr(row.layer)(x, tuple(weights), jax.eval_shape(jax.random.key, 0))


def count_operations(program: ClosedJaxpr) -> float:
    """Returns the floating-point operations of a program, including all rounds of its loops."""
    total = _xla_count(program)
    for equation in _equations(program.jaxpr):
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"]
            total += equation.params["length"] * count_operations(body) - _xla_count(body)
        elif equation.primitive.name == "cumsum":  # lowered as n sums, n² operations, which no backend computes
            sums = functools.partial(equation.primitive.bind, **equation.params)
            x: Any = equation.invars[0].aval
            total += x.size - _xla_count(jax.make_jaxpr(sums)(jax.ShapeDtypeStruct(x.shape, x.dtype)))
    return total


def _xla_count(program: ClosedJaxpr) -> float:
    """Returns XLA's count, which has the body of each loop once.

    The program is lowered but not compiled, because compilation may unroll loops and hide products in calls.
    """
    arguments = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals)
    analysis = jax.jit(jaxpr_as_fun(program)).lower(*arguments).cost_analysis()
    return float((analysis or {}).get("flops", 0.0))


def _equations(program: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields all equations outside of loops, and the loops themselves."""
    for equation in program.eqns:
        if equation.primitive.name == "while":
            raise ValueError("a while loop does not tell how many rounds it takes")
        inner = [] if equation.primitive.name == "scan" else list(jaxprs_in_params(equation.params))
        yield from itertools.chain([equation], *map(_equations, inner))


def count_sequential(program: Jaxpr) -> int:
    """Returns the rounds of loops along the longest chain of dependencies; 0 without loops."""
    rounds_until: dict[Var, int] = {}  # rounds until each variable is known
    for equation in program.eqns:
        before = max((rounds_until.get(x, 0) for x in equation.invars if isinstance(x, Var)), default=0)
        inside = max(map(count_sequential, jaxprs_in_params(equation.params)), default=0)
        if equation.primitive.name == "scan":
            inside = equation.params["length"] * max(1, inside)
        rounds_until.update((x, before + inside) for x in equation.outvars)
    return max(rounds_until.values(), default=0)


def path_length(row: Row, n: int, d: int = 8) -> float:
    """Returns the number of layers until every output depends on all inputs (if causal, on those up to its position).

    Infinity if n layers do not suffice.
    """
    required = np.tri(n, dtype=bool) if row.is_causal else np.ones((n, n), bool)
    reached = np.eye(n, dtype=bool)  # reached[i, j]: whether output i depends on input j
    shapes = ((n, d), (d,), *row.weights(n, d))
    for depth in range(n):
        layer = row.layer if row.hop is None else row.hop(depth)
        reached |= np.asarray(_connected(layer, shapes, jax.random.key(depth))) @ reached
        if reached[required].all():
            return depth + 1
    return math.inf


@functools.partial(jax.jit, static_argnums=(0, 1))
def _connected(layer: Layer, shapes: tuple[tuple[int, ...], ...], rng: Array) -> Bool[Array, "n n"]:
    """Returns whether output i depends on input j: where the Jacobian of a random projection of output i is not 0.

    Args:
      layer: the layer.
      shapes: shapes of the inputs, of the direction of projection and of the weights.
      rng: key for all of them.
    """
    rng, *rngs = jax.random.split(rng, len(shapes) + 1)
    x, direction, *weights = map(jax.random.normal, rngs, shapes)
    jacobian = jax.jacrev(lambda x: layer(x, tuple(weights), rng) @ direction)(x)
    return (jacobian != 0).any(axis=-1)


class Measured(NamedTuple):
    """The measurements of a row.

    Attributes:
      by_n: operations for each of `Sizes.n`.
      by_d: operations for each of `Sizes.d`.
      slopes: (exponent of n, exponent of d).
      sequential: sequential operations for each of `Sizes.n`.
      paths: maximum path length for each of `Sizes.n_of_paths`.
    """

    by_n: list[float]
    by_d: list[float]
    slopes: tuple[float, float]
    sequential: list[int]
    paths: list[float]


class Sizes(NamedTuple):
    """Sizes: large where a program is only analyzed, small (`*_of_paths`) where Jacobians are computed."""

    n: tuple[int, ...] = (4_096, 16_384, 65_536)
    d: tuple[int, ...] = (1_024, 4_096, 16_384)  # far above k and r, so that d² dominates r d
    r: int = 64
    n_of_paths: tuple[int, ...] = (64, 256)
    r_of_paths: int = 8


def measure(row: Row, small: Row, sizes: Sizes) -> Measured:
    """Measures a row.

    Args:
      row: the row for large sizes.
      small: the same row for small sizes, whose paths are measured.
      sizes: sizes; n varies at the middle d, and d at the middle n.
    """
    middle_n, middle_d = sizes.n[len(sizes.n) // 2], sizes.d[len(sizes.d) // 2]
    programs = [traced(row, n, middle_d) for n in sizes.n]
    by_n = [count_operations(program) for program in programs]
    by_d = [count_operations(traced(row, middle_n, d)) for d in sizes.d]
    slopes = _slope(sizes.n, by_n), _slope(sizes.d, by_d)
    sequential = [max(1, count_sequential(program.jaxpr)) for program in programs]
    return Measured(by_n, by_d, slopes, sequential, [path_length(small, n) for n in sizes.n_of_paths])


def _slope(sizes: tuple[int, ...], operations: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(operations), 1)[0])


def table(results: dict[Row, Measured], sizes: Sizes) -> str:
    """Returns the table in Markdown: theoretical and measured figures."""
    few, *_, many = sizes.n
    header = ["Layer", "Complexity", "exponent of n", "of d", "Sequential operations", f"n = {few:,}", f"n = {many:,}"]
    header += ["Maximum path length", *(f"n = {n}" for n in sizes.n_of_paths)]
    lines = [header, ["---"] * len(header)]
    for row, measured in results.items():
        exponents = (f"{slope:.2f} ({want:g})" for slope, want in zip(measured.slopes, row.slopes, strict=True))
        sequential = (f"{steps:,}" for steps in (measured.sequential[0], measured.sequential[-1]))
        paths = (f"{length}".replace("inf", "∞") for length in measured.paths)
        complexity, steps, path = row.theory
        lines.append([row.name, complexity, *exponents, steps, *sequential, path, *paths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(results: dict[Row, Measured], sizes: Sizes, path: pathlib.Path) -> None:
    """Draws how operations, sequential operations and paths grow."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    panels = (
        ("Operations, by length n", "n", sizes.n, lambda measured: measured.by_n),
        ("Operations, by size d", "d", sizes.d, lambda measured: measured.by_d),
        ("Sequential operations", "n", sizes.n, lambda measured: measured.sequential),
        ("Maximum path length (no line: never connected)", "n", sizes.n_of_paths, lambda measured: measured.paths),
    )
    for axis, (title, label, x, y) in zip(axes.flat, panels, strict=True):
        for i, (row, measured) in enumerate(results.items()):
            axis.loglog(x, y(measured), marker="os^Dv<>"[i % 7], color=f"C{i % 10}", label=row.name)
        axis.set(title=title, xlabel=label)
        axis.set_xticks(x, [f"{size:,}" for size in x])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures Table 1 of Attention Is All You Need.")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder for table1.md and table1.png")
    output = parser.parse_args().output
    sizes = Sizes()
    results = {}
    for row, small in zip(rows(sizes.r), rows(sizes.r_of_paths), strict=True):
        print(f"measuring {row.name}", file=sys.stderr)
        results[row] = measure(row, small, sizes)
    output.mkdir(parents=True, exist_ok=True)
    text = table(results, sizes)
    (output / "table1.md").write_text(text + "\n")
    plot(results, sizes, output / "table1.png")
    print(text)


if __name__ == "__main__":
    main()
