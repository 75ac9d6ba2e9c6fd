"""Text generation: a language model continues prompts, an encoder-decoder answers them.

`generate` takes and returns text, `TextGenerator` does so for many prompts with one compiled program, and `Generator`
works on token ids.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from flax import nnx

from tfx_jax.data.sources.lines import is_blank
from tfx_jax.data.tokenizers.chat import ChatTemplate, Message
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.data.tokenizers.streaming import TextStream
from tfx_jax.errors import UserError
from tfx_jax.functional.search import LENGTH_PENALTY
from tfx_jax.generation.decoding import BeamSearch, DecodeDriver, Observer, Sampling, Search, check_length_penalty
from tfx_jax.models.whisper import Whisper
from tfx_jax.nn.decoding import DecodingModel


class Generator:
    """Generates token ids for prompts of token ids; for an encoder-decoder, a prompt is the source."""

    def __init__(
        self,
        model: DecodingModel,
        *,
        eos_ids: Sequence[int] = (),
        first_ids: Sequence[int] = (),
        max_new_tokens: int = 64,
        search: Search = Sampling(),
        int8: bool = False,
        observer: Observer | None = None,
        slide: bool = False,
    ):
        """Prepares the model's weights for decoding.

        Args:
          model: a Module; it is not changed.
          eos_ids: tokens that end a text.
          first_ids: tokens that every output begins with, see `tfx_jax.generation.decoding.decode`.
          max_new_tokens: maximum number of new tokens, EOS included.
          search: search method and its options.
          int8: whether to decode with int8 weights, see `DecodeDriver`.
          observer: observer of the new tokens, see `DecodeDriver`.
          slide: whether a prompt and its new tokens may be longer than the model's positions: where they are, the model
            continues from the most recent tokens, at least half of its positions, which it reads again.

        Raises:
          UserError: if `max_new_tokens` exceeds the model's positions without `slide`, if `slide` is set for an
            encoder-decoder or beam search, or if greedy or beam search has an observer or not exactly one token in
            `eos_ids`.
        """
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        graphdef, params = nnx.split(model)
        make_driver = functools.partial(DecodeDriver, graphdef, search, eos_ids=eos_ids, int8=int8, observer=observer)
        self._driver = make_driver(first_ids=first_ids)
        self._later_driver = make_driver()  # of the parts after the first one, if the model slides
        self._decoder = self._driver.decoder(params)
        if slide and (isinstance(search, BeamSearch) or not self._decoder.continues_inputs):
            raise UserError("slide needs a language model and sampling or greedy search")
        max_prompt_length = self._decoder.max_input_length(max_new_tokens)
        if not slide and max_prompt_length is not None and max_prompt_length < 1:
            raise UserError(
                f"max_new_tokens={max_new_tokens} leaves no room for a prompt, as the model takes "
                f"{self._decoder.max_input_length(0)} tokens"
            )
        self._max_new_tokens, self._eos_ids = max_new_tokens, frozenset(eos_ids)
        self._slide, self._observer = slide, observer
        self._reads_history = isinstance(search, Sampling) and search.reads_history

    @property
    def continues_prompts(self) -> bool:
        """Whether the model continues a prompt; otherwise it answers it."""
        return self._decoder.continues_inputs

    def __call__(self, prompts: Sequence[Sequence[int]], *, seed: int = 0, first: int = 0) -> list[list[int]]:
        """Generates tokens for each prompt.

        Args:
          prompts: token ids, at least one each.
          seed: sampling seed. The samples of a prompt depend on it and on the prompt's number only.
          first: number of the first prompt, for callers that process prompts in parts.

        Returns:
          The new tokens of each prompt, without EOS.

        Raises:
          UserError: if a prompt is empty or longer than the model can read.
        """
        if any(map(self.must_slide, prompts)):
            outputs = [self._sliding(ids, seed, number) for number, ids in enumerate(prompts, first)]
        else:
            outputs = self._driver(
                self._decoder, prompts, max_new_tokens=lambda _: self._max_new_tokens, seed=seed, first=first
            )
        return [ids[:-1] if ids and ids[-1] in self._eos_ids else ids for ids in outputs]

    def must_slide(self, prompt: Sequence[int]) -> bool:
        """Whether the model continues this prompt in parts, because it does not fit with its new tokens."""
        limit = self._decoder.max_input_length(self._max_new_tokens)
        return self._slide and limit is not None and len(prompt) > limit

    def _sliding(self, prompt: Sequence[int], seed: int, number: int) -> list[int]:
        """Generates in parts; before each, the model reads as many of the most recent tokens as leave room for it."""
        num_positions = cast(int, self._decoder.max_input_length(0))  # None never slides
        new_tokens: list[int] = []
        for part in itertools.count():
            remaining = self._max_new_tokens - len(new_tokens)
            # Leave room for all remaining tokens, but read at least half of the positions.
            context_length = max(num_positions - remaining, num_positions // 2, 1)
            text = [*prompt, *new_tokens]
            earlier, context = text[:-context_length], text[-context_length:]
            count = min(remaining, num_positions - len(context))
            part_seed = int(np.random.SeedSequence([seed, part]).generate_state(1)[0]) if part else seed
            driver = self._later_driver if part else self._driver
            (newest,) = driver(
                self._decoder,
                [context],
                max_new_tokens=lambda _, count=count: count,
                seed=part_seed,
                first=number,
                earlier=[earlier] if earlier and self._reads_history else None,
            )
            new_tokens += newest
            if len(newest) < count or len(new_tokens) >= self._max_new_tokens or newest[-1] in self._eos_ids:
                break
            # The program does not show an observer its last token, because no step follows it.
            if self._observer is not None and self._observer(np.array(newest[-1:], np.int32))[0]:
                break
        return new_tokens


class GeneratedText(NamedTuple):
    """The output for one prompt."""

    text: str
    """The generated text, without the prompt and cut before a stop string."""
    num_tokens: int
    """Number of generated tokens, without EOS but with those of a stop string."""


class Continued(NamedTuple):
    """A prompt that is continued: in some tokenizers, the new text begins with a space because of its last word."""

    ids: Sequence[int]
    text: str
    """The decoded ids."""
    has_own_space: bool
    """Whether the prompt ends with white space that its decoded ids lack: then the new text needs no space."""

    @classmethod
    def of(cls, tokenizer: HFTokenizer, prompt: str, ids: Sequence[int]) -> "Continued":
        """Returns a prompt with its ids."""
        text = tokenizer.decode(ids)
        return cls(ids, text, prompt[-1:].isspace() and not text[-1:].isspace())


def stream_after(prompt: Continued | None, tokenizer: Any) -> TextStream:
    """Returns a stream for the text after a prompt; None: the text is an answer of its own, such as a translation."""
    if prompt is None:
        return tokenizer.stream()
    return tokenizer.stream(prompt.ids, drops_space=prompt.has_own_space)


def num_unstable(tokenizer: Any) -> int:
    """Returns how many characters at the end of a growing text may still change by `HFTokenizer.clean_up`."""
    return 8 if tokenizer.clean_up(" .") == "." else 0


class TextGenerator:
    """Generates text for prompts: continues them, or answers them with an encoder-decoder."""

    def __init__(
        self,
        model: DecodingModel,
        tokenizer: HFTokenizer,
        *,
        eos_ids: Sequence[int] = (),
        first_ids: Sequence[int] = (),
        max_new_tokens: int = 64,
        search: Search = Sampling(),
        stop: Sequence[str] = (),
        on_text: Callable[[str], object] | None = None,
        int8: bool = False,
        slide: bool = False,
        source_language: str | None = None,
        target_language: str | None = None,
    ):
        """Prepares the model for decoding.

        Args:
          model: any model that generates; it is not changed.
          tokenizer: its tokenizer.
          eos_ids: tokens that end a text.
          first_ids: tokens that every output begins with.
          max_new_tokens: maximum number of new tokens for each prompt, EOS included.
          search: search method and its options.
          stop: strings that end a text; they are not part of it.
          on_text: called with each new part of the text of the first prompt as soon as it is final.
          int8: decode with int8 weights, see `DecodeDriver`.
          slide: continue prompts beyond the model's positions, see `Generator`.
          source_language: of the prompts, as `HFTokenizer.languages` names it; None means the tokenizer's default.
          target_language: of the outputs, whose token then replaces `first_ids`.

        Raises:
          UserError: if the model reads speech or has no room for that many tokens, or `stop` or `on_text` is combined
            with beam search, which has no single growing text; if the tokenizer lacks a language, or the model
            continues prompts; as `Generator`.
        """
        if isinstance(model, Whisper):
            raise UserError(
                "a Whisper reads speech, not text: use tfx_jax.generation.Transcriber or tfx-jax transcribe"
            )
        if not all(stop):
            raise UserError("a stop string must not be empty")
        if isinstance(search, BeamSearch) and (stop or on_text is not None):
            raise UserError("stop strings and streaming need a single growing text: use sampling or greedy search")
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        is_observed = bool(stop) or on_text is not None
        self._observer = _StopObserver(tokenizer, self._stop, on_text, eos_ids) if is_observed else None
        if target_language is not None:
            first_ids = (tokenizer.language_id(target_language),)
        self._source_language = source_language
        if source_language is not None:
            tokenizer.encode_source("", source_language)  # raises for an unknown language
        self._generator = Generator(
            model,
            eos_ids=eos_ids,
            first_ids=first_ids,
            max_new_tokens=max_new_tokens,
            search=search,
            int8=int8,
            slide=slide,
            observer=self._observer,
        )
        if self.continues_prompts and (source_language, target_language) != (None, None):
            raise UserError("the languages of a source and a target are those of an encoder-decoder: leave them out")

    @property
    def continues_prompts(self) -> bool:
        """Whether the model continues a prompt; otherwise it answers it."""
        return self._generator.continues_prompts

    def __call__(self, prompts: Sequence[str | Sequence[int]], *, seed: int = 0, first: int = 0) -> list[GeneratedText]:
        """Generates a text for each prompt.

        Args:
          prompts: texts, or token ids where a text was encoded already.
          seed: sampling seed. The samples of a prompt depend on it and on the prompt's number only.
          first: number of the first prompt, from 0, for callers that process prompts in parts.

        Returns:
          The text and the number of tokens generated for each prompt.

        Raises:
          UserError: if a prompt has no tokens or is longer than the model can read.
        """
        # A blank source has no answer: its text is empty, whatever the model generates.
        unanswerable = [
            not self.continues_prompts and isinstance(prompt, str) and is_blank(prompt) for prompt in prompts
        ]
        encoded = [self._encode(prompt, number) for number, prompt in enumerate(prompts, first + 1)]
        batches = [encoded]
        if any(map(self._generator.must_slide, encoded)):  # the observer knows the rows of one program only
            batches = [[ids] for ids in encoded]
        continued = [self._continued(*pair) for pair in zip(prompts, encoded, strict=True)]
        outputs, num_done = [], 0
        for batch in batches:
            if self._observer is not None:  # only the first text is streamed
                is_silent = num_done > 0 or any(unanswerable[:1])
                self._observer.restart(continued[num_done : num_done + len(batch)], is_silent=is_silent)
            outputs += self._generator(batch, seed=seed, first=first + num_done)
            if self._observer is not None and outputs and num_done == 0:
                self._observer.finish(outputs[0])
            num_done += len(batch)
        outputs = [[] if is_empty else ids for ids, is_empty in zip(outputs, unanswerable, strict=True)]
        texts = [until_stop(self._text(*pair), self._stop) for pair in zip(outputs, continued, strict=True)]
        return [GeneratedText(text, len(ids)) for text, ids in zip(texts, outputs, strict=True)]

    def _continued(self, prompt: str | Sequence[int], ids: Sequence[int]) -> Continued | None:
        """Returns a prompt that is continued; None for one that is answered, or that is given as tokens."""
        if not (self.continues_prompts and isinstance(prompt, str)):
            return None
        return Continued.of(self._tokenizer, prompt, ids)

    def _text(self, ids: Sequence[int], prompt: Continued | None) -> str:
        """Returns the text of new tokens, which depends on the last word of the prompt if they continue one."""
        if prompt is None:
            return self._tokenizer.decode(ids)
        whole = self._tokenizer.decode([*prompt.ids, *ids])
        # New tokens may change the end of the prompt's text, such as " n" before "'t".
        if not whole.startswith(prompt.text):
            return self._tokenizer.decode(ids)
        text = whole[len(prompt.text) :]
        return text.removeprefix(" ") if prompt.has_own_space else text

    def _encode(self, prompt: str | Sequence[int], number: int) -> Sequence[int]:
        """Returns the token ids of a prompt as the model was trained to see them."""
        if not isinstance(prompt, str):
            return prompt
        tokenizer = self._tokenizer
        if not self.continues_prompts:
            return tokenizer.encode_source(prompt, self._source_language)
        ids = tokenizer.encode_prompt(prompt)
        if not ids:
            raise UserError(f"prompt {number} has no tokens, and the tokenizer has no token to start a text with")
        return ids


class TextModel(Protocol):
    """A model with its tokenizer, such as `tfx_jax.load` returns."""

    @property
    def model(self) -> Any:
        """The module."""
        ...

    @property
    def tokenizer(self) -> HFTokenizer | None:
        """The tokenizer; None if the model reads no text."""
        ...

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that end a text."""
        ...

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of its conversations; raises UserError if it has none."""
        ...

    @property
    def first_ids(self) -> Sequence[int]:
        """Tokens that every output begins with."""
        ...


def generate(
    model: TextModel,
    prompts: str | Sequence[str] | Sequence[Message],
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    beam_size: int = 1,
    length_penalty: float = LENGTH_PENALTY,
    stop: Sequence[str] = (),
    on_text: Callable[[str], object] | None = None,
    seed: int = 0,
    int8: bool = False,
    slide: bool = False,
    source_language: str | None = None,
    target_language: str | None = None,
) -> str | list[str]:
    """Continues prompts with a language model, or answers them with an encoder-decoder.

        model = tfx_jax.load("gpt2")
        tfx_jax.generate(model, "Once upon", top_p=0.95, stop=["THE END"], on_text=functools.partial(print, end=""))

    The first call compiles. A later one with the same options does not, whatever its temperature, if it has as many
    prompts and they are padded to the same length (both powers of two). Each call rearranges the weights, which takes
    as long as copying them; a `tfx_jax.generation.TextGenerator` does it once. The prompt of a chat model is a
    conversation:

        tfx_jax.generate(tfx_jax.load("HuggingFaceTB/SmolLM3-3B"), [{"role": "user", "content": "Hello"}])

    Args:
      model: the result of `tfx_jax.load`.
      prompts: one text, or several; or one conversation, a list of messages with "role" and "content", for a model with
        a chat template.
      max_new_tokens: maximum number of new tokens for each prompt, EOS included.
      temperature: divides the logits; 0 means greedy search.
      top_k: sample from that many of the most probable tokens.
      top_p: sample from the fewest tokens that together have this probability.
      min_p: sample from tokens with at least this share of the largest probability.
      repetition_penalty: above 1, tokens that occurred before are less probable.
      no_repeat_ngram_size: no sequence of this many tokens occurs twice; 0 allows it.
      beam_size: above 1, beam search instead of sampling, whose options must then be left out.
      length_penalty: exponent of the length penalty of beam search; without one, it must be left out.
      stop: strings that end a text; they are not part of it.
      on_text: for streaming, called with each new part of the first text as soon as it is final.
      seed: sampling seed.
      int8: decode with int8 weights, but for experts: faster, not exact.
      slide: continue prompts beyond the model's positions, see `Generator`; without it, they are refused.
      source_language: language of the prompts of a multilingual translator such as NLLB: "eng_Latn".
      target_language: language to translate into.

    Returns:
      The generated text without the prompt, or the reply; a list of them for several prompts.

    Raises:
      UserError: if the model does not generate text, an argument is out of range, or an option of sampling is combined
        with beam search, or the length penalty with sampling.
    """
    check_is_loaded(model)
    if not isinstance(model.model, DecodingModel):
        raise UserError(f"{type(model.model).__name__} does not generate text")
    if model.tokenizer is None:
        raise UserError(f"the {type(model.model).__name__} was loaded without a tokenizer: LoadedModel needs one")
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
    )
    search: Search = sampling
    check_length_penalty(length_penalty, beam_size)
    if beam_size != 1:
        search = BeamSearch(beam_size, length_penalty)
        if names := [option.name for option in dataclasses.fields(Sampling) if _is_set(sampling, option)]:
            raise UserError(f"{names[0]} needs sampling, but beam_size is above 1 (beam search): leave one of them out")
    generator = TextGenerator(
        model.model,
        model.tokenizer,
        eos_ids=model.eos_ids,
        first_ids=model.first_ids,
        max_new_tokens=max_new_tokens,
        search=search,
        stop=(stop,) if isinstance(stop, str) else stop,
        on_text=on_text,
        int8=int8,
        slide=slide,
        source_language=source_language,
        target_language=target_language,
    )
    inputs: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    is_chat = bool(inputs) and isinstance(inputs[0], Mapping)
    if is_chat:
        inputs = [model.chat_template.encode(model.tokenizer, inputs)]
    texts = [output.text for output in generator(inputs, seed=seed)]
    return texts[0] if is_chat or isinstance(prompts, str) else texts


def check_is_loaded(model: Any) -> None:
    """Raises UserError for a module alone, where a `LoadedModel` with its tokenizer is needed."""
    if isinstance(model, nnx.Module):
        raise UserError(
            f"a {type(model).__name__} has no tokenizer: pass the result of tfx_jax.load, or LoadedModel(model, "
            "tokenizer) of tfx_jax.training; for token ids call the model, or tfx_jax.generation.Generator"
        )


def _is_set(sampling: Sampling, option: dataclasses.Field[Any]) -> bool:
    """Returns whether an option does not have its default."""
    return getattr(sampling, option.name) != option.default


def until_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string."""
    indices = [text.find(stop) for stop in stops]
    return text[: min((index for index in indices if index >= 0), default=len(text))]  # -1: not in the text


class GrowingText:
    """The text of one prompt's new tokens, as they come: whether it has ended, and which part of it is final.

    Attributes:
      num_tokens: number of tokens so far.
      text: the text so far, before the first stop string.
      is_stopped: whether there is a stop string.
    """

    def __init__(self, tokenizer: HFTokenizer, stops: Sequence[str] = (), prompt: Continued | None = None):
        """Starts an empty text.

        Args:
          tokenizer: decodes the tokens.
          stops: strings that end the text.
          prompt: the prompt, if the text continues it.
        """
        self._tokenizer, self._stops, self._stream = tokenizer, stops, stream_after(prompt, tokenizer)
        self._decoded = ""  # as the stream returns it, before `clean_up`
        # The last characters may be the beginning of a stop string, or change with the next token.
        self._num_withheld = max(map(len, stops), default=1) - 1 + num_unstable(tokenizer)
        self._num_taken = 0  # characters that `take` has returned
        self.num_tokens, self.text, self.is_stopped = 0, "", False

    def push(self, token: int) -> None:
        """Adds a token."""
        self.num_tokens += 1
        self._add(self._stream.push(token))

    def finish(self) -> None:
        """Adds the characters that a further token might have completed."""
        self._add(self._stream.finish())
        self._num_withheld = 0

    def take(self) -> str:
        """Returns the part of the text that has become final since the last call."""
        end = max(self._num_taken, len(self.text) - self._num_withheld)
        part, self._num_taken = self.text[self._num_taken : end], end
        return part

    def _add(self, part: str) -> None:
        self._decoded += part
        text = self._tokenizer.clean_up(self._decoded)
        self.text = until_stop(text, self._stops)
        self.is_stopped = self.text != text


class _StopObserver:
    """Observes the tokens of a batch as they are generated: streams the first text, ends texts at stop strings."""

    def __init__(
        self,
        tokenizer: HFTokenizer,
        stops: Sequence[str],
        on_text: Callable[[str], object] | None,
        eos_ids: Sequence[int],
    ):
        self._tokenizer, self._stops, self._on_text, self._eos_ids = tokenizer, stops, on_text, frozenset(eos_ids)

    def restart(self, prompts: Sequence[Continued | None], *, is_silent: bool) -> None:
        """Resets the state for a new batch; `prompts` are those that are continued, `is_silent` disables streaming."""
        self._is_silent = is_silent
        self._texts = [GrowingText(self._tokenizer, self._stops, prompt) for prompt in prompts]

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Adds the newest token of each row, [B] int32, -1 if none; returns True for rows with a stop string, [B]."""
        is_finished = np.zeros(tokens.shape, bool)
        # The rows after the last text are padding.
        for row, (text, token) in enumerate(zip(self._texts, tokens.tolist(), strict=False)):
            if token >= 0 and token not in self._eos_ids:
                text.push(token)
                is_finished[row] = text.is_stopped
        self._stream()
        return is_finished

    def finish(self, ids: Sequence[int]) -> None:
        """Streams the rest of the first text, whose tokens are `ids`; the program does not show its last token."""
        first = self._texts[0]
        for token in ids[first.num_tokens :]:
            first.push(token)
        first.finish()
        self._stream()

    def _stream(self) -> None:
        """Streams what is new and final of the first text."""
        if self._on_text is not None and not self._is_silent and (part := self._texts[0].take()):
            self._on_text(part)
