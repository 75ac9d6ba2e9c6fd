"""How many files of the library execute on three journeys: a batch, a generated token, an attention by name.

    python -m benchmarks.journeys

A reader who follows one of them opens about as many files. Imports do not count: a file counts if one of its functions
runs. `setup` is what runs once before the journey, `journey` the journey itself, tracing of its program included.

The batch is one of the `test` variant of `transformer_demo`: from its sentences to the updated parameters. The token is
one step of a small GPT's decoder; `generate` is all of `tfx_jax.generate`. The attention is a sliding window, from
`config.model.attention.name` through multi-head attention to the output.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import tfx_jax
from tfx_jax.models import GPT, GPTConfig, TransformerConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions, MultiHeadAttention
from tfx_jax.tasks import TranslationConfig
from tfx_jax.training import ExperimentConfig, make_run, tiny_variant, validate
from tfx_jax.training.sharding.strategies import make_mesh, shard_batch
from tfx_jax.training.train_setup import base_rng, make_train_setup

LIBRARY = pathlib.Path(tfx_jax.__file__).parent


@contextlib.contextmanager
def executed(files: set[str]) -> Iterator[None]:
    """Inside the context, adds each file of the library in which a function is called to `files`."""

    def note(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(LIBRARY)) and frame.f_code.co_name != "<module>":
            files.add(pathlib.Path(name).relative_to(LIBRARY).as_posix())

    threading.setprofile(note)  # of threads that start inside, such as the one that reads data
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def batch_journey(workdir: pathlib.Path) -> tuple[set[str], set[str]]:
    """Returns (files of the set-up, files of one batch and its update)."""
    setup, journey = set[str](), set[str]()
    with executed(setup):
        config = validate(tiny_variant(ExperimentConfig(TransformerConfig(), TranslationConfig())))
        run, mesh = make_run(config, workdir), make_mesh(data=1)
        iterator = iter(run.train_data(mesh))
        training = make_train_setup(config, run.make_model, run.task.loss, mesh, make_carry=run.make_carry)
        state, rng = training.first_state(), base_rng(config)
    with executed(journey):
        training.step_fn(state, shard_batch(next(iterator), mesh), rng)
    iterator.close()
    return setup, journey


def token_journey() -> tuple[set[str], set[str]]:
    """Returns (files of the prefill, files of one decoding step)."""
    setup, journey = set[str](), set[str]()
    model = GPT(GPTConfig(16, max_length=16, num_layers=2, d_model=8, num_heads=2), rngs=nnx.Rngs(0))
    with executed(setup):
        decoder = model.decoder()
        cache, token = decoder.init_cache(decoder.encode(jnp.ones((1, 4), jnp.int32)), max_length=4)
    with executed(journey):
        jax.eval_shape(decoder.step, token, cache)
    return setup, journey


def attention_journey() -> tuple[set[str], set[str]]:
    """Returns (files that make a module with a named attention, files of its call)."""
    setup, journey = set[str](), set[str]()
    with executed(setup):
        core = AttentionConfig("window", AttentionOptions(window=2)).make(2, 4, rngs=nnx.Rngs(0))
        layer = MultiHeadAttention(8, 2, attention_fn=core, rngs=nnx.Rngs(0))
    with executed(journey):
        jax.eval_shape(layer, np.ones((1, 6, 8), np.float32))
    return setup, journey


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the names of the files as JSON")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        journeys = {
            "batch": batch_journey(pathlib.Path(folder)),
            "token": token_journey(),
            "attention": attention_journey(),
        }
    if arguments.json:
        print(json.dumps({name: {"setup": sorted(a), "journey": sorted(b)} for name, (a, b) in journeys.items()}))
        return
    print("journey     files   set-up besides")
    for name, (setup, journey) in journeys.items():
        print(f"{name:10}  {len(journey):5}   {len(setup - journey):5}")


if __name__ == "__main__":
    main()
