"""`tfx-jax generate`: continues prompts read from standard input, one per line."""

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
    """Writes one generated line for each line read."""
    parser = Parser(
        "generate",
        "Continues each line of standard input with a language model, or answers it with an encoder-decoder. Line "
        r"breaks in the generated text are written as \n, except with --stream. For a line without visible characters, "
        "an encoder-decoder writes an empty line.",
    )
    add_folder_options(parser, "with config.json, safetensors and a tokenizer")
    parser.add_argument(
        "--max-new-tokens",
        type=at_least_one,
        default=64,
        help="maximum number of tokens generated per line; %(default)s by default",
    )
    parser.add_argument(
        "--temperature",
        type=not_negative,
        default=1.0,
        help="divides the logits before sampling; 0 always takes the most probable token; %(default)s by default",
    )
    parser.add_argument("--top-k", type=at_least_one, help="sample from the TOP_K most probable tokens only")
    parser.add_argument(
        "--top-p", type=float, help="sample from the smallest set of tokens whose probabilities add up to TOP_P"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=not_negative,
        default=1.0,
        help="values above 1 make tokens that have occurred less probable; %(default)s by default",
    )
    parser.add_argument(
        "--beam",
        type=beam_width,
        default=1,
        help="beam width; above 1, beam search replaces sampling; %(default)s by default",
    )
    parser.add_argument(
        "--length-penalty",
        "--alpha",
        type=length_penalty,
        default=0.6,
        help="exponent of the beam search's length penalty; %(default)s by default",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the output before TEXT; may be repeated"
    )
    parser.add_argument(
        "--stream", action="store_true", help="process one line at a time and print each token when it is generated"
    )
    parser.add_argument(
        "--batch", type=at_least_one, default=8, help="maximum number of lines per batch; %(default)s by default"
    )
    parser.add_argument("--seed", type=seed, default=0, help="sampling seed; %(default)s by default")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the computation; %(default)s by default",
    )
    parser.add_argument(
        "--source-language",
        metavar="CODE",
        help="language of the lines for a multilingual translator, such as eng_Latn",
    )
    parser.add_argument("--target-language", metavar="CODE", help="language to translate into, such as deu_Latn")
    parser.add_argument("--int8", action="store_true", help="compute with int8 weights: faster, but not exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line: prompt, text, tokens")
    arguments = parser.parse_args(argv)
    _check(arguments)
    set_up_program()
    if arguments.model is not None:
        folder = local_folder(arguments.model)
        tokenizer = load_folder_tokenizer(folder)
        model = hf.load(folder, dtype=arguments.dtype, allow_nonfinite=arguments.allow_nonfinite)
        eos_ids, first_ids = hf.end_ids(folder), hf.first_ids(folder)
    else:
        model, tokenizer = load_trained(arguments, arguments.dtype)
        eos_ids, first_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,), ()
    if not isinstance(model, DecodingModel):
        source = arguments.model or arguments.workdir
        raise UserError(
            f"{source} holds a {type(model).__name__}, which generates no text: name a language model or an "
            "encoder-decoder"
        )

    def write(text: str) -> None:
        sys.stdout.write(shown(text))
        sys.stdout.flush()

    generator = TextGenerator(
        model,
        tokenizer,
        eos_ids=eos_ids,
        first_ids=first_ids,
        max_new_tokens=arguments.max_new_tokens,
        search=_search(arguments),
        stop=arguments.stop,
        on_text=write if arguments.stream else None,
        int8=arguments.int8,
        source_language=arguments.source_language,
        target_language=arguments.target_language,
    )
    reader, num_done = LineReader(sys.stdin.buffer), 0
    progress = Progress("answered {} lines", count_lines(sys.stdin.buffer))

    def answer(chunk: list[str], first: int) -> list[str]:
        """Returns the output line of each prompt; `first` is the index of the first, with which sampling is seeded."""
        if arguments.stream and generator.continues_prompts:
            sys.stdout.write(shown(chunk[0]))
        outputs = generator(chunk, seed=arguments.seed, first=first)
        progress.clear()
        if arguments.stream:  # all but the line break is printed already
            return [""]
        if arguments.json:
            pairs = zip(chunk, outputs, strict=True)
            objects = ({"prompt": line, "text": output.text, "tokens": output.num_tokens} for line, output in pairs)
            return [json.dumps(fields, ensure_ascii=False) for fields in objects]
        beginnings = chunk if generator.continues_prompts else [""] * len(chunk)
        return [_on_one_line(line + output.text) for line, output in zip(beginnings, outputs, strict=True)]

    while chunk := reader.take(1 if arguments.stream else arguments.batch):
        for answers in answered(chunk, answer, num_done):
            sys.stdout.write("".join(f"{shown(text)}\n" for text in answers))
            sys.stdout.flush()
            if not (arguments.stream or reader.is_terminal):
                progress.advance(len(answers))
        num_done += len(chunk)
    progress.clear()
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises UserError for flags that do not go together or values out of range, before the model is loaded."""
    check_one_source(arguments)
    _search(arguments)  # raises for values out of range
    if arguments.beam > 1 and (arguments.stop or arguments.stream):
        raise UserError("--stop and --stream need sampling, but --beam is above 1 (beam search): leave one of them out")
    if arguments.beam > 1 and arguments.repetition_penalty != 1:
        raise UserError(
            "--repetition-penalty needs sampling, but --beam is above 1 (beam search): leave one of them out"
        )
    if arguments.stream and arguments.json:
        raise UserError("--stream prints each token at once, --json only complete texts: choose one of them")
    if not all(arguments.stop):
        raise UserError("--stop must not be empty: give the text before which the output ends")


def _search(arguments: argparse.Namespace) -> Search:
    """Returns how tokens are chosen; checks the flags of sampling in any case."""
    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    return sampling if arguments.beam == 1 else BeamSearch(arguments.beam, arguments.length_penalty)


def _on_one_line(text: str) -> str:
    """Escapes line breaks and, only in a text that has some, backslashes."""
    return (
        text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n") if "\n" in text or "\r" in text else text
    )
