"""`tfx-jax completion`: prints the script with which a shell completes verbs, options and experiments."""

import argparse
from collections.abc import Sequence

import shtab

from tfx_jax.arguments import Parser
from tfx_jax.cli.experiments import experiment_files
from tfx_jax.cli.support.parsers import parser_of


def run(argv: Sequence[str]) -> int:
    """Prints the script and returns 0."""
    from tfx_jax.cli import VERBS  # which imports this module

    parser = Parser(
        "completion",
        'Prints a completion script. For bash: tfx-jax completion bash > ~/.tfx-jax-completion; then add "source '
        '~/.tfx-jax-completion" to ~/.bashrc. For zsh: write it to a file _tfx-jax in a folder of $fpath. For tcsh: '
        "tfx-jax completion tcsh > ~/.tfx-jax-completion.tcsh; then add "
        '"source ~/.tfx-jax-completion.tcsh" to ~/.tcshrc.',
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="shell that reads the script")
    shell = parser.parse_args(argv).shell
    command_parser = argparse.ArgumentParser("tfx-jax")
    verbs = command_parser.add_subparsers()
    for verb, summary in VERBS.items():
        # The parent brings its own --help.
        verb_parser = verbs.add_parser(verb, help=summary, parents=[parser_of(verb, "--help")], add_help=False)
        for action in verb_parser._actions:
            if "--config" in action.option_strings:
                action.choices = [*experiment_files()]
            elif {"--workdir", "--data-dir"} & set(action.option_strings):
                action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(command_parser, shell))
    return 0
