"""A mixture of experts token by token in float64, from the algorithms of Switch Transformer and GShard."""

import numpy as np


def probabilities(logits):
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def routes(logits, capacity, num_choices, mask=None):
    """(token, expert, position, weight) of every token that finds a place; all first choices come first."""
    gates = probabilities(logits)
    waiting = np.zeros(gates.shape[1], int)
    found = []
    for choice in range(num_choices):
        for token, gate in enumerate(gates):
            if mask is not None and not mask[token]:
                continue
            best = np.argsort(-gate, kind="stable")[:num_choices]
            weight = gate[best[choice]] / (1.0 if num_choices == 1 else gate[best].sum())
            if waiting[best[choice]] < capacity:
                found.append((token, best[choice], waiting[best[choice]], weight))
            waiting[best[choice]] += 1
    return found


def mixture(x, logits, experts, capacity, num_choices, mask=None):
    """The weighted sum of the answers of `experts`, functions of one token, [T, D]."""
    x = np.asarray(x, np.float64)
    out = np.zeros(x.shape)
    for token, expert, _, weight in routes(logits, capacity, num_choices, mask):
        out[token] += weight * experts[expert](x[token])
    return out


def switch_loss(logits):
    """Equations 4 to 6 of Fedus et al. (2021), alpha = 1."""
    gates = probabilities(logits)
    num_tokens, num_experts = gates.shape
    total = 0.0
    for expert in range(num_experts):
        fraction = sum(gate.argmax() == expert for gate in gates) / num_tokens
        total += fraction * gates[:, expert].sum() / num_tokens
    return num_experts * total


def gshard_loss(logits):
    """l_aux of algorithm 1 of Lepikhin et al. (2020)."""
    gates = probabilities(logits)
    num_tokens, num_experts = gates.shape
    counts = np.bincount(gates.argmax(axis=1), minlength=num_experts)
    return (counts / num_tokens * gates.mean(axis=0)).sum() / num_experts


def sequence_loss(logits, num_choices, mask=None):
    """Equations 17 to 20 of DeepSeek-V3, alpha = 1, of sequences [B, T, E] token by token; the mean over sequences."""
    losses = []
    for row, sequence in enumerate(np.asarray(logits, np.float64)):
        tokens = [token for t, token in enumerate(sequence) if mask is None or mask[row, t]]
        if not tokens:
            continue
        f, p = np.zeros(sequence.shape[1]), np.zeros(sequence.shape[1])
        for token in tokens:
            scores = 1 / (1 + np.exp(-token))
            for expert in np.argsort(-scores, kind="stable")[:num_choices]:
                f[expert] += len(scores) / (num_choices * len(tokens))
            p += scores / scores.sum() / len(tokens)
        losses.append((f * p).sum())
    return np.mean(losses)
