"""Launches end to end, each target's own programs replaced by stand-ins that record what reaches them."""

import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml

from tfx_jax.cli import launch, main
from tfx_jax.cli import plan as verb
from tfx_jax.launch import TARGETS

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = {
    "local": ["-n", "2"],
    "tpu-vm": ["--name=my-tpu", "--zone=us-central2-b", f"--source={ROOT}"],
    "xpk": ["--name=demo", "--cluster=pods", "--tpu-type=v5litepod-16", "--image=gcr.io/p/tfx-jax:1"],
    "jobset": ["--name=demo", "--image=gcr.io/p/tfx-jax:1", "--accelerator=tpu-v6e-slice", "--topology=4x4"],
    "slurm": ["--nodes=2", "--gpus-per-node=8", "--time=24:00:00"],
}
TRAIN = ["train", "--config=experiments/transformer_demo.py", "--workdir=gs://bucket/demo"]
DEMO = ["train", "--config=transformer_demo", "--workdir=gs://bucket/demo"]
ODD = [
    "",
    "a b",
    'it\'s "quoted"',
    "$HOME $(id) `id` ${x} $$ $",
    "back\\slash",
    "{brace} %s",
    "&& exit 3 #",
    "漢字",
    "*",
]
LINES = ["two\nlines", "x\nEND\nexit 3\n", "\t"]

# Writes the arguments and the standard input of every call into a file of its own, then does as the test wishes.
STAND_IN = """#!{python}
import json, os, pathlib, sys, time
reads = {name!r} in ("sbatch", "kubectl")
call = dict(argv=sys.argv[1:], stdin=sys.stdin.read() if reads else "")
pathlib.Path({calls!r}, f"{name}.{{time.monotonic_ns()}}").write_text(json.dumps(call))
{then}
"""


class Programs:
    """Stand-ins that come first on PATH."""

    def __init__(self, folder):
        self.bin, self.calls = folder / "bin", folder / "calls"
        self.bin.mkdir()
        self.calls.mkdir()

    def add(self, name, then=""):
        path = self.bin / name
        path.write_text(STAND_IN.format(python=sys.executable, name=name, calls=str(self.calls), then=then))
        path.chmod(0o755)

    def called(self, name):
        return [json.loads(path.read_text()) for path in sorted(self.calls.glob(f"{name}.*"))]


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """No test may reach the real programs: a machine may have them, and credentials; and none may compile for TPUs."""
    programs = Programs(tmp_path)
    monkeypatch.setattr(launch, "has_libtpu", lambda: False)
    for name in ("gcloud", "xpk", "kubectl", "sbatch", "srun", "scontrol", "curl"):
        programs.add(name)
    monkeypatch.setenv("PATH", f"{programs.bin}:/usr/bin:/bin")
    return programs


def dry_run(capfd, target, *options, command=TRAIN):
    capfd.readouterr()
    assert main(["launch", target, "--dry-run", *OPTIONS[target], *options, "--", *command]) == 0
    return capfd.readouterr().out


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited without success"
        time.sleep(0.02)


# Scripts


@pytest.mark.parametrize("command", [TRAIN, [*TRAIN, *ODD, *LINES]], ids=["plain", "odd"])
@pytest.mark.parametrize("target", ["local", "tpu-vm", "xpk", "slurm"])
def test_scripts_are_sound(target, command, capfd):
    command = [argument for argument in command if target != "xpk" or argument.isprintable()]
    scripts = [dry_run(capfd, target, command=command)]
    scripts += [
        f"#!/bin/bash\n{inner}" for inner in re.findall("<<'END'\n(.*?)^END$", scripts[0], re.MULTILINE | re.DOTALL)
    ]
    assert len(scripts) == 1 + (target == "tpu-vm")
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:/usr/bin")
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        if shellcheck:
            # SC2016 remarks on a dollar sign that stays one, which is what the odd arguments are about.
            check = [shellcheck, "--norc", "--severity=style", "--exclude=SC2016", "-"]
            subprocess.run(check, input=script, text=True, check=True)


@pytest.mark.parametrize("target", TARGETS)
def test_dry_run_writes_a_file_and_runs_nothing(target, tmp_path, capfd, programs):
    output = tmp_path / "launch"
    printed = dry_run(capfd, target)
    assert dry_run(capfd, target, f"--output={output}") == ""
    without_port = [re.sub(r"127.0.0.1:\d+", "", text) for text in (printed, output.read_text())]
    assert without_port[0] == without_port[1]
    assert list(programs.calls.iterdir()) == []


@pytest.mark.parametrize("target", ["xpk", "jobset", "slurm"])
def test_what_is_begun_is_what_dry_run_writes(target, capfd, programs):
    written = dry_run(capfd, target)
    program = TARGETS[target].__name__.rpartition(".")[2].replace("jobset", "kubectl").replace("slurm", "sbatch")
    programs.add(program, "sys.exit(7)")
    assert main(["launch", target, *OPTIONS[target], "--", *TRAIN]) == 7
    assert written in capfd.readouterr().err
    (call,) = programs.called(program)
    if target == "xpk":
        assert ["xpk", *call["argv"]] == shlex.split(written.replace("\\\n", ""), comments=True)
    else:
        assert call["stdin"] == written


# Slurm


@pytest.mark.parametrize(
    ("status", "losses", "goes_back"),
    [
        *[(status, 0, False) for status in (0, 1, 2, 42, 127)],
        *[(status, losses, True) for status in (129, 130, 143) for losses in (0, 99)],
        *[(status, losses, losses < 10) for status in (75, 134, 137, 139) for losses in (0, 9, 10)],
    ],
)
def test_slurm_returns_to_the_queue_what_can_go_on(status, losses, goes_back, capfd, programs, tmp_path, monkeypatch):
    """Restarts of saved jobs, which SLURM_RESTART_COUNT counts too, do not use up those after a loss."""
    monkeypatch.chdir(tmp_path)
    script = dry_run(capfd, "slurm", command=[*TRAIN, *ODD, *LINES])
    programs.add("srun", f"sys.exit({status})")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "99")
    if losses:
        (tmp_path / "slurm-41.losses").write_text("\n" * losses)
    assert subprocess.run(["bash"], input=script, text=True).returncode == status
    (srun,) = programs.called("srun")
    assert srun["argv"][srun["argv"].index("tfx-jax") :] == ["tfx-jax", *TRAIN, *ODD, *LINES]
    assert [call["argv"] for call in programs.called("scontrol")] == [["requeue", "41"]] * goes_back
    counted = tmp_path / "slurm-41.losses"
    assert (len(counted.read_text()) if counted.exists() else 0) == losses + (status in (75, 134, 137, 139))


def test_slurm_directives(capfd):
    script = dry_run(capfd, "slurm", "--name=run.1", "--grace=120", "--sbatch=--partition=gpu", "--sbatch=--qos=low")
    before, _, _ = script.partition("srun")
    directives = [line.split()[1] for line in before.splitlines() if line.startswith("#SBATCH")]
    assert before.splitlines()[1 : len(directives) + 1] == [f"#SBATCH {directive}" for directive in directives]
    assert {
        *("--job-name=run.1", "--nodes=2", "--gpus-per-node=8", "--time=24:00:00", "--requeue"),
        *("--ntasks-per-node=8", "--signal=TERM@120", "--partition=gpu", "--qos=low"),
    } <= set(directives)


# Kubernetes


def closed(required, **properties):
    """A JSON schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def each(items, **more):
    return {"type": "array", "items": items, **more}


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
LABEL = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
POD = closed(
    "containers",
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    terminationGracePeriodSeconds=COUNT,
    hostNetwork=FLAG,
    dnsPolicy={"enum": ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]},
    serviceAccountName=TEXT,
    nodeSelector=TEXTS,
    tolerations=each(closed("", key=TEXT, operator={"enum": ["Exists", "Equal"]}, value=TEXT, effect=TEXT)),
    containers=each(
        closed(
            "name",
            name=LABEL,
            image=TEXT,
            command=each(TEXT),
            resources=closed("", limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}}),
        ),
        minItems=1,
    ),
)
POD_FAILURE_RULE = closed(
    "action",
    action={"enum": ["FailIndex", "FailJob", "Ignore", "Count"]},
    onExitCodes=closed(
        "operator values",
        containerName=LABEL,
        operator={"enum": ["In", "NotIn"]},
        # Ordered, without repetition, and "In" must not hold 0.
        values=each({"type": "integer", "minimum": 1}, uniqueItems=True, minItems=1, maxItems=255),
    ),
    onPodConditions=each(closed("type status", type=TEXT, status={"enum": ["True", "False", "Unknown"]}), maxItems=20),
)
JOB = closed(
    "template",
    parallelism=COUNT,
    completions=COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=COUNT,
    podFailurePolicy=closed("rules", rules=each(POD_FAILURE_RULE, maxItems=20)),
    template=closed("spec", metadata={"type": "object"}, spec=POD),
)
REASONS = ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]
FAILURE_RULE = closed(
    "name action",
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", "maxLength": 128},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons=each({"enum": REASONS}, uniqueItems=True),
    onJobFailureMessagePatterns=each(TEXT, uniqueItems=True),
    targetReplicatedJobs=each(TEXT),
)
# By the API types of kubernetes-sigs/jobset (v1alpha2, 0.10) and of batch/v1 and core/v1, as far as we use them.
JOBSET = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=closed("name", name=LABEL, namespace=LABEL, labels=TEXTS, annotations=TEXTS),
    spec=closed(
        "replicatedJobs",
        failurePolicy=closed(
            "",
            maxRestarts=COUNT,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules=each(FAILURE_RULE),
        ),
        replicatedJobs=each(
            closed("name template", name=LABEL, replicas=COUNT, template=closed("spec", spec=JOB)), minItems=1
        ),
    ),
)


def jobset_of(capfd, *options, command=TRAIN):
    manifest = yaml.safe_load(dry_run(capfd, "jobset", *options, command=command))
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return manifest, job, job["template"]["spec"]


def expanded_by_kubernetes(text):
    """What a container's command becomes: $$ is a dollar sign, $(NAME) the variable where there is one of the name."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "$" if found[0] == "$$" else f"<{found[1]}>", text)


def test_jobset_follows_the_schemas(capfd):
    everything = ["--queue=q", "--namespace=team", "--service-account=trainer", "--num-slices=2", "--max-restarts=3"]
    for options in ([], everything):
        manifest, job, pod = jobset_of(capfd, *options)
        jsonschema.validate(manifest, JOBSET)
        # A podFailurePolicy needs restartPolicy Never, and names a container of the pod.
        assert pod["restartPolicy"] == "Never"
        exit_codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
        assert exit_codes["containerName"] == pod["containers"][0]["name"]
        assert exit_codes["values"] == sorted(exit_codes["values"])
    assert manifest["metadata"]["namespace"] == "team"
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert pod["serviceAccountName"] == "trainer"


@pytest.mark.parametrize("text", ["1e-3", "-1E3", "0o17", "y", "N", "1."])
def test_jobset_quotes_what_kubernetes_reads_as_a_number_or_a_boolean(text, capfd):
    """PyYAML reads these as text without quotes; kubectl does not."""
    printed = dry_run(capfd, "jobset", f"--service-account={text}")
    assert f"serviceAccountName: '{text}'\n" in printed
    assert "- name: tfx-jax\n" in printed


@pytest.mark.parametrize(
    ("topology", "chips_per_host", "num_hosts"), [("4x4", 4, 4), ("2x4", 8, 1), ("2x2x4", 4, 4), ("1x1", 1, 1)]
)
def test_jobset_has_a_pod_for_each_host(topology, chips_per_host, num_hosts, capfd):
    _, job, pod = jobset_of(capfd, f"--topology={topology}", f"--chips-per-host={chips_per_host}")
    assert (job["parallelism"], job["completions"]) == (num_hosts, num_hosts)
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips_per_host}


@pytest.mark.parametrize(
    ("status", "is_evicted", "expected"),
    [
        (2, False, "FailJobSet"),
        (130, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (143, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (143, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (1, False, "RestartJobSet"),
        (14, False, "RestartJobSet"),
        (20, False, "RestartJobSet"),
        (75, False, "RestartJobSet"),
        (134, False, "RestartJobSet"),
        (137, False, "RestartJobSet"),
    ],
)
def test_jobset_restarts_by_exit_status(status, is_evicted, expected, capfd):
    """Acts out the Job controller, then the JobSet controller."""
    manifest, job, _ = jobset_of(capfd)
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        if status in rule.get("onExitCodes", {}).get("values", []):
            what = f"Container tfx-jax for pod team/demo-slice-0-1-x2k failed with exit code {status}"
        elif is_evicted and rule.get("onPodConditions"):
            what = "Pod team/demo-slice-0-1-x2k has condition DisruptionTarget"
        else:
            continue
        reason, message = "PodFailurePolicy", f"{what} matching FailJob rule at index {index}"
        break
    action = "RestartJobSet"
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            action = rule["action"]
            break
    assert action == expected


def test_jobset_carries_arguments_exactly(capfd):
    _, _, pod = jobset_of(capfd, command=[*TRAIN, *ODD, *LINES, "1e3", "yes"])
    (container,) = pod["containers"]
    assert [expanded_by_kubernetes(text) for text in container["command"]] == [
        *("tfx-jax", *TRAIN, *ODD, *LINES, "1e3", "yes")
    ]


def test_xpk_carries_arguments_exactly(capfd, programs):
    assert main(["launch", "xpk", *OPTIONS["xpk"], "--zone=us-east5-a", "--", *TRAIN, *ODD]) == 0
    (call,) = programs.called("xpk")
    assert call["argv"][:2] == ["workload", "create"]
    options = dict(argument.removeprefix("--").split("=", 1) for argument in call["argv"][2:])
    assert (options["workload"], options["docker-image"]) == ("demo", "gcr.io/p/tfx-jax:1")
    assert options["restart-on-exit-codes"] == "1,75"  # those above 126 are XPK's own
    assert options["zone"] == "us-east5-a"
    assert "project" not in options
    assert "\n" not in options["command"]
    programs.add("tfx-jax")
    in_container = f"({expanded_by_kubernetes(options['command'])}) & wait $!"  # as XPK 1.16 runs it
    subprocess.run(["bash", "-c", in_container], check=True)
    assert [call["argv"] for call in programs.called("tfx-jax")] == [[*TRAIN, *ODD]]


# Cloud TPU VM

HOSTS = """
hosts = [pathlib.Path({root!r}, name) for name in ("host-0", "host-1")]
verb, *rest = sys.argv[4:]
if verb == "scp":
    import shutil
    assert rest[2] == "my-tpu:"
    for host in hosts:
        for file in rest[:2]:
            shutil.copy(file, host)
else:
    import signal, subprocess
    assert rest[0] == "my-tpu"
    (command,) = [argument.removeprefix("--command=") for argument in rest if argument.startswith("--command=")]
    statuses = []
    for host in hosts:
        shell = subprocess.Popen(["bash", "-c", command], cwd=host, env=os.environ | dict(HOME=str(host)),
                                 start_new_session=True)
        statuses.append(shell.wait())
        try:
            os.killpg(shell.pid, signal.SIGHUP)  # the connection is lost
        except ProcessLookupError:
            pass
    sys.exit(max(statuses))
"""


def test_tpu_vm_installs_and_starts_on_every_host(tmp_path, programs, capfd):
    source = tmp_path / "a clone's folder"
    for name in ("pyproject.toml", "experiments/demo.py", ".git/config", ".venv/bin/python", "runs/demo/checkpoint"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    hosts = [tmp_path / "host-0", tmp_path / "host-1"]
    for host in hosts:
        host.mkdir()
    programs.add("gcloud", HOSTS.format(root=str(tmp_path)))
    programs.add("uv", "'venv' in sys.argv and pathlib.Path('.venv').mkdir()")
    programs.add("tfx-jax", "pathlib.Path('up').touch(); print('training', flush=True); time.sleep(60)")
    launch = [
        *("launch", "tpu-vm", "--name=my-tpu", "--zone=us-central2-b", "--project=p", f"--source={source}"),
        *("--", *TRAIN, *ODD, *LINES),
    ]
    assert main(launch) == 0
    try:
        wait_for(lambda: all((host / "tfx-jax" / "up").exists() for host in hosts))
        assert [call["argv"] for call in programs.called("tfx-jax")] == [[*TRAIN, *ODD, *LINES]] * 2
        for call in programs.called("gcloud"):
            assert {"--zone=us-central2-b", "--project=p", "--worker=all"} <= set(call["argv"])
        for host in hosts:
            copied = {path.relative_to(host).as_posix() for path in (host / "tfx-jax").rglob("*") if path.is_file()}
            assert copied == {
                f"tfx-jax/{name}" for name in ("pyproject.toml", "experiments/demo.py", "pid", "log", "up")
            }
        assert main(launch) == 1  # two trainings must not share a workdir
        assert "still running as process" in capfd.readouterr().err
        assert len(programs.called("tfx-jax")) == 2
    finally:
        for host in hosts:
            os.kill(int((host / "tfx-jax" / "pid").read_text()), signal.SIGTERM)
    assert [(host / "tfx-jax" / "log").read_text() for host in hosts] == ["training\n"] * 2


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "launch needs a target; use one of local, tpu-vm, xpk, jobset, slurm"),
        (["-n", "2", "--", *TRAIN], "launch needs a target"),
        (["--", *TRAIN], "launch needs a target"),
        (["pod", "--", *TRAIN], "unknown target 'pod'; use one of local"),
        (["local", "-n", "2"], "nothing to launch: put a verb and its arguments after --, as in tfx-jax launch"),
        (["local", "-n", "2", "--"], "nothing to launch"),
        (["local", "-n", "2", "train", "--config=a"], "unrecognized arguments: train --config=a"),
        (["local", "-n", "2", "--", "fly"], "unknown verb 'fly' after --; use one of train, evaluate"),
        (["local", "-n", "2", "--", "launch", "local"], "unknown verb 'launch' after --"),
        (["local", "-n", "2", "--", "translate"], "run tfx-jax translate without launch"),
        (["local", "-n", "0", "--", *TRAIN], 'must be a whole number from 1 to 2,147,483,647, got "0"'),
        (["local", "-n", "two", "--", *TRAIN], 'must be a whole number from 1 to 2,147,483,647, got "two"'),
        (["local", "--", *TRAIN], "the following arguments are required: -n/--num-processes"),
        (["local", "-n", "2", "--output=x", "--", *TRAIN], "--output needs --dry-run"),
        (["local", "-n", "2", "--dry-run", "--output=no/x", "--", *TRAIN], "cannot write --output=no/x: No such file"),
        (["tpu-vm", "--name=my-tpu", "--", *TRAIN], "required: --zone"),
        (["tpu-vm", "--name=my-tpu", "--zone=z", "--source=.", "--", *TRAIN], "--source=. has no pyproject.toml"),
        (["xpk", *OPTIONS["xpk"], "--name=My Run", "--", *TRAIN], '"My Run" must be at most 40 lower-case'),
        (["xpk", *OPTIONS["xpk"], "--", *TRAIN, "a\nb"], r"on one line of a YAML file, but 'a\nb' has line breaks"),
        (["jobset", *OPTIONS["jobset"], f"--name={'a' * 41}", "--", *TRAIN], "must be at most 40 lower-case"),
        (["jobset", *OPTIONS["jobset"], "--topology=4*4", "--", *TRAIN], '"4*4" must be a topology such as 4x4'),
        (
            ["jobset", *OPTIONS["jobset"], "--topology=3x3", "--", *TRAIN],
            "has 9 chips, which is not a multiple of --chips-per-host=4",
        ),
        (
            ["jobset", *OPTIONS["jobset"], "--", "train", "--workdir=runs/a"],
            "--workdir=runs/a would be a different folder",
        ),
        (["jobset", *OPTIONS["jobset"], "--", "train", "--workdir", "runs/a"], "name a bucket, --workdir=gs://"),
        (["slurm", *OPTIONS["slurm"], "--time=a day", "--", *TRAIN], '"a day" must be a time such as'),
        (["slurm", *OPTIONS["slurm"], "--name=a b", "--", *TRAIN], '"a b" must consist of letters'),
        (["slurm", *OPTIONS["slurm"], "--", "train", "--config=transformer_demo:bigg"], "'bigg'"),
        (["tpu-vm", *OPTIONS["tpu-vm"], "--dry-run", "--", "train", "--config=transfrmer_demo"], "transformer_demo"),
        (
            ["xpk", *OPTIONS["xpk"], "--dry-run", "--", *DEMO, "--config.task.data.token_per_batch=8"],
            "did you mean config.task.data.tokens_per_batch",
        ),
        (["jobset", *OPTIONS["jobset"], "--", *DEMO, "--config.model.num_heads=7"], "is not divisible by num_heads=7"),
        (
            ["slurm", *OPTIONS["slurm"], "--sbatch=--x\nrm y", "--", *TRAIN],
            'must be an option of sbatch, beginning with "-", on one line',
        ),
    ],
)
def test_mistakes_cost_one_line(arguments, message, capfd, tmp_path, monkeypatch, programs):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main(["launch", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert list(folder.iterdir()) == list(programs.calls.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "program"), [("tpu-vm", "gcloud"), ("xpk", "xpk"), ("jobset", "kubectl"), ("slurm", "sbatch")]
)
def test_missing_programs_are_named(target, program, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", target, *OPTIONS[target], "--", *TRAIN]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{program} is not installed here: install it, or write the commands to a file with --dry-run" in err


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_help(target, capfd):
    with pytest.raises(SystemExit) as done:
        main(["launch", target, "--help"])
    assert done.value.code == 0
    assert TARGETS[target].SUMMARY in " ".join(capfd.readouterr().out.split())


# What --dry-run foresees


@pytest.mark.parametrize(
    ("target", "options", "planned"),
    [
        ("xpk", ["--tpu-type=v5litepod-16"], ("v5e:4x4", 1)),
        ("xpk", ["--tpu-type=v5litepod-1", "--num-slices=2"], ("v5e:1x1", 2)),
        ("xpk", ["--tpu-type=v5p-128"], ("v5p:4x4x4", 1)),
        ("xpk", ["--tpu-type=v4-16"], ("v4:2x2x2", 1)),
        ("xpk", ["--tpu-type=v6e-3"], "v6e-3"),
        ("xpk", ["--tpu-type=v5e-8"], "v5e-8"),
        ("xpk", ["--tpu-type=n2-standard-32"], "n2-standard-32"),
        ("jobset", ["--num-slices=3"], ("v6e:4x4", 3)),
        ("jobset", ["--accelerator=tpu-v5p-slice", "--topology=2x2x4"], ("v5p:2x2x4", 1)),
        ("jobset", ["--accelerator=tpu-v9"], "tpu-v9"),
        *((target, [], None) for target in ("local", "tpu-vm", "slurm")),
    ],
)
def test_a_dry_run_plans_what_would_be_rented(target, options, planned, capfd, monkeypatch):
    plain = dry_run(capfd, target, *options)
    asked = []
    monkeypatch.setattr(launch, "has_libtpu", lambda: True)
    monkeypatch.setattr(verb, "plan_topology", lambda *arguments: (asked.append(arguments), None))
    monkeypatch.setattr(verb, "described", lambda _: ["memory       fits", "prediction   1 ms"])
    assert main(["launch", target, "--dry-run", *OPTIONS[target], *options, "--", *TRAIN]) == 0
    out, err = capfd.readouterr()
    assert out == plain or target == "local"  # whose port is another each time
    if isinstance(planned, str):  # a type that is not known: the line names those that are
        known = "v5litepod-1 to v5litepod-256, v5p-8 to" if target == "xpk" else "tpu-v5p-slice, tpu-v6e-slice, tpu7x"
        assert err.startswith("no plan: --")
        assert f"={planned} is no TPU" in err
        assert known in err
        assert (asked, err.count("\n")) == ([], 1)
        return
    assert asked == ([] if planned is None else [("experiments/transformer_demo.py", [], *planned)])
    assert err == ("" if planned is None else "memory       fits\nprediction   1 ms\n")
    if planned is not None:
        asked.clear()
        dry_run(capfd, target, *options, command=[*TRAIN, "--profile=1:2", "--config.seed=1"])
        assert [arguments[1] for arguments in asked] == [["--config.seed=1"]]


@pytest.mark.parametrize(("speedup", "warns"), [(1.2, False), (1.3, True)])
def test_a_dry_run_warns_of_a_run_that_is_more_than_a_fifth_too_slow(capfd, monkeypatch, speedup, warns):
    faster = verb.Faster("--config.model.unroll=True", 0.5, speedup)
    monkeypatch.setattr(launch, "has_libtpu", lambda: True)
    monkeypatch.setattr(verb, "plan_topology", lambda *_: (None, faster))
    monkeypatch.setattr(verb, "described", lambda _: ["prediction   1 ms"])
    assert main(["launch", "xpk", "--dry-run", *OPTIONS["xpk"], "--", *TRAIN]) == 0
    warning = "warning      more than a fifth slower than with --config.model.unroll=True, which would take 500.00 ms a"
    assert capfd.readouterr().err == "prediction   1 ms\n" + (f"{warning} step\n" if warns else "")


TO_BFLOAT16, TO_UNROLL = "--config.model.dtype=bfloat16", "--config.model.unroll=True"


@pytest.mark.parametrize(
    ("target", "overrides", "faster"),
    [
        ("xpk", [], f"{TO_BFLOAT16} {TO_UNROLL}"),
        ("jobset", [TO_BFLOAT16], TO_UNROLL),
        ("jobset", [TO_UNROLL, "--config.model.remat=full"], TO_BFLOAT16),
        ("xpk", [TO_BFLOAT16, "--config.model.remat=full"], None),
        ("xpk", [TO_BFLOAT16, TO_UNROLL], None),
        ("tpu-vm", [], None),  # of unknown topology
        ("slurm", [], None),  # no TPUs
    ],
)
def test_a_launch_warns_before_it_begins_and_without_compiling(target, overrides, faster, capfd, programs, monkeypatch):
    monkeypatch.setattr(verb, "plan_training", lambda *_, **__: pytest.fail("compiles"))
    program = {"xpk": "xpk", "jobset": "kubectl", "tpu-vm": "gcloud", "slurm": "sbatch"}[target]
    programs.add(program, "print('BEGUN', file=sys.stderr)")
    slices = ["--num-slices=2"] if target == "jobset" else []
    assert main(["launch", target, *OPTIONS[target], *slices, "--", *TRAIN, *overrides]) == 0
    before, begun, _ = capfd.readouterr().err.partition("BEGUN")
    assert begun
    warnings = [line for line in before.splitlines() if line.startswith("warning")]
    topology = "v6e:4x4 --slices=2" if target == "jobset" else "v5e:4x4"
    plan = " ".join([f"tfx-jax plan --config={TRAIN[1].partition('=')[2]} --topology={topology}", *overrides])
    expected = f"warning      probably more than a fifth slower than with {faster}: {plan} predicts by how much"
    assert warnings == ([] if faster is None else [expected])


def test_a_dry_run_says_in_a_line_what_it_would_plan_with(capfd, monkeypatch):
    assert main(["launch", "xpk", "--dry-run", *OPTIONS["xpk"], "--", *TRAIN]) == 0
    written = capfd.readouterr().err
    assert written.count("\n") == 1
    assert "v5e:4x4" in written
    assert 'pip install "tfx-jax[plan] @ git+https' in written
    monkeypatch.setattr(launch, "has_libtpu", lambda: True)
    evaluate = ["evaluate", "--workdir=gs://bucket/demo"]
    assert main(["launch", "xpk", "--dry-run", *OPTIONS["xpk"], "--", *evaluate]) == 0
    assert capfd.readouterr().err == ""
    assert main(["launch", "xpk", "--dry-run", *OPTIONS["xpk"], "--", "train", "--config=none.py"]) == 0
    written = capfd.readouterr().err
    assert written.count("\n") == 1
    assert written.startswith("no plan: ")


# The page of the documentation


def test_the_page_shows_what_the_commands_print(capfd, monkeypatch):
    """Runs every `--dry-run` of the page; the block behind it holds lines of what is printed, in order."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "from_laptop_to_pod.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    seen = set()
    for (language, code), (_, shown) in itertools.pairwise([*blocks, ("", "")]):
        commands = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
        launches = [words[1:] for words in commands if words[:2] == ["tfx-jax", "launch"]]
        assert language == "bash" or not launches
        for words in launches:
            if "--dry-run" not in words:
                words = [*words[:2], "--dry-run", *words[2:]]
            seen.add(words[1])
            capfd.readouterr()
            assert main(words) == 0, words
            printed = iter(capfd.readouterr().out.splitlines())
            if "--dry-run" in code:
                assert all(line in printed for line in shown.splitlines()), shown
    assert seen == set(TARGETS)
