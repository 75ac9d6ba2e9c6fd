"""Notebooks: each is what its py:percent source makes, names the experiment it copies, and runs from top to bottom."""

import ast
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import runpy
import shutil
import subprocess

import jupytext
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests.colab.execute import COVERS, DIGEST, MAX_BYTES, converted, cover, digest, run

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted((ROOT / "colab").glob("*.py"))

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def _stored(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=nbformat.NO_CONVERT)


@each_notebook
def test_is_made_from_its_source(source):
    """Cell for cell, but for outputs, and without the ids that would differ from one conversion to the next."""
    made, stored = converted(source), _stored(source)
    shown = [{key: cell[key] for key in ("cell_type", "metadata", "source")} for cell in stored.cells]
    expected = [{key: cell[key] for key in ("cell_type", "metadata", "source")} for cell in made.cells]
    assert shown == expected, f"{source.stem}.ipynb is out of date: run `make colab`"
    assert stored.metadata.kernelspec == made.metadata.kernelspec
    assert (stored.nbformat, stored.nbformat_minor) == (4, 4)  # the last format in which cells need no id


@each_notebook
def test_stored_outputs_are_of_the_current_code(source):
    notebook = _stored(source)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    if not outputs:
        assert DIGEST not in notebook.metadata
        return
    assert notebook.metadata[DIGEST] == digest(jupytext.read(source)), (
        f"the outputs of {source.stem}.ipynb are those of other code: "
        f"run `make colab-outputs ARGS=colab/{source.stem}.ipynb`, or `make colab` to drop them"
    )
    assert not [output for output in outputs if output.output_type == "error"]
    assert source.with_suffix(".ipynb").stat().st_size <= MAX_BYTES
    _check_pictures(notebook)
    assert (COVERS / f"{source.stem}.png").read_bytes() == cover(notebook)
    pictures = ("image/png", "image/svg+xml")
    kinds = [{k: v for k, v in output.get("data", {}).items() if k not in pictures} for output in outputs]
    text = str(kinds) + "".join(output.get("text", "") for output in outputs)
    text = text.replace("http://www.w3.org/", "")  # names of formats, which are not requested
    assert not re.findall(r"(?<![\w.<])/(?:tmp|home|root|work|usr|opt|mnt|var|Users)/\S*|https?://\S+", text)


def test_a_changed_cell_drops_the_outputs(tmp_path):
    source = tmp_path / "one.py"
    source.write_text("# %% [markdown]\n# Text\n\n# %%\n1 + 1\n")
    stored = converted(source)
    stored.cells[1].outputs = [nbformat.v4.new_output("stream", text="2")]
    stored.metadata[DIGEST] = digest(stored)
    source.write_text(source.read_text().replace("Text", "Other text"))
    assert converted(source, stored).cells[1].outputs == stored.cells[1].outputs
    source.write_text(source.read_text().replace("1 + 1", "1 + 2"))
    changed = converted(source, stored)
    assert changed.cells[1].outputs == []
    assert DIGEST not in changed.metadata


@each_notebook
def test_sections_have_exercises_with_answers(source):
    """An answer is folded: text between the tags of details, or a cell whose code is hidden."""
    cells = jupytext.read(source).cells
    places = [place for place, cell in enumerate(cells) if cell.source.startswith("### Exercise")]
    assert len(places) >= 3
    for place in places:
        answer = cells[place + 1]
        is_hidden = answer.metadata.get("cellView") == "form" and answer.metadata["jupyter"]["source_hidden"]
        assert "<details><summary>Answer" in cells[place].source or (is_hidden and "# @title Answer" in answer.source)


@each_notebook
def test_badge_opens_the_notebook_itself(source):
    title = _stored(source).cells[0].source
    assert f"(https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/{source.stem}.ipynb)" in title


def _first_cell(source):
    return next(cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code")


def test_all_notebooks_install_the_same():
    assert len({_first_cell(source) for source in SOURCES}) == 1


@pytest.mark.parametrize(
    ("has_gpu", "devices", "wanted"),
    [
        (False, [], "jax"),
        (True, [], "jax[cuda13]"),
        (False, ["accel0", "accel1"], "jax[tpu]"),
        (False, ["vfio/0"], "jax[tpu]"),
    ],
)
def test_first_cell_installs_what_the_runtime_needs_and_says_when_to_restart(
    tmp_path, monkeypatch, has_gpu, devices, wanted
):
    for device in devices:
        (tmp_path / "dev" / device).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / device).touch()
    versions, commands = {"jax": "1", "numpy": "2"}, []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/nvidia-smi" if has_gpu and name == "nvidia-smi" else None)
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    code = _first_cell(SOURCES[0]).replace('"/dev', f'"{tmp_path}/dev')
    exec(code, {})
    assert commands[0][1:4] == ["-m", "pip", "install"]
    assert commands[0][-2:] == ["tfx-jax[parquet] @ git+https://github.com/tfx-jax/tfx-jax@main", wanted]
    monkeypatch.setattr(subprocess, "run", lambda command, check: versions.update(numpy="3"))
    with pytest.raises(SystemExit, match="Restart session"):
        exec(code, {})


@pytest.mark.parametrize("variant", ["demo", "test"])
def test_translation_trains_the_demo_experiment(variant, monkeypatch):
    """The notebook shows every line of the experiment, so it holds a copy, which evaluates more often."""
    monkeypatch.setenv("TFX_JAX_VARIANT", variant)
    names = {"os": os}
    for cell in jupytext.read(ROOT / "colab" / "translation.py").cells:
        if "config" in cell.metadata.get("tags", ()):
            exec(cell.source, names)
    wanted = runpy.run_path(str(ROOT / "experiments" / "transformer_demo.py"))["get_config"](variant)
    wanted.eval_every = names["config"].eval_every
    assert names["config"] == wanted


def test_fine_tuning_trains_no_model_in_place_of_one_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = jupytext.read(ROOT / "colab" / "fine_tuning.py").cells
    (cell,) = (one.source for one in cells if one.cell_type == "code" and "BASE = OWN" in one.source)
    names = {"RUNS": tmp_path / "runs", "IS_TEST": True, "pathlib": pathlib}  # there is no `tfx` to train with
    exec(cell.replace("BASE = OWN", 'BASE = "HuggingFaceTB/SmolLM2-135M"'), names)
    assert names["BASE"] == "HuggingFaceTB/SmolLM2-135M"
    with pytest.raises(NameError, match="tfx"):
        exec(cell, names)


@pytest.mark.slow
@each_notebook
def test_runs_from_top_to_bottom(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TFX_JAX_VARIANT", "test")
    notebook = _stored(source)
    run(notebook, tmp_path)
    _check_pictures(notebook)


def _check_pictures(notebook):
    """Fails for a cell that promises a picture and has none."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    promised = _promised_pictures([cell.source for cell in cells])
    assert any(promised)
    for cell, count in zip(cells, promised, strict=True):
        data = [output.data for output in cell.outputs if "data" in output]
        assert sum("image/png" in kinds for kinds in data) >= count, cell.source
        assert not [kinds for kinds in data if "<Figure" in kinds.get("text/plain", "") and "image/png" not in kinds]


def _promised_pictures(sources):
    """Returns how many statements of each cell draw a picture, themselves or by a function of the notebook."""
    drawing = {"show", "plot_attention"}
    counts = []
    for source in sources:
        count = 0
        for statement in ast.parse(TransformerManager().transform_cell(source)).body:
            if not _names_called(statement) & drawing:
                continue
            if isinstance(statement, ast.FunctionDef):
                drawing.add(statement.name)
            else:
                count += 1
        counts.append(count)
    return counts


def _names_called(statement):
    functions = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return {getattr(function, "attr", getattr(function, "id", None)) for function in functions}


def test_pictures_are_counted_in_functions_too():
    sources = [
        "def draw():\n    plt.show()\n\n\ndraw()",
        "draw()\nx = 1",
        "%matplotlib inline\ndisplay(plot_attention(maps))",
        "x",
    ]
    assert _promised_pictures(sources) == [1, 1, 1, 0]
