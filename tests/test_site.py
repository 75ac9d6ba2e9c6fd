"""The documentation's generator: coverage of public names, Markdown of docstrings, and checks of built pages."""

import inspect
import posixpath
import re

import pytest

from docs.site import api, catalogue, check, formulas, hand_written, llms, markdown, notebooks, symbols
from tfx_jax.functional.attention import SPECS

GENERATED_TOP = {"configuration", "commands", "experiments"}
GENERATED = GENERATED_TOP | {f"attention/{name}" for name in SPECS}


@pytest.fixture(scope="module")
def pages():
    return hand_written.pages() | api.pages()


def test_every_public_name_has_a_docstring_and_a_page(pages):
    assert api.missing() == []
    for package in symbols.PACKAGES.values():
        for name in symbols.exported(package):
            page = pages[f"api/{package.removeprefix('tfx_jax.')}/{name}"]
            assert page.startswith(f"# {markdown.inline(name)}\n")


def test_links_between_pages_lead_to_pages(pages):
    broken = []
    for name, text in pages.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)[^)]*\)", prose):  # pictures have their own test
            place = posixpath.normpath(posixpath.join(posixpath.dirname(name), link.removesuffix(".md")))
            if "://" not in link and place not in pages and place not in GENERATED:
                broken.append(f"{name}: {link}")
    assert broken == []


def test_pictures_of_notebooks_keep_their_relative_path(pages):
    names = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", pages["notebooks"])
    assert names
    for name in names:
        assert hand_written.PICTURES.parent / name in [*hand_written.PICTURES.glob("*.png")]


def test_hand_written_pages_are_in_the_navigation(pages):
    entries = re.findall(r"^```\{toctree\}\n(.*?)^```$", pages["index"], re.MULTILINE | re.DOTALL)
    names = {line for entry in entries for line in entry.splitlines() if line and not line.startswith(":")}
    assert names == {*hand_written.FILES.values(), "api/index", *GENERATED_TOP} - {"index"}


def test_llms_txt_has_the_recipes_and_a_line_for_each_page(pages, monkeypatch):
    for version, base in (("main", llms.SITE), ("v0.2.0", f"{llms.SITE}/v0.2.0")):
        monkeypatch.setenv("DOCS_VERSION", version)
        text = llms.text(pages)
        targets = [link.removeprefix(f"{base}/") for link in re.findall(r"\]\(([^)]+)\)", text)]
        assert not [target for target in targets if "://" in target]
        assert not [target for target in targets if target.partition(".html")[0] not in pages]
    assert text.startswith("# tfx_jax\n\n> Attention and Transformers in JAX: ")
    assert f"- [A new attention]({base}/contributing.html#a-new-attention)\n" in text
    assert f"- [Serving a model]({base}/serving.html): `tfx-jax serve` answers on this machine: a page" in text
    assert "make check " in text
    written = {name for name in hand_written.FILES.values() if name not in ("index", "contributing")}
    assert {f"{name}.html" for name in written} <= set(targets)


def test_gallery_has_a_card_for_each_notebook_and_the_pictures_that_exist(pages):
    text = notebooks.gallery(pages["notebooks"])
    names = sorted(path.stem for path in (hand_written.ROOT / "colab").glob("*.py"))
    assert sorted(re.findall(r":link: \S+/colab/(\w+)\.ipynb", text)) == names
    shown = re.findall(r":img-top: notebooks/(\w+)\.png", text)
    assert sorted(shown) == sorted(path.stem for path in hand_written.PICTURES.glob("*.png"))
    assert "| notebook |" not in text
    assert text.endswith(pages["notebooks"].partition("You need to know")[2])
    assert "\n*first level, 11 minutes*\n" in text
    with pytest.raises(ValueError, match="has no table"):
        notebooks.gallery("# Notebooks")


def test_signatures_print_types_as_the_source_has_them(pages):
    text = pages["api/functional/dot_product_attention"]
    assert '    query: Float[Array, "B T N H"],\n' in text
    assert "    local_window_size: Window | None = None,\n" in text
    assert "- `ValueError`: " in text


def test_every_attention_is_in_one_family_and_has_a_public_function():
    names = [name for members in catalogue.families().values() for name in members]
    assert sorted(names) == sorted(SPECS)
    for spec in SPECS.values():
        assert (
            spec.name.split("_")[0] in catalogue.symbol_of(spec).name
            or spec.platform
            or spec.name in ("dense", "window")
        )


def test_decoding_is_told_from_the_spec():
    assert "all of which" in catalogue.decoding(SPECS["dense"])
    assert "of its window" in catalogue.decoding(SPECS["window"])
    assert "constant size" in catalogue.decoding(SPECS["gated_delta_rule"])
    assert "no causal form" in catalogue.decoding(SPECS["nystrom"])
    assert "Without a cache" in catalogue.decoding(SPECS["lsh"])


def test_what_each_attention_supports_and_learns_is_told_from_the_spec():
    tables = {name: catalogue.supported(spec) for name, spec in SPECS.items()}
    learning = {name for name, table in tables.items() if table["Learned parameters"] != "none"}
    assert learning == {name for name, spec in SPECS.items() if spec.parameters or spec.state}
    assert "`dt_bias`" in tables["state_space_duality"]["Learned parameters"]


def test_papers_lead_to_functions_and_equations(pages):
    (row,) = [line for line in pages["papers"].splitlines() if "1706.03762" in line]
    assert row.startswith("| Vaswani et al. (2017) | [Attention Is All You Need]")
    assert "[`dot_product_attention`](api/functional/dot_product_attention.md) (equation 1)" in row


def test_prose_is_escaped_and_code_is_kept():
    text = "sum_j of `a_b * c` and x_j * <y>, see https://arxiv.org/abs/1706.03762."
    assert markdown.prose(text) == "sum\\_j of `a_b * c` and x\\_j \\* \\<y>, see <https://arxiv.org/abs/1706.03762>."
    assert markdown.prose(">>> 1 + 1\n2") == "```pycon\n>>> 1 + 1\n2\n```"
    assert markdown.prose("    a = b") == "```text\na = b\n```"


def test_docstrings_are_split_into_sections():
    doc = "Adds.\n\nArgs:\n  a: first,\n    of two.\n  b: second.\n\nReturns:\n  The sum.\n\n>>> 1\n1"
    parts = markdown.sections(doc)
    assert markdown.items(parts["Args"]) == [("a", "first,\nof two."), ("b", "second.")]
    assert parts["Returns"] == "The sum."
    assert parts[""].startswith("Adds.")
    assert ">>> 1" in parts[""]


def test_links_to_files_lead_to_pages_or_to_the_repository():
    text = hand_written.convert(
        "[a](formats.md#x) [b](../experiments/recall.py) [c](../tests/README.md)", "docs/guide.md"
    )
    assert text.split() == [
        "[a](formats.md#x)",
        "[b](experiments.md#recall)",
        f"[c]({symbols.REPOSITORY}/blob/main/tests/README.md)",
    ]


def test_every_attention_has_a_formula():
    assert formulas.FORMULAS.keys() == SPECS.keys()
    assert formulas.parts(SPECS["dense"]) == [
        r"O = \operatorname{softmax}\left(\beta\, Q K^\top + B\right) V",
    ]
    unbiased = [part for spec in SPECS.values() if not spec.bias for part in formulas.parts(spec)]
    assert [part for part in unbiased if re.search(r"\+ (B|b_\{ts\})", part)] == []
    for spec in SPECS.values():
        formula, arguments = " ".join(formulas.parts(spec)), inspect.signature(spec.function).parameters
        assert not spec.bias or re.search(r"\+ (B|b_\{ts\})", formula), spec.name
        assert "scale" not in arguments or r"\beta" in formula, spec.name
        for part in formulas.parts(spec):
            assert part.count("{") == part.count("}"), part
            assert part.count(r"\left") == part.count(r"\right"), part


def test_check_finds_attentions_without_a_formula(tmp_path):
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "a.html").write_text("<math><mi>a</mi></math>")
    (tmp_path / "attention" / "b.html").write_text("<p>softmax</p>")
    (tmp_path / "attention" / "c.html").write_text(r"<math><mi>\nonsense</mi></math>")
    assert sorted(check.problems(tmp_path)) == [
        "attention/b.html: has no formula",
        "attention/c.html: a formula has a command of LaTeX that latex2mathml does not know",
    ]


def test_check_finds_requests_and_broken_links(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="x">A</h1><a href="b.html#y">b</a><a href="c.html">c</a><a href="#x">x</a>'
    )
    (tmp_path / "b.html").write_text(
        '<script src="https://example.org/a.js"></script><a href="https://example.org">d</a>'
    )
    (tmp_path / "s.css").write_text("@font-face { src: url('//example.org/f.woff') }")
    assert sorted(check.problems(tmp_path)) == [
        "a.html: b.html#y has no such anchor",
        "a.html: c.html does not exist",
        "b.html: requests https://example.org/a.js",
        "s.css: requests //example.org/f.woff",
    ]
