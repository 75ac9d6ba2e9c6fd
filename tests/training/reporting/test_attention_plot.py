import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from tfx_jax.errors import UserError
from tfx_jax.training.reporting import attention_plot
from tfx_jax.training.reporting.attention_plot import clean_piece, plot_attention, save_attention

SOURCE = ["▁the", "▁child", "▁who", "▁read", "▁three", "▁book", "s", "▁met", "▁a", "▁teacher", ".", "</s>"]
TARGET = ["三冊", "の", "本", "を", "読ん", "だ", "子供", "は", "先生", "に", "会っ", "た", "。", "</s>"]
TARGET_INPUTS = ["<s>", *TARGET[:-1]]
NUM_HEADS = 2


def _maps(num_source, num_target, *, num_layers=2, seed=0):
    """Random weights, every row adding up to one, the decoder's causal; listed as a sorted pytree would be."""
    rng = np.random.default_rng(seed)

    def weights(num_rows, num_columns, *, is_causal=False):
        scores = rng.exponential(size=(NUM_HEADS, num_rows, num_columns)) ** 3
        scores = np.tril(scores) if is_causal else scores
        return (scores / scores.sum(-1, keepdims=True)).astype(np.float32)

    maps = {}
    for layer in range(num_layers):
        maps[f"encoder/{layer}/self"] = weights(num_source, num_source)
        maps[f"decoder/{layer}/self"] = weights(num_target, num_target, is_causal=True)
        maps[f"decoder/{layer}/cross"] = weights(num_target, num_source)
    return dict(sorted(maps.items()))


def _panels(figure):
    """The axes of the maps by title, without the scale."""
    return {axes.texts[0].get_text(): axes for axes in figure.axes if axes.images and axes.texts}


def _drawn(axes):
    return np.asarray(axes.images[0].get_array())


def _labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.fixture(scope="module")
def maps():
    return _maps(len(SOURCE), len(TARGET))


@pytest.fixture(scope="module")
def figure(maps):
    return plot_attention(maps, SOURCE, TARGET, target_inputs=TARGET_INPUTS)


def test_every_head_has_its_panel_and_its_weights(figure, maps):
    lead, *small = _panels(figure).items()
    order = [("encoder", "self"), ("decoder", "self"), ("decoder", "cross")]
    expected = [(*kind, layer, head) for kind in order for layer in range(2) for head in range(NUM_HEADS)]
    assert [title for title, _ in small] == [f"{s} {layer} · {kind} · head {head}" for s, kind, layer, head in expected]
    for (_, axes), (stack, kind, layer, head) in zip(small, expected, strict=True):
        np.testing.assert_array_equal(_drawn(axes), maps[f"{stack}/{layer}/{kind}"][head])
        assert axes.images[0].get_clim() == (0, 1)
    assert lead[0] == "cross-attention · mean over the heads of all layers"
    mean = (maps["decoder/0/cross"].sum(0) + maps["decoder/1/cross"].sum(0)) / (2 * NUM_HEADS)
    np.testing.assert_allclose(_drawn(lead[1]), mean, rtol=1e-5)


def test_layers_are_in_order_of_number(maps):
    maps = {f"encoder/{layer}/self": maps["encoder/0/self"] for layer in (10, 9, 2)}
    titles = list(_panels(plot_attention(maps, SOURCE, [])))
    assert titles[::NUM_HEADS] == [f"encoder {layer} · self · head 0" for layer in (2, 9, 10)]


def test_tokens_label_the_right_sides(figure):
    source, panels = [clean_piece(token) for token in SOURCE], _panels(figure)
    sides = {
        "cross-attention · mean over the heads of all layers": (TARGET, source),
        "encoder 1 · self · head 0": (source, source),
        "decoder 1 · self · head 0": (TARGET, TARGET_INPUTS),
        "decoder 1 · cross · head 0": (TARGET, source),
        "decoder 1 · cross · head 1": ([], source),  # the first of its row speaks for it
    }
    for title, (rows, columns) in sides.items():
        assert _labels(panels[title].yaxis) == rows
        assert _labels(panels[title].xaxis) == columns
        # Weight [t, s] is drawn around (s, t), the first row uppermost: that is what the labels are set by.
        assert panels[title].get_ylim() == (len(_drawn(panels[title])) - 0.5, -0.5)


def test_lead_layer(maps):
    axes = _panels(plot_attention(maps, SOURCE, TARGET, lead_layer=1))[
        "cross-attention · mean over the heads of layer 1"
    ]
    np.testing.assert_allclose(_drawn(axes), maps["decoder/1/cross"].mean(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SOURCE, TARGET),
        pytest.param(TARGET, SOURCE, marks=pytest.mark.slow),
        (["a"], ["▁b", "$x", "y$"]),
        ([f"▁word{index}" for index in range(47)], ["京都市", "の"] * 25),
        pytest.param(["▁short"] * 3, [f"▁long{index}" * 9 for index in range(150)], marks=pytest.mark.slow),
    ],
    ids=["en-ja", "ja-en", "tiny", "50 tokens", "150 tokens"],
)
def test_nothing_overlaps_and_everything_is_on_the_page(source, target):
    figure = plot_attention(_maps(len(source), len(target), num_layers=1), source, target)
    figure.canvas.draw()
    page, boxes = figure.bbox, []
    for axes in figure.axes:
        columns, rows = (
            [tick for tick in axis.get_ticklabels() if tick.get_text()] for axis in (axes.xaxis, axes.yaxis)
        )
        texts = [text.get_window_extent() for text in (*columns, *rows, *axes.texts)]
        assert all(page.x0 <= box.x0 <= box.x1 <= page.x1 and page.y0 <= box.y0 <= box.y1 <= page.y1 for box in texts)
        if columns and columns[0].get_rotation() not in (0, 90):
            _check_slanted(axes, columns, figure)
            texts = texts[len(columns) :]
        boxes += [box.padded(-1) for box in (*texts, axes.get_window_extent())]
    extents = np.array([box.extents for box in boxes])  # x and y of one corner, then of the opposite one
    low, high = extents[:, None, :2], extents[:, None, 2:]
    overlap = (low <= high.swapaxes(0, 1)).all(axis=-1)
    np.testing.assert_array_equal(overlap & overlap.T, np.eye(len(boxes), dtype=bool))  # each with itself alone


def _check_slanted(axes, labels, figure):
    """Slanted lines of type are as far apart as their feet, times the sine; their boxes say nothing."""
    feet = [axes.transData.transform((label.get_position()[0], 0))[0] for label in labels]
    distances = np.diff(feet) * np.sin(np.radians(labels[0].get_rotation()))
    assert np.all(distances > 1.16 * labels[0].get_fontsize() * figure.dpi / 72)  # the height of DejaVu Sans
    title = axes.texts[0].get_window_extent()
    assert not any(label.get_window_extent().padded(-1).overlaps(title) for label in labels)
    assert all(label.get_window_extent().y0 > axes.get_window_extent().y1 for label in labels)


def test_crowded_tokens_are_labeled_at_intervals():
    figure = plot_attention(_maps(3, 150, num_layers=1), ["a", "b", "c"], [str(index) for index in range(150)])
    labels = _labels(_panels(figure)["decoder 0 · cross · head 0"].yaxis)
    assert labels == [str(index) for index in range(0, 150, 150 // len(labels))]
    assert 10 < len(labels) < 150


def test_odd_tokens_are_drawn_without_a_warning():
    source, target = [r"$\no$", "🎈a", "x" * 40], ["a\nb", "กข"]
    figure = plot_attention(_maps(3, 2, num_layers=1), source, target)
    figure.canvas.draw()  # warnings are errors
    axes = _panels(figure)["encoder 0 · self · head 0"]
    assert _labels(axes.xaxis) == [r"$\no$", "�a", "x" * 17 + "…"]
    assert _labels(_panels(figure)["decoder 0 · self · head 0"].yaxis) == ["a�b", "��"]


def test_japanese_is_drawn_in_its_own_shapes(maps, tmp_path):
    one = {"decoder/0/cross": maps["decoder/0/cross"][:, :2, :2]}
    drawn = []
    for index, target in enumerate((["京都", "会っ"], ["東京", "読ん"])):
        assert not set("".join(target)) & {"�"}
        save_attention(tmp_path / f"{index}.png", one, ["a", "b"], target)
        drawn.append((tmp_path / f"{index}.png").read_bytes())
    assert drawn[0] != drawn[1]  # boxes in place of glyphs would look alike


def test_lightness_falls_evenly_from_white_to_black():
    rgb = np.array([to_rgb(attention_plot._COLORS(value)) for value in np.linspace(0, 1, 11)])
    luminance = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
    lightness = np.where(luminance > 0.008856, 116 * np.cbrt(luminance) - 16, 903.3 * luminance)  # CIE 1976 L*
    np.testing.assert_allclose(lightness, np.linspace(100, 0, 11), atol=8)
    assert np.all(np.diff(lightness) < -6)


@pytest.mark.slow
def test_global_state_of_matplotlib_is_untouched(maps):
    before = dict(matplotlib.rcParams)
    plot_attention({"encoder/0/self": maps["encoder/0/self"]}, SOURCE, TARGET)
    assert dict(matplotlib.rcParams) == before
    program = (
        "import sys, numpy, tfx_jax.training.reporting.attention_plot as plot\n"
        "plot.plot_attention({'encoder/0/self': numpy.eye(2)[None]}, ['a', 'b'], []).canvas.draw()\n"
        "print(sorted({'matplotlib.pyplot', 'matplotlib_fontja'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".PNG", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")]
)
def test_saves_by_suffix(tmp_path, maps, suffix, magic):
    path = tmp_path / f"attention{suffix}"
    save_attention(path, {"decoder/0/cross": maps["decoder/0/cross"][:1, :2, :2]}, ["a", "b"], ["c", "d"])
    assert path.read_bytes().startswith(magic)


def test_a_huge_picture_is_made_coarser(tmp_path, maps, monkeypatch):
    monkeypatch.setattr(attention_plot, "_MOST_PIXELS", 2e5)
    path = tmp_path / "attention.png"
    save_attention(path, {"decoder/0/cross": maps["decoder/0/cross"]}, SOURCE, TARGET)
    width, height = np.frombuffer(path.read_bytes()[16:24], ">u4")
    assert width * height == pytest.approx(2e5, rel=0.02)


def test_save_errors_are_one_line(tmp_path, maps):
    with pytest.raises(UserError, match=r"a\.bmp: its name must end in \.png"):
        save_attention(tmp_path / "a.bmp", maps, SOURCE, TARGET)
    with pytest.raises(UserError, match=r"no folder .*nowhere"):
        save_attention(tmp_path / "nowhere" / "a.png", maps, SOURCE, TARGET)
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*taken\.png: Is a directory"):
        save_attention(tmp_path / "taken.png", {"decoder/0/cross": maps["decoder/0/cross"]}, SOURCE, TARGET)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder/0/cross", (2, 3, 4), r"shape \[2, 3, 4\], but 3 target tokens by 5 source tokens need \[N, 3, 5\]"),
        ("decoder/0/cross", (2, 5, 3), r"shape \[2, 5, 3\], but 3 target tokens by 5 source tokens"),
        ("decoder/0/self", (2, 3, 5), r"3 target tokens by 3 target input tokens need \[N, 3, 3\]"),
        ("encoder/0/self", (5, 5), r"shape \[5, 5\], but 5 source tokens by 5 source tokens need \[N, 5, 5\]"),
        ("encoder/0/self", (0, 5, 5), r"shape \[0, 5, 5\]: there is nothing to draw"),
        ("encoder/0/cross", (2, 5, 5), r"5 source tokens by 3 target tokens need \[N, 5, 3\]"),
        ("pool/0/cross", (1, 1, 5), r"unknown attention map 'pool/0/cross'"),
        ("decoder/first/self", (2, 3, 3), r"unknown attention map 'decoder/first/self'"),
    ],
)
def test_maps_must_fit_the_tokens(name, shape, message):
    with pytest.raises(ValueError, match=message):
        plot_attention({name: np.zeros(shape, np.float32)}, list("abcde"), list("xyz"))


def test_other_errors(maps):
    with pytest.raises(ValueError, match="no attention maps"):
        plot_attention({}, SOURCE, TARGET)
    with pytest.raises(UserError, match=r"layer 2 has no cross-attention: choose one of \[0, 1\]"):
        plot_attention(maps, SOURCE, TARGET, lead_layer=2)


@pytest.mark.parametrize(
    ("piece", "expected"),
    [("▁in", "in"), ("in", "in"), ("▁", "␣"), ("", "␣"), ("▁New▁York", "New York"), ("京都", "京都"), ("</s>", "</s>")],
)
def test_clean_piece(piece, expected):
    assert clean_piece(piece) == expected
    assert clean_piece(expected) == expected
