"""Every attention that configurations name, with the options of its spec's example: parameters of many tests."""

from tfx_jax.functional.attention import SPECS
from tfx_jax.nn import AttentionConfig, AttentionOptions

ON_CPU = [name for name, spec in SPECS.items() if spec.platform is None]
"""Kernels of accelerators are tested in tests/functional/attention/test_kernels.py."""
CAUSAL = [name for name in ON_CPU if SPECS[name].causal]
ENCODING = [name for name in ON_CPU if not SPECS[name].causal_only]
KINDS = ("dense", "chunked", "window", "lsh", "linear", "additive", "gated_delta_rule")
"""One attention of each kind, for what all share: all pairs, chunks, blocks, buckets, a state, learned arrays, gates.

`make test` tries these where the mechanism is the same for all attentions, the slow tier all of them.
"""
PATTERNS = ["window,dense", "local,window", "lsh,dense", "additive,dense", "gated_delta_rule,dense"]
"""Layers with different attentions."""


def example(names: str, length: int = 16, **options) -> AttentionConfig:
    """The configuration of one attention, or of a pattern of several, for sequences of about this length."""
    values = {}
    for name in names.split(","):
        values |= SPECS[name].example(length) if name in SPECS else {}
    return AttentionConfig(names, AttentionOptions(**values | options))
