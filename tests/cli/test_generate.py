"""`tfx-jax generate` on a small GPT with a byte-level tokenizer, both made in place, against `Generator`."""

import functools
import io
import json
import shutil
import sys
import types

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

import tfx_jax
from tests.cli.small_gpt import save_small_gpt
from tfx_jax.cli import main
from tfx_jax.cli.support.lines import LineReader
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.data.tokenizers.train import train_or_load_folder
from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import Sampling
from tfx_jax.generation.text import Generator
from tfx_jax.models import (
    T5,
    Bert,
    BertConfig,
    BertTagger,
    T5Config,
    Transformer,
    TransformerConfig,
    hf,
)

PROMPTS = ("the cat", "", "日本 a dog", "x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, draw_model):
    folder = tmp_path_factory.mktemp("gpt")
    save_small_gpt(folder, draw_model)
    return folder


@pytest.fixture
def generate(folder, monkeypatch, capsys):
    """Runs the verb; returns its exit status and what it wrote on both streams."""

    def call(*options, lines=PROMPTS, model=folder):
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        status = main(["generate", f"--model={model}", *options])
        return status, *capsys.readouterr()

    return call


@functools.cache
def continuations(folder, sampling, lines=PROMPTS, **options):
    """What the command should find, without it."""
    tokenizer = load_folder_tokenizer(folder)
    generator = Generator(hf.load(folder), eos_ids=[0], max_new_tokens=24, search=sampling)
    found = generator([tokenizer.encode(line) or [0] for line in lines], **options)
    return [tokenizer.decode(ids) for ids in found]


def escaped(text):
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n") if set("\r\n") & set(text) else text


def test_a_line_for_every_line(generate, folder):
    want = continuations(folder, Sampling(temperature=0))
    status, out, err = generate("--max-new-tokens=24", "--temperature=0")
    assert (status, err) == (0, "")
    assert out == "".join(f"{escaped(line + text)}\n" for line, text in zip(PROMPTS, want, strict=True))
    assert out == generate("--max-new-tokens=24", "--temperature=0", "--batch=3")[1]
    assert len(set(want)) > 1


def test_json_and_drawing(generate, folder):
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2)
    options = ["--temperature=0.9", "--top-k=40", "--top-p=0.95", "--repetition-penalty=1.2", "--seed=5"]
    _, out, _ = generate("--max-new-tokens=24", "--json", *options)
    want = continuations(folder, sampling, seed=5)
    assert [json.loads(line)["text"] for line in out.split("\n")[:-1]] == want
    assert [json.loads(line)["prompt"] for line in out.split("\n")[:-1]] == list(PROMPTS)
    assert any(set("\r\n\\") & set(text) for text in want) or len("".join(want)) > 40


def test_stream_is_the_text_as_it_is(generate, folder):
    lines = PROMPTS[:1]
    want = continuations(folder, Sampling(), lines, seed=1)
    status, out, _ = generate("--max-new-tokens=24", "--stream", "--seed=1", lines=lines)
    assert status == 0
    assert out == f"{lines[0]}{want[0]}\n"


@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_stops_before_any_of_the_strings(generate, folder, options):
    (whole,) = continuations(folder, Sampling(temperature=0), PROMPTS[:1])
    stop = whole[6:8]
    assert "\n" not in whole[:8]
    status, out, _ = generate(
        "--max-new-tokens=24", "--temperature=0", "--stop=never there", f"--stop={stop}", *options, lines=PROMPTS[:1]
    )
    assert status == 0
    assert out == f"{PROMPTS[0]}{whole[: whole.index(stop)]}\n"


def test_an_error_does_not_follow_the_prompt_on_its_line(generate):
    status, out, err = generate("--max-new-tokens=60", "--stream", lines=["a long prompt"])
    assert (status, out) == (2, "")
    assert err.startswith("tfx-jax generate: prompt 1 has 13 tokens")


@pytest.mark.slow
def test_a_prompt_slides(generate):
    options = ("--max-new-tokens=100", "--temperature=0", "--slide")
    status, out, err = generate(*options, "--json")
    assert (status, err) in [(0, ""), (0, "answered 4 lines\n")]  # the latter on a machine that takes half a minute
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == [100] * len(PROMPTS)
    assert (
        generate(*options, "--stream", lines=PROMPTS[:1])[1]
        == PROMPTS[0] + json.loads(out.split("\n")[0])["text"] + "\n"
    )


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}a:"


@pytest.fixture
def chat_folder(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE})
    )
    return tmp_path


def test_a_line_is_a_message_or_a_conversation(generate, folder, chat_folder):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": ""},
    ]
    lines = ["Hi", json.dumps(messages), json.dumps({"messages": messages[:1]}), "[not JSON"]
    texts = ["u:Hi\0a:", "u:Hi\0a:Yo\0u:\0a:", "u:Hi\0a:", "u:[not JSON\0a:"]
    tokenizer = load_folder_tokenizer(folder)
    ids = [[i for part in text.split("\0") for i in [0, *tokenizer.encode(part)]][1:] for text in texts]
    outputs = Generator(hf.load(folder), eos_ids=[0], max_new_tokens=20, search=Sampling(temperature=0))(ids)
    expected = [tokenizer.decode(output) for output in outputs]
    options = ("--chat", "--max-new-tokens=20", "--temperature=0")
    status, out, err = generate(*options, lines=lines, model=chat_folder)
    assert (status, err, out) == (0, "", "".join(f"{escaped(text)}\n" for text in expected))
    assert len(set(expected)) == 3
    assert generate(*options, "--stream", lines=lines[:1], model=chat_folder)[1] == f"{expected[0]}\n"
    model = tfx_jax.load(chat_folder)
    assert tfx_jax.generate(model, messages, max_new_tokens=20, temperature=0) == expected[1]


def test_a_terminal_is_one_conversation(generate, chat_folder, monkeypatch):
    """The second reply is that to both messages and the first reply."""
    options = ("--chat", "--max-new-tokens=6", "--temperature=0")
    _, out, _ = generate(*options, "--json", lines=["Hi"], model=chat_folder)
    first = json.loads(out)["text"]
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
    _, out, _ = generate(
        *options, "--json", lines=[json.dumps([*history, {"role": "user", "content": "So?"}])], model=chat_folder
    )
    second = json.loads(out)["text"]
    monkeypatch.setattr("tfx_jax.cli.support.lines.LineReader", TerminalReader)
    status, out, _ = generate(*options, lines=["Hi", "So?"], model=chat_folder)
    assert (status, out) == (0, f"{first}\n{second}\n")
    status, out, _ = generate(*options, "--json", lines=["Hi", "So?"], model=chat_folder)
    assert [json.loads(line)["text"] for line in out.splitlines()] == [first, second]


class TerminalReader(LineReader):
    """Takes its stream for a terminal."""

    def __init__(self, stream):
        super().__init__(stream, screen=io.StringIO())
        self.is_terminal = True


def test_a_bad_conversation_is_named_by_its_line(generate, chat_folder):
    lines = ["Hi", '[{"role": "user"}]']
    status, out, err = generate("--chat", "--max-new-tokens=6", lines=lines, model=chat_folder)
    assert (status, out.count("\n")) == (2, 1)
    assert 'line 2: message 1 must have a string "content"' in err


def test_a_run_replies_by_the_template_that_its_workdir_keeps(generate, chat_folder, tmp_path, monkeypatch, capsys):
    options = ("--chat", "--max-new-tokens=6", "--temperature=0")
    expected = generate(*options, lines=["Hi"], model=chat_folder)
    model = hf.load(chat_folder), load_folder_tokenizer(chat_folder)
    monkeypatch.setattr("tfx_jax.cli.generate.load_trained", lambda *_: model)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer").symlink_to(chat_folder)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi\n")))
    assert (main(["generate", f"--workdir={tmp_path / 'run'}", *options]), *capsys.readouterr()) == expected
    (tmp_path / "run" / "tokenizer").unlink()
    (tmp_path / "run" / "tokenizer").mkdir()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi\n")))
    assert main(["generate", f"--workdir={tmp_path / 'run'}", *options]) == 2
    assert "run/tokenizer has no chat template" in capsys.readouterr().err


def test_beam(generate):
    assert generate("--max-new-tokens=5", "--beam=3")[1].count("\n") == len(PROMPTS)


def test_no_lines(generate):
    assert generate("--max-new-tokens=8", lines=[]) == (0, "", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature=-1"], 'must be a finite number of at least 0, got "-1"'),
        (["--top-p=2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["--beam=2", "--stop=x"], "--stop and --stream need sampling"),
        (["--beam=2", "--temperature=0"], "--temperature needs sampling"),
        (["--beam=2", "--top-k=1"], "--top-k needs sampling"),
        (["--beam=2", "--top-p=1"], "--top-p needs sampling"),
        (["--beam=2", "--min-p=0"], "--min-p needs sampling"),
        (["--beam=2", "--repetition-penalty=2"], "--repetition-penalty needs sampling"),
        (["--beam=2", "--no-repeat-ngram-size=2"], "--no-repeat-ngram-size needs sampling"),
        (["--beam=2", "--slide"], "--slide and --chat need sampling"),
        (["--length-penalty=1"], "--length-penalty needs beam search: set --beam above 1 as well"),
        (["--min-p=1.5"], "min_p must be at least 0 and at most 1, got 1.5"),
        (["--chat"], "has no chat template, neither chat_template.jinja nor chat_template in tokenizer_config.json"),
        (["--stream", "--json"], "choose one of them"),
        (["--stop="], "--stop must not be empty"),
        (["--max-new-tokens=64"], "leaves no room for a prompt"),
        (["--max-new-tokens=60"], "prompt 1 has 7 tokens: with max_new_tokens=60 the model has room for 4"),
        (["--model=/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_cost_one_line(generate, options, message):
    status, out, err = generate(*options)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_a_model_that_is_no_numbers_generates_on_demand_only(generate, folder, tmp_path):
    """Every token would be as probable as not a number: "!!!!!!"."""
    model = hf.load(folder)
    model.norm.bias[...] = jax.device_put(np.full(16, np.nan, np.float32))
    hf.save(model, tmp_path, allow_nonfinite=True)
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    status, out, err = generate("--max-new-tokens=24", "--temperature=0", model=tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert (
        "ln_f.bias has values that are NaN or infinite: take another copy of the model, or load it anyway with --allow"
        in err
    )
    status, out, _ = generate("--max-new-tokens=24", "--temperature=0", "--allow-nonfinite", model=tmp_path)
    assert (status, len(out.splitlines())) == (0, len(PROMPTS))


def test_a_folder_does_not_choose_the_search(generate, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    fields = {"eos_token_id": [0], "num_beams": 3, "do_sample": True, "temperature": 5.0, "no_repeat_ngram_size": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    options = ("--max-new-tokens=24", "--temperature=0")
    assert generate(*options, model=tmp_path) == generate(*options)
    models = [tfx_jax.load(path) for path in (tmp_path, folder)]
    texts = [tfx_jax.generate(model, PROMPTS[0], temperature=0, max_new_tokens=24) for model in models]
    assert texts[0] == texts[1]


def test_models_that_do_not_generate(generate, folder, tmp_path, draw_model):
    config = BertConfig(vocab_size=257, max_length=8, num_layers=1, d_model=8, num_heads=2, d_ff=8)
    hf.save(draw_model(lambda: BertTagger(config, rngs=nnx.Rngs(0))), tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    status, _, err = generate(model=tmp_path)
    assert status == 2
    assert err.startswith(
        f"tfx-jax generate: {tmp_path} holds a BertTagger, which generates no text: name a language model"
    )
    assert err.count("\n") == 1


def test_a_byte_order_mark_is_no_prompt(generate):
    options = ("--max-new-tokens=4", "--temperature=0")
    assert generate(*options, lines=["\ufeffthe cat", "x"]) == generate(*options, lines=["the cat", "x"])


@pytest.mark.parametrize("option", [(), ("--stream",), ("--json",)])
def test_an_encoder_decoder_answers_what_shows_nothing_with_nothing(generate, tmp_path, draw_model, option):
    tokenizer = train_or_load_folder(tmp_path, lambda: ["a b c d"], kind="words", family="t5", vocab_size=150)
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 8, "d_k": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1}
    hf.save(draw_model(lambda: T5(T5Config(**sizes), rngs=nnx.Rngs(0))), tmp_path)
    lines = ["a b", "\u200b", "", "\xad\x01", "c"]
    status, out, _ = generate("--max-new-tokens=12", "--temperature=9", *option, lines=lines, model=tmp_path)
    assert status == 0
    answers = out.splitlines()
    texts = [json.loads(line)["text"] for line in answers] if option == ("--json",) else answers
    assert [bool(text) for text in texts] == [True, False, False, False, True]


@pytest.fixture(scope="module")
def translator(tmp_path_factory, draw_model):
    """A folder as mBART's: behind a source are EOS and its language, and English is the default."""
    folder = tmp_path_factory.mktemp("translator")
    names = ["<pad>", "</s>", "<unk>", "en_XX", "de_DE", *"abcdefgh"]
    pipeline = tokenizers.Tokenizer(tokenizers.models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    pipeline.add_special_tokens(names[:5])
    pipeline.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s> en_XX", special_tokens=[("</s>", 1), ("en_XX", 3)]
    )
    pipeline.save(str(folder / "tokenizer.json"))
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "d_ff": 8, "pad_id": 0, "start_id": 1, "eos_id": 1}
    config = TransformerConfig.marian(vocab_size=len(names), **sizes)
    hf.save(draw_model(lambda: Transformer(config, rngs=nnx.Rngs(0))), folder)
    return folder


@pytest.mark.slow
def test_languages(generate, translator):
    model = hf.load(translator)

    def expected(first, *ids):
        options = {"eos_ids": [1], "first_ids": first, "max_new_tokens": 9}
        return Generator(model, search=Sampling(temperature=0), **options)([list(ids)])[0]

    def text(ids):
        return " ".join("abcdefgh"[index - 5] for index in ids if index > 4)

    for flags, want in (
        ([], expected([], 5, 6, 1, 3)),
        (["--target-language=de_DE"], expected([4], 5, 6, 1, 3)),
        (["--source-language=de_DE", "--target-language=en_XX"], expected([3], 5, 6, 1, 4)),
    ):
        options = ["--max-new-tokens=9", "--temperature=0", "--json", *flags]
        status, out, _ = generate(*options, lines=["a b"], model=translator)
        found = json.loads(out)
        assert (status, found["text"].replace(" ", ""), found["tokens"]) == (0, text(want).replace(" ", ""), len(want))
    languages = {"source_language": "de_DE", "target_language": "en_XX"}
    loaded = tfx_jax.load(translator)
    assert tfx_jax.generate(loaded, "a b", max_new_tokens=9, temperature=0, **languages) == found["text"]
    (translator / "generation_config.json").write_text('{"forced_bos_token_id": 4, "eos_token_id": 1}')
    assert tfx_jax.load(translator).first_ids == (4,)
    assert json.loads(generate(*options[:3], lines=["a b"], model=translator)[1])["tokens"] == len(
        expected([4], 5, 6, 1, 3)
    )


def test_languages_that_are_none(generate, translator, folder):
    for flag in ("--source-language=xx", "--target-language=xx"):
        status, out, err = generate(flag, model=translator)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "the tokenizer has no language 'xx'; its languages are: en_XX, de_DE" in err
    model = tfx_jax.load(translator)
    with pytest.raises(UserError, match="are those of an encoder-decoder: leave them out"):
        tfx_jax.generate(
            types.SimpleNamespace(**vars(model) | {"model": hf.load(folder)}),
            "a",
            max_new_tokens=9,
            target_language="en_XX",
        )


def test_python_generates_what_the_command_does(generate, folder):
    """The same texts for the same options, one prompt or several; streaming shows them in parts."""
    options = {"max_new_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    status, out, _ = generate("--json", *(f"--{name.replace('_', '-')}={x}" for name, x in options.items()))
    expected = [json.loads(line)["text"] for line in out.splitlines()]
    model, parts = tfx_jax.load(folder), []
    assert (status, tfx_jax.generate(model, PROMPTS, **options)) == (0, expected)
    assert tfx_jax.generate(model, PROMPTS[0], on_text=parts.append, **options) == expected[0] == "".join(parts)
    assert len(parts) > 1
    end = expected[0][5:7]
    assert tfx_jax.generate(model, PROMPTS[0], stop=end, **options) == expected[0].partition(end)[0]


def test_a_pretrained_model_is_loaded_with_the_options_of_hf(folder):
    model = tfx_jax.load(folder, dtype="bfloat16", keep_bfloat16=True)
    assert model.model.config.dtype == "bfloat16"
    assert isinstance(tfx_jax.generate(model, "x", max_new_tokens=2), str)


def test_python_says_what_cannot_be_generated(folder):
    model = tfx_jax.load(folder)
    with pytest.raises(UserError, match="is a pretrained model without a task"):
        model.predict(["a text"])
    with pytest.raises(UserError, match="a stop string must not be empty"):
        tfx_jax.generate(model, "x", stop=[""])
    with pytest.raises(UserError, match="need a single growing text"):
        tfx_jax.generate(model, "x", beam_size=2, on_text=print)
    with pytest.raises(UserError, match=r"^a GPT has no tokenizer: pass the result of tfx_jax\.load, or LoadedModel"):
        tfx_jax.generate(model.model, "x")
    with pytest.raises(UserError, match=r"^the GPT was loaded without a tokenizer: LoadedModel needs one$"):
        tfx_jax.generate(tfx_jax.training.LoadedModel(model.model), "x")
    with pytest.raises(UserError, match="Bert does not generate text"):
        tfx_jax.generate(types.SimpleNamespace(model=Bert.__new__(Bert), tokenizer=model.tokenizer, eos_ids=()), "x")


def test_nothing_is_loaded_from_a_folder_of_neither_kind(tmp_path):
    with pytest.raises(UserError, match="neither the workdir of a run nor a Hugging Face folder"):
        tfx_jax.load(tmp_path)
