"""Launches the command on every host of a Cloud TPU VM, through gcloud and ssh."""

import argparse
import functools
import pathlib
import shlex
from collections.abc import Sequence

from tfx_jax.arguments import Parser
from tfx_jax.errors import UserError
from tfx_jax.launch.plan import Plan, dns_label, execute, require_shared_workdir

SUMMARY = "every host of an existing Cloud TPU VM, by ssh"

# The hosts run a script that is copied as a file, so that only the command must be quoted for a second shell (printf).
_SCRIPT = """\
#!/usr/bin/env bash
set -euo pipefail
tpu={name}
where=({where})
command=({command})

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/tfx-jax-start.sh" <<'END'
# On every host: install what was copied, and start the command so that it outlives this connection.
set -euo pipefail
mkdir -p ~/tfx-jax
cd ~/tfx-jax
if [[ -f pid ]] && kill -0 "$(cat pid)" 2> /dev/null; then
  echo "$(hostname): still running as process $(cat pid)" >&2
  exit 1
fi
export PATH="$PWD/.venv/bin:$HOME/.local/bin:$PATH"
tar -xzf ~/tfx-jax.tar.gz
command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
[[ -d .venv ]] || uv venv --quiet --python 3.12 .venv
uv pip install --quiet --python .venv '.[tpu,tfds]'
trap '' HUP
setsid "$@" >> log 2>&1 < /dev/null &
echo $! > pid
END
tar -czf "$folder/tfx-jax.tar.gz" --exclude-vcs --exclude='./.venv*' --exclude=./runs -C {source} .
gcloud compute tpus tpu-vm scp "$folder/tfx-jax.tar.gz" "$folder/tfx-jax-start.sh" "$tpu:" "${{where[@]}}"
gcloud compute tpus tpu-vm ssh "$tpu" "${{where[@]}}" \\
  --command="bash tfx-jax-start.sh$(printf ' %q' "${{command[@]}}")"
echo "Started. To see what every host says, or to save and stop:
  gcloud compute tpus tpu-vm ssh $tpu ${{where[*]}} --command='tail -f tfx-jax/log'
  gcloud compute tpus tpu-vm ssh $tpu ${{where[*]}} --command='kill \\$(cat tfx-jax/pid)'" >&2
"""


def add_options(parser: Parser) -> None:
    """Adds the flags of this target."""
    parser.add_argument("--name", type=dns_label, required=True, help="name of the existing TPU VM")
    parser.add_argument("--zone", required=True, help="zone of the TPU VM")
    parser.add_argument("--project", help="Google Cloud project; by default that of gcloud's configuration")
    parser.add_argument(
        "--source", default=".", help="clone of tfx_jax to copy to the hosts; the current folder by default"
    )


def plan(options: argparse.Namespace, command: Sequence[str]) -> Plan:
    """Plans a script that copies and installs the source and starts the command on every host."""
    require_shared_workdir(command)
    if not (pathlib.Path(options.source) / "pyproject.toml").is_file():
        raise UserError(f"--source={options.source} has no pyproject.toml: name a clone of tfx_jax")
    where = [f"--zone={options.zone}", "--worker=all"]
    if options.project:
        where.append(f"--project={options.project}")
    text = _SCRIPT.format(
        name=shlex.quote(options.name),
        where=shlex.join(where),
        command=shlex.join(["tfx-jax", *command]),
        source=shlex.quote(options.source),
    )
    return Plan(text, "gcloud", functools.partial(execute, ["bash", "-c", text]))
