"""What `help` prints of the functions, and which attentions share the signature of the first."""

import inspect
import pathlib
import pydoc

from tfx_jax import functional
from tfx_jax.functional.readable_signatures import ReadableSignature

ATTENTION_MD = pathlib.Path(__file__).parents[2] / "docs" / "attention.md"
FIRST = ["query", "key", "value", "bias", "mask"]


def test_signatures_are_printed_as_in_the_source():
    printed = pydoc.render_doc(functional.dot_product_attention, renderer=pydoc.plaintext)
    assert "jaxlib" not in printed
    assert "jaxtyping." not in printed
    lines = [line.strip() for line in printed.splitlines()]
    assert "query: Float[Array, 'B T N H']," in lines
    assert lines[lines.index("*,") + 1] == "is_causal: bool = False,"
    assert "dropout_rng: Array | None = None," in lines or "dropout_rng: jax.Array | None = None," in lines
    signature = inspect.signature(functional.z_loss)  # a short one is in one line
    assert str(signature) == "(logits: Float[Array, '*batch V']) -> Float[Array, '*batch']"


def test_markers_of_parameters_stand_where_they_do_in_the_source():
    functions = (lambda a, /, b, *, c: 0, lambda a, /: 0, lambda a, b, /, *c, d: 0, lambda a, /, *, b: 0, lambda **a: 0)
    for function in functions:
        signature = inspect.signature(function)
        assert str(ReadableSignature(list(signature.parameters.values()))) == str(signature)


def test_annotations_remain_what_they_were():
    signature = inspect.signature(functional.dot_product_attention)
    assert signature.parameters["query"].annotation.dim_str == "B T N H"
    assert signature.parameters["is_causal"].annotation is bool


def test_attentions_with_other_arguments_are_named_on_the_page():
    text = ATTENTION_MD.read_text()
    endings = ("_attention", "_from_logits", "_pooling", "_regression", "_rule", "retention", "_duality")
    attentions = [name for name in functional.__all__ if name.endswith(endings)]
    parameters = {name: list(inspect.signature(getattr(functional, name)).parameters) for name in attentions}
    others = {name for name in attentions if parameters[name][:5] != FIRST} - {"merge_attention"}
    paragraph = text.partition("Four functions have other arguments")[2].partition("\n\n")[0]
    assert others == {"kernel_regression", "decomposable_attention", "structured_pooling", "attention_from_logits"}
    assert [name for name in others if f"`{name}`" not in paragraph] == []
