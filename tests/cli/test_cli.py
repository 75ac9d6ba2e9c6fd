"""The command line as a user meets it: a small training, every verb on it, and every mistake as one line."""

import io
import json
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import types

import flax
import jax
import jaxlib
import numpy as np
import pytest

import tfx_jax
from tfx_jax.cli import VERBS, main
from tfx_jax.cli.support.options import set_up_program
from tfx_jax.training.checkpoint.checkpoints import Checkpoints, load_params
from tfx_jax.training.config import load_config
from tfx_jax.training.step import TrainState

EXPERIMENT = str(pathlib.Path(__file__).parents[2] / "experiments" / "transformer_demo.py")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a text to reverse, word by word; to train on, also an empty line and an endless one."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    for split, size in (("train", 200), ("validation", 3)):
        sentences = [[f"w{word}" for word in random.integers(30, size=random.integers(2, 8))] for _ in range(size)]
        if split == "train":
            sentences += [[], ["w1"] * 100_000]
        (folder / f"{split}.src").write_text("".join(f"{' '.join(words)}\n" for words in sentences))
        (folder / f"{split}.tgt").write_text("".join(f"{' '.join(reversed(words))}\n" for words in sentences))
    return folder


def train_arguments(text, workdir, *overrides):
    """The command of a training that compiles little: batches of one shape, on one device."""
    files = {
        f"{split}_{side}": f"{split}.{side[:3].replace('sou', 'src').replace('tar', 'tgt')}"
        for split in ("train", "validation")
        for side in ("source", "target")
    }
    return [
        "train",
        f"--config={EXPERIMENT}:test",
        f"--workdir={workdir}",
        "--config.task.data.dataset=files",
        f"--config.task.data.data_dir={text}",
        "--config.task.data.source_language=en",
        "--config.task.data.target_language=de",
        "--config.task.data.tokenizer=words",
        *(f"--config.task.data.{name}={path}" for name, path in files.items()),
        "--config.task.data.max_length=8",
        "--config.model.pre_norm=false",
        "--config.mesh.data=1",
        "--config.num_steps=6",
        *overrides,
    ]


@pytest.fixture(scope="module")
def workdir(text, tmp_path_factory):
    """The workdir of a training that is done."""
    folder = tmp_path_factory.mktemp("run")
    assert main(train_arguments(text, folder)) == 0
    return folder


@pytest.fixture
def stdin(monkeypatch):
    def feed(data):
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))

    return feed


def fails_with(capfd, arguments):
    """Runs a command that must fail with status 2; returns the one line it prints."""
    capfd.readouterr()
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("tfx-jax")]
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


def test_module_and_command_are_the_same():
    command = [sys.executable, "-m", "tfx_jax", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(verb in printed for verb in VERBS)


def test_version_names_what_matters_for_a_report(capfd):
    assert main(["--version"]) == 0
    version, _, packages = capfd.readouterr().out.partition(" (")
    assert version == f"tfx-jax {tfx_jax.__version__}"
    assert packages == f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, flax {flax.__version__}, Python " + (
        f"{platform.python_version()})\n"
    )


def test_windows_is_refused_with_one_line(capfd, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Linux and macOS" in fails_with(capfd, ["train", "--help"])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capfd):
    with pytest.raises(SystemExit) as done:
        main([verb, "--help"])
    assert done.value.code == 0
    flag = {
        "completion": "bash",
        "compare": "WORKDIR",
        "experiments": "--copy",
        "plan": "--topology",
        "check-attention": "--case",
        "prepare": "--data-dir",
        "bench": "--json",
        "generate": "--model",
        "convert": "--model",
        "export": "--model",
    }
    assert flag.get(verb, "--workdir") in capfd.readouterr().out


def test_bash_completes_verbs_options_and_experiments(capfd, tmp_path):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capfd.readouterr().out)

    def completed(*words):
        line = " ".join(words)
        program = f"""
source {script}
COMP_WORDS=(tfx-jax {line}); COMP_CWORD={len(words)}; COMP_LINE="tfx-jax {line}"; COMP_POINT=${{#COMP_LINE}}
_shtab_tfx_jax; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert sorted(completed("tra")) == ["train", "transcribe", "translate"]
    assert completed("evaluate", "--st") == ["--step"]
    assert completed("train", "--config", "bert_b") == ["bert_banking77"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script_with_verbs_options_and_experiments(capfd, shell):
    """Which no test runs: their programs are on few machines."""
    assert main(["completion", shell]) == 0
    script = capfd.readouterr().out
    assert [name for name in (*VERBS, "--workdir", "bert_banking77") if name not in script] == []


def test_help_of_a_verb_in_both_orders(capfd):
    printed = []
    for arguments in (["help", "average"], ["average", "--help"]):
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert done.value.code == 0
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith("usage: tfx-jax average")


@pytest.mark.parametrize(("in_environment", "seconds"), [("0.25", 0.25), (None, 0.5)])
def test_a_program_keeps_what_took_long_to_compile_or_what_the_environment_says(monkeypatch, in_environment, seconds):
    name = "jax_persistent_cache_min_compile_time_secs"
    if in_environment is None:
        monkeypatch.delenv(name.upper(), raising=False)
    else:
        monkeypatch.setenv(name.upper(), in_environment)
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, 0.25)  # as JAX reads it from the environment when it is imported
        set_up_program()
        assert getattr(jax.config, name) == seconds
    finally:
        jax.config.update(name, before)


def test_training_leaves_what_it_should(workdir):
    assert json.loads((workdir / "config.json").read_text())["num_steps"] == 6
    assert sorted(int(path.name) for path in (workdir / "checkpoints").iterdir()) == [2, 4, 6]
    assert list((workdir / "tensorboard").iterdir())
    assert "Step 6 of 6: finished." in (workdir / "report.md").read_text()
    assert (workdir / "learning_curves.png").exists()
    assert (workdir / "tokenizer" / "tokenizer.json").exists()
    assert {"embedding", "encoder_layers", "decoder_layers"} <= set(load_params(workdir))


@pytest.mark.parametrize("options", [["--alpha=0.6", "--int8"], pytest.param([], marks=pytest.mark.slow)])
def test_translate_writes_as_many_lines_as_it_reads(workdir, stdin, capfdbinary, options):
    sentences = [b"w1 w2 w3", b"", b"w4", b"never seen words \xe3\x81\x82", b"   ", b" ".join([b"w5"] * 100_000), b"w6"]
    stdin(b"\n".join(sentences))
    assert main(["translate", f"--workdir={workdir}", "--beam=2", *options]) == 0
    out = capfdbinary.readouterr().out
    assert out.count(b"\n") == len(sentences)
    lines = out.split(b"\n")
    assert lines[1] == lines[4] == b""


def test_translate_of_nothing_is_nothing(workdir, stdin, capfdbinary):
    stdin(b"")
    assert main(["translate", f"--workdir={workdir}"]) == 0
    assert capfdbinary.readouterr().out == b""


def test_translate_answers_the_lines_before_one_that_is_not_utf8(workdir, stdin, capfd):
    stdin(b"w1\nw2 \xff\n")
    capfd.readouterr()
    assert main(["translate", f"--workdir={workdir}"]) == 2
    out, err = capfd.readouterr()
    assert out.count("\n") == 1
    assert err.splitlines()[-1] == "tfx-jax translate: standard input, line 2: not UTF-8 (invalid start byte)"


def test_evaluate_prints_json_and_takes_files(workdir, text, capfd):
    files = [f"--source={text / 'validation.src'}", f"--reference={text / 'validation.tgt'}"]
    assert main(["evaluate", f"--workdir={workdir}", "--json", *files]) == 0
    of_files = json.loads(capfd.readouterr().out)
    assert main(["evaluate", f"--workdir={workdir}", "--json", "--step=latest"]) == 0
    assert of_files == json.loads(capfd.readouterr().out)
    assert set(of_files) == {"sacrebleu", "signature", "tokenized", "compound_split", "exact_match", "sentences"}


@pytest.mark.slow
def test_evaluate_takes_another_configuration_for_the_same_parameters(workdir, capfd):
    def evaluated(*overrides):
        assert main(["evaluate", f"--workdir={workdir}", "--json", *overrides]) == 0
        return json.loads(capfd.readouterr().out)

    assert evaluated("--config.model.attention.name=chunked") == evaluated()
    narrow = ["--config.model.attention.name=window", "--config.model.attention.options.window=1"]
    assert evaluated(*narrow)["sentences"] == 3
    message = fails_with(capfd, ["evaluate", f"--workdir={workdir}", "--config.model.d_ff=8"])
    assert "decoder_layers/feed_forward/down of shape (1, 8, 32), but the checkpoint has (1, 64, 32)" in message
    message = fails_with(capfd, ["evaluate", f"--workdir={workdir}", "--config.model.attention.name=bigbird"])
    assert "bigbird attention" in message


def test_average_of_a_young_training_takes_what_there_is(workdir, capfd):
    assert len(list((workdir / "checkpoints").iterdir())) < load_config(workdir).keep_last
    assert main(["average", f"--workdir={workdir}"]) == 0
    assert capfd.readouterr().out == "averaged the checkpoints of steps 2, 4, 6\n"


@pytest.fixture
def averaged(workdir, capfd):
    """What `average` printed of the last two checkpoints."""
    assert main(["average", f"--workdir={workdir}", "--last=2"]) == 0
    return capfd.readouterr().out


def test_average_is_the_mean(workdir, averaged):
    assert averaged == "averaged the checkpoints of steps 4, 6\n"
    table = load_params(workdir, "average")["embedding"]["table"]
    parts = [load_params(workdir, step)["embedding"]["table"].astype(np.float64) for step in (4, 6)]
    np.testing.assert_array_equal(table, ((parts[0] + parts[1]) / 2).astype(np.float32))


@pytest.mark.usefixtures("averaged")
def test_evaluate_takes_the_average_and_ends_with_exact_match(workdir, capfd):
    assert main(["evaluate", f"--workdir={workdir}", "--step=average"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "sentences: 3"
    assert lines[-1].startswith("exact match: ")
    assert lines[-1].endswith(" %")


@pytest.mark.slow
def test_attend_draws_a_pair_and_its_own_translation(workdir, tmp_path, capfd):
    picture, page = tmp_path / "given.png", tmp_path / "own.html"
    arguments = ["attend", f"--workdir={workdir}", "--source=w1 w2"]
    assert main([*arguments, f"--output={picture}", "--target=w2 w1"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in capfd.readouterr().out
    assert main([*arguments, f"--html={page}"]) == 0
    text = page.read_text().replace("\\u003c", "<")
    assert '"source": ["w1", "w2", "</s>"]' in text
    assert re.search(rf'"title": "Attention: Transformer in {re.escape(str(workdir))}, step \d+"', text)
    assert str(page) in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "unknown verb 'fly'; use one of train, experiments, evaluate, compare, translate, "),
        (["trian", "--config=a"], "unknown verb 'trian'; did you mean train?"),
        (["help", "evalute"], "unknown verb 'evalute'; did you mean evaluate?"),
        (["train", "--workdir=w"], "the following arguments are required: --config"),
        (["train", "--config=missing.py", "--workdir=w"], "missing.py does not exist"),
        (["train", "--config=transformer_deom", "--workdir=w"], "did you mean transformer_demo"),
        (
            ["train", f"--config={EXPERIMENT}", "--workdir=w", "--config.task.data.dataset=files"],
            "config.task.data.source_language must be the code of a language",
        ),
        (["train", f"--config={EXPERIMENT}:tset", "--workdir=w"], "unknown variant 'tset'"),
        (
            ["train", f"--config={EXPERIMENT}", "--workdir=w", "--config.model.d_modle=8"],
            "did you mean config.model.d_model",
        ),
        (["train", f"--config={EXPERIMENT}", "--workdir=w", "--config.num_steps=many"], "many"),
        (
            ["train", f"--config={EXPERIMENT}", "--workdir=w", "--config.num_steps=0"],
            "config.num_steps must be at least 1",
        ),
        (["train", f"--config={EXPERIMENT}", "--workdir=w", "--steps=3"], "unknown argument --steps=3"),
        (
            ["train", f"--config={EXPERIMENT}", "--workdir=w", "--config.num_steps"],
            "--config.num_steps has no value",
        ),
        (["train", f"--config={EXPERIMENT}", "--workdir=w", "--profile=7:7"], "--profile=7:7 must be START:STOP"),
        (["translate", "--workdir=nowhere"], "nowhere has no config.json"),
        (["translate", "--workdir=nowhere", "--beam=0"], 'must be a whole number from 1 to 2,147,483,647, got "0"'),
        (["evaluate", "--workdir=nowhere", "--source=a"], "--source and --reference must be given together"),
        (
            ["evaluate", "--workdir=nowhere", "--config.task.data.test_file=a.csv"],
            "--config.task.data.test_file is read with --split=test alone, and this is --split=validation",
        ),
        (
            ["evaluate", "--workdir=nowhere", "--split=test", "--config.task.data.validation_file=a.csv"],
            "--config.task.data.validation_file is read with --split=validation alone, and this is --split=test",
        ),
        (["evaluate", "--workdir=nowhere", "--step=lates"], '"lates" must be a step number'),
        (["attend", "--workdir=nowhere", "--source= ", "--output=a.png"], "--source is empty"),
        (
            ["attend", "--workdir=nowhere", "--source=a"],
            "attend needs a file to write: --output=IMAGE, --html=PAGE or both",
        ),
        (
            ["attend", "--workdir=nowhere"],
            "attend needs exactly one of --source=TEXT (text), --image=FILE (images) and --row=NUMBER",
        ),
        (["attend", "--workdir=nowhere", "--source=a", "--image=3"], "attend needs exactly one of --source=TEXT"),
        (["attend", "--workdir=nowhere", "--row=0"], 'must be a whole number from 1 to 2,147,483,647, got "0"'),
    ],
)
def test_mistakes_cost_one_line(arguments, message, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in fails_with(capfd, arguments)
    assert list(tmp_path.iterdir()) == []  # and leave nothing behind


def test_missing_checkpoints_are_named(workdir, capfd):
    message = fails_with(capfd, ["evaluate", f"--workdir={workdir}", "--step=5"])
    assert "has no checkpoint of step 5; there are 2, 4, 6" in message
    assert "cannot average the last 9" in fails_with(capfd, ["average", f"--workdir={workdir}", "--last=9"])


@pytest.mark.slow
def test_a_translation_model_becomes_a_folder(workdir, tmp_path, stdin, capfd):
    """Which `generate` reads as it reads the workdir, and both as `translate` does."""
    assert main(["convert", f"--workdir={workdir}", f"--output={tmp_path}/out"]) == 0
    assert "MarianMTModel" in capfd.readouterr().err
    found = []
    for verb, source in (("translate", "workdir"), ("generate", "workdir"), ("generate", "model")):
        stdin(b"w1 w2 w3 </s> w4\nw5\n")
        folder = workdir if source == "workdir" else tmp_path / "out"
        limit = ["--max-new-tokens=40"] if verb == "generate" else []
        assert main([verb, f"--{source}={folder}", "--beam=2", *limit]) == 0
        found.append(capfd.readouterr().out)
    assert found[1] == found[2]
    assert found[0].count("\n") == found[1].count("\n") == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "train.tgt").unlink(), "train.tgt does not exist"),
        (lambda folder: (folder / "train.tgt").write_text("one line\n"), "202 lines and"),
        (lambda folder: (folder / "train.src").write_bytes(b""), "train.src is empty"),
        (lambda folder: (folder / "train.src").write_bytes(b"a\n\xff\n" * 101), "line 2: not UTF-8"),
        (lambda folder: (folder / "validation.src").unlink(), "validation.src does not exist"),
        (lambda folder: [(folder / f"train.{side}").write_text("\n" * 202) for side in ("src", "tgt")], "none of the"),
        (
            # All words of the text in one line: the vocabulary stays, and with it the program that draws a model.
            lambda folder: [
                path.write_text(path.read_text().replace("\n", " ") + "\n") for path in folder.glob("train.*")
            ],
            "none has 1 to 7 tokens on both sides",
        ),
    ],
)
def test_bad_text_costs_one_line(text, tmp_path, capfd, damage, message):
    folder = tmp_path / "text"
    folder.mkdir()
    for path in text.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage(folder)
    assert message in fails_with(capfd, train_arguments(folder, tmp_path / "run"))


def test_empty_lines_and_endless_ones_are_left_out_of_training(workdir):
    """Of 202, one is no pair, and one was skipped in the one buffer of pairs that six steps got through."""
    saved = json.loads((workdir / "checkpoints" / "6" / "_CHECKPOINT_METADATA").read_text())
    reader = saved["custom_metadata"]["data"]
    assert (reader["portion"], reader["skipped"], reader["num_examples"]) == (1, 1, 201)


@pytest.fixture
def copy(workdir, tmp_path):
    """A copy of the workdir to damage."""
    return pathlib.Path(shutil.copytree(workdir, tmp_path / "copy"))


READING = [["translate"], ["evaluate"], ["attend", "--source=w1 w2", "--output=picture.png"]]


@pytest.mark.parametrize("verb", [*READING, ["train"]], ids=lambda verb: verb[0])
@pytest.mark.parametrize("file", ["tokenizer/tokenizer.json", "config.json"])
def test_damage_beside_the_checkpoints_is_named_and_nothing_is_made_or_lost(text, copy, capfd, stdin, verb, file):
    stdin(b"w1 w2\n")
    command = train_arguments(text, copy) if verb == ["train"] else [*verb, f"--workdir={copy}"]
    content = (copy / file).read_bytes()
    (copy / file).write_bytes(content.replace(b"w1", b"w0").replace(b'"length_penalty": 0.6', b'"length_penalty": 4.6'))
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != "train.lock"}
    assert f"copy/{file} is damaged" in fails_with(capfd, command)
    (copy / file).unlink()
    if (verb, file) != (["train"], "config.json"):  # which the command line tells again
        message = fails_with(capfd, command)
        assert re.search(f"copy/{file} is missing, but the checkpoints|copy has no config.json", message)
        assert "delete" not in message
    after = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != "train.lock"}
    assert after == {path: content for path, content in before.items() if path != copy / file}


@pytest.fixture(scope="module")
def spoilt(workdir, tmp_path_factory):
    """A copy of the workdir with one more checkpoint, the newest, which is not all numbers."""
    folder = shutil.copytree(workdir, tmp_path_factory.mktemp("spoilt") / "run")
    params = load_params(folder)
    params["embedding"]["table"][3, 1] = np.nan
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(TrainState(np.array(8, np.int32), params, {}, (), {}), {})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["average"], *READING], ids=lambda verb: verb[0])
def test_a_model_that_is_no_numbers_is_read_on_demand_only(spoilt, capfd, stdin, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    stdin(b"w1 w2\n")
    command = [*verb, f"--workdir={spoilt}", *([] if verb == ["average"] else ["--step=latest"])]
    message = fails_with(capfd, command)
    assert "checkpoints/8: embedding/table has values that are NaN or infinite: take another copy" in message
    if verb in (["average"], ["translate"]):  # the others compile more
        assert main([*command, "--allow-nonfinite"]) == 0


def test_workdir_of_another_config_is_refused(text, workdir, capfd):
    message = fails_with(capfd, train_arguments(text, workdir, "--config.model.d_ff=128"))
    assert "was made with model.d_ff=64, not 128" in message


# Writes until no one reads; stands for a verb, which would take seconds to import.
ENDLESS = """
import sys, types
from tfx_jax import cli
def run(_):
    while True:
        sys.stdout.buffer.write(b"line\\n" * 100)
sys.modules["tfx_jax.cli.translate"] = types.SimpleNamespace(run=run)
sys.exit(cli.main(["translate"]))
"""


def test_broken_pipe_is_not_an_error():
    command = f"{sys.executable} -c {shlex.quote(ENDLESS)} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("line\n141\n", "")


@pytest.mark.slow
def test_broken_pipe_of_a_translation_is_not_an_error(workdir):
    command = (
        f"yes 'w1 w2' | head -n 5000 | {sys.executable} -m tfx_jax translate --workdir={workdir} --beam=1 | head -n 1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "Error" not in done.stderr
