"""Mistakes in modules."""

from tests.mutants.mutant import in_file

_STEPS = "models/test_gpt.py -k steps, models/test_transformer_decoding.py"

MUTANTS = (
    *in_file(
        "nn/auxiliary.py",
        "models/test_seq2seq_coverage.py, models/test_seq2vec.py",
        ("what does not exist counts", "(values * exists).sum()", "values.sum()"),
        ("the loss is what the metric tells", "scale * mean, mean", "mean, mean"),
        ("the metric is what the loss is", "scale * mean, mean", "scale * mean, scale * mean"),
    ),
    *in_file(
        "nn/pooling.py",
        "models/test_esim.py, models/test_long_encoder.py",
        ("padding is pooled", "jnp.where(token_mask[..., None], x.astype(jnp.float32), 0.0)", "x.astype(jnp.float32)"),
        (
            "the mean is over padding",
            "jnp.maximum(token_mask.sum(axis=1, keepdims=True), 1)",
            "jnp.array(x.shape[1])[None, None]",
        ),
        (
            "padding is the largest",
            "jnp.where(token_mask[..., None], x.astype(jnp.float32), -jnp.inf)",
            "x.astype(jnp.float32)",
        ),
        (
            "nothing is the largest of no words",
            "jnp.where(token_mask.any(axis=1, keepdims=True), largest, 0.0)",
            "largest",
        ),
    ),
    *in_file(
        "nn/attention.py",
        "nn/test_attention.py",
        (
            "values from the queries' inputs",
            "self.value(memory if value_memory is None else value_memory)",
            "self.value(memory)",
        ),
        ("twice the variance", 'variance_scaling(0.5, "fan_avg"', 'variance_scaling(1.0, "fan_avg"'),
        (
            "drops without being asked",
            "if rngs is not None and self.dropout_rate:",
            "if rngs is not None and not self.dropout_rate:",
        ),
        ("key heads that do not divide are taken", "if num_heads % num_kv_heads:", "if False:"),
        ("float32 whatever was asked", "use_bias=use_bias, dtype=dtype,", "use_bias=use_bias, dtype=jnp.float32,"),
    ),
    *in_file(
        "nn/fused_decoder.py",
        "nn/test_layers.py",
        ("writes one place further", "start = position * newest.key", "start = (position + 1) * newest.key"),
        (
            "sees one place further",
            "exists & (places <= position)[None]",
            "exists & (places <= position + 1)[None]",
            _STEPS,
        ),
        (
            "beams see each other",
            "(is_own & is_seen[:, None, :, None])",
            "(is_seen[:, None, :, None] | (is_own & False))",
            _STEPS,
        ),
        (
            "the padding of a prompt is seen",
            "exists & (places <= position)[None]",
            "(places <= position)[None] & (exists | True)",
            _STEPS,
        ),
        (
            "one window for all layers",
            "masks[step.sees]",
            "masks[steps[0].sees]",
            "models/test_attention_cores.py -k whole_text",
        ),
        (
            "positions count from one",
            "jnp.cumsum(exists, axis=1) - 1",
            "jnp.cumsum(exists, axis=1)",
            _STEPS,
        ),
        (
            "positions of beams",
            "jnp.repeat(newest[:, 0], num_beams)",
            "jnp.tile(newest[:, 0], num_beams)",
            _STEPS,
        ),
    ),
    *in_file(
        "nn/fused_linear.py",
        "nn/test_layers.py",
        ("no bias", "return y if self.bias is None else y +", "return y if self.bias is None else y + 0 *"),
        ("the gate is forgotten", "hidden if self.gate is None else hidden * self.gate(x)", "hidden"),
    ),
    *in_file(
        "nn/embedding.py",
        "nn/test_embedding.py",
        ("not scaled", "math.sqrt(d_model) if scale is None", "1.0 if scale is None"),
        ("scores are scaled", "linear_logits(x.astype", "linear_logits(self.scale * x.astype"),
        (
            "twice the deviation",
            "init = nnx.initializers.normal(d_model**-0.5 if init_stddev is None else init_stddev)\n"
            "        self.table = nnx.Param(init(rngs.params(), (vocab_size",
            "init = nnx.initializers.normal(2 * d_model**-0.5 if init_stddev is None else init_stddev)\n"
            "        self.table = nnx.Param(init(rngs.params(), (vocab_size",
        ),
    ),
    *in_file(
        "nn/feed_forward.py",
        "nn/test_feed_forward.py",
        ("drops in evaluation", "rngs.dropout() if rngs is not None and self.dropout_rate else None", "None"),
        (
            "two activations exchanged",
            "jax.nn.gelu, approximate=False",
            "jax.nn.gelu, approximate=True",
            "models/test_bert.py -k equations, models/test_vit.py -k equations",
        ),
    ),
    *in_file(
        "nn/dropout.py",
        "nn/test_layers.py",
        ("nothing is dropped", "rngs.dropout() if rngs is not None and rate else None", "None"),
    ),
    *in_file(
        "nn/layers.py",
        "nn/test_layers.py",
        ("the sum is not normalised", "return (x if self.pre_norm else self.norm(x)), extra", "return x, extra"),
        ("the branch is not normalised", "sublayer(self.norm(x) if self.pre_norm else x)", "sublayer(x)"),
        (
            "the sum is dropped",
            "x = x + drop(y, self.dropout_rate, rngs)",
            "x = drop(x + y, self.dropout_rate, rngs)",
        ),
        ("the decoder sees the future", "is_causal=True", "is_causal=False"),
        ("padding of the source is seen", "mask=memory_mask, ", ""),
    ),
    *in_file(
        "nn/moe.py",
        "nn/test_moe.py",
        (
            "a bfloat16 router",
            "x.astype(jnp.float32), self.router[...].astype(jnp.float32)",
            "x, self.router[...].astype(x.dtype)",
        ),
        ("padding counts in the losses", "load_balancing_loss(logits, mask)", "load_balancing_loss(logits)"),
        ("evaluation drops tokens", "if rngs is not None:\n            of_mesh", "if True:\n            of_mesh"),
        ("all groups compete for the same places", "num_groups=num_groups,", "num_groups=1,"),
        ("a share of all tokens", "is_dropped.sum() / jnp.maximum(is_real.sum(), 1)", "is_dropped.mean()"),
        (
            "all experts drop alike",
            "jax.random.split(rngs.dropout(), self.num_experts)",
            "jnp.stack([rngs.dropout()] * self.num_experts)",
        ),
    ),
    *in_file(
        "nn/normalization.py",
        "nn/test_normalization.py",
        ("its own epsilon", "self.scale[...], bias, epsilon=self.epsilon", "self.scale[...], bias"),
        ("its own epsilon in RMS norm", "self.scale[...], epsilon=self.epsilon)", "self.scale[...])"),
    ),
    *in_file(
        "nn/stack.py",
        "nn/test_stack.py",
        (
            "layers start alike",
            "jax.random.split(rngs.params(), num_layers // len(kinds))",
            "jax.numpy.stack([rngs.params()] * (num_layers // len(kinds)))",
        ),
        (
            "layers drop alike",
            "jax.random.split(rngs.dropout(), _num_groups(layers) * len(members))",
            "jax.numpy.stack([rngs.dropout()] * (_num_groups(layers) * len(members)))",
        ),
        ("layers in another order", "jnp.stack(leaves, axis=1).reshape", "jnp.stack(leaves).reshape"),
        ('"full" keeps as much as "dots"', '"full": None', '"full": jax.checkpoint_policies.everything_saveable'),
    ),
    *in_file(
        "nn/learned_attention.py",
        "models/test_long_encoder.py -k moves_no_centroid",
        (
            "centroids stay where they are",
            "if is_training:",
            "if False:",
        ),
        (
            "padding takes places in clusters",
            "if mask is not None and segment_ids is None:",
            "if False:",
            "models/test_long_encoder.py -k padding",
        ),
        (
            "distances are turned round",
            "jnp.arange(key.shape[1] - 1, -query.shape[1], -1)",
            "jnp.arange(-query.shape[1] + 1, key.shape[1])",
            "nn/test_cores.py",
        ),
    ),
    *in_file(
        "nn/cores.py",
        "models/test_attention_cores.py -k whole_text",
        ("all options are taken", "if strange:", "if False:", "models/test_attention_cores.py -k options_belong"),
        (
            "a causal form of everything",
            "if is_causal and not",
            "if False and not",
            "models/test_attention_cores.py -k refused",
        ),
        (
            "a bias for everything",
            "if has_bias and not",
            "if False and not",
            "models/test_attention_cores.py -k refused",
        ),
        (
            "weights of everything are dropped",
            "if drops is not None and not",
            "if False and not",
            "training/test_attention_requests.py -k line_names",
        ),
        (
            "options are not tried",
            "if attention.name in KERNEL_PLATFORMS:",
            "if True:",
            "training/test_attention_requests.py -k line_names",
        ),
    ),
    *in_file(
        "nn/step_attention.py",
        "models/test_attention_cores.py -k whole_text",
        (
            "a window to the right",
            "query - key <= self.distance",
            "key - query <= self.distance",
            "models/test_attention_cores.py",
        ),
        (
            "blocks of one more",
            "query // self.size == key // self.size",
            "query // (self.size + 1) == key // (self.size + 1)",
        ),
    ),
    *in_file(
        "nn/replay.py",
        "models/test_attention_cores.py -k whole_text",
        ("the newest token is lost", '.set(newest.astype(cache["tokens"].dtype))', ".set(0)"),
    ),
    *in_file(
        "nn/recurrent.py",
        "models/test_seq2seq.py -k loop",
        ("both directions read forwards", "kept=mask, is_reversed=is_reversed)", "kept=mask, is_reversed=False)"),
        ("the last of both is the same", "last.append(state[0])", "last.append(state[-1])"),
        (
            "all layers begin as the first",
            "mask in zip(above, others, masks, strict=True)",
            "mask in zip(above, states, masks, strict=False)",
        ),
        (
            "nothing between layers",
            "layer.gates(between(output))",
            "layer.gates(output)",
            "nn/test_recurrent.py -k run",
        ),
        (
            "a step of all layers drops nothing",
            "between(after[-1][0], number)), state, mask)",
            "between(after[-1][0], number)), state)",
            "nn/test_recurrent.py -k run",
        ),
        (
            "both directions drop alike",
            "token_mask, kept=mask, is_reversed",
            "token_mask, kept=None if kept is None else kept[0], is_reversed",
            "models/test_seq2seq_dropout.py -k loop",
        ),
    ),
)
