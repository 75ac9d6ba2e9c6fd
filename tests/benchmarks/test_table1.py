"""The measured Table 1: its three instruments on programs whose figures are known, and some of its lines."""

import math
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import table1

ROWS = {row.name: row for row in table1.rows(4)}


def test_operations_of_a_product_are_twice_its_size():
    program = jax.make_jaxpr(lambda x, y: x @ y)(jnp.ones((3, 5)), jnp.ones((5, 7)))
    assert table1.count_operations(program) == 2 * 3 * 5 * 7


def test_every_round_of_nested_loops_counts():
    def program(x):
        def inner(x, _):
            return x @ x, None

        def outer(x, _):
            return jax.jit(lambda x: jax.lax.scan(inner, x, None, length=5)[0])(x) @ x, None

        return jax.lax.scan(outer, x, None, length=3)[0] @ x

    traced = jax.make_jaxpr(program)(jnp.ones((16, 16)))
    products = 3 * (5 + 1) + 1
    assert table1.count_operations(traced) == pytest.approx(products * 2 * 16**3, rel=0.01)  # counters count too
    assert table1.count_sequential(traced.jaxpr) == 15


def test_a_cumulative_sum_is_linear():
    traced = jax.make_jaxpr(lambda x: jnp.cumsum(x, axis=1) @ x.T)(jnp.ones((3, 50)))
    assert table1.count_operations(traced) == 3 * 50 + 2 * 3 * 3 * 50


def test_loops_in_a_row_add_up_and_loops_side_by_side_do_not():
    def loop(x, length):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=length)[0]

    in_a_row = jax.make_jaxpr(lambda x: loop(loop(x, 3), 4))(1.0)
    side_by_side = jax.make_jaxpr(lambda x: loop(x, 3) + loop(x, 4))(1.0)
    assert table1.count_sequential(in_a_row.jaxpr) == 7
    assert table1.count_sequential(side_by_side.jaxpr) == 4


def test_a_loop_of_unknown_length_is_refused():
    program = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x < 9.0, lambda x: x + x, x))(1.0)
    with pytest.raises(ValueError, match="does not tell how many rounds"):
        table1.count_operations(program)


@pytest.mark.parametrize(
    "name",
    [
        "Self-attention",
        "Recurrent",
        pytest.param("Restricted (sliding window)", marks=pytest.mark.slow),
        pytest.param("Chunked", marks=pytest.mark.slow),
    ],
)
def test_slopes_are_those_of_theory(name):
    sizes = table1.Sizes(n=(256, 1_024), d=(256, 512), n_of_paths=())
    measured = table1.measure(ROWS[name], ROWS[name], sizes)
    assert measured.slopes == pytest.approx(ROWS[name].slopes, abs=0.05)
    sequential = {"Recurrent": [256, 1_024], "Chunked": [64**2, 256**2]}
    assert measured.sequential == sequential.get(name, [1, 1])


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("Self-attention", 1),
        ("Recurrent", 14),
        ("Restricted (sliding window)", 7),  # two positions a layer, the last with less to do
        pytest.param("Convolutional", 5, marks=pytest.mark.slow),
        pytest.param("Dilated, causal", 2, marks=pytest.mark.slow),  # 6 positions back, then 6 + 42
        ("Local blocks", math.inf),
        pytest.param("Linear, causal", 1, marks=pytest.mark.slow),
    ],
)
def test_path_lengths(name, length):
    assert table1.path_length(ROWS[name], 15, 4) == length


def test_command_writes_table_and_plot(tmp_path, monkeypatch, capsys):
    rows = table1.rows
    few = table1.Sizes(n=(64, 128), d=(16, 32), n_of_paths=(4, 8), r=8, r_of_paths=4)
    monkeypatch.setattr(table1, "rows", lambda r: rows(r)[:2])
    monkeypatch.setattr(table1, "Sizes", lambda: few)
    monkeypatch.setattr(sys, "argv", ["table1.py", f"--output={tmp_path / 'new'}"])
    table1.main()
    lines = (tmp_path / "new" / "table1.md").read_text().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| Self-attention | n² d | 2.00 (2) |")
    assert lines[3].endswith("| n | 64 | 128 | n | 3 | 7 |")
    assert capsys.readouterr().out.splitlines() == lines
    assert (tmp_path / "new" / "table1.png").stat().st_size > 10_000
