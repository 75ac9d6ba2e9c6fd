"""What tasks share that predict every next token of plain text: tokenizer, stream, and how an evaluation is told."""

import math
from typing import TypeVar

import numpy as np

from tfx_jax.data.batching.documents import TextDocuments, encode_documents
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.loss import Metric
from tfx_jax.tasks.task import EvalResult, MetricInfo

Config = TypeVar("Config", bound=ModelConfig)

PERPLEXITY_METRICS = (
    MetricInfo("loss", "loss", " nats", digits=4, is_loss=True),
    MetricInfo("perplexity", "perplexity", is_loss=True),
)


def token_stream(tokenizer: HFTokenizer, texts: TextDocuments, *, documents: str) -> np.ndarray:
    """Joins the tokens of all documents, [number of tokens] int32, on disk.

    Args:
      tokenizer: has a token for the end of a text.
      texts: the documents.
      documents: what they are, see `TextData.documents`: each has an end, but the last "file" none but its own.
    """
    tokens, _ = encode_documents(tokenizer, texts, eos_id=tokenizer.eos_id)
    return tokens[:-1] if documents == "file" else tokens


def perplexity_result(nll: Metric) -> EvalResult:
    """Tells the cross entropy of a text as PERPLEXITY_METRICS."""
    loss = float(nll.mean)
    perplexity = math.exp(min(loss, 700.0))
    summary = f"loss {loss:.4f} nats, perplexity {perplexity:,.2f}, {nll.weight:,.0f} tokens"
    return EvalResult({"loss": loss, "perplexity": perplexity}, summary)
