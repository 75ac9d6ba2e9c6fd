"""Translation of text of one's own: its scores, what is set aside, its vocabulary, and models of other folders."""

import dataclasses
import json
import shutil
import types
import unicodedata
from typing import Any

import jax
import numpy as np
import pytest
import sacrebleu
from etils import epath
from flax import nnx

from tests.nn.programs import draw
from tests.tiers import slow_but
from tfx_jax.cli.train import load_config_file
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import BeamSearch
from tfx_jax.models import TransformerConfig, hf
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.text.translation import PairData, TranslationTask, Translator, _score_and_attend
from tfx_jax.training.config import save_config, validate
from tfx_jax.training.init_from import adopt_pretrained_config
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh, state_shardings

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


def scores_of(config, hypotheses, references, normalize=str):
    pairs = [{"source": "", "target": reference} for reference in references]
    tokenizer = types.SimpleNamespace(normalize=normalize, normalization="nmt_nfkc")
    task = TranslationTask(config.task, config.model, config.task.splits(), tokenizer=tokenizer)
    return task.score(lambda params, lines: hypotheses, TrainedModel(None, {}), pairs)[0]


def test_references_are_normalized_as_the_text_of_training_and_the_signature_says_so(folder):
    references = ["Zwei Hunde spielen, im Schnee um １２ Uhr!", "Sie liest ein Buch."]
    hypotheses = [unicodedata.normalize("NFKC", line) for line in references]
    config = own_text(folder)
    found = scores_of(config, hypotheses, references, lambda text: unicodedata.normalize("NFKC", text))
    assert (found.exact_match, found.tokenized) == (100, 100)
    assert found.signature.endswith("|norm:nmt_nfkc")
    assert "norm:" not in scores_of(config, hypotheses, hypotheses).signature
    assert scores_of(config, hypotheses, references).exact_match == 50


def test_own_text_is_scored_in_its_own_language(folder):
    """As sacreBLEU's command does, and with Moses' tokens of German: not by characters, nor by what spaces divide."""
    hypotheses = ["Ein Mann schläft!", "Zwei Hunde spielen im Schnee.", "Sie liest ein Buch."]
    found = scores_of(own_text(folder), hypotheses, GERMAN)
    assert found.sacrebleu == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [GERMAN]).score)
    assert "tok:13a" in found.signature
    assert 0 < found.tokenized < 100
    split_by_spaces = scores_of(own_text(folder, "--config.task.data.is_tokenized=true"), hypotheses, GERMAN)
    assert split_by_spaces.tokenized < found.tokenized


def test_the_region_of_a_language_does_not_change_its_script(folder):
    config = own_text(folder, "--config.task.data.target_language=zh_TW")
    assert "tok:zh" in scores_of(config, ["我看書"], ["我看書"]).signature


def test_the_grammar_is_scored_as_japanese_tokens():
    config = validate(load_config_file("transformer_demo"))
    found = scores_of(config, ["私 は 本 を 読む 。"], ["私 は 本 を 読む 。"])
    assert "tok:char" in found.signature
    assert found.tokenized == pytest.approx(100)


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
    with pytest.raises(UserError, match=r"^config.task.data.test_source is not set: the test split needs a file$"):
        opened["test"]


def test_a_corpus_of_several_files(folder):
    """Named one by one or by a pattern; the files of both sides match in number and in order."""
    for number, (english, german) in enumerate((("one", "eins"), ("two\nthree", "zwei\ndrei"))):
        (folder / f"part-{number}.en").write_text(f"{english}\n")
        (folder / f"part-{number}.de").write_text(f"{german}\n")
        (folder / f"part-{number}.tsv").write_text(f"{number}\tx\n")
    (folder / "a,b.tsv").write_text("comma\tKomma\n")

    def sources(source, target=""):
        pairs = PairData("files", str(folder), source, target).load("train")
        return [pair["source"] for pair in map(pairs.__getitem__, range(len(pairs)))]

    assert sources("part-*.en", "part-*.de") == ["one", "two", "three"]
    assert sources("part-1.en, part-0.en", "part-1.de,part-0.de") == ["two", "three", "one"]
    assert sources("part-?.tsv") == ["0", "1"]
    assert sources("a,b.tsv") == ["comma"]
    for names, message in (
        (("part-*.en", "part-0.de"), r"train_source names 2 files and train_target 1: each source file needs a"),
        (("part-0.en,part-1.en", "part-1.de,part-0.de"), r"part-0\.en has 1 lines and .*part-1\.de has 2: line i of"),
        (("part-*.en", "part-*.fr"), r"^no file matches .*part-\*\.fr$"),
        (("part-0.tsv,part-0.en", ""), "train_target is missing: name the target file; only a .tsv has both sides"),
    ):
        with pytest.raises(UserError, match=message):
            sources(*names)


def test_a_validation_file_leaves_the_training_text_whole(folder):
    files = [f"--config.task.data.validation_{side}=my.{code}" for side, code in (("source", "en"), ("target", "de"))]
    splits = own_text(folder, *files).task.splits()
    assert (len(splits["train"]), len(splits["validation"])) == (20, 20)


def test_a_text_too_small_to_set_some_aside_says_so(folder):
    for name in ("my.en", "my.de"):
        (folder / name).write_text("a b\n" * 9)
    with pytest.raises(
        UserError,
        match=r"^my.en has \d pairs, but a validation split can be taken from at least 10: add pairs, or name config",
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


@pytest.mark.parametrize("bpe_dropout", [0.0, 0.3])
def test_bpe_dropout_splits_the_words_of_training(folder, tmp_path, bpe_dropout):
    config = own_text(
        folder, f"--config.task.data.bpe_dropout={bpe_dropout}", "--config.task.data.tokens_per_batch=512"
    )
    task = make_run(config, tmp_path / "run").task
    batches = iter(task.train_data(LoaderOptions(seed=0)))
    targets = [row[row > 0].tolist()[:-1] for row in next(batches)["target"] if row.any()]
    batches.close()
    texts = list(map(task.tokenizer.decode, targets))
    assert len(texts) > 5
    assert {text.partition(" ")[2] for text in texts} == set(GERMAN)
    assert (task.tokenizer.encode_batch(texts) == targets) == (bpe_dropout == 0)


def test_bpe_dropout_of_whole_words_is_refused(folder):
    with pytest.raises(UserError, match=r'bpe_dropout leaves out merges .*tokenizer="words" has none: use tokenizer='):
        own_text(folder, "--config.task.data.bpe_dropout=0.1", "--config.task.data.tokenizer=words")


def test_the_test_variant_is_on_built_in_text():
    data = load_config_file("transformer_files:test").task.data
    assert (data.dataset, data.source_language, data.target_language) == ("grammar", "", "")
    assert PairData().validation_pairs == 0


@pytest.mark.parametrize(("name", "wanted"), [("pad_id", 0), ("start_id", 1), ("eos_id", 2)])
def test_other_special_tokens_than_the_tokenizer_has(folder, tmp_path, name, wanted):
    config = own_text(folder, f"--config.model.{name}=3")
    with pytest.raises(UserError, match=rf"^config.model.{name} is 3, but the tokenizer of .* has {wanted}: set the"):
        make_run(config, tmp_path / "run")


def small(folder, **changes):
    """A model of its own form, of the text in `folder`."""
    config = own_text(folder)
    config.task.decoding.extra_length = 6
    config.model = TransformerConfig(vocab_size=60, num_layers=1, d_model=16, num_heads=2, d_ff=24)
    return dataclasses.replace(config, **changes)


@pytest.fixture
def workdir(folder, tmp_path):
    """As a training makes it before its first step."""
    workdir = tmp_path / "workdir"
    workdir.mkdir()
    save_config(small(folder), epath.Path(workdir))
    make_run(small(folder), workdir)
    return workdir


@pytest.fixture
def exported(workdir, tmp_path):
    """A run, a model of it, and the folder that is made of both."""
    run, output = load_run(workdir, TranslationTask), tmp_path / "exported"
    model = draw(run.make_model, stddev=0.5)
    hf.save(model, output)
    for path in (workdir / "tokenizer").iterdir():
        shutil.copy(path, output)
    return run, model, output


SENTENCES = ["1 A man sleeps.", "Two </s> dogs", "She reads a book.", "17 dogs, in the <pad> snow!"]


@pytest.mark.parametrize("beam_size", slow_but([1, 3], 3))
def test_a_folder_translates_as_the_workdir_does(exported, beam_size):
    run, model, folder = exported
    tokenizer, again = load_folder_tokenizer(folder), hf.load(folder)
    found = []
    for side, words in ((model, run.task.tokenizer), (again, tokenizer)):
        graphdef, params = nnx.split(side)
        found.append(Translator(graphdef, words, search=BeamSearch(beam_size), extra_length=6)(params, SENTENCES))
    assert found[0] == found[1]
    assert len(set(found[0])) > 2


def test_a_translation_starts_from_another(workdir, exported, folder, tmp_path):
    for number, source in enumerate((workdir, exported[2])):
        config = small(folder, init_from=str(source))
        config.model.dropout_rate = 0.3
        config = validate(adopt_pretrained_config(config))
        assert (config.model.vocab_size, config.model.dropout_rate) == (60, 0.3)
        run = make_run(config, tmp_path / f"run{number}")
        assert run.task.model_config.vocab_size == run.task.tokenizer.vocab_size == 60
        for path in (workdir / "tokenizer").iterdir():
            assert (tmp_path / f"run{number}" / "tokenizer" / path.name).read_bytes() == path.read_bytes()


def test_a_translation_starts_from_a_model_of_opus(exported, folder, tmp_path):
    """Where 0 ends a sentence, and the last token of the vocabulary starts and pads it."""
    pieces = load_folder_tokenizer(exported[2]).pieces(range(60))
    opus = tmp_path / "opus"
    model = TransformerConfig.marian(
        vocab_size=59, num_layers=1, d_model=16, num_heads=2, d_ff=24, pad_id=58, start_id=58, eos_id=0
    )
    hf.save(draw(lambda: model.make(rngs=nnx.Rngs(0))), opus)
    for name in ("source.spm", "target.spm"):
        shutil.copy(exported[2] / name, opus)
    ids = {piece: index for index, piece in enumerate(["</s>", "<unk>", *pieces[4:], "<pad>"])}
    (opus / "vocab.json").write_text(json.dumps(ids))
    config = validate(adopt_pretrained_config(small(folder, init_from=str(opus))))
    run = make_run(config, tmp_path / "run")
    iterator = iter(run.task.train_data(LoaderOptions(seed=0)))
    batch = next(iterator)
    iterator.close()
    for rows in batch.values():
        for row in rows:
            length = row.tolist().index(58) if 58 in row else len(row)
            assert np.flatnonzero(row == 0).tolist() == ([length - 1] if length else [])
            assert (row[length:] == 58).all()
    translator = run.task.translator(nnx.graphdef(hf.load(opus)))
    assert len(translator(nnx.state(hf.load(opus)), GERMAN)) == 3


@pytest.mark.parity
def test_transformers_translates_the_same(exported):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    run, model, folder = exported
    theirs = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    graphdef, params = nnx.split(model)
    translator = Translator(graphdef, run.task.tokenizer, search=BeamSearch(1), extra_length=6)
    sentences = [line for line in [*ENGLISH, *SENTENCES] if "<" not in line]  # they would find tokens there
    for line, ids, text in zip(
        sentences, translator.translate_ids(params, sentences), translator(params, sentences), strict=True
    ):
        inputs = tokenizer(line, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == run.task.tokenizer.encode_with_specials(line).ids
        with torch.no_grad():
            found = theirs.generate(
                **inputs, num_beams=1, do_sample=False, max_new_tokens=inputs["input_ids"].shape[1] + 6
            )
        assert found[0].tolist() == [1, *ids]
        if 3 not in ids:  # which they leave out
            assert tokenizer.decode(found[0], skip_special_tokens=True) == text
    assert len({tuple(ids) for ids in translator.translate_ids(params, sentences)}) > 2


def test_a_long_sentence_is_explained_as_it_is_translated(exported):
    run, model, _ = exported
    task, sentence = run.task, " ".join(SENTENCES * 5)
    limit = task.config.data.max_length
    read = [*task.tokenizer.encode(sentence)[: limit - 1], task.tokenizer.eos_id]
    assert len(read) == limit
    graphdef, params = nnx.split(model)
    trained = TrainedModel(graphdef, nnx.to_pure_dict(params))
    (translation,) = task.translator(graphdef, beam_size=1).translate_ids(params, [sentence])
    (description,) = task.explain(trained, [sentence], [translation])
    assert description["source"] == task.tokenizer.pieces(read)
    logits = jax.jit(lambda *inputs: model(*inputs))(np.array([read]), np.array([translation]))
    logits = np.asarray(logits, np.float64)[0]
    log_probs = logits[np.arange(len(logits)), translation] - np.log(np.exp(logits).sum(axis=1))
    assert description["score"] == pytest.approx(log_probs.sum(), rel=1e-5)
    maps = task.attention(trained, sentence, GERMAN[0])
    assert maps.source == description["source"]


def test_short_translations_of_longer_sentences_are_explained(exported):
    run, model, _ = exported
    sentences, translations = [" ".join(SENTENCES[:2]), SENTENCES[0]], [[5, 6, 2], [7] * 17]
    trained = TrainedModel(nnx.split(model)[0], nnx.to_pure_dict(nnx.split(model)[1]))
    together = run.task.explain(trained, sentences, translations)
    for sentence, translation, description in zip(sentences, translations, together, strict=True):
        assert len(description["source"]) > 8
        (alone,) = run.task.explain(trained, [sentence], [translation])
        assert description["score"] == pytest.approx(alone["score"], rel=1e-5)


def test_a_model_without_maps_has_a_score_alone():
    class Uniform:
        config = types.SimpleNamespace(pad_id=0)

        def __call__(self, source, target):
            return np.zeros((*target.shape, 4), np.float32)

    batch: Any = {"source": np.array([[1, 2], [3, 1]]), "target": np.array([[1, 2, 3], [3, 1, 0]])}
    scores, maps = jax.jit(lambda batch: _score_and_attend(Uniform(), batch))(batch)
    np.testing.assert_allclose(scores, [-3 * np.log(4), -2 * np.log(4)], rtol=1e-6)
    assert maps.shape == (2, 0, 0)


@pytest.mark.slow
def test_parameters_that_a_mesh_divides_translate_where_they_are(exported):
    run, model, _ = exported
    params = nnx.to_pure_dict(nnx.state(model))
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    divided = jax.device_put(params, state_shardings(params, mesh))
    assert sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(divided)) > 3
    translator = run.task.translator(run.graphdef)
    assert translator(divided, SENTENCES) == translator(params, SENTENCES)
    assert any(translator(params, SENTENCES))
    assert run.evaluate(divided, "train")[0] == pytest.approx(run.evaluate(params, "train")[0], rel=1e-5)
