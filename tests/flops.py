"""Model FLOPs by hand: formulas of the papers' matrix products, to compare `tfx_jax.training.flops` with.

Each formula takes the configuration of a model and the shapes of a batch. A weight costs 6 FLOPs where it is applied to
something learned, 4 where it is applied to an input, 2 where it is frozen.
"""

from tfx_jax.nn.recurrent import CELLS
from tfx_jax.tasks.text.bert_pretraining import max_predictions


def stack(rows, length, *, num_layers, d_model, width, d_ff):
    """Transformer layers with attention heads of `width` in total."""
    layer = length * (4 * d_model * width + 2 * d_model * d_ff) + 2 * width * length**2
    return 6 * rows * num_layers * layer


def experts(m, rows, length, num_layers):
    """Routers, the weighted sums of the answers, and shared networks, of the mixtures in a stack."""
    e = m.experts
    mixtures = num_layers // e.every if e.num_experts else 0
    shared = 2 * e.shared_d_ff + e.use_shared_gate
    return 6 * rows * length * mixtures * m.d_model * (e.num_experts + e.experts_per_token + shared)


def active(m):
    """Hidden units that a token meets in a layer, on average."""
    e, d_ff = m.experts, m.d_ff or 4 * m.d_model
    return d_ff * (e.every - 1 + e.experts_per_token) // e.every if e.num_experts else d_ff


def _encoder_decoder(m):
    """Multiplications of a position by a query and its output, and by a feed-forward; of a pair; numbers of layers."""
    d_k = m.d_k or m.d_model // m.num_heads
    per_head = d_k + (getattr(m, "d_v", None) or d_k)
    feed_forward = (3 if getattr(m, "is_gated", False) else 2) * m.d_model * active(m)
    num_decoder_layers = m.num_layers if m.num_decoder_layers is None else m.num_decoder_layers
    return m.num_heads * m.d_model * per_head, feed_forward, m.num_heads * per_head, m.num_layers, num_decoder_layers


def encoder_decoder(m, rows, source_length, target_length):
    """A Transformer or T5, whose decoder projects the encoder's output: cross attention costs source positions too."""
    s, t = source_length, target_length
    projection, feed_forward, pair, layers, decoder_layers = _encoder_decoder(m)
    encoder_layer = s * (2 * projection + feed_forward) + pair * s * s
    decoder_layer = t * (3 * projection + feed_forward) + s * projection + pair * (t * t + t * s)
    products = layers * encoder_layer + decoder_layers * decoder_layer + t * m.d_model * m.vocab_size
    return 6 * rows * products


def search(m, rows, num_beams, source_length, target_length):
    """A beam search: the t-th query of a hypothesis meets t positions."""
    s, t = source_length, target_length
    projection, feed_forward, pair, layers, decoder_layers = _encoder_decoder(m)
    once = s * (layers * (2 * projection + feed_forward + s * pair) + decoder_layers * projection)
    weights = decoder_layers * (3 * projection + feed_forward) + m.d_model * m.vocab_size
    attention = decoder_layers * pair * (t * (t + 1) // 2 + t * s)
    return 2 * rows * (once + num_beams * (t * weights + attention))


def pairs(m, shapes):
    """Any encoder-decoder on a batch of "source" and "target"."""
    (rows, source_length), (_, target_length) = shapes["source"], shapes["target"]
    if m.kind == "encoder_decoder" and hasattr(m, "cell"):
        return seq2seq(m, rows, source_length, target_length)
    return encoder_decoder(m, rows, source_length, target_length)


def seq2seq(m, rows, source_length, target_length):
    """A recurrent encoder-decoder; scores by a vector, as additive ones, are no matrix products."""
    s, t, d, cell = source_length, target_length, m.d_model, CELLS[m.cell]
    matrix = d * d
    encoder = s * m.num_layers * 3 * cell.num_gates * matrix // 2  # of each direction [D + D / 2, G D / 2]
    fed = 1 if m.variant == "fixed" else t  # how often something is fed
    decoder = (fed + 2 * t * m.decoder_depth) * cell.num_gates * matrix
    readout = t * (2 if m.variant == "luong" else 6) * matrix
    scoring = {"concat": (s + t) * matrix, "general": t * matrix}.get(m.scored_by, 0)
    pairs = 0 if m.variant == "fixed" else (1 if m.scored_by == "concat" else 2) * s * t * d
    if m.alignment == "local-p":  # the weights are changed after a first sum, which is traced and not needed
        scoring, pairs = scoring + t * (matrix + d), pairs + s * t * d
    initial = m.decoder_depth * cell.num_states * matrix
    return 6 * rows * (encoder + initial + decoder + readout + scoring + pairs + t * d * m.vocab_size)


def gpt(m, shapes):
    rows, length = shapes["inputs"]
    width = m.num_heads * (m.d_k or m.d_model // m.num_heads)
    layers = stack(rows, length, num_layers=m.num_layers, d_model=m.d_model, width=width, d_ff=active(m))
    return layers + experts(m, rows, length, m.num_layers) + 6 * rows * length * m.d_model * m.vocab_size


def llama(m, shapes):
    """Three matrices of a feed-forward, and fewer heads of keys and values."""
    rows, length = shapes["inputs"]
    heads = 2 * (m.num_heads + (m.num_kv_heads or m.num_heads)) * m.head_size
    layer = length * (m.d_model * heads + 3 * m.d_model * m.d_ff) + 2 * m.num_heads * m.head_size * length * length
    return 6 * rows * (m.num_layers * layer + length * m.d_model * m.vocab_size)


def reformer(m, shapes):
    """No matrix of keys, and an output that reads two streams."""
    (rows, length), d = shapes["inputs"], m.d_model
    layer = length * (3 * d * d + 2 * d * m.d_ff) + 2 * d * length**2
    return 6 * rows * (m.num_layers * layer + length * 2 * d * m.vocab_size)


def transformer_xl(m, shapes):
    """Keys and values of the memory are projected again; encodings of distances, which rows share, are not learned."""
    (rows, length), d = shapes["inputs"], m.d_model
    keys = m.memory_length + length
    layer = length * (2 * d * d + 2 * d * m.d_ff) + keys * 2 * d * d + 3 * d * length * keys
    return m.num_layers * (6 * rows * layer + 4 * keys * d * d) + 6 * rows * length * d * m.vocab_size


def _bert(m, rows, length):
    return stack(
        rows, length, num_layers=m.num_layers, d_model=m.d_model, width=m.d_model, d_ff=m.d_ff or 4 * m.d_model
    )


def bert_pretraining(m, shapes):
    (rows, length), d = shapes["tokens"], m.d_model
    masked = max_predictions(length, 0.15) * (d * d + d * m.vocab_size)
    return _bert(m, rows, length) + 6 * rows * (masked + d * d + 2 * d)


def bert_classification(m, shapes):
    (rows, length), d = shapes["tokens"], m.d_model
    return _bert(m, rows, length) + 6 * rows * (d * d + d * len(m.labels))


def bert_tagging(m, shapes):
    rows, length = shapes["tokens"]
    return _bert(m, rows, length) + 6 * rows * length * m.d_model * len(m.labels)


def bert_question_answering(m, shapes):
    rows, length = shapes["tokens"]
    return _bert(m, rows, length) + 6 * rows * length * m.d_model * 2


def _characters(c, word_length, d_model):
    features = sum(c.num_filters)
    filters = sum(width * number for width, number in zip(c.filter_widths, c.num_filters, strict=True))
    return word_length * filters * c.d_character + features * (2 * c.num_highway * features + d_model)


def _elmo(m):
    layer = m.d_hidden * (4 * (m.d_model + m.d_model) + m.d_model)
    return _characters(m.characters, m.word_length, m.d_model) + 2 * m.num_layers * layer


def elmo(m, shapes):
    rows, length = shapes["token_mask"]
    return 6 * rows * length * (_elmo(m) + 2 * m.d_model * m.vocab_size)


def elmo_tagging(m, shapes):
    """A frozen ELMo, whose layers are mixed by learned scalars, below a tagger."""
    (rows, length), t = shapes["token_mask"], m.tagger
    size = 2 * m.d_model if t.use_elmo else 0
    own = _characters(t.characters, m.word_length, t.d_word)
    own += 2 * t.d_hidden * (4 * (t.d_word + size + t.d_hidden) + len(m.labels))
    frozen = 2 * _elmo(m) + 4 * (m.num_layers + 1) * size if t.use_elmo else 0
    return rows * length * (6 * own + frozen)


def ctc(rows, steps, num_classes, max_labels):
    """What optax picks the labels' probabilities by."""
    return 4 * rows * (steps * num_classes * max_labels + max_labels + 1)


def san_ctc(m, shapes):
    (rows, num_frames, _), (_, max_labels) = shapes["frames"], shapes["labels"]
    steps, d = m.num_steps(num_frames), m.d_model
    layers = stack(rows, steps, num_layers=m.num_layers, d_model=d, width=d, d_ff=m.d_ff)
    ends = rows * steps * d * (4 * m.subsampling * m.num_features + 6 * m.vocab_size)
    return layers + ends + ctc(rows, steps, m.vocab_size, max_labels)


def conformer(m, shapes):
    (rows, num_frames, num_bins), (_, max_labels) = shapes["frames"], shapes["labels"]
    steps, d, d_ff = m.num_steps(num_frames), m.d_model, m.d_ff or 4 * m.d_model
    bands = -(-m.num_features // 2)
    layers = stack(rows, steps, num_layers=m.num_layers, d_model=d, width=d, d_ff=2 * d_ff)
    layers += 6 * rows * m.num_layers * steps * (3 * d * d + m.kernel_size * d)
    if "relative" in m.attention.names:  # by distance as by content, and the distances' projection, which rows share
        layers += m.num_layers * (2 * steps - 1) * (6 * rows * steps * d + 4 * d * d)
    window = 25 * num_bins // 10  # of 25 ms, where a frame is 10 ms
    mel = 2 * rows * num_frames * (1 + 2 ** (window - 1).bit_length() // 2) * m.num_features
    first = -(-num_frames // 2) * bands * 9 * d
    second = steps * -(-bands // 2) * (9 * d + d) * d
    ends = rows * (4 * first + 6 * second + 6 * steps * d * m.vocab_size)
    return layers + ends + mel + ctc(rows, steps, m.vocab_size, max_labels)


def captioner(m, shapes):
    """Convolutions of stride two, an initial state, and a word at a time; scores by a vector are no matrix product."""
    rows, length = shapes["caption"]
    side, places, features, d = m.image_size, m.grid_size**2, m.channels[-1], m.d_model
    total = 0
    for c_in, c_out in zip((3, *m.channels), m.channels, strict=False):
        side //= 2
        total += (4 if c_in == 3 else 6) * side**2 * 9 * c_in * c_out
    total += 6 * (places * features * d + 2 * features * d)
    step = 4 * d * (2 * d + features) + d * d + places * features + d + d * (d + features)
    return rows * (total + 6 * length * (step + d * m.vocab_size))


def vit(m, shapes):
    (rows,), d = shapes["label"], m.d_model
    num_patches = (m.image_size // m.patch_size) ** 2
    layers = stack(rows, 1 + num_patches, num_layers=m.num_layers, d_model=d, width=d, d_ff=m.d_ff)
    return layers + rows * d * (4 * num_patches * m.patch_size**2 * m.num_channels + 6 * len(m.labels))


def patch_pooling(m, shapes):
    """A patch is embedded, scored by a hidden layer and a query, and added to the mean; then the classifier."""
    (rows,), d, f = shapes["label"], m.d_model, m.d_ff
    num_patches = (m.image_size // m.patch_size) ** 2
    patch = 4 * m.patch_size**2 * m.num_channels * d + 6 * (d * f + f + d)
    return rows * (num_patches * patch + 6 * d * len(m.labels))


def seq2vec(m, shapes):
    """Keys for each event, and hops that pool them; lookups and scores by a vector are no matrix products."""
    (rows, num_events), hops, d, f = shapes["variable"], m.rows_pooled, m.d_model, m.d_ff
    keys = {"additive": d * f, "structured": (d + hops) * f}[m.pooling]
    overlap = hops * hops if m.is_penalised else 0
    return 6 * rows * (num_events * (keys + hops * d + overlap) + hops * d * f + f * m.num_classes)


def decomposable(m, shapes):
    """Projection, F and G of each word; scores and sums in both directions; the classifier."""
    (rows, length), d, f = shapes["premise"], m.d_model, m.d_ff
    width = 2 * d if m.intra_attention else d
    word = m.d_embedding * d + width * f + f * f + 2 * width * f + f * f
    if m.intra_attention:
        word += d * f + f * f + (f + d) * length
    head = 2 * f * f + f * f + f * len(m.labels)
    return 6 * rows * (2 * length * word + 2 * length**2 * (f + width) + head)


def esim(m, shapes):
    """Encoder, projection and composition of each word; scores and sums in both directions; the classifier."""
    (rows, length), d = shapes["premise"], m.d_model
    word = 8 * d * (m.d_embedding + d) + 8 * d * d + 8 * d * (d + d)
    return 6 * rows * (2 * length * word + 2 * length**2 * (2 * d + 2 * d) + 8 * d * d + d * len(m.labels))


def long_encoder(m, shapes):
    (rows, length), d, f, n = shapes["tokens"], m.d_model, m.d_ff, m.num_sequences
    head = d * f + f * len(m.labels) if n == 1 else 4 * d * f + f * f // 2 + f // 2 * len(m.labels)
    return stack(rows * n, length, num_layers=m.num_layers, d_model=d, width=d, d_ff=f) + 6 * rows * head


FORMULAS = {
    ("TransformerConfig", "TranslationConfig"): pairs,
    ("Seq2SeqConfig", "TranslationConfig"): pairs,
    ("GPTConfig", "LanguageModelConfig"): gpt,
    ("GPTConfig", "DuplicationConfig"): gpt,
    ("LlamaConfig", "LanguageModelConfig"): llama,
    ("LlamaConfig", "RecallConfig"): llama,
    ("ReformerConfig", "LanguageModelConfig"): reformer,
    ("TransformerXLConfig", "RecurrentLanguageModelConfig"): transformer_xl,
    ("BertConfig", "BertPretrainingConfig"): bert_pretraining,
    ("BertConfig", "ClassificationConfig"): bert_classification,
    ("BertConfig", "TaggingConfig"): bert_tagging,
    ("ElmoConfig", "TaggingConfig"): elmo_tagging,
    ("ElmoConfig", "BidirectionalLanguageModelConfig"): elmo,
    ("BertConfig", "QuestionAnsweringConfig"): bert_question_answering,
    ("T5Config", "SpanCorruptionConfig"): pairs,
    ("T5Config", "TextToTextConfig"): pairs,
    ("SanCTCConfig", "SpeechRecognitionConfig"): san_ctc,
    ("ConformerConfig", "SpeechRecognitionConfig"): conformer,
    ("TransformerConfig", "ParsingConfig"): pairs,
    ("CaptionerConfig", "CaptioningConfig"): captioner,
    ("ViTConfig", "ImageClassificationConfig"): vit,
    ("PatchPoolingConfig", "ImageClassificationConfig"): patch_pooling,
    ("Seq2VecConfig", "EventClassificationConfig"): seq2vec,
    ("DecomposableConfig", "SentencePairConfig"): decomposable,
    ("EsimConfig", "SentencePairConfig"): esim,
    ("LongEncoderConfig", "LongRangeConfig"): long_encoder,
}
"""By the configurations of model and task."""
