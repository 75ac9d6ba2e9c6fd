r"""A small Conformer with CTC on strings of spoken digits, and Conformer-L on WAV files of your own.

Result: 2.59 % of the words of one to five digits wrong, 5.90 % of single ones, after 15 minutes of a busy core

    tfx-jax train --config=conformer_fsdd --workdir=runs/digits --config.task.data.data_dir=DIR
    tfx-jax evaluate --workdir=runs/digits
    tfx-jax transcribe --workdir=runs/digits FILE.wav

DIR holds train.zip and dev.zip, of Free Spoken Digit Dataset (https://github.com/Jakobovski/free-spoken-digit-dataset):
digits of six speakers, 8 kHz, called DIGIT_SPEAKER_NUMBER.wav. An utterance is one to five of them by one speaker, with
0.15 to 0.3 seconds of silence around each; nobody says where they begin. They are written as words, letter by letter.
On single digits small convolutional networks that choose one of ten reach 97 to 99 %.

WAV files of your own, with a table of lines FILE, TAB, transcript beside them, or both in a zip:

    tfx-jax plan --config=conformer_fsdd:large --topology=v5e:4x4
    tfx-jax train --config=conformer_fsdd:large --workdir=runs/mine --config.task.data.data_dir=DIR \
        --config.task.data.train_file=train.tsv --config.task.data.validation_file=dev.tsv

`large` is Conformer-L (Gulati et al., 2020, https://arxiv.org/abs/2005.08100, table 1) with masks as there (section
3.1) and CTC, for utterances of up to 16 seconds. The paper has a transducer, which gets 2.1 and 4.3 % of the words of
LibriSpeech wrong (test-clean and test-other), without a language model.

Variants: `small`, for a CPU core; `large`, for sixteen chips of v5e; `test`.

Measured: `small`, seed 0, on one core that others used too: 1,200 steps in 15 minutes, on 500 strings of dev.zip.

    step                         200     400     600     800   1,000   1,200
    word error rate, %         59.33   12.56    6.41    5.12    3.24    2.59
    character error rate, %    21.94    4.44    3.29    2.79    2.17    1.63

A search that keeps eight prefixes (`config.task.beam_size=8`) gets 2.46 % of the words wrong. Of 1,000 utterances of
one digit each 94.10 % are right, and 94.70 with that search: less than of digits in strings, and less than networks
that can choose but ten words. What is heard is normalised by the utterance, of which a single digit says little; and
files cut as tightly as the data set's own, without the silence that was trained with, are often misheard
(`transcribe` of two of them wrote "ve" and "hre"). The error had not ended to fall. Trained on single digits alone
(`config.task.data.max_digits=1`, 25 minutes of a busy core), 95.20 % are right. `large`: not yet run.
"""

from tfx_jax.models.conformer import ConformerConfig
from tfx_jax.tasks.recorded_speech import RecordedSpeech
from tfx_jax.tasks.speech_recognition import MaskConfig, SpeechRecognitionConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    if variant in ("small", "test"):
        model = ConformerConfig(num_layers=4, d_model=64, num_heads=4, kernel_size=15)
        data = RecordedSpeech("fsdd", train_file="train.zip", validation_file="dev.zip", sample_rate=8_000)
        data.num_features, data.num_train, data.tokens_per_batch, data.max_length = 40, 20_000, 4_096, 800
        data.speed_spread = 0.1
        masks = MaskConfig(num_time_masks=2, num_frequency_masks=2, max_frequencies=8)
        config = ExperimentConfig(model, SpeechRecognitionConfig(data, masks))
        optimizer = config.optimizer
        optimizer.peak_learning_rate, optimizer.warmup_steps, optimizer.clip_norm = 2e-3, 200, 1.0
        optimizer.schedule, optimizer.final_fraction = "cosine", 0.02
        config.num_steps, config.eval_every, config.checkpoint_every = 2_400, 400, 100
        return tiny_variant(config) if variant == "test" else config
    if variant != "large":
        raise ValueError(f"unknown variant {variant!r}; there are small, large, test")
    # With all of the activations kept, a chip would need 15.96 of its 15.75 GiB.
    model = ConformerConfig.published("Conformer-L", dtype="bfloat16", vocab_size=29, remat="dots")
    data = RecordedSpeech("files", max_length=1_600, max_characters=400, tokens_per_batch=256 * 1_600)
    masks = MaskConfig(num_time_masks=10, num_frequency_masks=2)
    config = ExperimentConfig(model, SpeechRecognitionConfig(data, masks))
    optimizer = config.optimizer
    optimizer.peak_learning_rate, optimizer.warmup_steps = 0.05 / 512**0.5, 10_000  # the paper's
    optimizer.clip_norm, optimizer.weight_decay, optimizer.name = 1.0, 1e-6, "adamw"
    config.num_steps, config.eval_every, config.checkpoint_every = 100_000, 5_000, 5_000
    return config
