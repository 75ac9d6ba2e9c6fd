"""Readers of published formats: text, tables, trees, sound, images, and data sets of TFDS.

Every reader streams or maps its files and raises `UserError` with file and line for damaged input. `lines` is below all
readers of text; `splits` says which split of a data set is read.
"""

from tfx_jax.data.sources.audio import SoundFiles, read_wav
from tfx_jax.data.sources.columns import read_columns
from tfx_jax.data.sources.conll import TaggedSentence, read_tagged
from tfx_jax.data.sources.disk_array import DiskArray
from tfx_jax.data.sources.images import read_center, read_image
from tfx_jax.data.sources.labeled import (
    LabeledPair,
    LabeledText,
    read_labeled,
    read_labeled_columns,
    read_labeled_pairs,
)
from tfx_jax.data.sources.lines import read_lines
from tfx_jax.data.sources.parquet import read_columnar
from tfx_jax.data.sources.splits import SPLITS, Split, Splits
from tfx_jax.data.sources.squad import Answer, Question, read_questions
from tfx_jax.data.sources.tables import Table, read_table
from tfx_jax.data.sources.text import PairSource, join_pairs, read_pairs, read_tsv, split_pairs
from tfx_jax.data.sources.tfds import tfds_pairs
from tfx_jax.data.sources.trees import Tree, read_trees
from tfx_jax.data.sources.wikitext import Article, read_articles

__all__ = [
    "SPLITS",
    "Answer",
    "Article",
    "DiskArray",
    "LabeledPair",
    "LabeledText",
    "PairSource",
    "Question",
    "SoundFiles",
    "Split",
    "Splits",
    "Table",
    "TaggedSentence",
    "Tree",
    "join_pairs",
    "read_articles",
    "read_center",
    "read_columnar",
    "read_columns",
    "read_image",
    "read_labeled",
    "read_labeled_columns",
    "read_labeled_pairs",
    "read_lines",
    "read_pairs",
    "read_questions",
    "read_table",
    "read_tagged",
    "read_trees",
    "read_tsv",
    "read_wav",
    "split_pairs",
    "tfds_pairs",
]
