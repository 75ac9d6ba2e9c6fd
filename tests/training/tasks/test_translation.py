"""Translation of text of one's own: how it is scored, what is set aside, how large its vocabulary is."""

import pytest
import sacrebleu

from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.tasks.pair_data import PairData
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.translation import TranslationTask
from tfx_jax.training.config_checks import validate
from tfx_jax.training.run import make_run

GERMAN = ["Ein Mann schläft.", "Zwei Hunde spielen, im Schnee!", "Sie liest ein Buch."]
ENGLISH = ["A man sleeps.", "Two dogs play, in the snow!", "She reads a book."]


@pytest.fixture
def folder(tmp_path):
    """Twenty pairs in two files."""
    for name, lines in (("my.en", ENGLISH), ("my.de", GERMAN)):
        (tmp_path / name).write_text("".join(f"{i} {lines[i % 3]}\n" for i in range(20)))
    return tmp_path


def own_text(folder, *overrides):
    """The configuration of the README's command."""
    files = [
        f"--config.task.data.{name}" for name in (f"data_dir={folder}", "train_source=my.en", "train_target=my.de")
    ]
    languages = ["--config.task.data.source_language=en", "--config.task.data.target_language=de"]
    return validate(load_config_file("transformer_files", [*files, *languages, *overrides]))


def scores_of(config, hypotheses, references):
    pairs = [{"source": "", "target": reference} for reference in references]
    task = TranslationTask(config.task, config.model, config.task.splits(), tokenizer=None)
    return task.score(lambda params, lines: hypotheses, TrainedModel(None, {}), pairs)[0]


def test_own_text_is_scored_in_its_own_language(folder):
    """As sacreBLEU's command does, and with Moses' tokens of German: not by characters, nor by what spaces divide."""
    hypotheses = ["Ein Mann schläft!", "Zwei Hunde spielen im Schnee.", "Sie liest ein Buch."]
    found = scores_of(own_text(folder), hypotheses, GERMAN)
    assert found.sacrebleu == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [GERMAN]).score)
    assert "tok:13a" in found.signature
    assert 0 < found.tokenised < 100
    split_by_spaces = scores_of(own_text(folder, "--config.task.data.is_tokenised=true"), hypotheses, GERMAN)
    assert split_by_spaces.tokenised < found.tokenised


def test_the_region_of_a_language_does_not_change_its_script(folder):
    config = own_text(folder, "--config.task.data.target_language=zh_TW")
    assert "tok:zh" in scores_of(config, ["我看書"], ["我看書"]).signature


def test_the_grammar_is_scored_as_japanese_tokens():
    config = validate(load_config_file("transformer_demo"))
    found = scores_of(config, ["私 は 本 を 読む 。"], ["私 は 本 を 読む 。"])
    assert "tok:char" in found.signature
    assert found.tokenised == pytest.approx(100)


def test_without_a_validation_file_a_tenth_is_set_aside(folder):
    opened = own_text(folder).task.splits()
    splits = {
        split: [(pair["source"], pair["target"]) for pair in map(pairs.__getitem__, range(len(pairs)))]
        for split in ("train", "validation")
        for pairs in [opened[split]]
    }
    everything = list(zip(*((folder / name).read_text().splitlines() for name in ("my.en", "my.de")), strict=True))
    assert len(splits["validation"]) == 2
    assert splits["train"] == [pair for pair in everything if pair not in splits["validation"]]
    assert sorted(splits["train"] + splits["validation"]) == sorted(everything)
    assert "validation" in opened
    with pytest.raises(UserError, match=r"^config.task.data.test_source names no file for the test split$"):
        opened["test"]


def test_a_validation_file_leaves_the_training_text_whole(folder):
    files = [f"--config.task.data.validation_{side}=my.{code}" for side, code in (("source", "en"), ("target", "de"))]
    splits = own_text(folder, *files).task.splits()
    assert (len(splits["train"]), len(splits["validation"])) == (20, 20)


def test_a_text_too_small_to_set_some_aside_says_so(folder):
    for name in ("my.en", "my.de"):
        (folder / name).write_text("a b\n" * 9)
    with pytest.raises(
        UserError, match=r"^my.en has too few pairs to set some aside: name config.task.data.validation"
    ):
        own_text(folder).task.splits()["train"]


def test_vocabulary_goes_by_the_text(folder, tmp_path):
    """18 pairs are left to learn from: 32 * sqrt(18) tokens at most, besides every character; a number is obeyed."""
    characters = set((folder / "my.en").read_text() + (folder / "my.de").read_text()) - {"\n"}
    tokenizers = []
    for number, overrides in enumerate([(), ("--config.model.vocab_size=60",)]):
        tokenizers.append(make_run(own_text(folder, *overrides), tmp_path / f"run{number}").task.tokenizer)
    by_text, of_60 = tokenizers
    assert 60 == of_60.vocab_size < by_text.vocab_size <= 4 + len(characters) + 136
    for line in GERMAN:
        assert by_text.decode(by_text.encode(line)) == line


def test_the_test_variant_is_on_built_in_text():
    data = load_config_file("transformer_files:test").task.data
    assert (data.dataset, data.source_language, data.target_language) == ("grammar", "", "")
    assert PairData().validation_pairs == 0
