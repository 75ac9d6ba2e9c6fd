"""A GPT-2 or a Llama from a Hugging Face folder: loading and generating by us and by transformers.

The weights are random, saved once with `tfx_jax.models.hf`; both sides read the same folder. Speed does not depend on
their values.
"""

# pyright: reportMissingImports=false
import pathlib
import resource
import sys
import time
from typing import Any

import numpy as np

from benchmarks.peers.sizes import DECODER_SIZES
from benchmarks.peers.worker import Workload, cores


def prepare(*, folder: str, model: str) -> dict[str, float]:
    """Writes the folder of a model, a key of `DECODER_SIZES`, once."""
    if not (pathlib.Path(folder) / "config.json").exists():
        import jax
        from flax import nnx

        from tfx_jax.models import GPTConfig, LlamaConfig, hf

        sizes = DECODER_SIZES[model]._asdict()
        config = LlamaConfig(**sizes, is_tied=True) if model.startswith("llama") else GPTConfig(**sizes)
        hf.save(jax.jit(lambda: config.make(rngs=nnx.Rngs(0)))(), folder)
    return {}


def load(*, folder: str, measure: str) -> dict[str, float]:
    """Reads the folder into our model; `measure` is "seconds" or "memory"."""
    start = time.perf_counter()
    import jax

    from tfx_jax.models import hf

    jax.devices()
    imports = time.perf_counter() - start
    run = lambda: sum(float(np.asarray(leaf).sum()) for leaf in jax.tree.leaves(hf.load(folder)))  # noqa: E731
    return _measured(run, imports, measure)


def load_by_transformers(*, folder: str, measure: str) -> dict[str, float]:
    """Reads the folder into the model of transformers; `measure` is "seconds" or "memory"."""
    start = time.perf_counter()
    import torch
    import transformers

    make = transformers.GPT2LMHeadModel.from_pretrained  # accessing it imports most of transformers
    imports = time.perf_counter() - start
    torch.set_num_threads(cores())
    return _measured(lambda: sum(float(parameter.sum()) for parameter in make(folder).parameters()), imports, measure)


def _measured(run: Any, imports: float, measure: str) -> dict[str, float]:
    """Returns the seconds of imports and of `run`, or the peak memory of the process in GiB (`measure` "memory").

    `run` adds up all parameters, because transformers leaves them in the file until they are used.
    """
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return {"import": imports, "load": seconds} if measure == "seconds" else {"peak": peak}


def generate(
    *, folder: str, model: str, rows: int, prompt_length: int, length: int, dtype: str, int8: bool = False
) -> Workload:
    """Returns greedy generation to a forced length by our `Generator`."""
    from tfx_jax.generation import Generator, Sampling
    from tfx_jax.models import hf

    prepare(folder=folder, model=model)
    loaded = hf.load(folder, dtype=dtype)
    generator = Generator(loaded, max_new_tokens=length, search=Sampling(temperature=0), int8=int8)
    prompts = _prompts(model, rows, prompt_length).tolist()

    def run() -> list[list[int]]:
        return generator(prompts)

    best = run()
    assert all(len(tokens) == length for tokens in best)
    return Workload(run, rows * length, {"best": best})


def generate_by_transformers(
    *, folder: str, model: str, rows: int, prompt_length: int, length: int, dtype: str, device: str
) -> Workload:
    """Returns greedy generation to a forced length by `generate` of transformers, with its cache."""
    import torch
    import transformers

    torch.set_num_threads(cores())
    prepare(folder=folder, model=model)
    net = transformers.AutoModelForCausalLM.from_pretrained(folder).to(device, getattr(torch, dtype)).eval()
    prompts = torch.tensor(_prompts(model, rows, prompt_length), device=device)
    options = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}

    def run() -> Any:
        with torch.inference_mode():
            tokens = net.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=length,
                max_new_tokens=length,
                **options,
            )
        return tokens[:, prompt_length:].cpu()

    found = run()
    assert found.shape == (rows, length)
    about = {"beams": [[row] for row in found.tolist()], "transformers": transformers.__version__}
    return Workload(run, rows * length, about)


def _prompts(model: str, rows: int, length: int) -> np.ndarray:
    """Returns random token ids, [rows, length]."""
    return np.random.default_rng(0).integers(0, DECODER_SIZES[model].vocab_size, (rows, length))
