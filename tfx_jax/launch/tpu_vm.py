"""Every host of a Cloud TPU VM, through gcloud and ssh."""

import argparse
import functools
import pathlib
import shlex
from collections.abc import Sequence

from tfx_jax.arguments import Parser
from tfx_jax.errors import UserError
from tfx_jax.launch.plan import Plan, dns_label, execute, require_shared_workdir

SUMMARY = "every host of a Cloud TPU VM, by ssh"

# What the hosts run goes there as a file: only the command has to be quoted for a second shell, and printf does that.
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
uv pip install --quiet --python .venv '.[tpu]'
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
    """Adds what this target asks for."""
    parser.add_argument("--name", type=dns_label, required=True, help="of the TPU VM, which exists already")
    parser.add_argument("--zone", required=True, help="where it is")
    parser.add_argument("--project", help="that of gcloud's configuration by default")
    parser.add_argument("--source", default=".", help="folder to copy there, a clone of tfx_jax (.)")


def plan(options: argparse.Namespace, command: Sequence[str]) -> Plan:
    """Plans copying, installing and starting the same command on every host."""
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
