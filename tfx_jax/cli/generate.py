"""`tfx-jax generate`: prompts in, one a line, and how a model continues them."""

import argparse
import json
import sys
from collections.abc import Sequence

from tfx_jax.arguments import Parser, at_least_one, beam_width, length_penalty, not_negative, seed
from tfx_jax.cli.support.lines import LineReader, answered, count_lines, shown
from tfx_jax.cli.support.options import add_folder_options, check_one_source, load_trained, set_up_program
from tfx_jax.cli.support.progress import Progress
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import BeamSearch, Sampling, Search
from tfx_jax.generation.text import TextGenerator
from tfx_jax.hub import local_folder
from tfx_jax.models import hf
from tfx_jax.nn.decoding import DecodingModel


def run(argv: Sequence[str]) -> int:
    """Writes a line for every line read."""
    parser = Parser(
        "generate",
        "Goes on with each line of standard input (a language model) or answers it (an encoder-decoder). Line breaks "
        r"inside a text are written as \n, but not with --stream. An encoder-decoder answers a line that shows nothing "
        "with an empty one.",
    )
    add_folder_options(parser, "(config.json, safetensors, tokenizer)")
    parser.add_argument("--max-new-tokens", type=at_least_one, default=64, help="longest continuation")
    parser.add_argument(
        "--temperature", type=not_negative, default=1.0, help="divides the logits; 0: the most probable token"
    )
    parser.add_argument("--top-k", type=at_least_one, help="draw from that many of the most probable tokens")
    parser.add_argument("--top-p", type=float, help="draw from the fewest tokens that have this probability together")
    parser.add_argument(
        "--repetition-penalty", type=not_negative, default=1.0, help="above 1: what was there is less probable"
    )
    parser.add_argument("--beam", type=beam_width, default=1, help="beam width; above 1 nothing is drawn")
    parser.add_argument(
        "--length-penalty", "--alpha", type=length_penalty, default=0.6, help="of the beam search's length penalty"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")
    parser.add_argument("--stream", action="store_true", help="one line at a time, each token as soon as it is there")
    parser.add_argument("--batch", type=at_least_one, default=8, help="lines at a time, if so many are there")
    parser.add_argument("--seed", type=seed, default=0, help="of the draws")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    parser.add_argument("--int8", action="store_true", help="weights of 8 bits: faster, not exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line: prompt, text, tokens")
    arguments = parser.parse_args(argv)
    _check(arguments)
    set_up_program()
    if arguments.model is not None:
        folder = local_folder(arguments.model)
        tokenizer = load_folder_tokenizer(folder)
        model = hf.load(folder, dtype=arguments.dtype, allow_nonfinite=arguments.allow_nonfinite)
        eos_ids = hf.end_ids(folder)
    else:
        model, tokenizer = load_trained(arguments, arguments.dtype)
        eos_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    if not isinstance(model, DecodingModel):
        source = arguments.model or arguments.workdir
        raise UserError(f"{source} holds a {type(model).__name__}, which generates no text")

    def write(text: str) -> None:
        sys.stdout.write(shown(text))
        sys.stdout.flush()

    generator = TextGenerator(
        model,
        tokenizer,
        eos_ids=eos_ids,
        max_new_tokens=arguments.max_new_tokens,
        search=_search(arguments),
        stop=arguments.stop,
        on_text=write if arguments.stream else None,
        int8=arguments.int8,
    )
    reader, num_lines = LineReader(sys.stdin.buffer), 0
    progress = Progress("answered {} lines", count_lines(sys.stdin.buffer))

    def answer(chunk: list[str], first: int) -> list[str]:
        if arguments.stream and generator.continues_prompts:
            sys.stdout.write(shown(chunk[0]))
        outputs = generator(chunk, seed=arguments.seed, first=first)
        progress.clear()
        if arguments.stream:
            return [""]
        if arguments.json:
            pairs = zip(chunk, outputs, strict=True)
            objects = ({"prompt": line, "text": out.text, "tokens": out.num_tokens} for line, out in pairs)
            return [json.dumps(one, ensure_ascii=False) for one in objects]
        beginnings = chunk if generator.continues_prompts else [""] * len(chunk)
        return [_on_one_line(line + out.text) for line, out in zip(beginnings, outputs, strict=True)]

    while chunk := reader.take(1 if arguments.stream else arguments.batch):
        for answers in answered(chunk, answer, num_lines):
            sys.stdout.write("".join(f"{shown(text)}\n" for text in answers))
            sys.stdout.flush()
            if not (arguments.stream or reader.is_terminal):
                progress.advance(len(answers))
        num_lines += len(chunk)
    progress.clear()
    return 0


def _check(arguments: argparse.Namespace) -> None:
    check_one_source(arguments)
    _search(arguments)  # refuses what is out of range before a model is loaded
    if arguments.beam > 1 and (arguments.stop or arguments.stream):
        raise UserError("--stop and --stream show a text as it grows, but with --beam there are several until the end")
    if arguments.beam > 1 and arguments.repetition_penalty != 1:
        raise UserError("--repetition-penalty is for texts that are drawn, but with --beam nothing is")
    if arguments.stream and arguments.json:
        raise UserError("--stream writes text as it comes, --json when it is complete: choose one")
    if not all(arguments.stop):
        raise UserError("--stop needs a text that is not empty")


def _search(arguments: argparse.Namespace) -> Search:
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.repetition_penalty)
    return sampling if arguments.beam == 1 else BeamSearch(arguments.beam, arguments.length_penalty)


def _on_one_line(text: str) -> str:
    return (
        text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n") if "\n" in text or "\r" in text else text
    )
