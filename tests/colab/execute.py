"""Runs notebooks at full size and stores their outputs: `python -m tests.colab.execute colab/translation.ipynb`.

The metadata keep a digest of the code that was run. `make colab` keeps outputs as long as the digest is right, and
`test_notebooks.py` fails for outputs of other code.
"""

import base64
import hashlib
import io
import os
import pathlib
import sys
import tempfile
import unittest.mock

import jupytext
import nbformat
import PIL.Image
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

SETUP = "# @title Setup"
DIGEST = "outputs_of"  # the key in the metadata
MAX_BYTES = 1_200_000
COVERS = pathlib.Path(__file__).parents[2] / "docs" / "notebooks"


def digest(notebook):
    """The digest of all code cells but the setup, which computes nothing and names another version at each release."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code" and not cell.source.startswith(SETUP)]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def converted(source, stored=None):
    """The notebook of a py:percent source, with the outputs of a stored one if these are of the same code."""
    notebook = jupytext.read(source)
    notebook.nbformat_minor = 4  # the last format without cell ids, which would be other random ones each time
    for cell in notebook.cells:
        cell.pop("id", None)
    if stored is not None and stored.metadata.get(DIGEST) == digest(notebook):
        notebook.metadata[DIGEST] = stored.metadata[DIGEST]
        ran = [cell for cell in stored.cells if cell.cell_type == "code"]
        for cell, old in zip([cell for cell in notebook.cells if cell.cell_type == "code"], ran, strict=True):
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return notebook


def run(notebook, folder):
    """Runs all cells in a folder, by this interpreter on the CPU."""
    write_kernel_spec(folder / "jupyter" / "kernels" / "python3")  # whatever else is installed
    folders = {"JUPYTER_PATH": str(folder / "jupyter"), "IPYTHONDIR": str(folder / "ipython"), "JAX_PLATFORMS": "cpu"}
    work = folder / "notebook"
    work.mkdir()
    with unittest.mock.patch.dict(os.environ, folders):
        os.environ.pop("MPLBACKEND", None)  # the kernel draws into the notebook
        NotebookClient(
            notebook, kernel_name="python3", timeout=3_600, resources={"metadata": {"path": str(work)}}
        ).execute()


def cover(notebook):
    """The bytes of the first picture, which the index of notebooks shows."""
    pictures = [
        output.data["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    return base64.b64decode(pictures[0])


def write(notebook, path):
    """Writes a notebook, always with the same bytes."""
    path.write_text(nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n", encoding="utf-8")


def read(path):
    """A notebook as it is stored."""
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def _smaller(picture):
    """A PNG in base64 with a palette of 256 colors."""
    image = PIL.Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(256)
    out = io.BytesIO()
    image.save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def _cleaned(notebook):
    """Removes what says when or where a notebook ran, and joins the pieces of a stream."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        outputs = []
        for output in cell.get("outputs", ()):
            if outputs and output.output_type == "stream" and outputs[-1].get("name") == output.name:
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        for output in outputs:
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _smaller(output.data["image/png"])
        if cell.cell_type == "code":
            cell.outputs = outputs
    notebook.metadata.pop("language_info", None)


def main(paths):
    for path in map(pathlib.Path, paths):
        source = path.with_suffix(".py")
        if not source.exists():
            sys.exit(f"{source} does not exist: name a notebook of colab/")
        notebook = converted(source)
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, pathlib.Path(folder))
        text = nbformat.writes(notebook, version=nbformat.NO_CONVERT)
        text = text.replace(f"{folder}/notebook", "/content")  # the folder in which Colab runs it
        notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
        _cleaned(notebook)
        notebook.metadata[DIGEST] = digest(notebook)
        write(notebook, path.with_suffix(".ipynb"))
        COVERS.mkdir(exist_ok=True)
        (COVERS / f"{path.stem}.png").write_bytes(cover(notebook))
        print(f"{path.stem}: {path.with_suffix('.ipynb').stat().st_size:,} bytes")


def convert_all():
    for source in sorted(pathlib.Path("colab").glob("*.py")):
        path = source.with_suffix(".ipynb")
        write(converted(source, read(path) if path.exists() else None), path)


if __name__ == "__main__":
    main(sys.argv[1:]) if sys.argv[1:] else convert_all()
