"""PyTorch's side: `nn.Transformer` trained eagerly or compiled, and its attention."""

# pyright: reportMissingImports=false
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everyone who uses PyTorch writes it
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.sizes import (
    ADAM,
    BOS_ID,
    LABEL_SMOOTHING,
    LAYER_NORM_EPSILON,
    PAD_ID,
    SIZES,
    Sizes,
    pairs,
)
from benchmarks.peers.worker import Workload, cores, timed


class Translator(nn.Module):
    """`nn.Transformer` with our architecture: post-norm, no final normalization, one embedding, sinusoidal positions.

    Unlike ours, its attention's projections have biases: 0.1 % of the parameters, and no products.
    """

    positions: torch.Tensor
    future: torch.Tensor

    def __init__(self, sizes: Sizes, length: int):
        super().__init__()
        c = sizes
        layers = nn.Transformer(
            c.d_model,
            c.num_heads,
            c.num_layers,
            c.num_layers,
            c.d_ff,
            c.dropout_rate,
            layer_norm_eps=LAYER_NORM_EPSILON,
            batch_first=True,
        )
        layers.encoder.norm = layers.decoder.norm = None
        for layer in (*layers.encoder.layers, *layers.decoder.layers):
            layer.dropout = nn.Identity()  # no dropout of the hidden units, as in the paper
            for attention in (layer.self_attn, getattr(layer, "multihead_attn", None)):
                if attention is not None:
                    attention.dropout = 0.0
        self.layers = layers
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        nn.init.normal_(self.embedding.weight, std=c.d_model**-0.5)
        self.dropout = nn.Dropout(c.dropout_rate)
        self.scale = math.sqrt(c.d_model)
        self.register_buffer("positions", sinusoids(length, c.d_model))
        self.register_buffer("future", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the logits of every target token, [B, T, V]."""
        padding = source == PAD_ID
        inputs = torch.cat([torch.full_like(target[:, :1], BOS_ID), target[:, :-1]], dim=1)
        x, y = (self.dropout(self.embedding(ids) * self.scale + self.positions) for ids in (source, inputs))
        out = self.layers(
            x,
            y,
            tgt_mask=self.future,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.linear(out, self.embedding.weight)


def sinusoids(length: int, d_model: int) -> torch.Tensor:
    """Returns the positional encoding of Vaswani et al. (2017), section 3.5, [length, d_model]."""
    rates = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10_000) / d_model))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def training(
    *, model: str, rows: int, length: int, is_compiled: bool, device: str = "cpu", dtype: str = "float32"
) -> Workload:
    """Returns a training step of `Translator`."""
    sizes = SIZES[model]
    sides = pairs(sizes.vocab_size, rows, length)
    return training_of(lambda: Translator(sizes, length), sides, is_compiled=is_compiled, device=device, dtype=dtype)


def training_of(
    make: Callable[[], nn.Module],
    sides: tuple[np.ndarray, np.ndarray],
    *,
    is_compiled: bool,
    device: str,
    dtype: str,
    label_smoothing: float = LABEL_SMOOTHING,
) -> Workload:
    """Returns a training step of a module on `sides`, (source, target), with the faster of PyTorch's Adams."""
    torch.set_num_threads(cores())
    torch.manual_seed(0)
    net = make().to(device)
    source, target = (torch.tensor(ids, dtype=torch.int64, device=device) for ids in sides)

    def loss_of(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
            logits = net(source, target)
        options: dict[str, Any] = {"ignore_index": PAD_ID, "label_smoothing": label_smoothing}
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), **options)

    loss_fn: Callable[..., torch.Tensor] = torch.compile(loss_of) if is_compiled else loss_of

    def step_with(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            loss = loss_fn(source, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            _wait(device)

        return step

    betas = (ADAM["b1"], ADAM["b2"])
    steps = {
        name: step_with(torch.optim.Adam(net.parameters(), 1e-4, betas, ADAM["eps"], fused=fused))
        for name, fused in (("default", None), ("fused", True))
    }
    seconds = {name: min(timed(step) for _ in range(3)) for name, step in steps.items()}
    best = min(seconds, key=seconds.__getitem__)
    return Workload(steps[best], target.numel(), {"adam": best, "torch": torch.__version__})


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def attention(
    *,
    rows: int,
    length: int,
    heads: int,
    head_size: int,
    is_causal: bool,
    dtype: str = "float32",
    device: str = "cpu",
    backend: str = "",
) -> Workload:
    """Returns forward and backward pass of `scaled_dot_product_attention`; `backend` "" lets PyTorch choose."""
    torch.set_num_threads(cores())
    shape = (rows, heads, length, head_size)  # PyTorch's layout
    *leaves, gradient = (torch.randn(shape, dtype=getattr(torch, dtype), device=device) for _ in range(4))
    for tensor in leaves:
        tensor.requires_grad_()

    def attend() -> None:
        out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
        torch.autograd.grad(out, leaves, gradient)
        _wait(device)

    def run() -> None:
        if not backend:
            return attend()
        with sdpa_kernel(SDPBackend[backend]):
            attend()

    return Workload(run, 1, {"torch": torch.__version__})
