"""Formulas of the attention catalogue, in LaTeX, which the site shows as MathML (`_math` in `conf.py`)."""

from tfx_jax.functional.attention import AttentionSpec

_SOFTMAX = r"\operatorname{softmax}"
_DENSE = rf"O = {_SOFTMAX}\left(\beta\, Q K^\top + B\right) V"
_SUM = r"o_t = \sum_s w_{ts} v_s"
_LOGITS = r"l_{ts} = \beta\, q_t \cdot k_s + b_{ts}"


def _visible(keys: str) -> str:
    """Returns the softmax over a set of keys, with the definition of the set."""
    weight = r"\frac{e^{l_{ts}}}{\sum_{j \in S_t} e^{l_{tj}}}"
    return rf"o_t = \sum_{{s \in S_t}} {weight} v_s, \quad {keys}, \quad {_LOGITS}"


def _recurrent(update: str) -> str:
    """Returns the reading of a state, with the update of the state."""
    return rf"o_t = \beta\, S_t^\top q_t, \quad S_t = {update}"


def _delta(update: str) -> str:
    """Returns a delta rule, whose queries and keys have the length 1."""
    units = r"q_t = \frac{\text{query}_t}{|\text{query}_t|}, \quad k_t = \frac{\text{key}_t}{|\text{key}_t|}"
    return rf"{_recurrent(update)}, \quad b_t = \sigma(\text{{beta}}_t), \quad {units}"


FORMULAS = {
    **dict.fromkeys(("dense", "chunked", "splash", "flash", "cudnn"), _DENSE),
    "local": _visible(r"S_t = \left\{ s : \lfloor s / b \rfloor = \lfloor t / b \rfloor \right\}"),
    "window": _visible(r"S_t = \left\{ s : -\text{ahead} \le t - s \le \text{back} \right\}"),
    "bigbird": _visible(
        r"S_t = \text{global blocks} \cup \text{neighboring blocks} \cup \text{random blocks of the block of } t"
    ),
    "strided": _visible(r"S_t = \left\{ s : |t - s| \le l \ \text{or} \ (t - s) \bmod l = 0 \right\}"),
    "fixed": _visible(
        r"S_t = \left\{ s : \lfloor s / l \rfloor = \lfloor t / l \rfloor \ \text{or} \ s \bmod l \ge l - c \right\}"
    ),
    "lsh": r"o_i = \sum_r e^{z_i^{(r)} - z_i} o_i^{(r)}, \quad "
    r"z_i^{(r)} = \log \sum_{j \in P_i^{(r)}} e^{\beta\, q_i \cdot k_j - \log N_{ij}}, \quad "
    r"z_i = \log \sum_r e^{z_i^{(r)}}, \quad k_j = \frac{q_j}{|q_j|}",
    "routing": r"o_t = \frac{1}{|C_t|} \sum_{c \in C_t} \sum_{s \in K_c} "
    r"\frac{e^{\beta\, q_t \cdot k_s}}{\sum_{j \in K_c} e^{\beta\, q_t \cdot k_j}} v_s, \quad "
    r"C_t = \left\{ c : t \in \operatorname{top}_n \text{ queries } i \text{ by } q_i \cdot \mu_c \right\}, \quad "
    r"K_c = \operatorname{top}_n \text{ keys } s \text{ by } k_s \cdot \mu_c, \quad "
    r"\mu_c = \text{centroid of the cluster } c, \quad n = \text{window}, \quad "
    r"q = \operatorname{LayerNorm}(\text{query}), \quad k = \operatorname{LayerNorm}(\text{key})",
    "sinkhorn": rf"O_i = {_SOFTMAX}\left(\beta\, Q_i \left[K_i, \sum_j P_{{ij}} K_j\right]^\top\right) "
    r"\left[V_i, \sum_j P_{ij} V_j\right], \quad "
    r"P = \operatorname{Sinkhorn}_{ij}\left(\frac{\beta\, \bar{q}_i \cdot \bar{k}_j}{\text{temperature}}\right), \quad "
    r"\bar{q}_i, \bar{k}_i = \text{means of the block } i",
    "moba": _visible(
        r"S_t = \text{own block} \cup \operatorname{top}_{n - 1} \text{ other blocks } C \text{ by } "
        r"q_t \cdot \frac{1}{|C|} \sum_{s \in C} k_s"
    ),
    "native_sparse": r"o_t = g_t^{(1)} \operatorname{attend}\left(q_t, \tilde{K}, \tilde{V}\right) + "
    r"g_t^{(2)} \operatorname{attend}\left(q_t, K_{\text{selected}}, V_{\text{selected}}\right) + "
    r"g_t^{(3)} \operatorname{attend}\left(q_t, K_{\text{window}}, V_{\text{window}}\right), \quad "
    r"g_t = \sigma(\text{gate}_t), \quad "
    rf"\operatorname{{attend}}(q, K, V) = V^\top {_SOFTMAX}\left(\beta\, K q\right), \quad "
    r"\tilde{k}_C = \sum_{s_i \in C} \text{key_mix}_i \left(k_{s_i} + \text{key_positions}_i\right), \quad "
    r"\tilde{v}_C = \sum_{s_i \in C} \text{value_mix}_i\, v_{s_i}, \quad "
    r"\text{selected} = \text{own block} \cup \operatorname{top}_{n - 1} \text{ other blocks } C \text{ by the weight "
    r"of } \tilde{k}_C \text{, summed over the heads that share it}",
    "indexed": _visible(
        r"S_t = \operatorname{top}_n \text{ keys } s \text{ by } I_{ts}, \quad "
        r"I_{ts} = \sum_j \text{index_weight}_{tj} \max\left(\text{index_query}_{tj} \cdot \text{index_key}_s, 0\right)"
    ),
    "favor": r"o_t = \frac{\sum_s \phi(\sqrt{\beta}\, q_t) \cdot \phi(\sqrt{\beta}\, k_s)\, v_s}"
    r"{\sum_s \phi(\sqrt{\beta}\, q_t) \cdot \phi(\sqrt{\beta}\, k_s)}, \quad "
    r"\phi(x) = \frac{1}{\sqrt{M}} e^{W x - |x|^2 / 2}",
    "linear": r"o_t = \frac{\left(\sum_s v_s \phi(\sqrt{\beta}\, k_s)^\top\right) \phi(\sqrt{\beta}\, q_t)}"
    r"{\phi(\sqrt{\beta}\, q_t) \cdot \sum_s \phi(\sqrt{\beta}\, k_s)}",
    "nystrom": rf"O = {_SOFTMAX}\left(\beta\, Q \tilde{{K}}^\top\right) Z\, "
    rf"{_SOFTMAX}\left(\beta\, \tilde{{Q}} K^\top\right) V, \quad "
    rf"Z \approx {_SOFTMAX}\left(\beta\, \tilde{{Q}} \tilde{{K}}^\top\right)^{{+}}",
    "linformer": rf"O = {_SOFTMAX}\left(\beta\, Q (E K)^\top\right) (F V)",
    "induced": rf"O = {_SOFTMAX}\left(\beta\, Q (A K)^\top\right) A V, \quad "
    rf"A = {_SOFTMAX}\left(\beta\, I K^\top\right)",
    "latent": rf"O = {_SOFTMAX}\left(\beta\, Q \left[R, C W_K\right]^\top + B\right) C W_V",
    "hard": rf"o_t = v_{{s_t}}, \quad s_t \sim \operatorname{{Categorical}}\left({_SOFTMAX}_s\, l_{{ts}}\right), "
    rf"\quad {_LOGITS}",
    "additive": rf"{_SUM}, \quad "
    rf"w_{{ts}} = {_SOFTMAX}_s\left(\beta\, v \cdot \tanh(W_q q_t + W_k k_s) + b_{{ts}}\right)",
    "general": rf"{_SUM}, \quad w_{{ts}} = {_SOFTMAX}_s\left(\beta\, q_t \cdot W k_s + b_{{ts}}\right)",
    "cosine": rf"{_SUM}, \quad w_{{ts}} = {_SOFTMAX}_s\left(\frac{{\beta\, q_t \cdot k_s}}{{\tau\, |q_t|\, |k_s|}} + "
    r"b_{ts}\right)",
    "relative": rf"{_SUM}, \quad w_{{ts}} = {_SOFTMAX}_s\left(\beta \left((q_t + u) \cdot k_s + "
    r"(q_t + v) \cdot r_{t-s}\right) + b_{ts}\right)",
    "entmax": r"o_t = \sum_s \max\left((\alpha - 1)\, l_{ts} - \tau_t,\ 0\right)^{1 / (\alpha - 1)} v_s, \quad "
    rf"\sum_s w_{{ts}} = 1, \quad {_LOGITS}",
    "sigmoid": r"O = \sigma\left(\beta\, Q K^\top + B + \text{offset}\right) V",
    "stick_breaking": rf"{_SUM}, \quad "
    rf"w_{{ts}} = \sigma(l_{{ts}}) \prod_{{s < j \le t}} \left(1 - \sigma(l_{{tj}})\right), \quad {_LOGITS}",
    "topk": _visible(r"S_t = \operatorname{top}_n \text{ keys } s \text{ by } l_{ts}"),
    "differential": r"O = (1 - \lambda_{\text{init}}) \operatorname{RMSNorm}\left(W \left[V_1, V_2\right]\right) "
    rf"\text{{norm_scale}}, \quad W = {_SOFTMAX}\left(\beta\, Q_1 K_1^\top + B\right) - "
    rf"\lambda\, {_SOFTMAX}\left(\beta\, Q_2 K_2^\top + B\right), \quad "
    r"\lambda = e^{a_1 \cdot b_1} - e^{a_2 \cdot b_2} + \lambda_{\text{init}}",
    "talking_heads": rf"O_n = \sum_m P^w_{{mn}}\, {_SOFTMAX}\left(\sum_h P^l_{{hm}}\, \beta\, Q_h K_h^\top "
    r"+ B_m\right) V_n",
    "forgetting": rf"O = {_SOFTMAX}\left(\beta\, Q K^\top + D + B\right) V, \quad "
    r"D_{ts} = \sum_{s < j \le t} \log \sigma(\text{gate}_j)",
    "synthesizer": rf"O = {_SOFTMAX}\left(\beta\, R + B\right) V, \quad R \text{{ learned}}",
    "dense_synthesizer": rf"O = {_SOFTMAX}\left(\beta \left(\max(Q W + b,\ 0)\, W' + b'\right) + B\right) V",
    "retention": _recurrent(r"\gamma S_{t-1} + k_t v_t^\top"),
    "gated_linear": _recurrent(
        r"\operatorname{diag}(a_t)\, S_{t-1} + k_t v_t^\top, \quad a_t = \sigma(\text{gate}_t)^{1 / \text{temperature}}"
    ),
    "state_space_duality": _recurrent(
        r"e^{-\text{rate}\, d_t} S_{t-1} + d_t k_t v_t^\top, \quad "
        r"d_t = \operatorname{softplus}(\text{dt}_t + \text{dt_bias}), \quad \text{rate} = e^{\text{log_rate_scale}}"
    ),
    "delta_rule": _delta(r"S_{t-1} + b_t k_t \left(v_t - S_{t-1}^\top k_t\right)^\top"),
    "gated_delta_rule": _delta(
        r"a_t S_{t-1} + b_t k_t \left(v_t - a_t S_{t-1}^\top k_t\right)^\top, \quad "
        r"a_t = e^{-\text{rate}\, \operatorname{softplus}(\text{dt}_t + \text{dt_bias})}, \quad "
        r"\text{rate} = e^{\text{log_rate_scale}}"
    ),
    "kimi_delta": _delta(
        r"A_t S_{t-1} + b_t k_t \left(v_t - (A_t S_{t-1})^\top k_t\right)^\top, \quad A_t = \operatorname{diag}(a_t), "
        r"\quad a_t = e^{-\text{rate}\, \operatorname{softplus}(\text{dt}_t + \text{dt_bias})}, \quad "
        r"\text{rate} = e^{\text{log_rate_scale}}"
    ),
}
"""The formula of each attention by its name; `, \\quad ` separates equations, which the site shows as lines."""


LEGEND = (
    "*q*, *k* and *v* are a query, a key and a value of one head, and *Q*, *K* and *V* all of them, as rows; *o* "
    "or *O* is the output, *l* a logit, *w* a weight, *b* with two indices or *B* the bias, *β* the argument `scale`."
)


def parts(spec: AttentionSpec) -> list[str]:
    """Returns the equations of an attention, without a bias if it supports none."""
    formula = FORMULAS[spec.name]
    if not spec.bias:
        formula = formula.replace(" + b_{ts}", "").replace(" + B", "")
    return formula.split(r", \quad ")
