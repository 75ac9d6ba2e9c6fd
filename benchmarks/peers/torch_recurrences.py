"""PyTorch's side of attentions with a state of constant size: the chunked functions of transformers."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false
import functools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone who uses PyTorch writes it
from transformers import MiniMaxConfig
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax import modeling_minimax
from transformers.models.qwen3_next import modeling_qwen3_next

from benchmarks.peers.worker import Workload, cores

Tensor = torch.Tensor
_CHUNK = 64


def attention(
    *, function: str, rows: int, length: int, heads: int, head_size: int, dtype: str = "float32", device: str = "cpu"
) -> Workload:
    """Returns forward and backward pass of one of `FUNCTIONS`, whose gates are features of the keys, as ours are."""
    torch.set_num_threads(cores())
    make = functools.partial(torch.randn, (rows, length, heads, head_size), dtype=getattr(torch, dtype), device=device)
    *leaves, gradient = (make() for _ in range(4))
    for tensor in leaves:
        tensor.requires_grad_()

    def run() -> None:
        out = FUNCTIONS[function](*leaves)
        torch.autograd.grad(out.reshape(gradient.shape), leaves, gradient)
        if device == "cuda":
            torch.cuda.synchronize()

    return Workload(run, 1, {"torch": torch.__version__})


def _gated_delta_rule(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    decay, beta = -F.softplus(key[..., 0]), torch.sigmoid(key[..., 1])
    return _delta_rule_of_qwen3_next(query, key, value, decay, beta)


def _delta_rule(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The gated rule with decays of 1: transformers has no other."""
    return _delta_rule_of_qwen3_next(query, key, value, torch.zeros_like(key[..., 0]), torch.sigmoid(key[..., 1]))


def _delta_rule_of_qwen3_next(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    chunked = modeling_qwen3_next.torch_chunk_gated_delta_rule
    return chunked(query, key, value, decay, beta, chunk_size=_CHUNK, use_qk_l2norm_in_kernel=True)[0]


def _kimi_delta(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    chunked = modeling_kimi_linear.chunk_kimi_delta_attention
    decay, beta = -F.softplus(key), torch.sigmoid(key[..., 1])
    return chunked(query, key, value, decay, beta, chunk_size=_CHUNK, use_qk_l2norm_in_kernel=True)[0]


def _state_space_duality(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rate, zeros = -torch.ones(key.shape[2], device=key.device), torch.zeros(key.shape[2], device=key.device)
    return modeling_mamba2.mamba2_chunk_scan(
        value, key[..., 0], rate, key, query, _CHUNK, dt_bias=zeros, dt_softplus=True
    )


def _retention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """MiniMax's lightning attention between its projections, and before its norm and its gate."""
    rows, length, heads, size = query.shape
    joined = torch.cat([query, key, value], dim=-1).reshape(rows, length, -1)
    identity, open_gate = torch.nn.Identity(), functools.partial(torch.full_like, fill_value=torch.inf)
    layer = types.SimpleNamespace(**_lightning(heads, size), qkv_proj=lambda x: joined, act_fn=identity, norm=identity)
    layer.out_proj, layer.output_gate = identity, open_gate
    hidden = query.reshape(rows, length, -1)
    return modeling_minimax.MiniMaxLightningAttention.forward(layer, hidden, None, None)[0]  # pyright: ignore


@functools.cache
def _lightning(heads: int, size: int) -> dict[str, object]:
    """Returns the decays and sizes of a layer of MiniMax."""
    config = MiniMaxConfig(
        hidden_size=heads * size, num_attention_heads=heads, num_hidden_layers=3, head_dim=size, block_size=_CHUNK
    )
    layer = modeling_minimax.MiniMaxLightningAttention(config, layer_idx=1)
    names = ("block_size", "num_attention_heads", "head_dim", "query_decay", "key_decay", "diagonal_decay")
    return {name: getattr(layer, name) for name in (*names, "slope_rate")}


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "retention": _retention,
    "state_space_duality": _state_space_duality,
    "delta_rule": _delta_rule,
    "gated_delta_rule": _gated_delta_rule,
    "kimi_delta": _kimi_delta,
}
