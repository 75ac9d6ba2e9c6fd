r"""BERT answers questions on the Japanese Wikipedia: JaQuAD.

Result: dev F1 26.4 from scratch after 18 minutes on two cores

JaQuAD (So et al., 2022, "JaQuAD: Japanese Question Answering Dataset for Machine Reading Comprehension") has questions
that people wrote on paragraphs which answer them. Its README has 77.35 F1 and 61.01 exact match on the validation set
for BERT-Japanese, which was pre-trained on all of the Japanese Wikipedia. Here the score is that of 35 articles of the
training set that were set aside. Answers are compared by characters, as JaQuAD does, because words have no spaces
between them; and for the same reason a token is a character: SentencePiece, trained on raw text, puts the edges of 21
to 26 % of the answers inside a token, and no model could answer these exactly.

    tfx-jax train --config=bert_jaquad --workdir=runs/jaquad --config.task.data.data_dir=DIR
    tfx-jax evaluate --workdir=runs/jaquad
    tfx-jax plan --config=bert_jaquad:base --topology=v5e:2x2

DIR holds train.json.gz (30,222 questions on 656 articles) and dev.json.gz (1,526 on 35). Variants: `small`, trained
from scratch on two CPU cores with short windows; `base`, a BERT-base for an accelerator (add
`--config.init_from=FOLDER`, a Hugging Face folder of a Japanese BERT with a tokenizer that `tfx_jax` reads, or a
pre-training of our own); `test`.

An epoch of `small` has 85,539 windows of 228 tokens on average, of which 42 % show the whole answer.

Measured: `small`, seed 0, 17 min 33 s on two cores of a cloud machine, beside tests; 17,900 tokens a second.

    step             1,500  3,000  4,500
    dev F1           22.98  25.76  26.35
    dev exact match   5.77   7.54   7.54

A question's characters lead it to a place (`model.init="matching"`), but it has 30,222 questions to learn Japanese from
and no pre-training: that is what limits it, and with 2 layers, a window of 256 characters. `base`: not yet run.
"""

from tfx_jax.models.bert import BertConfig
from tfx_jax.tasks import QuestionAnsweringConfig, QuestionData
from tfx_jax.training import ExperimentConfig, accelerator_variant, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    model = BertConfig.published("bert-base-uncased", vocab_size=5_000)
    data = QuestionData(dataset="files", train_file="train.json.gz", validation_file="dev.json.gz")
    task = QuestionAnsweringConfig(data)
    config = ExperimentConfig(model, task)
    data.scoring = data.tokenizer = "characters"
    data.max_answer_length = 50
    data.tokens_per_batch = 32 * 384
    # Devlin et al. (2019), section 4.2 and appendix A.3: windows of 384, a rate of 5e-5, batches of 32, three epochs.
    config.optimizer.name, config.optimizer.schedule = "adamw", "linear"
    config.optimizer.b2, config.optimizer.epsilon, config.optimizer.weight_decay = 0.999, 1e-6, 0.01
    config.optimizer.clip_norm = 1.0
    config.optimizer.peak_learning_rate = 5e-5
    config.optimizer.warmup_steps = 500
    config.num_steps = 6_000
    config.eval_every = 1_000
    if variant == "small":
        model.num_layers, model.d_model, model.num_heads = 2, 128, 4
        model.init = "matching"
        model.vocab_size = 4_000
        model.max_length = data.max_length = 256
        task.stride = 160
        data.tokens_per_batch = 16 * 256
        config.optimizer.peak_learning_rate = 1e-3
        config.optimizer.warmup_steps = 300
        config.num_steps, config.eval_every = 4_500, 1_500  # nearly an epoch
    elif variant == "test":
        return tiny_variant(config)
    elif variant == "base":
        return accelerator_variant(config)
    else:
        raise ValueError(f"unknown variant {variant!r}; there are small, base, test")
    return config
