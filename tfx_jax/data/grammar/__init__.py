from tfx_jax.data.grammar.pairs import GrammarPairs as GrammarPairs
