"""Mistakes in models."""

from tests.mutants.mutant import in_file

MUTANTS = (
    *in_file(
        "models/hf/marian.py",
        "models/hf/test_marian.py",
        ("sines stay between cosines", ".reshape(-1, 2).T.reshape(-1)", ""),
        ("one matrix keeps its order", '    "up": -2,\n', ""),
    ),
    *in_file(
        "models/transformer.py",
        "models/test_transformer.py, models/test_transformer_decoding.py, models/test_transformer_options.py",
        ("the target is not shifted", "inputs = shift_right(target, self.config.start_id)", "inputs = target"),
        ("no positions", "drop(add_bias(x, vectors), self", "drop(x, self"),
        (
            "positions are dropped out before the sum",
            "return drop(add_bias(x, vectors), self.config.dropout_rate, rngs)",
            "return add_bias(drop(x, self.config.dropout_rate, rngs), vectors)",
        ),
        ("no last norm of the encoder", "(x if self.encoder_norm is None else self.encoder_norm(x))", "x"),
        (
            "no last norm of the decoder",
            "self.embedding.attend(x if self.decoder_norm is None else self.decoder_norm(x))",
            "self.embedding.attend(x)",
        ),
        (
            "no bias of the logits",
            "logits if self.logits_bias is None else logits + self.logits_bias[...][None, None]",
            "logits",
        ),
        (
            "steps without a last norm",
            "output(x if norm is None else norm(x), jnp.float32)",
            "output(x, jnp.float32)",
        ),
        ("always interleaved", "is_interleaved=is_interleaved", "is_interleaved=True"),
        (
            "more steps than positions are taken",
            "if positions is not None and max_length > positions.table.shape[0]:",
            "if False:",
        ),
        ("heads of uneven sizes", "if None in (self.d_k, self.d_v) and self.d_model % self.num_heads:", "if False:"),
        (
            "big has the heads of base",
            '"d_model": 1024, "num_heads": 16',
            '"d_model": 1024, "num_heads": 8',
            "models/test_table_3.py",
        ),
    ),
    *in_file(
        "models/encoder_decoder.py",
        "models/test_transformer.py, models/test_transformer_decoding.py, models/test_transformer_options.py",
        ("the last token comes first", "jnp.full_like(target[:, :1], start_id)", "target[:, -1:]"),
        (
            "padding is the unknown token",
            "(source != pad_id)[:, None, None, :]",
            "(source != pad_id + 3)[:, None, None, :]",
        ),
        (
            "maps are named by kind alone",
            'f"{prefix}/{index}/{kind}": weights',
            'f"{prefix}/{kind}": weights',
            "models/test_transformer_maps.py -k keys",
        ),
    ),
    *in_file(
        "models/bert.py",
        "models/test_bert.py",
        (
            "no norm of the sum",
            "x = self.norm(add_bias(x, self.positions(positions)))",
            "x = add_bias(x, self.positions(positions))",
        ),
        (
            "no token types",
            "jnp.zeros_like(tokens) if token_type_ids is None else token_type_ids",
            "jnp.zeros_like(tokens)",
        ),
        ("no tanh", "jnp.tanh(self.pooler(x[:, 0]))", "self.pooler(x[:, 0])"),
        ("the last token is pooled", "jnp.tanh(self.pooler(x[:, 0]))", "jnp.tanh(self.pooler(x[:, -1]))"),
        ("padding is seen", "mask = None if token_mask is None else token_mask[:, None, None, :]", "mask = None"),
        (
            "large has half its heads",
            '"bert-large-uncased": (30_522, 24, 1024, 16)',
            '"bert-large-uncased": (30_522, 24, 1024, 8)',
            "models/test_published_heads.py",
        ),
    ),
    *in_file(
        "models/bert_heads.py",
        "models/test_bert.py",
        ("no activation", "self.norm(self.activation_fn(self.dense(x)))", "self.norm(self.dense(x))"),
        (
            "start and end exchanged",
            "SpanLogits(logits[..., 0], logits[..., 1])",
            "SpanLogits(logits[..., 1], logits[..., 0])",
        ),
        (
            "a body of other sizes is taken",
            "if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, mine):",
            "if False:",
        ),
        (
            "the head's dropout is ignored",
            "config.dropout_rate if config.head_dropout_rate is None else config.head_dropout_rate",
            "config.dropout_rate",
        ),
    ),
    *in_file(
        "models/gpt.py",
        "models/test_gpt.py",
        ("sees the future", '"is_causal": True', '"is_causal": False'),
        (
            "padding moves positions",
            "if token_mask is None else count(token_mask)",
            "if token_mask is None or True else count(token_mask)",
        ),
        ("packed texts see each other", '"segment_ids": segment_ids}', '"segment_ids": None}'),
        ("residual projections start large", " * (2 * c.num_layers) ** -0.5", ""),
        (
            "no last norm",
            "logits = self.embedding.attend(x if self.norm is None else self.norm(x))",
            "logits = self.embedding.attend(x)",
        ),
        (
            "the last token is read twice",
            "is_past = token_mask & (places != last)",
            "is_past = token_mask",
        ),
        (
            "more than max_length is taken",
            "if num_past + max_length > self.model.config.max_length:",
            "if max_length > self.model.config.max_length:",
        ),
    ),
    *in_file(
        "models/t5.py",
        "models/test_t5.py",
        (
            "a decoder that looks both ways",
            "RelativeBias(c, is_bidirectional=False",
            "RelativeBias(c, is_bidirectional=True",
        ),
        ("scaled scores", "scale=1.0,\n                dtype=dtype", "dtype=dtype"),
        ("tied logits are not scaled", "(self.config.d_model**-0.5 if self.config.is_tied else 1.0)", "1.0"),
        ("no bias in the encoder", '{"bias": bias, "mask": mask,', '{"mask": mask,'),
        (
            "padding of a source takes places of experts",
            '"token_mask": mask[:, 0, 0]}',
            '"token_mask": None}',
            "models/test_experts.py",
        ),
        (
            "queries start as large as keys",
            "draw((c.d_model * c.d_k) ** -0.5, made.query.kernel",
            "draw(c.d_model**-0.5, made.query.kernel",
        ),
        (
            "steps at the first position",
            "model.decoder_bias(1, num_places, position)",
            "model.decoder_bias(1, num_places, 0)",
        ),
        (
            "the last outputs are not dropped",
            "attend(drop(self._last_norm(x), self.config.dropout_rate, rngs))",
            "attend(self._last_norm(x))",
        ),
    ),
    *in_file(
        "models/seq2seq.py",
        "models/test_seq2seq.py -k loop, models/test_seq2seq.py -k steps, models/test_seq2seq.py -k fits",
        (
            "no input feeding",
            "DecoderState(tuple(layers), context), (output",
            "DecoderState(tuple(layers), state.fed), (output",
        ),
        (
            "Bahdanau asks with the first layer",
            "attend(state.layers[-1][0])",
            "attend(state.layers[0][0])",
        ),
        ("dot is scaled", "functools.partial(dot_product_attention, scale=1.0)", "dot_product_attention"),
        ("an attention of one's own is forgotten", "if self.attention_fn is not None:", "if False:"),
        ("a fixed context is not told", "return gates + (told if words.ndim == 2 else told[:, None])", "return gates"),
    ),
    *in_file(
        "models/vit.py",
        "models/test_vit.py",
        (
            "huge has as many heads as its heads have numbers",
            '"ViT-H/14": (32, 1280, 16, 14)',
            '"ViT-H/14": (32, 1280, 80, 14)',
            "models/test_published_heads.py",
        ),
        ("channels and pixels mixed up", '"ByuxvC,CuvD->ByxD"', '"ByvxuC,CuvD->ByxD"'),
        (
            "the class token last",
            "jnp.concatenate([class_token, x], axis=1)",
            "jnp.concatenate([x, class_token], axis=1)",
        ),
        ("no last norm", "x = self.norm(x)\n        output", "output"),
        ("corners of patches are aligned", "(np.arange(new) + 0.5) * old / new - 0.5", "np.arange(new) * old / new"),
        ("another cubic kernel", "a: float = -0.75", "a: float = -0.5"),
    ),
    *in_file(
        "models/transformer_xl.py",
        "models/test_transformer_xl.py",
        ("a gradient into the memory", "jax.lax.stop_gradient(memories.inputs)", "memories.inputs"),
        ("what does not exist is seen", ">= m - memories.lengths[:, None]", ">= 0 * memories.lengths[:, None]"),
        (
            "outputs of layers are remembered",
            "_last(jnp.concatenate([memory, x], axis=1)",
            "_last(jnp.concatenate([memory, layer(x, memory, mask)], axis=1)",
        ),
        ("the oldest are remembered", "x[:, -missing:]", "x[:, :length]"),
        ("prompts see one too far", "(back <= window)", "(back <= window + 1)"),
        ("prompts are padded behind", "jnp.argsort(token_mask,", "jnp.argsort(~token_mask,"),
        ("all others forget", "jnp.where(rows, 0, self.lengths)", "jnp.where(rows, self.lengths, 0)"),
    ),
    *in_file(
        "models/san_ctc.py",
        "models/test_san_ctc.py",
        ("padding is stacked", "jnp.where(exists[..., None], frames,", "jnp.where(True, frames,"),
        ("a step too few", "return -(-num_frames // self.subsampling)", "return num_frames // self.subsampling"),
        ("padding is attended to", "layer(x, mask=mask, rngs", "layer(x, rngs"),
        ("no last norm", "self.classifier(self.norm(x)", "self.classifier((x)"),
    ),
    *in_file(
        "models/elmo.py",
        "models/test_elmo.py",
        ("windows begin in padding", "jnp.where(exists[..., None], y, jnp.zeros((), y.dtype))", "y"),
        ("padding has a vector", "jnp.where(exists[..., None], vectors, 0.0)", "vectors"),
        ("the gate is upside down", "+ (1 - gate) * x", "+ gate * x"),
        ("no projection", "narrow_product(wide, projection), c", "wide[:, : projection.shape[1]], c"),
        ("both directions read forwards", "token_mask, is_reversed=True)", "token_mask)"),
        ("the first layer has a residual", "layers.append(x + y if index else y)", "layers.append(x + y)"),
        ("the second layer has none", "layers.append(x + y if index else y)", "layers.append(y)"),
        (
            "the softmax reads the words",
            "token_mask=token_mask, rngs=rngs)[-1]",
            "token_mask=token_mask, rngs=rngs)[0]",
        ),
    ),
    *in_file(
        "models/elmo_tagger.py",
        "models/test_elmo.py",
        ("ELMo is trained", "setattr(part, name, Frozen(value[...]))", "pass"),
        ("the last layer alone", "scalar_mix(layers, self.weights[...], self.scale[...])", "layers[-1]"),
        ("the mix has no gamma", "gamma * jax.nn.softmax(weights)", "jax.nn.softmax(weights)"),
        ("shares do not sum to 1", "jax.nn.softmax(weights)", "weights"),
    ),
)

MUTANTS += in_file(
    "models/captioning.py",
    "models/test_captioning.py",
    ("no gate", "context = gate * looked.context", "context = looked.context"),
    (
        "words are told what the gate shut out",
        "return (h, c), looked._replace(context=context)",
        "return (h, c), looked",
    ),
    ("a maximum is drawn in training", "attention_fn=attend, rng=key, **asked", "attention_fn=attend, **asked"),
    ("no image gets the expectation", ">= c.soft_share", ">= 0.0"),
    ("an expectation has a choice to pay for", "jnp.where(drawn[..., 0], log_prob, 0.0)", "log_prob"),
    (
        "places have no vectors",
        "add_bias(x.astype(jnp.float32).reshape(len(x), -1, x.shape[-1]), self.positions.table[...])",
        "x.astype(jnp.float32).reshape(len(x), -1, x.shape[-1])",
    ),
    ("a state begins with its memory", "h, c = jnp.split(both, 2, axis=1)", "c, h = jnp.split(both, 2, axis=1)"),
)

MUTANTS += (
    *in_file(
        "models/seq2vec.py",
        "models/test_seq2vec.py",
        (
            "the nearest knot below",
            "return (1.0 - share) * jnp.take(rows, first, axis=0) + share *",
            "return jnp.take(rows, first, axis=0) + 0 * share *",
        ),
        ("all variables have one curve", "below + index * num_knots", "below"),
        ("times mean nothing", " + _between_knots(self.times[...][None], None, time)", ""),
        ("padding is pooled", "event_mask[:, None, None])", "jnp.ones_like(event_mask)[:, None, None])"),
        ("curves go on outside", "jnp.clip(place, 0.0, 1.0)", "place"),
        (
            "the hidden layer of the score has no query",
            "self.query[...].astype(events.dtype)",
            "0 * self.query[...].astype(events.dtype)",
        ),
    ),
    *in_file(
        "models/decomposable.py",
        "models/test_decomposable.py",
        (
            "F_intra compares padding",
            "words[:, :, None], bias, mask, scale=1.0)",
            "words[:, :, None], bias, scale=1.0)",
        ),
        ("F_intra's scores are scaled", "bias, mask, scale=1.0)", "bias, mask)"),
        ("distances have no sign", "places[:, None] - places[None]", "abs(places[:, None] - places[None])"),
        ("a distance less", "most, places = self.config.max_distance + 1,", "most, places = self.config.max_distance,"),
        (
            "maps change places",
            '"decoder/0/cross": of_hypothesis[:, None], "encoder/0/cross": of_premise',
            '"decoder/0/cross": of_premise[:, None], "encoder/0/cross": of_hypothesis',
        ),
        ("the projection has an offset", "use_bias=False", "use_bias=True"),
        ("matching sums", "[kernel[:width], -kernel[:width]]", "[kernel[:width], kernel[:width]]"),
    ),
)

MUTANTS += in_file(
    "models/long_encoder.py",
    "models/test_long_encoder.py",
    ("padding is pooled", "jnp.where(token_mask[..., None], x.astype(jnp.float32), 0.0)", "x.astype(jnp.float32)"),
    (
        "the mean is over padding",
        "jnp.maximum(token_mask.sum(axis=1, keepdims=True), 1)",
        "jnp.array(x.shape[1])[None, None]",
    ),
    ("padding is seen", "return layer(x, mask=mask, rngs", "return layer(x, rngs"),
    ("pairs change partners", "u, v = vectors[0::2], vectors[1::2]", "u, v = jnp.split(vectors, 2)"),
    ("no product", "[u, v, u * v, u - v],", "[u, v, u + v, u - v],"),
    ("the difference is the other way round", "u * v, u - v],", "u * v, v - u],"),
)
