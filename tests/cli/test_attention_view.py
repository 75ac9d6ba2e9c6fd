import html
import json
import re

import numpy as np
import pytest

from tfx_jax.cli.attention_view import AttentionView
from tfx_jax.errors import UserError

SOURCE, TARGET = ["▁the", "▁cat", "</script><b>", "</s>"], ["猫", "だ", "</s>"]


def _maps():
    random = np.random.default_rng(0)
    sizes = {"encoder/0/self": (4, 4), "decoder/0/cross": (3, 4), "decoder/10/cross": (3, 4), "decoder/2/cross": (3, 4)}
    return {name: random.dirichlet(np.ones(columns), (2, rows)) for name, (rows, columns) in sizes.items()}


def _data(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_page_holds_every_weight_with_its_tokens_in_the_order_of_layers():
    data = _data(AttentionView(_maps(), SOURCE, TARGET).page)
    listed = [(entry["kind"], entry["layer"]) for entry in data["maps"]]
    assert listed == [("encoder self", 0), ("decoder cross", 0), ("decoder cross", 2), ("decoder cross", 10)]
    source, target = ["the", "cat", "</script><b>", "</s>"], ["猫", "だ", "</s>"]
    assert [(entry["queries"], entry["keys"]) for entry in data["maps"]] == [(source, source)] + [(target, source)] * 3
    for entry, (name, want) in zip(data["maps"], sorted(_maps().items(), key=_order), strict=True):
        np.testing.assert_allclose(np.array(entry["weights"]) / data["one"], want, atol=5e-4, err_msg=name)


def _order(item):
    stack, layer, _ = item[0].split("/")
    return stack != "encoder", int(layer)


def test_page_needs_nothing_from_elsewhere():
    page = AttentionView(_maps(), SOURCE, TARGET).page.replace("http://www.w3.org/2000/svg", "")  # a name, not a place
    assert not re.search(r"https?:|src=|<link|@import|url\(", page)


def test_notebook_gets_the_page_in_a_frame():
    view = AttentionView(_maps(), SOURCE, TARGET)
    assert html.unescape(re.search(r'srcdoc="([^"]*)"', view._repr_html_())[1]) == view.page


def test_maps_that_do_not_fit():
    with pytest.raises(ValueError, match="no attention maps"):
        AttentionView({}, SOURCE, TARGET)
    with pytest.raises(ValueError, match=r"map 'decoder/0/cross' has shape \[2, 3, 4\], but 2 target tokens by 4"):
        AttentionView({"decoder/0/cross": np.ones((2, 3, 4))}, SOURCE, TARGET[1:])


def test_page_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*: No such file or directory"):
        AttentionView(_maps(), SOURCE, TARGET).save(tmp_path / "nowhere" / "page.html")
