"""Experiment configuration: plain dataclasses, changed by experiment files and the command line."""

import dataclasses
import difflib
import typing
from typing import Any

from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.models.bert import BertConfig
from tfx_jax.models.gpt import GPTConfig
from tfx_jax.models.t5 import T5Config
from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.training.artifacts import read_sealed, write_sealed


@dataclasses.dataclass
class DataConfig:
    """Where sentence pairs come from and how they become batches."""

    dataset: str = "grammar"  # "grammar" (built in), "files", or a TFDS name such as "wmt14_translate/de-en"
    data_dir: str = ""  # TFDS: where the data set was prepared; files: the folder that the names below are relative to
    train_source: str = ""  # files: one sentence a line, plain or .gz; a .tsv holds both sides and needs no target
    train_target: str = ""
    validation_source: str = ""
    validation_target: str = ""
    test_source: str = ""
    test_target: str = ""
    validation_pairs: int = (
        0  # files: without a validation file, up to so many pairs, and a tenth, are set aside for it
    )
    source_language: str = ""  # codes such as "de", which files and TFDS need; the grammar is English to Japanese
    target_language: str = ""  # decides how translations are tokenised and scored
    is_tokenised: bool = False  # files and TFDS: the text is tokens with spaces between them, as the grammar's is
    tokenizer: str = "sentencepiece"  # or "words": the text is segmented already, for example by BPE with "@@ " marks
    max_length: int = 256  # tokens of a sentence, its end included; longer training pairs are left out
    tokens_per_batch: int = 25_000  # positions of each side of a global batch, padding included (the paper's 25,000)
    sort_buffer: int = 65_536  # pairs that are sorted by length together


@dataclasses.dataclass
class TextConfig:
    """Where plain text comes from, for models that are pre-trained on it."""

    dataset: str = "grammar"  # "grammar" (built in) or "files"
    data_dir: str = ""  # files: the folder that the names below are relative to
    train_file: str = ""  # UTF-8, plain or .gz
    validation_file: str = ""
    test_file: str = ""
    validation_share: float = 0.0  # without a file of its own, validation is this part of the training text, its end
    # A document is a whole "file" (for BERT, what stands between its empty lines), each of its "lines" or, in WikiText,
    # each of its "articles".
    documents: str = "file"
    is_packed: bool = False  # whether documents share a row without seeing each other; or all are one stream
    tokenizer: str = "wordpiece"  # or another of `tfx_jax.data.train_tokenizer.KINDS`
    max_length: int = 256  # tokens of a row
    tokens_per_batch: int = 16_384  # positions of a global batch


@dataclasses.dataclass
class LabelledConfig:
    """Where labelled texts, or pairs of texts, come from."""

    dataset: str = "grammar"  # "grammar" (built in: texts), "grammar_pairs" (pairs) or "files"
    data_dir: str = ""  # files: the folder that the names below are relative to
    train_file: str = ""  # lines of label, TAB, text; or, of pairs, columns that the first line names
    validation_file: str = ""
    test_file: str = ""
    first_column: str = ""  # of pairs: the columns of both texts and of the label; empty for single texts
    second_column: str = ""
    label_column: str = ""
    tokenizer: str = "wordpiece"  # or another of `tfx_jax.data.train_tokenizer.KINDS`; without effect with init_from
    max_length: int = 128  # tokens of an input, special ones included; longer texts are cut
    tokens_per_batch: int = 2_048  # positions of a global batch, padding included


@dataclasses.dataclass
class TaggedConfig:
    """Where tagged sentences come from."""

    dataset: str = "grammar"  # "grammar" (built in) or "files"
    data_dir: str = ""  # files: the folder that the names below are relative to
    train_file: str = ""  # CoNLL's format with BIO tags
    validation_file: str = ""
    test_file: str = ""
    tokenizer: str = "wordpiece"  # or another of `tfx_jax.data.train_tokenizer.KINDS`; without effect with init_from
    max_length: int = 128  # tokens of a sentence, special ones included; words beyond count as outside
    tokens_per_batch: int = 2_048  # positions of a global batch, padding included


@dataclasses.dataclass
class QuestionsConfig:
    """Where questions on texts come from."""

    dataset: str = "grammar"  # "grammar" (built in) or "files"
    data_dir: str = ""  # files: the folder that the names below are relative to
    train_file: str = ""  # SQuAD's format
    validation_file: str = ""
    test_file: str = ""
    scoring: str = "words"  # as SQuAD compares answers; or by "characters", as JaQuAD does
    tokenizer: str = "wordpiece"  # or another of `tfx_jax.data.train_tokenizer.KINDS`; without effect with init_from
    max_length: int = 384  # tokens of a window: question, a stretch of the context and special ones
    stride: int = 128  # tokens of the context from one window to the next
    max_question_length: int = 64  # tokens; the rest is cut off
    max_answer_length: int = 30  # tokens
    tokens_per_batch: int = 12_288  # positions of a global batch, padding included


@dataclasses.dataclass
class OptimizerConfig:
    """By default Adam as in section 5.3 of the paper."""

    name: str = "adam"  # or "adamw" or "adafactor"
    schedule: str = "inverse_sqrt"  # after the warm-up; or "cosine" or "linear", down to the end of the training
    final_fraction: float = 0.0  # of the peak, where "cosine" and "linear" end
    warmup_steps: int = 4_000
    peak_learning_rate: float | None = None  # None: (d_model * warmup_steps)^-0.5; of Adafactor, warmup_steps^-0.5
    b1: float = 0.9  # this and the next two: of Adam and AdamW
    b2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0  # of AdamW and Adafactor, times the learning rate; not of biases and gains
    clip_norm: float = 0.0  # a gradient whose norm over all parameters is larger is scaled down to it; 0: never


@dataclasses.dataclass
class DecodingConfig:
    """Beam search as in section 6.1 of the paper."""

    beam_size: int = 4
    alpha: float = 0.6  # of the length penalty
    extra_length: int = 50  # an output may be this many tokens longer than its input


@dataclasses.dataclass
class MeshConfig:
    """How many devices share what; the product is at most the number of devices, which several processes all take."""

    data: int = -1  # rows of a batch, each device with the whole model; -1: all devices that the others leave
    fsdp: int = 1  # rows of a batch, and the parameters, which are gathered layer by layer
    expert: int = 1  # rows of a batch, and the experts of a mixture
    sequence: int = 1  # positions of a sequence, by ring attention
    tensor: int = 1  # heads, hidden units and vocabulary


@dataclasses.dataclass
class ExperimentConfig:
    """Everything a run depends on.

    What is learned follows from the classes of `model` and `data`, by default to translate; `EXPERIMENTS` in
    `tfx_jax.training.experiments` lists them all.
    """

    model: Any = dataclasses.field(default_factory=TransformerConfig)  # or another class of `_CLASSES`, as of data
    data: Any = dataclasses.field(default_factory=DataConfig)
    init_from: str = ""  # a training's workdir or Hugging Face folder, whose tokenizer, sizes and parameters are taken
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    label_smoothing: float = 0.1
    z_loss: float = 0.0  # weight of log^2 Z in the loss of a token; PaLM has 1e-4
    accumulate: int = 1  # parts of a batch that are worked through one after the other, to save memory
    bad_steps: str = "stop"  # at a step that is not finite, or a spike; "skip": it is left out and the run goes on
    spike_factor: float = 0.0  # a spike is a loss this many times its running mean; 0: nothing is
    num_steps: int = 100_000
    seed: int = 0
    log_every: int = 50  # steps between lines and TensorBoard points
    checkpoint_every: int = 1_000
    eval_every: int = 0  # steps between evaluations on the validation split; 0: only after the last step
    patience: int = 0  # evaluations without a better score before training stops; 0: never
    keep_last: int = 5  # newest checkpoints kept, and averaged by `tfx-jax average` unless told otherwise
    keep_best: int = 1  # checkpoints of the best validation scores kept besides
    keep_every: int = 0  # checkpoints of steps that are a multiple of it stay for ever; 0: none
    hang_seconds: float = 1_800.0  # a step that takes longer (more than compiling does) ends the process; 0: never


# The first of each is what a configuration has that does not name its class.
_CLASSES = {
    "model": (TransformerConfig, GPTConfig, BertConfig, T5Config),
    "data": (DataConfig, TextConfig, LabelledConfig, TaggedConfig, QuestionsConfig),
}

# What may differ between two runs in one workdir: how long, how visibly, how carefully and on which devices, but not
# what is trained.
_CHANGEABLE = {
    "num_steps",
    "log_every",
    "checkpoint_every",
    "eval_every",
    "patience",
    "keep_last",
    "keep_best",
    "keep_every",
    "hang_seconds",
    "decoding",
    "mesh",
    "model.remat",
    "accumulate",
    "bad_steps",
    "spike_factor",
}


def tiny_variant(config: ExperimentConfig) -> ExperimentConfig:
    """Turns any experiment into its `test` variant: seconds on one CPU, on the built-in grammar, saving often."""
    model, data = config.model, config.data
    is_of_pairs = isinstance(data, LabelledConfig) and bool(data.second_column)
    data.dataset = "grammar_pairs" if is_of_pairs else "grammar"
    data.max_length, data.tokens_per_batch = 64, 512
    if isinstance(data, DataConfig):
        data.source_language = data.target_language = ""
        data.tokenizer, data.is_tokenised, data.sort_buffer = "sentencepiece", False, 256
    elif isinstance(data, TextConfig):
        data.documents = "lines" if data.documents == "lines" else "file"
    elif isinstance(data, QuestionsConfig):
        data.stride, data.max_question_length, data.scoring = 16, 16, "words"
    model.vocab_size, model.num_layers, model.d_model, model.num_heads, model.d_ff = 1_000, 1, 32, 2, 64
    if isinstance(model, GPTConfig | BertConfig):
        model.max_length = data.max_length
    if isinstance(model, T5Config):
        model.d_k = 16
    config.init_from = ""
    config.decoding.extra_length = 4
    config.num_steps, config.checkpoint_every, config.eval_every, config.log_every = 6, 2, 0, 2
    return config


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Lists every leaf of nested dataclasses by its dotted name."""
    leaves = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            leaves |= flat(value, f"{prefix}{field.name}.")
        else:
            leaves[prefix + field.name] = value
    return leaves


def unknown_field(name: str, config: Any) -> UserError:
    """Makes the error for an override of a field that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, flat(config), n=1, cutoff=0.4)
    hint = f"; did you mean config.{near[0]}?" if near else ""
    return UserError(f"config has no field {name}{hint}")


def save_config(config: ExperimentConfig, workdir: epath.Path) -> None:
    """Writes `config.json`, or checks that the one that is there describes the same experiment.

    Raises:
      UserError: if the workdir belongs to another experiment; the message names the fields that differ.
    """
    path = workdir / "config.json"
    if path.exists():
        saved, wanted = _described(load_config(workdir)), _described(config)
        may_change = _CHANGEABLE
        if config.optimizer.schedule in ("cosine", "linear"):  # every step's learning rate depends on the last step
            may_change = may_change - {"num_steps"}
        changed = [
            f"{name}={saved.get(name)!r}, not {wanted[name]!r}"
            for name in wanted
            if saved.get(name) != wanted[name] and not may_change & {name, name.split(".")[0]}
        ]
        if changed:
            raise UserError(f"{workdir} was made with {'; '.join(changed)}: take another --workdir")
    write_sealed(path, _to_dict(config))


def check_config(config: ExperimentConfig, workdir: epath.Path) -> None:
    """Checks that another process, with this configuration, has called `save_config` on the same folder.

    Raises:
      UserError: if there is none, or another configuration.
    """
    if not (workdir / "config.json").exists():
        raise UserError(f"{workdir} has no config.json, which process 0 has just written: the folder must be shared")
    saved, wanted = _described(load_config(workdir)), _described(config)
    changed = [
        f"{name}={wanted[name]!r}, not {saved.get(name)!r}" for name in wanted if saved.get(name) != wanted[name]
    ]
    if changed:
        raise UserError(f"this process was started with {'; '.join(changed)} as process 0 was")


def load_config(workdir: epath.Path) -> ExperimentConfig:
    """Reads what `save_config` wrote.

    Raises:
      UserError: if there is none, or it cannot be read.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise UserError(f"{workdir} has no config.json: it is not the --workdir of a training")
    try:
        return _from_dict(ExperimentConfig, read_sealed(path))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(
            f"{path} is damaged or from another version ({error}): put back a copy, or delete it and run the "
            "training's command again, which writes it"
        ) from None


def _described(config: ExperimentConfig) -> dict[str, Any]:
    """The leaves of a configuration, and the classes of its model and data."""
    return {name: type(getattr(config, name)).__name__ for name in _CLASSES} | flat(config)


def _to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """What JSON can hold; "class" names the classes of model and data."""
    values = dataclasses.asdict(config)
    for name in _CLASSES:
        values[name] = {"class": type(getattr(config, name)).__name__} | values[name]
    return values


def _from_dict(cls: type, values: dict[str, Any]) -> Any:
    kinds = typing.get_type_hints(cls)
    found = {}
    for name, value in values.items():
        if cls is ExperimentConfig and name in _CLASSES:
            classes = {kind.__name__: kind for kind in _CLASSES[name]}
            kind = classes[value.get("class", next(iter(classes)))]
            found[name] = _from_dict(kind, {key: item for key, item in value.items() if key != "class"})
        elif dataclasses.is_dataclass(kinds.get(name)):
            found[name] = _from_dict(kinds[name], value)
        else:
            found[name] = tuple(value) if isinstance(value, list) else value
    return cls(**found)
