"""The attention catalogue: a page for each attention of `SPECS`, with its map, made by running it."""

import contextlib
import io
import pathlib
import re
from collections.abc import Callable

import jax
import numpy as np
from matplotlib.figure import Figure

from docs.site import formulas
from docs.site.api import Pages
from docs.site.markdown import cell, inline, prose, sections, table
from docs.site.symbols import Symbol, public
from tfx_jax.functional.attention import SPECS, AttentionSpec
from tfx_jax.functional.attention.spec import CachedDecoding, SeesBack, SeesBlock, unbound

LENGTH = 16  # tokens of the examples
_PAPERS = "[From paper to function](papers.md) also lists the functions that configurations do not name."
FAMILIES = {
    "Exact": (),
    "Limited to some pairs": (
        *("local", "window", "strided", "fixed", "bigbird"),  # by position
        *("lsh", "routing", "sinkhorn", "moba", "native_sparse", "indexed"),  # by content
    ),
    "Low rank, latent, random features": ("favor", "linear", "linformer", "nystrom", "induced", "latent"),
    "Recurrent, with a state of constant size": (),
    "Other normalizations": (
        *("entmax", "sigmoid", "stick_breaking", "topk"),
        *("differential", "talking_heads", "forgetting"),
    ),
    "Other scores": (),
}
"""Names of attentions by family, in the order of the catalogue. `families` finds the members of families with ()."""


def pages(images: pathlib.Path) -> Pages:
    """Returns a page for each attention and the index of all.

    Args:
      images: folder for the drawings of the attention weights.
    """
    images.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(images.parents[2] / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return {f"attention/{spec.name}": _page(spec, images) for spec in SPECS.values()}


def index(text: str) -> str:
    """Returns the text of docs/attention.md with the cards of all attentions in place of its marker."""
    lines: list[str] = []
    for title, names in families().items():
        lines += [f"### {title}", "", "::::{grid} 1 2 2 3", ":gutter: 2", ""]
        for name in names:
            spec = SPECS[name]
            summary = _first_sentence(symbol_of(spec))
            lines += [f":::{{grid-item-card}} {name}", f":link: attention/{name}", ":link-type: doc", ""]
            lines += [summary, "", f"*{inline(spec.reference)}*", ":::", ""]
        lines += ["::::", ""]
    entries = ["```{toctree}", ":hidden:", "", *(f"attention/{name}" for name in SPECS), "papers", "```"]
    return text.replace("<!-- catalogue -->", "\n".join([_PAPERS, "", *lines, _overview(), "", *entries]))


def families() -> dict[str, list[str]]:
    """Returns the names of all attentions by family."""
    result: dict[str, list[str]] = {title: [] for title in FAMILIES}
    titles = {name: title for title, names in FAMILIES.items() for name in names}
    for name, spec in SPECS.items():
        is_recurrent = "state of constant size" in decoding(spec)
        default_title = "Recurrent, with a state of constant size" if is_recurrent else "Other scores"
        result["Exact" if spec.is_exact else titles.get(name, default_title)].append(name)
    return result


def symbol_of(spec: AttentionSpec) -> Symbol:
    """Returns the public function of a spec, which has its documentation."""
    function, _ = unbound(spec.function)  # a spec may bind options of a public function
    names = (getattr(function, "__name__", ""), f"{spec.name}_attention", spec.name)
    return next(public()[name] for name in names if name in public())


def supported(spec: AttentionSpec) -> dict[str, str]:
    """Returns the rows of the table "What it supports": feature and whether or how the attention supports it."""
    words = {True: "yes", False: "no"}
    platform = {None: "CPU, GPU, TPU", "tpu": "TPU only", "gpu": "NVIDIA GPU only"}[spec.platform]
    return {
        "Causal": "always" if spec.causal_only else words[spec.causal],
        "Bias and mask for each pair": words[spec.bias] if spec.bias else "no; a mask hides keys",
        "Packed texts (`segment_ids`)": words[spec.segments],
        "Cross-attention": words[spec.cross],
        "Fewer key heads than query heads": words[spec.grouped_queries],
        "Dropout of weights": words[spec.dropout],
        "Devices": platform + (", half precision" if spec.bfloat16_only else ""),
        "Same values as dense attention": words[spec.is_exact],
        "Learned parameters": ", ".join(f"`{name}`" for name in _learned(spec)) or "none",
        "Gates, projected from the input": ", ".join(f"`{name}`" for name in _gates(spec)) or "none",
    }


def decoding(spec: AttentionSpec) -> str:
    """Returns a sentence about how a model with this attention generates, one token at a time."""
    if not spec.causal:
        return "It has no causal form, so decoders cannot use it."
    method = spec.decoding(**spec.example(LENGTH)) if spec.decoding is not None else None
    if method is None:
        return "Without a cache: each new token reads all tokens before it again."
    if not isinstance(method, CachedDecoding):
        return "From a state of constant size: time and memory per token do not grow with the text."
    match method.is_visible:
        case SeesBack():
            return "From a cache of keys and values; a query sees those of its window."
        case SeesBlock():
            return "From a cache of keys and values; a query sees those of its block."
        case _:
            return "From a cache of keys and values, all of which a query sees."


def _first_sentence(symbol: Symbol) -> str:
    paragraph = " ".join(symbol.doc.split("\n\n")[0].split())
    return inline(paragraph)


def _overview() -> str:
    """Returns a table of the features of all attentions, one row for each."""
    heads = ["attention", "causal", "bias", "packed", "cross", "grouped", "dropout", "decodes from"]
    rows: list[list[str]] = []
    for spec in SPECS.values():
        flags = [spec.causal, spec.bias, spec.segments, spec.cross, spec.grouped_queries, spec.dropout]
        sentence = decoding(spec)
        source = "state" if "state" in sentence else "cache" if sentence.startswith("From") else "all tokens"
        link = f"[{inline(spec.name)}](attention/{spec.name}.md)"
        rows.append([link, *("✓" if flag else "–" for flag in flags), source if spec.causal else "–"])
    return "### What each supports\n\n" + table(heads, rows)


def _gates(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each gate, without batch and length, by the name of its argument."""
    return {} if spec.gates is None else spec.gates(num_heads=2, num_kv_heads=2, d_k=8, **spec.example(LENGTH))


def _learned(spec: AttentionSpec) -> list[str]:
    """Returns the names of the arrays that an attention learns or keeps."""
    return [name for init in (spec.parameters, spec.state) if init is not None for name in _arrays(init, spec)]


def _arrays(init: Callable[..., dict[str, jax.Array]], spec: AttentionSpec) -> list[str]:
    """Returns the names of the arrays that an `init` function of a spec makes, without computing them."""
    arguments = {"num_heads": 2, "num_kv_heads": 2, "d_k": 8, "dtype": "float32", **spec.example(LENGTH)}
    return list(jax.eval_shape(lambda key: init(key, **arguments), jax.random.key(0)))


def example(spec: AttentionSpec) -> str:
    """Returns a program that calls an attention, as a layer or as a function, and prints the shape of its output."""
    symbol, options = symbol_of(spec), spec.example(LENGTH)
    function, bound_options = unbound(spec.function)
    # Parts of the call, each ", name=value".
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    bound = "".join(f", {name}={value!r}" for name, value in bound_options.items())
    causal = ", is_causal=True" if spec.causal else ""
    is_public = getattr(function, "__name__", "") == symbol.name
    keywords = [argument.arg for argument in symbol.node.args.kwonlyargs]
    if is_public and spec.parameters is None and spec.state is None:
        gates = _gates(spec)
        lines = [
            "import jax",
            f"from tfx_jax.functional import {symbol.name}",
            "",
            "keys = jax.random.split(jax.random.key(0), 8)",
            f"query, key, value = jax.random.normal(keys[0], (3, 1, {LENGTH}, 2, 8))  # [B, T, N, H]",
        ]
        for index, (name, shape) in enumerate(gates.items(), 1):
            lines.append(f"{name} = jax.random.normal(keys[{index}], {(1, LENGTH, *shape)})")
        gate_arguments = "".join(f", {name}={name}" for name in gates)
        if spec.bfloat16_only:
            lines.append("query, key, value = (x.astype('bfloat16') for x in (query, key, value))")
        if "return_weights" in keywords:
            causal += ", return_weights=True"
        call = f"{symbol.name}(query, key, value{bound}{arguments}{gate_arguments}{causal})"
        result = "output, weights" if "return_weights" in keywords else "output"
        return "\n".join([*lines, f"{result} = {call}", "print(output.shape)"])
    return "\n".join(
        [
            "import jax",
            "from flax import nnx",
            "from tfx_jax.nn import AttentionConfig, AttentionOptions, MultiHeadAttention",
            "",
            # Without the first ", ".
            f'config = AttentionConfig("{spec.name}", AttentionOptions({arguments[2:]}))',
            "attend = config.make(num_heads=2, d_k=8, rngs=nnx.Rngs(0))",
            "layer = MultiHeadAttention(16, 2, attention_fn=attend, rngs=nnx.Rngs(1))",
            f"x = jax.random.normal(jax.random.key(2), (1, {LENGTH}, 16))  # [B, T, D]",
            f"output, weights = layer(x{causal}, return_weights=True)",
            "print(output.shape)",
        ]
    )


def run(code: str) -> tuple[str, dict[str, object]]:
    """Runs a program and returns (printed text, variables by name)."""
    printed, variables = io.StringIO(), dict[str, object]()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<example>", "exec"), variables)
    return printed.getvalue(), variables


def draw(weights: np.ndarray, path: pathlib.Path) -> None:
    """Draws attention weights, [queries, keys], as an image: queries from top to bottom, keys from left to right."""
    figure = Figure(figsize=(3.2, 2.9), dpi=150)
    axes = figure.subplots()
    limit = float(np.abs(weights).max()) or 1.0
    is_signed = bool((weights < -1e-6).any())
    image = axes.imshow(weights, cmap="RdBu_r" if is_signed else "Blues", vmin=-limit if is_signed else 0, vmax=limit)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_xticks(range(0, weights.shape[1], 5))
    axes.set_yticks(range(0, weights.shape[0], 5))
    figure.colorbar(image, shrink=0.8)
    figure.savefig(path, bbox_inches="tight")


def _page(spec: AttentionSpec, images: pathlib.Path) -> str:
    """Returns the page of an attention; runs its example and draws its weights into the folder `images`."""
    symbol = symbol_of(spec)
    lines = [
        f"# {inline(spec.name)}",
        "",
        f"*{inline(spec.reference)}* · [`{symbol.name}`](../{symbol.page}.md) · [source]({symbol.source})",
        "",
        *(f"```{{math}}\n{part}\n```\n" for part in formulas.parts(spec)),
        formulas.LEGEND,
        "",
        prose(_without_examples(sections(symbol.doc)[""]), link="../"),
        "",
    ]
    code = example(spec)
    printed, variables = run(code) if spec.platform is None else ("", {})
    if "weights" in variables:
        weights = np.asarray(variables["weights"], np.float32)[0, 0]  # [B, N, T, S] -> [T, S]
        draw(weights, images / f"{spec.name}.png")
        causal = "causal " if np.allclose(weights, np.tril(weights), atol=1e-6) else ""
        lines += [
            f"```{{figure}} ../images/attention/{spec.name}.png",
            f":alt: Map of the {causal}attention weights of {spec.name}",
            ":width: 360px",
            ":class: map",
            "",
            f"Weights of the first head in the example below, with {LENGTH} random queries (rows) and keys (columns).",
            "```",
            "",
        ]
    rows = [f"| {name} | {value} |" for name, value in supported(spec).items()]
    lines += [
        "## What it supports",
        "",
        "| | |",
        "| --- | --- |",
        *rows,
        "",
        "## Generating text",
        "",
        decoding(spec),
        "",
    ]
    lines += ["## Example", "", *_example(spec, code, printed), "", "## In a model", ""]
    flags = {"name": spec.name} | {f"options.{name}": _flag(value) for name, value in spec.example(512).items()}
    fields = [f"  --config.model.attention.{name}={value}" for name, value in flags.items()]
    lines += ["```bash", " \\\n".join(["tfx-jax train --config=NAME --workdir=DIR", *fields]), "```", ""]
    if spec.options:
        lines += ["| option | type | |", "| --- | --- | --- |"]
        for name, option in spec.options.items():
            limits = [f"at least {option.at_least}"] if option.at_least is not None else []
            limits += [f"at most {option.at_most}"] if option.at_most is not None else []
            meaning = "; ".join([option.help, *(["required"] if option.required else []), *limits])
            lines.append(f"| `{name}` | `{option.kind.__name__}` | {cell(inline(meaning))} |")
    return "\n".join(lines)


def _flag(value: object) -> str:
    """Returns a value for the command line, without spaces, which would need quotes in a shell."""
    return str(value).replace(" ", "")


def _without_examples(text: str) -> str:
    """Returns the paragraphs of a docstring that are not doctests."""
    return "\n\n".join(block for block in re.split(r"\n\s*\n", text) if not block.lstrip().startswith(">>>"))


def _example(spec: AttentionSpec, code: str, printed: str) -> list[str]:
    """Returns the lines of the section "Example": the program `code` and what it printed."""
    if spec.platform is not None:
        device = "a TPU" if spec.platform == "tpu" else "an NVIDIA GPU"
        return [f"```python\n{code}\n```", "", f"It needs {device}, so this page was built without running it."]
    return [f"```python\n{code}\n```", "", f"prints `{printed.strip()}`; this page was built by running it."]
