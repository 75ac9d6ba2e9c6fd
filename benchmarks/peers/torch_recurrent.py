"""PyTorch's side of recurrent translation: `nn.LSTM` where a whole sequence is known, `nn.LSTMCell` where it is not."""

# pyright: reportMissingImports=false
import math

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone who uses PyTorch writes it
from torch import nn

from benchmarks.peers.sizes import BOS_ID, RECURRENT_SIZES, RecurrentSizes, pairs
from benchmarks.peers.torch_peers import training_of
from benchmarks.peers.worker import Workload


class RecurrentTranslator(nn.Module):
    """`tfx_jax.models.Seq2Seq` with LSTMs: a fixed context, or Luong's general score with input feeding.

    The cells of both libraries have the same products; PyTorch's have a second bias.
    """

    def __init__(self, sizes: RecurrentSizes, *, is_attending: bool):
        super().__init__()
        c = sizes
        d, n = c.d_model, c.num_layers
        self.embedding = nn.Embedding(c.vocab_size, d)
        nn.init.normal_(self.embedding.weight, std=d**-0.5)
        self.dropout = nn.Dropout(c.dropout_rate)
        between = c.dropout_rate if n > 1 else 0.0
        self.encoder = nn.LSTM(d, d // 2, n, batch_first=True, bidirectional=True, dropout=between)
        self.initial = nn.Linear(d, 2 * n * d)
        self.is_attending = is_attending
        if is_attending:
            self.cells = nn.ModuleList(nn.LSTMCell(2 * d if index == 0 else d, d) for index in range(n))
            self.score = nn.Linear(d, d, bias=False)
            self.readout = nn.Linear(2 * d, d, bias=False)
        else:
            self.decoder = nn.LSTM(2 * d, d, n, batch_first=True, dropout=between)
            self.readout = nn.Linear(3 * d, 2 * d)
        self.scale, self.num_layers = math.sqrt(d), n

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the logits of every target token, [B, T, V]; there is no padding in the benchmark."""
        inputs = torch.cat([torch.full_like(target[:, :1], BOS_ID), target[:, :-1]], dim=1)
        memory, (last, _) = self.encoder(self.dropout(self.embedding(source) * self.scale))
        context = torch.cat([last[-2], last[-1]], dim=-1)
        states = torch.tanh(self.initial(context)).unflatten(-1, (2 * self.num_layers, -1)).unbind(1)
        words = self.dropout(self.embedding(inputs) * self.scale)
        write = self._attending if self.is_attending else self._fixed
        return F.linear(self.dropout(write(words, memory, context, states)), self.embedding.weight)

    def _fixed(
        self, words: torch.Tensor, memory: torch.Tensor, context: torch.Tensor, states: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Returns the readout of a decoder with a fixed context, [B, T, D]."""
        del memory
        contexts = context[:, None].expand_as(words)
        first = torch.stack(states[::2]), torch.stack(states[1::2])
        output, _ = self.decoder(torch.cat([words, contexts], dim=-1), first)
        readout = self.readout(torch.cat([output, words, contexts], dim=-1))
        return readout.unflatten(-1, (-1, 2)).amax(dim=-1)  # maxout over pairs of units

    def _attending(
        self, words: torch.Tensor, memory: torch.Tensor, context: torch.Tensor, states: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Returns the readout of a decoder with attention, [B, T, D].

        A Python loop, because the attended context is an input of the next step.
        """
        layers = list(zip(states[::2], states[1::2], strict=True))
        fed, outputs = torch.zeros_like(context), []
        for word in words.unbind(1):
            x = torch.cat([word, fed], dim=-1)
            for index, cell in enumerate(self.cells):
                layers[index] = cell(self.dropout(x) if index else x, layers[index])
                x = layers[index][0]
            weights = torch.softmax(torch.einsum("bd,bsd->bs", self.score(x), memory), dim=-1)
            attended = torch.einsum("bs,bsd->bd", weights, memory)
            fed = torch.tanh(self.readout(torch.cat([attended, x], dim=-1)))
            outputs.append(fed)
        return torch.stack(outputs, dim=1)


def training(
    *, model: str, rows: int, length: int, is_attending: bool, device: str = "cpu", dtype: str = "float32"
) -> Workload:
    """Returns a training step of `RecurrentTranslator`."""
    sizes = RECURRENT_SIZES[model]

    def make() -> nn.Module:
        return RecurrentTranslator(sizes, is_attending=is_attending)

    return training_of(make, pairs(sizes.vocab_size, rows, length), is_compiled=False, device=device, dtype=dtype)
