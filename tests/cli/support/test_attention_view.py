import base64
import html
import http.server
import json
import queue
import re
import shutil
import subprocess
import zlib
from typing import ClassVar
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.serving import serving
from tfx_jax.cli.support import attention_view
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
    assert data["tokens"] == {"source": source, "target": target, "target input": target}
    sides = [(entry["querySide"], entry["keySide"]) for entry in data["maps"]]
    assert sides == [("source", "source")] + [("target", "source")] * 3
    for entry, (name, want) in zip(data["maps"], sorted(_maps().items(), key=_order), strict=True):
        numbers = np.frombuffer(zlib.decompress(base64.b64decode(entry["weights"])), "<i2").reshape(want.shape)
        np.testing.assert_allclose(numbers / data["one"], want, atol=2e-5, err_msg=name)


def test_a_language_model_looks_at_the_tokens_that_are_listed():
    """An encoder-decoder model reads other tokens than it predicts, which are listed too."""
    maps, tokens = {"decoder/0/self": np.ones((1, 2, 2)) / 2}, ["a", "b"]
    sides = {}
    for name, read in (("one", tokens), ("two", ["<s>", "a"])):
        (listed,) = _data(AttentionView(maps, [], tokens, target_inputs=read).page)["maps"]
        sides[name] = (listed["querySide"], listed["keySide"])
    assert sides == {"one": ("target", "target"), "two": ("target", "target input")}


def test_weights_outside_of_the_range_of_the_page_are_clipped():
    data = _data(AttentionView({"encoder/0/self": np.array([[[-0.25, np.nan], [3, -9]]])}, ["a", "b"], []).page)
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(data["maps"][0]["weights"])), "<i2")
    np.testing.assert_allclose(numbers / data["one"], [-0.25, 0, 1, -1], atol=2e-5)


def test_more_weights_than_a_page_holds(monkeypatch):
    monkeypatch.setattr(attention_view, "_MOST_WEIGHTS", 103)
    with pytest.raises(UserError, match="a page holds up to 103 weights, but the maps have 104: use a shorter text"):
        AttentionView(_maps(), SOURCE, TARGET)


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


# What a user does in the page, behind the page's own script, and how the page says what it shows.
HELPERS = """
const result = {};
const send = () => fetch("/", { method: "POST", body: JSON.stringify(result) });
const settled = async () => { for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame); };
const until = async test => { while (!test()) await new Promise(resolve => setTimeout(resolve, 5)); await settled(); };
const press = (target, key) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const buttonOf = (place, text) => [...element(place).children].find(button => button.textContent === text);
const type = text => {
  element("search").value = text;
  element("search").dispatchEvent(new Event("input"));
};
const touch = (query, key) => {
  const { left, top, cell } = gridLayout(), { x, y } = grid.getBoundingClientRect();
  const clientX = x + left + cell * (key + 0.5 - view.left), clientY = y + top + cell * (query + 0.5 - view.top);
  for (const name of ["pointerdown", "pointerup"])
    grid.dispatchEvent(new PointerEvent(name, { pointerId: 1, pointerType: "touch", clientX, clientY }));
};
"""

STEPS = """
  await until(() => shown);
  for (const name of ["title", "said", "gridcaption", "colors", "sentences"]) result[name] = element(name).textContent;
  Object.assign(result, { tab: document.title, width: document.documentElement.scrollWidth,
    window: document.documentElement.clientWidth });
  grid.focus();
  for (const key of ["ArrowDown", "ArrowDown", "ArrowRight"]) press(grid, key);
  await settled();
  result.keyboard = element("said").textContent;
  press(grid, "Escape");
  touch(1, 2);
  await settled();
  result.tap = element("said").textContent;
  element("sentences").children[3].children[1].click();
  await settled();
  result.word = element("said").textContent;
  result.marked = [...element("sentences").children[1].children].map(word => word.style.background);
  type("ca T");
  await settled();
  result.count = element("count").textContent;
  result.found = [...document.querySelectorAll("dd .found")].map(word => word.textContent);
  type("だ");
  press(element("search"), "Enter");
  await settled();
  result.next = [element("count").textContent, chosen.query, view.top <= 1];
  element("larger").click();
  await settled();
  result.zoom = [view.zoom, gridLayout().down < 3 || gridLayout().cell > 24];
  element("whole").click();
  await settled();
  result.svg = exported("grid", "svg");
  result.png = exported("lines", "png").toDataURL().slice(0, 22);
  element("sentences").children[3].children[1].click();
  buttonOf("modes", "all layers and heads").click();
  await until(() => document.querySelectorAll("#all button").length === 6);
  result.all = [...document.querySelectorAll("#all button")].map(button => button.getAttribute("aria-label"));
  result.allWidth = document.documentElement.scrollWidth;
  document.querySelectorAll("#all button")[3].click();
  await until(() => chosen.mode === "one layer" && shown.map.layer === 2);
  result.opened = element("gridcaption").textContent;
"""


class _Page(http.server.BaseHTTPRequestHandler):
    """Sends the page `text`, in a frame of `width` pixels, and keeps what it posts in `results`."""

    text, width = "", 0
    results: ClassVar[queue.Queue] = queue.Queue()

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        # Windows of Chromium have at least 500 pixels.
        frame = f'<iframe src="/page" style="width:{self.width}px;height:900px;border:0"></iframe>'
        self.wfile.write((self.text if self.path == "/page" else frame).encode())

    def do_POST(self):
        self.results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


def _browse(page, folder, steps, width):
    """What the steps find in a page that Chromium shows in a frame of so many pixels."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("there is no Chromium to open the page with")
    steps = f"(async () => {{{steps}}})().catch(error => {{ result.error = String(error.stack); }}).finally(send);"
    script = f"<script>{HELPERS}{steps}</script></html>"
    handler = type(
        "Handler", (_Page,), {"text": page.replace("</html>", script), "width": width, "results": queue.Queue()}
    )
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        sizes = ["--window-size=1400,1000", f"--user-data-dir={folder}"]
        command = [browser, *options, *sizes, f"http://127.0.0.1:{server.server_port}/"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            result = handler.results.get(timeout=60)
        finally:
            process.terminate()
            process.wait()
    assert "error" not in result, result["error"]
    return result


def test_page_by_touch_and_keyboard_in_a_narrow_frame(tmp_path):
    page = AttentionView(_maps(), SOURCE, TARGET, title="A & <b>, step 3").page
    result = _browse(page, tmp_path, STEPS, width=420)
    source, target = ["the", "cat", "</script><b>", "</s>"], ["猫", "だ", "</s>"]
    weights = _maps()["decoder/10/cross"].mean(axis=0)
    assert result["title"] == result["tab"] == "A & <b>, step 3"
    assert result["said"].startswith("Point at a token or a cell, or tap it.")
    assert result["sentences"] == "source" + "".join(f"{token} " for token in source) + "target" + "猫 だ </s> "
    assert result["gridcaption"] == "decoder cross, layer 10, mean of all heads: rows target, columns source"
    assert result["colors"] == "head 0head 1the fainter a line, the smaller the weight"
    assert result["width"] <= result["window"] <= 420
    assert result["allWidth"] <= 420
    assert result["keyboard"] == f"だ → cat: {100 * weights[1, 1]:.1f} %"
    assert result["tap"] == f"だ → </script><b>: {100 * weights[1, 2]:.1f} %"
    best = weights[1].argmax()
    assert result["word"].startswith(f"だ looks at {source[best]} {100 * weights[1, best]:.0f} %")
    opacity = [float(re.search(r"([\d.e-]+)\)$", style)[1]) for style in result["marked"]]
    np.testing.assert_allclose(opacity, 0.6 * weights[1], atol=2e-3)  # of a color that a browser rounds
    assert (result["count"], result["found"]) == ("1 found", ["cat"])
    assert result["next"] == ["1 of 1", 1, True]
    assert result["zoom"] == [1.5, True]
    svg = ElementTree.fromstring(result["svg"])
    texts = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["A & <b>, step 3", result["gridcaption"], *target, *source]
    shades = [
        float(node.attrib["fill-opacity"])
        for node in svg.iter("{http://www.w3.org/2000/svg}rect")
        if node.attrib["fill"].startswith("rgb")
    ]
    np.testing.assert_allclose(shades, weights.ravel(), atol=5e-5)
    assert result["png"] == "data:image/png;base64,"
    assert result["all"] == [f"layer {layer}, head {head}" for layer in (0, 2, 10) for head in (0, 1)]
    assert result["opened"] == "decoder cross, layer 2, mean of head 1: rows target, columns source"


LONG = """
  await until(() => shown);
  await settled();
  const strongest = (query, key) => {  // the largest opacity of the pixels around a weight
    const { left, top, cell } = gridLayout(), scale = window.devicePixelRatio;
    const x = Math.round(scale * (left + cell * (key + 0.5))), y = Math.round(scale * (top + cell * (query + 0.5)));
    return Math.max(...grid.getContext("2d").getImageData(x - 1, y - 1, 3, 3).data.filter((_, i) => i % 4 === 3));
  };
  result.dark = strongest(500, 3);
  result.light = strongest(500, 300);
  result.nodes = document.querySelectorAll("*").length;
  result.lined = linesFigure().isTooLong;
  type("500x");
  next();
  for (let i = 0; i < 30; i++) zoom(1.5);
  chosen.key = 3;
  follow();
  await settled();
  const { cell, down } = gridLayout();
  Object.assign(result, { cell, isShown: view.top < 500 && 500 < view.top + down, said: element("said").textContent,
    linedNear: linesFigure().isTooLong ?? false });
"""


def test_page_of_a_long_text_draws_it_on_a_canvas_and_zooms(tmp_path):
    """One weight among a million others is seen from afar; the number of elements grows with tokens, not weights."""
    weights = np.zeros((1, 1024, 1024), np.float32)
    weights[0, 500, 3] = 1
    tokens = [f"{number}x" for number in range(1024)]
    result = _browse(AttentionView({"decoder/0/self": weights}, [], tokens).page, tmp_path, LONG, width=900)
    assert (result["dark"] > 150, result["light"]) == (True, 0)
    assert result["nodes"] < 1024 + 150
    assert result["lined"] is True
    assert (result["isShown"], result["said"], result["linedNear"]) == (True, "500x → 3x: 100.0 %", False)
    assert result["cell"] == pytest.approx(48)


def test_page_has_colors_for_the_dark():
    light, dark = re.findall(r":root \{([^}]*)\}", AttentionView(_maps(), SOURCE, TARGET).page)
    names = [set(re.findall(r"--\w+", part)) for part in (light, dark)]
    assert names[0] == names[1] == {"--paper", "--ink", "--faint", "--line", "--pressed", "--weight", "--found"}
