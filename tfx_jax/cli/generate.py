"""`tfx-jax generate`: continues prompts read from standard input, one per line, or answers messages with `--chat`."""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence

from etils import epath

from tfx_jax.arguments import Parser, at_least_one, beam_width, length_penalty, not_negative, seed
from tfx_jax.cli.support.lines import answered, count_lines, open_readers, shown
from tfx_jax.cli.support.options import (
    add_folder_options,
    check_one_source,
    load_generating_folder,
    load_trained,
    set_up_program,
)
from tfx_jax.cli.support.progress import Progress
from tfx_jax.data.tokenizers.chat import Message, check_messages, load_chat_template
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.errors import UserError
from tfx_jax.functional.search import LENGTH_PENALTY
from tfx_jax.generation.decoding import BeamSearch, Sampling, Search
from tfx_jax.generation.text import TextGenerator
from tfx_jax.hub import local_folder
from tfx_jax.nn.decoding import DecodingModel


def run(argv: Sequence[str]) -> int:
    """Writes one generated line for each line read."""
    parser = Parser(
        "generate",
        "Continues each line of standard input, or of files, with a language model, or answers it with an "
        r"encoder-decoder. Line breaks in the generated text are written as \n, except with --stream. For a line "
        "without visible characters, an encoder-decoder writes an empty line.",
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
        "--min-p",
        type=not_negative,
        help="sample from the tokens whose probability is at least MIN_P times the largest",
    )
    parser.add_argument(
        "--no-repeat-ngram-size",
        type=at_least_one,
        default=0,
        metavar="N",
        help="generate no sequence of N tokens that occurred before; allowed by default",
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
        default=LENGTH_PENALTY,
        help="exponent of the beam search's length penalty; %(default)s by default",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the output before TEXT; may be repeated"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="reply to each line by the model's chat template: a message, or a conversation as a JSON list of "
        '{"role": ..., "content": ...}; on a terminal, all lines are one conversation, and replies are streamed except '
        "with --json",
    )
    parser.add_argument(
        "--slide",
        action="store_true",
        help="where a prompt and its new tokens are longer than the model reads, continue from the most recent tokens; "
        "by default such a prompt is refused",
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
    parser.add_argument("files", nargs="*", metavar="FILE", help="text files, by default standard input")
    arguments = parser.parse_args(argv)
    _check(arguments)
    set_up_program()
    template = None
    if arguments.model is not None:
        folder = local_folder(arguments.model)
        tokenizer = load_folder_tokenizer(folder)
        template = load_chat_template(folder) if arguments.chat else None
        model, eos_ids, first_ids = load_generating_folder(arguments, folder)
    else:
        model, tokenizer = load_trained(arguments, arguments.dtype)
        template = load_chat_template(epath.Path(arguments.workdir) / "tokenizer") if arguments.chat else None
        eos_ids, first_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,), ()
    if not isinstance(model, DecodingModel):
        source = arguments.model or arguments.workdir
        raise UserError(
            f"{source} holds a {type(model).__name__}, which generates no text: name a language model or an "
            "encoder-decoder"
        )

    readers = open_readers(arguments.files)
    reader = first_reader = next(readers)
    num_done = num_before = 0  # lines answered, and those of earlier files
    progress = Progress("answered {} lines", None if arguments.files else count_lines(sys.stdin.buffer))
    is_dialog = arguments.chat and reader.is_terminal
    is_streaming = arguments.stream or (is_dialog and not arguments.json)
    history: list[Message] = []
    unwritten = ""  # the prompt, which is written with the first part of its continuation: an error may come before

    def write(text: str) -> None:
        """Prints a part of the generated text, after the prompt if that is not printed yet."""
        nonlocal unwritten
        sys.stdout.write(shown(unwritten + text))
        sys.stdout.flush()
        unwritten = ""

    generator = TextGenerator(
        model,
        tokenizer,
        eos_ids=eos_ids,
        first_ids=first_ids,
        max_new_tokens=arguments.max_new_tokens,
        search=_search(arguments),
        stop=arguments.stop,
        on_text=write if is_streaming else None,
        int8=arguments.int8,
        slide=arguments.slide,
        source_language=arguments.source_language,
        target_language=arguments.target_language,
    )
    has_prompt = generator.continues_prompts and template is None

    def encoded(line: str, number: int) -> str | list[int]:
        """Returns a prompt: the line itself, or the tokens of the conversation that it is or continues."""
        if template is None:
            return line
        try:
            return template.encode(tokenizer, history + conversation(line))
        except UserError as error:
            where = f"{reader.name}, line {number - num_before}" if arguments.files else f"line {number}"
            raise UserError(f"{where}: {error}") from None

    def answer(chunk: list[str], first: int) -> list[str]:
        """Returns the output line of each prompt; `first` is the index of the first, with which sampling is seeded."""
        nonlocal unwritten
        unwritten = chunk[0] if is_streaming and has_prompt else ""
        prompts = [encoded(line, number) for number, line in enumerate(chunk, first + 1)]
        outputs = generator(prompts, seed=arguments.seed, first=first)
        progress.clear()
        if is_dialog:
            history.extend([*conversation(chunk[0]), {"role": "assistant", "content": outputs[0].text}])
        if is_streaming:
            write("")  # all but the line break is printed then
            return [""]
        if arguments.json:
            pairs = zip(chunk, outputs, strict=True)
            objects = ({"prompt": line, "text": output.text, "tokens": output.num_tokens} for line, output in pairs)
            return [json.dumps(fields, ensure_ascii=False) for fields in objects]
        beginnings = chunk if has_prompt else [""] * len(chunk)
        return [_on_one_line(line + output.text) for line, output in zip(beginnings, outputs, strict=True)]

    for reader in itertools.chain([first_reader], readers):
        num_before = num_done
        while chunk := reader.take(1 if is_streaming or is_dialog else arguments.batch):
            for answers in answered(chunk, answer, num_done):
                sys.stdout.write("".join(f"{shown(text)}\n" for text in answers))
                sys.stdout.flush()
                if not (is_streaming or reader.is_terminal):
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
    for flag, is_set in (
        ("--temperature", arguments.temperature != 1),
        ("--top-k", arguments.top_k is not None),
        ("--top-p", arguments.top_p is not None),
        ("--min-p", arguments.min_p is not None),
        ("--repetition-penalty", arguments.repetition_penalty != 1),
        ("--no-repeat-ngram-size", arguments.no_repeat_ngram_size),
    ):
        if arguments.beam > 1 and is_set:
            raise UserError(f"{flag} needs sampling, but --beam is above 1 (beam search): leave one of them out")
    if arguments.beam == 1 and arguments.length_penalty != LENGTH_PENALTY:
        raise UserError("--length-penalty needs beam search: set --beam above 1 as well")
    if arguments.stream and arguments.json:
        raise UserError("--stream prints each token at once, --json only complete texts: choose one of them")
    if arguments.beam > 1 and (arguments.slide or arguments.chat):
        raise UserError("--slide and --chat need sampling, but --beam is above 1 (beam search): leave one of them out")
    if not all(arguments.stop):
        raise UserError("--stop must not be empty: give the text before which the output ends")


def conversation(line: str) -> list[Message]:
    """Returns the messages of a line: those of a JSON list or of an object with "messages", or the line as one.

    >>> conversation('[{"role": "user", "content": "a"}]') == conversation("a") == [{"role": "user", "content": "a"}]
    True
    """
    if line.lstrip()[:1] in ("[", "{"):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if isinstance(values, dict) and "messages" in values:
            values = values["messages"]
        if isinstance(values, list) and all(isinstance(value, dict) for value in values):
            check_messages(values)
            return values
    return [{"role": "user", "content": line}]


def _search(arguments: argparse.Namespace) -> Search:
    """Returns how tokens are chosen; checks the flags of sampling in any case."""
    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        no_repeat_ngram_size=arguments.no_repeat_ngram_size,
    )
    return sampling if arguments.beam == 1 else BeamSearch(arguments.beam, arguments.length_penalty)


def _on_one_line(text: str) -> str:
    """Escapes line breaks and, only in a text that has some, backslashes."""
    if "\n" not in text and "\r" not in text:
        return text
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
