"""PyTorch's GPT-2, trained eagerly or compiled, with its fused attention."""

# pyright: reportMissingImports=false
import torch
import torch.nn.functional as F  # noqa: N812  # as everyone who uses PyTorch writes it
from torch import nn

from benchmarks.peers.sizes import DECODER_SIZES, LAYER_NORM_EPSILON, DecoderSizes, pairs
from benchmarks.peers.torch_peers import training_of
from benchmarks.peers.worker import Workload


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, sizes: DecoderSizes):
        super().__init__()
        width = sizes.d_model
        self.num_heads = sizes.num_heads
        self.attention_norm, self.norm = (nn.LayerNorm(width, LAYER_NORM_EPSILON) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, sizes.d_ff), nn.Linear(sizes.d_ff, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the layer, [B, T, D]."""
        rows, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, N, T, H]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 without dropout: learned positions, layers with norms before them, the output tied to the embedding."""

    def __init__(self, sizes: DecoderSizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.positions = nn.Embedding(sizes.max_length, sizes.d_model)
        self.layers = nn.Sequential(*(Block(sizes) for _ in range(sizes.num_layers)))
        self.norm = nn.LayerNorm(sizes.d_model, LAYER_NORM_EPSILON)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the logits of every next token, [B, T, V]."""
        x = self.embedding(inputs) + self.positions.weight[: inputs.shape[1]]
        return F.linear(self.norm(self.layers(x)), self.embedding.weight)


def training(
    *, model: str, rows: int, length: int, is_compiled: bool, device: str = "cpu", dtype: str = "float32"
) -> Workload:
    """Returns a training step of `GPT`."""
    sizes = DECODER_SIZES[model]
    sides = pairs(sizes.vocab_size, rows, length)
    options = {"device": device, "dtype": dtype, "is_compiled": is_compiled}
    return training_of(lambda: GPT(sizes), sides, label_smoothing=0.0, **options)
