"""Whisper: folders, features and transcripts, and what transformers makes of the same weights and sounds."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
import scipy.io.wavfile
from flax import nnx

from tests.models.hf.folders import assert_comes_back, assert_refused, assert_same, change_config, redrawn
from tests.models.hf.small_whisper import FIRST_WORD, GENERATION, SIZES, WORDS, V, make_model, save_small_whisper
from tests.nn.programs import draw, jitted, normal
from tfx_jax.cli import main
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.errors import UserError
from tfx_jax.functional import whisper_features
from tfx_jax.generation import Transcriber
from tfx_jax.models import GPT, GPTConfig, Whisper, WhisperConfig, hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    save_small_whisper(folder)
    return folder


@pytest.fixture(scope="module")
def transcriber(folder):
    return Transcriber.load(folder)


def sounds():
    """One shorter than what the model reads, and one as long."""
    return [normal(seed, length) / 4 for seed, length in ((1, 9_000), (2, 16_000), (3, 400))]


@functools.cache
def score():
    return jitted(lambda frames, target: make_model()(frames, target)[0])


def greedy(frames, first):
    """Token by token, reading everything again; tokens that must not come are skipped."""
    found, length = list(first), SIZES["learned_positions"] - 1
    while len(found) < length - 1:  # at the limit is the end, whatever is probable
        target = np.zeros((1, length), np.int32)
        target[0, : len(found)] = found
        logits = np.array(score()(frames, target)[len(found)])
        logits[GENERATION["suppress_tokens"]] = -np.inf
        if len(found) == len(first):
            logits[GENERATION["begin_suppress_tokens"]] = -np.inf
        found.append(int(logits.argmax()))
        if found[-1] == SIZES["eos_id"]:
            break
    return found


def test_what_is_saved_is_loaded(tmp_path):
    assert_comes_back(make_model(), tmp_path)


def test_sizes_that_differ_are_refused(tmp_path):
    hf.save(make_model(), tmp_path)
    change_config(tmp_path, decoder_ffn_dim=41)
    assert_refused(tmp_path, "decoder_ffn_dim is 41, but only 40 is supported")
    hf.save(make_model(), tmp_path)
    change_config(tmp_path, num_attention_heads=1)  # also a name of the number in the encoder
    assert_refused(tmp_path, "num_attention_heads is 1, but only 3 is supported")
    with pytest.raises(ValueError, match=r"frames of shape \(99, 20\), but the model reads \(100, 20\)"):
        jax.eval_shape(make_model().encode, np.zeros((1, 99, 20), np.float32))
    with pytest.raises(ValueError, match="activation must be "):
        Whisper(WhisperConfig(activation="none"), rngs=nnx.Rngs(0))


def test_transcripts(transcriber):
    """With a language, without, and translated; a model of English only has neither."""
    texts, features = set(), jitted(functools.partial(whisper_features, num_bands=20))
    for sound in sounds()[:2]:
        frames = features(np.pad(sound, (0, 16_000 - len(sound)))[None])
        languages = score()(frames, np.zeros((1, 23), np.int32))[0, 2:5]
        cases = [({"language": "de"}, [3, 6, 8]), ({"task": "translate"}, [2 + int(languages.argmax()), 5, 8])]
        for options, first in cases:
            words = [WORDS[index - FIRST_WORD] for index in greedy(frames, first) if index >= FIRST_WORD]
            assert transcriber(sound, **options).split() == words
            texts.add(tuple(words))
    assert len(texts) > 2
    english = Transcriber(make_model(), transcriber._tokenizer, is_multilingual=False)
    assert english._first_ids(frames, None, "transcribe").tolist() == [8]
    for options in ({"language": "de"}, {"task": "translate"}):
        with pytest.raises(UserError, match="the model knows English only"):
            english(sound, **options)


def test_what_cannot_be_transcribed(transcriber, tmp_path, folder):
    for options, match in (
        ({"language": "xx"}, "the tokenizer has no language 'xx'; its languages are: en, de, haw"),
        ({"task": "sing"}, "the task must be transcribe or translate, got 'sing'"),
    ):
        with pytest.raises(UserError, match=match):
            transcriber(sounds()[0], **options)
    with pytest.raises(
        UserError, match=r"the recording has 16,001 samples, but at most 16,000 are read: cut it into parts"
    ):
        transcriber(np.zeros(16_001, np.float32))
    with pytest.raises(
        UserError, match=r"the samples have the shape \(99, 2\), not one axis: mix the channels into one"
    ):
        transcriber(np.zeros((99, 2), np.float32))
    for samples in (np.full(400, 99, np.int16), np.full(400, np.nan, np.float32)):
        with pytest.raises(UserError, match=rf"the samples are {samples.dtype}, but must be finite floats from -1 to"):
            transcriber(samples)
    with pytest.raises(UserError, match="the recording has no samples"):
        transcriber(np.zeros(0, np.float32))
    with pytest.raises(UserError, match="beam_size must be at least 1, got 0"):
        Transcriber(make_model(), transcriber._tokenizer, beam_size=0)
    with pytest.raises(UserError, match="length_penalty needs beam search: set beam_size above 1 as well"):
        Transcriber(make_model(), transcriber._tokenizer, length_penalty=1.0)
    config = GPTConfig(vocab_size=9, max_length=8, num_layers=1, d_model=8, num_heads=2)
    hf.save(draw(lambda: GPT(config, rngs=nnx.Rngs(0))), tmp_path)
    with pytest.raises(UserError, match="holds a GPT, which does not transcribe: name a Whisper"):
        Transcriber.load(tmp_path)
    pipeline = json.loads((folder / "tokenizer.json").read_text().replace("<|notimestamps|>", "<|other|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline))
    with pytest.raises(UserError, match=r"the tokenizer has no token <\|notimestamps\|>: take another copy"):
        Transcriber(make_model(), load_folder_tokenizer(tmp_path))(sounds()[0], language="de")


def test_command(transcriber, folder, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("one.wav", "none.wav", "long.wav")]
    samples = np.rint(sounds()[0] * 32_768).astype(np.int16)
    scipy.io.wavfile.write(files[0], 16_000, samples)
    scipy.io.wavfile.write(files[2], 16_000, np.zeros(16_160, np.int16))
    assert main(["transcribe", f"--model={folder}", "--language=de", *files]) == 2
    out, err = capsys.readouterr()
    assert out == f"{transcriber(samples / 32_768, language='de')}\n\n\n"
    none, long = err.splitlines()
    assert none.startswith(f"error: {files[1]} cannot be read: ")
    assert long == f"error: {files[2]} lasts 1.0 seconds, but the model reads at most 1.0: cut the file"
    assert main(["transcribe", "--workdir=w", "--task=translate", files[0]]) == 2
    assert "--language and --task are for --model" in capsys.readouterr().err


# Beside transformers.


@pytest.fixture(scope="module")
def net():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    both = {f"{side}_attention_heads": 3 for side in ("encoder", "decoder")}
    both |= {f"{side}_ffn_dim": 40 for side in ("encoder", "decoder")}
    config = transformers.WhisperConfig(
        vocab_size=V, num_mel_bins=20, max_source_positions=50, max_target_positions=24, d_model=24, encoder_layers=2,
        decoder_layers=3, **both, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, attn_implementation="eager",
    )  # fmt: skip
    net = redrawn(transformers.WhisperForConditionalGeneration(config))
    net.generation_config = transformers.GenerationConfig(**GENERATION)
    return net


@pytest.mark.parity
def test_logits_and_maps(net, tmp_path):
    torch = pytest.importorskip("torch")
    net.save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    frames, target = normal(0, 3, 100, 20), np.random.default_rng(0).integers(9, V, (3, 7))
    inputs = np.concatenate([np.ones((3, 1), int), target[:, :-1]], axis=1)
    with torch.no_grad():
        want = net(
            input_features=torch.tensor(frames.swapaxes(1, 2)),
            decoder_input_ids=torch.tensor(inputs),
            output_attentions=True,
        )
    logits, maps = jitted(lambda model: model(frames, target, return_attention=True))(model)
    np.testing.assert_allclose(logits, want.logits, atol=1e-4 * want.logits.abs().max().item())
    for kind, name in (("encoder/{}/self", "encoder_attentions"), ("decoder/{}/cross", "cross_attentions")):
        for index, weights in enumerate(want[name]):
            np.testing.assert_allclose(maps[kind.format(index)], weights, atol=1e-5)
    hf.save(model, tmp_path / "ours")
    again, info = type(net).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in net.state_dict().items())
    assert_same(hf.load(tmp_path / "ours"), model)


@pytest.mark.parity
@pytest.mark.parametrize("num_bands", [80, 128])
def test_features(num_bands):
    transformers = pytest.importorskip("transformers")
    sound = normal(0, 480_000) * np.linspace(0, 0.3, 480_000).astype(np.float32)
    sound[:1_000] = 0
    want = transformers.WhisperFeatureExtractor(feature_size=num_bands)(sound, sampling_rate=16_000).input_features
    got = jitted(functools.partial(whisper_features, num_bands=num_bands))(sound[None])
    np.testing.assert_allclose(got, np.swapaxes(want, 1, 2), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "warns"), [({"language": "hindi"}, True), ({"task": "translate"}, True), ({}, False)]
)
def test_language_and_task_of_a_folder_are_not_used_without_a_word(folder, tmp_path, caplog, fields, warns):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"task": "transcribe"} | fields))
    Transcriber.load(tmp_path)
    assert ("language and task are not used" in caplog.text) == warns


@pytest.mark.parity
@pytest.mark.parametrize("options", [{"language": "de"}, {"language": "en", "task": "translate"}, {}])
def test_tokens(net, folder, tmp_path, options):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    net.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    transcriber = Transcriber.load(tmp_path)
    extract, texts = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1), set()
    for sound in sounds():
        features = extract(sound, sampling_rate=16_000, return_tensors="pt").input_features
        with torch.no_grad():
            tokens = net.generate(features, **{"task": "transcribe"} | options, max_new_tokens=19, do_sample=False)
        want = [WORDS[index - FIRST_WORD] for index in tokens[0].tolist() if index >= FIRST_WORD]
        found = transcriber(sound, **options).split()
        # At the limit ours ends, and theirs goes on to its own limit.
        assert found[: len(want)] == want[: len(found)]
        assert min(len(found), len(want)) >= 18 or len(found) == len(want)
        texts.add(tuple(want))
    assert len(texts) > 1
