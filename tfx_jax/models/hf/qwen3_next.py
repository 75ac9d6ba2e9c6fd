"""Qwen3-Next in Hugging Face folders: what `tfx_jax.models.hf.llama` does not have.

Most layers have Gated DeltaNet, whose projections are one tensor, grouped by heads of keys, as are its convolutions.
The query projection of the other layers also has their gates. Layers that predict further tokens are refused: their
tensors have no place.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfx_jax.errors import UserError
from tfx_jax.models.hf.folder import Fields, shortest_pattern
from tfx_jax.models.hf.names import Row, linear, vector
from tfx_jax.models.llama import LlamaConfig, RecurrentConfig
from tfx_jax.nn.attention import AttentionConfig

NAME = "Qwen3NextForCausalLM"
# Our names of attentions by the names of layers in config.json.
_LAYERS = {"linear_attention": "gated_delta_rule", "full_attention": "dense"}


def read_options(architecture: str, fields: Fields, config: LlamaConfig) -> dict[str, Any]:
    """Returns the options of a configuration that differ from those of other relatives of Llama.

    Args:
      architecture: `NAME`.
      fields: the fields of config.json.
      config: the configuration that is read from them so far.

    Raises:
      UserError: for an option that the model does not support.
    """
    del architecture
    fields.require(attention_bias=False)
    if config.activation != "swish":  # also of the convolutions
        raise UserError(f"hidden_act is {config.activation!r}, but only 'silu' is supported")
    types = fields.get("layer_types", [])
    if not types:
        every = max(fields.get("full_attention_interval", 4), 1)
        types = [("linear" if (index + 1) % every else "full") + "_attention" for index in range(config.num_layers)]
    names = [fields.chosen("layer_types", kind, _LAYERS) for kind in types]
    return {
        "d_k": fields.get("head_dim", 256),
        "attention": AttentionConfig(",".join(shortest_pattern(names))),
        "recurrent": RecurrentConfig(
            num_heads=fields.get("linear_num_value_heads", 32),
            num_key_heads=fields.get("linear_num_key_heads", 16),
            d_k=fields.get("linear_key_head_dim", 128),
            d_v=fields.get("linear_value_head_dim", 128),
            convolution_width=fields.get("linear_conv_kernel_dim", 4),
        ),
    }


def write_options(architecture: str, config: LlamaConfig, values: dict[str, Any]) -> None:
    """Adds the fields of config.json that `read_options` reads to `values`, which has the others."""
    del architecture
    kinds, recurrent = {ours: theirs for theirs, ours in _LAYERS.items()}, config.recurrent
    names = config.attention.names
    values |= {
        "layer_types": [kinds[names[index % len(names)]] for index in range(config.num_layers)],
        "linear_num_value_heads": recurrent.num_heads,
        "linear_num_key_heads": recurrent.num_key_heads or recurrent.num_heads,
        "linear_key_head_dim": recurrent.d_k,
        "linear_value_head_dim": recurrent.d_v,
        "linear_conv_kernel_dim": recurrent.convolution_width,
    }


def attention_rows(config: LlamaConfig, attention: str, path: str, tensor: str) -> list[Row]:
    """Returns the rows of the attention at `path`; `tensor` is the start of the names of the layer's tensors."""
    if attention == "dense":
        return _dense_rows(config, path, f"{tensor}.self_attn")
    recurrent, tensor = config.recurrent, f"{tensor}.linear_attn"
    num_groups = recurrent.num_key_heads or recurrent.num_heads
    repeats = recurrent.num_heads // num_groups
    names = ("query", "key", "value", "output_gate")
    of_group = (recurrent.d_k, recurrent.d_k, repeats * recurrent.d_v, repeats * recurrent.d_v)
    rows = [
        *_grouped_rows(
            [f"{path}/{name}/kernel" for name in names], of_group, num_groups, f"{tensor}.in_proj_qkvz.weight"
        ),
        *_grouped_rows(
            [f"{path}/gate_{name}/kernel" for name in ("beta", "dt")],
            (repeats, repeats),
            num_groups,
            f"{tensor}.in_proj_ba.weight",
        ),
        vector(f"{path}/attention_fn/log_rate_scale", f"{tensor}.A_log"),
        vector(f"{path}/attention_fn/dt_bias", f"{tensor}.dt_bias"),
        vector(f"{path}/output_norm/scale", f"{tensor}.norm.weight"),
        linear(f"{path}/out/kernel", f"{tensor}.out_proj.weight", 2),
    ]
    convolution = Row("", f"{tensor}.conv1d.weight", num_inputs=1, is_transposed=True)
    convolution = dataclasses.replace(convolution, kernel_size=(recurrent.convolution_width,))
    sizes = [num_groups * size for size in of_group[:3]]
    for index, name in enumerate(names[:3]):
        outputs = range(sum(sizes[:index]), sum(sizes[: index + 1]))
        row = dataclasses.replace(convolution, path=f"{path}/{name}_convolution/kernel")
        rows.append(dataclasses.replace(row, outputs=outputs, num_outputs=sum(sizes)))
    return rows


def _dense_rows(config: LlamaConfig, path: str, tensor: str) -> list[Row]:
    """Returns the rows of a layer with dense attention."""
    query = [f"{path}/{name}/kernel" for name in ("query", "output_gate")]
    return [
        *_grouped_rows(query, (config.head_size,) * 2, config.num_heads, f"{tensor}.q_proj.weight"),
        linear(f"{path}/key/kernel", f"{tensor}.k_proj.weight"),
        linear(f"{path}/value/kernel", f"{tensor}.v_proj.weight"),
        linear(f"{path}/out/kernel", f"{tensor}.o_proj.weight", 2),
        vector(f"{path}/query_norm/scale", f"{tensor}.q_norm.weight"),
        vector(f"{path}/key_norm/scale", f"{tensor}.k_norm.weight"),
    ]


def _grouped_rows(paths: Sequence[str], sizes: Sequence[int], num_groups: int, tensor: str) -> list[Row]:
    """Returns the rows of matrices in one tensor, each group of whose outputs has `sizes` outputs of each matrix."""
    total, rows = sum(sizes), []
    for index, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        start = sum(sizes[:index])
        outputs = tuple(group * total + start + column for group in range(num_groups) for column in range(size))
        row = linear(path, tensor)
        rows.append(dataclasses.replace(row, outputs=outputs, num_outputs=num_groups * total))
    return rows
