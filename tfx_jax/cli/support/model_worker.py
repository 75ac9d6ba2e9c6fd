"""The thread that answers the requests of `tfx-jax serve`: batches what waits, one program at a time."""

import base64
import contextlib
import dataclasses
import io
import math
import os
import pathlib
import random
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, cast

import numpy as np
from flax import nnx

from tfx_jax.cli.support.attention_view import AttentionView
from tfx_jax.data.sources.audio import read_wav
from tfx_jax.data.sources.images import read_center, read_image
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError, one_line
from tfx_jax.functional.audio import WHISPER_SAMPLE_RATE
from tfx_jax.generation import DecodeDriver, Sampling, Transcriber
from tfx_jax.generation.decoding import check_prompt
from tfx_jax.generation.text import Continued, GrowingText
from tfx_jax.nn.decoding import DecodingModel
from tfx_jax.tasks.speech.recorded_speech import RecordedSpeech
from tfx_jax.tasks.vision.captioning import CaptioningTask
from tfx_jax.training import LoadedModel, attention
from tfx_jax.training.reporting.image_plot import plot_maps

MAX_WAITING = 512  # requests; more are refused
MAX_ROWS = 64  # prompts or inputs processed by one call of the model
MAX_BATCH_TOKENS = 2**15  # rows * (prompt + new tokens) of one call, padding included
MAX_ATTENTION_WEIGHTS = 2**24  # tokens^2 * heads * layers: each weight is about 16 bytes of the page
_MIN_PROMPT = 16  # shorter prompts are padded to this length
_UPLOAD = "the file"  # what messages call an uploaded file


class BusyError(Exception):
    """Too many requests wait."""


class StoppedError(BusyError):
    """The model's thread has ended or ends, so the request is not answered."""


@dataclasses.dataclass
class Job:
    """One request.

    Attributes:
      kind: "predict", "generate" or "attend".
      inputs: inputs of `predict`, prompts or a conversation, or the input of `attention`.
      result: the answer, or the error.
      sampling: sampling options.
      max_tokens: maximum number of new tokens.
      stop: strings that end a text.
      seed: sampling seed; None leaves it to the server.
      is_chat: whether `inputs` are the messages of one conversation.
      on_text: called, in the worker's thread, with each new part of the text.
      is_cancelled: whether the client no longer waits for the answer.
      prompts: token ids of each prompt; None before `ModelWorker.encode`.
      has_streamed: whether `on_text` has been called.
    """

    kind: str
    inputs: Any
    result: "Future[Any]" = dataclasses.field(default_factory=Future)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_tokens: int = 16
    stop: Sequence[str] = ()
    seed: int | None = None
    is_chat: bool = False
    on_text: Callable[[str], object] | None = None
    is_cancelled: bool = False
    prompts: list[list[int]] | None = None
    has_streamed: bool = False

    @property
    def is_live(self) -> bool:
        """Whether a client waits for the answer."""
        return not self.is_cancelled and not self.result.done()

    @property
    def num_rows(self) -> int:
        """Number of rows of the model's inputs."""
        return 1 if self.is_chat or self.kind == "attend" else len(self.inputs)

    def key(self) -> Any:
        """Returns what the requests of a batch have in common; a unique value for one that is answered alone."""
        is_seeded = self.seed is not None and self.sampling.temperature != 0  # samples depend on the row's number
        if self.kind == "attend" or is_seeded:
            return id(self)
        return self.kind, self.sampling, _power_of_two(self.max_tokens)

    def fail(self, error: BaseException) -> bool:
        """Sets the error; returns False if the request has a result already or is cancelled."""
        with contextlib.suppress(InvalidStateError):
            self.result.set_exception(error)
            return True
        return False


class ModelWorker:
    """Answers requests with one model in one thread; those that wait meanwhile are the next batch.

    Generation keeps one decoder, a copy of the weights arranged for decoding; programs are kept as `DecodeDriver` says.
    Requests of all temperatures share them. Each new combination of `top_k`, `top_p`, `min_p` and
    `repetition_penalty` compiles its own, which takes seconds for a large model.

    Attributes:
      model: the model.
      suffixes: ends of the names of files that are inputs; () for a model of text.
      inputs: names of the parts of an input of `predict`; () if the model generates instead.
      generates: whether the model continues or answers texts, and has no other task.
      max_positions: maximum number of tokens, of prompt and output together for a model that continues its prompt; None
        without a limit.
      num_batches: number of batches answered.
      num_inputs: number of requests in these batches.
      num_tokens: number of generated tokens.
    """

    def __init__(self, model: LoadedModel, transcriber: Transcriber | None = None):
        """Starts the thread.

        Args:
          model: the model.
          transcriber: transcribes the sound, if the model is a Whisper.

        Raises:
          UserError: if the model neither predicts nor generates.
        """
        self.model, self._transcriber = model, transcriber
        self.inputs, self.suffixes = model.inputs, model.suffixes
        if transcriber is not None:
            self.inputs, self.suffixes = ("sound",), (".wav",)
        self.generates = not self.inputs and isinstance(model.model, DecodingModel) and model.tokenizer is not None
        if not self.inputs and not self.generates:
            raise UserError(f"{type(model.model).__name__} has no task that takes text or files, and writes no text")
        self._continues, self.max_positions = True, None
        if self.generates:
            self._graphdef, params = nnx.split(model.model)
            self._decoder: Any = self._make_driver(Sampling()).decoder(params)
            self._continues, self.max_positions = self._decoder.continues_inputs, self._decoder.max_input_length(0)
        self.num_batches = self.num_inputs = self.num_tokens = 0
        self._changed = threading.Condition()  # guards the next three
        self._jobs: list[Job] = []  # requests that wait
        self._running: list[Job] = []  # the batch that is being answered
        self._is_closed = False
        self._rows = _Rows()
        self._seeds = random.SystemRandom()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, without cancelled ones."""
        with self._changed:
            return sum(job.is_live for job in self._jobs)

    @property
    def max_seconds(self) -> float | None:
        """Length of the longest recording that a model of sound takes; None for other models."""
        if self._transcriber is not None:
            return self._transcriber.max_samples / WHISPER_SAMPLE_RATE
        data: Any = self.model.task and self.model.task.config.data
        return data.max_length * data.hop / data.sample_rate if isinstance(data, RecordedSpeech) else None

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def check_accepts(self) -> None:
        """Checks that a request could be added now, before work is done for one that could not.

        Raises:
          BusyError: if too many requests wait.
          StoppedError: if the worker is closed or its thread has ended.
        """
        with self._changed:
            if self._is_closed:
                raise StoppedError("the model's thread has ended: restart the server")
            self._remove_ended()
            if len(self._jobs) >= MAX_WAITING:
                raise BusyError("too many requests wait: try again later")

    def submit(self, job: Job) -> Job:
        """Adds a request; raises what `check_accepts` raises."""
        with self._changed:  # reentrant
            self.check_accepts()
            self._jobs.append(job)
            self._changed.notify()
        return job

    def close(self, timeout: float = 60.0) -> int:
        """Answers the requests that wait, ends the thread, and cancels what remains after `timeout` seconds.

        Returns:
          The number of cancelled requests.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout)
        return self._drop()

    def _drop(self) -> int:
        """Fails all requests; returns how many clients waited for them."""
        with self._changed:
            jobs, self._jobs = [job for job in (*self._running, *self._jobs) if job.is_live], []
        error = StoppedError("the server ended before it answered")
        num_dropped = sum(job.fail(error) for job in jobs)
        for job in jobs:
            job.is_cancelled = True  # ends its rows at the next token
        return num_dropped

    def _remove_ended(self) -> None:
        """Removes cancelled and failed requests from those that wait; `_changed` must be held."""
        for job in self._jobs:
            if job.is_cancelled:
                job.result.cancel()
        self._jobs = [job for job in self._jobs if job.is_live]

    def _run(self) -> None:
        """Answers batches until `close`; at its end, also by an error, no request waits any longer."""
        try:
            while batch := self._next_batch():
                self._answer(batch)
        finally:
            with self._changed:
                self._is_closed = True
            self._drop()

    def _next_batch(self) -> list[Job]:
        """Waits for requests and returns those of the next batch; [] after `close` once none waits."""
        while True:
            with self._changed:
                self._running = []
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                self._remove_ended()
                waiting = list(self._jobs)
                if not waiting and self._is_closed:
                    return []
            chosen = set(map(id, self._choose(waiting)))  # without the lock, because it tokenizes
            with self._changed:
                batch = [job for job in self._jobs if id(job) in chosen]
                self._jobs = [job for job in self._jobs if id(job) not in chosen]
                # No result may be set for a request that is cancelled; from here on, none can be.
                self._running = [job for job in batch if job.is_live and job.result.set_running_or_notify_cancel()]
                if self._running:
                    return self._running

    def _choose(self, waiting: list[Job]) -> list[Job]:
        """Returns the first request and those that fit into one batch with it; fails bad ones that it meets."""
        batch: list[Job] = []
        for job in waiting:
            if batch and job.key() != batch[0].key():
                continue
            try:
                self._prepare(job)
            except Exception as error:
                self._fail(job, error)
                continue
            if not batch or self._fits([*batch, job]):
                batch.append(job)
            if sum(job.num_rows for job in batch) >= MAX_ROWS:
                break
        return batch

    def _prepare(self, job: Job) -> None:
        """Encodes the prompts of a request and checks them against its own maximum of new tokens."""
        if job.kind == "generate":
            for number, ids in enumerate(self.encode(job), start=1):
                check_prompt(self._decoder, number, ids, job.max_tokens)

    def _fits(self, batch: list[Job]) -> bool:
        """Whether one call of the model can answer these requests."""
        if batch[0].kind != "generate":
            return sum(job.num_rows for job in batch) <= MAX_ROWS
        return self._rows_fit([(job, ids) for job in batch for ids in job.prompts or ()])

    def _rows_fit(self, rows: Sequence[tuple[Job, list[int]]]) -> bool:
        """Whether one program can process these rows, each the request and the token ids of a prompt."""
        prompt_length, max_tokens = max(len(ids) for _, ids in rows), max(job.max_tokens for job, _ in rows)
        limit = self._decoder.max_input_length(max_tokens)
        if len(rows) > MAX_ROWS or (limit is not None and prompt_length > limit):
            return False
        num_tokens = max(_MIN_PROMPT, _power_of_two(prompt_length)) + _power_of_two(max_tokens)
        return _power_of_two(len(rows)) * num_tokens <= MAX_BATCH_TOKENS

    def _answer(self, batch: list[Job]) -> None:
        """Answers a batch; if that fails, each request by itself, but none whose text is already being streamed."""
        try:
            answers = getattr(self, f"_{batch[0].kind}")(batch)
        except Exception as error:
            for job in batch:
                if len(batch) > 1 and not job.has_streamed:
                    self._answer([job])
                else:
                    self._fail(job, error)
            return
        self.num_batches, self.num_inputs = self.num_batches + 1, self.num_inputs + len(batch)
        for job, answer in zip(batch, answers, strict=True):
            with contextlib.suppress(InvalidStateError):  # `close` has dropped it
                job.result.set_result(answer)

    def _fail(self, job: Job, error: Exception) -> None:
        """Fails a request; prints errors that are not the client's."""
        job.fail(error)
        if not isinstance(error, UserError):
            with contextlib.suppress(OSError, ValueError):  # stderr may be broken or closed
                traceback.print_exception(error, file=sys.stderr)

    def _predict(self, batch: list[Job]) -> list[Any]:
        """Returns the predictions of each request."""
        if self._transcriber is not None:
            return [[{"transcript": self._transcribe(item)} for item in job.inputs] for job in batch]
        inputs = [item for job in batch for item in job.inputs]
        if not self.suffixes:
            parts = [inputs[start : start + MAX_ROWS] for start in range(0, len(inputs), MAX_ROWS)]
            predictions = iter([prediction for part in parts for prediction in self.model.predict(part)])
        else:
            with _temporary_files(inputs, self.suffixes[0]) as paths:
                outputs = self.model.predict(paths)
                predictions = iter([{k: v for k, v in output.items() if k != "file"} for output in outputs])
        return [[next(predictions) for _ in job.inputs] for job in batch]

    def _transcribe(self, content: bytes) -> str:
        """Returns what is said in a WAV file, by a Whisper."""
        assert self._transcriber is not None
        samples = read_wav(content, WHISPER_SAMPLE_RATE, name=_UPLOAD) / np.float32(32_768)
        return self._transcriber(samples)

    def _generate(self, batch: list[Job]) -> list[Any]:
        """Returns (text, number of new tokens, finish reason, number of prompt tokens) of each prompt of each request.

        Rows beyond `MAX_ROWS` or `MAX_BATCH_TOKENS` are processed by further programs.
        """
        for job in batch:
            self._prepare(job)
        rows = [(job, ids) for job in batch for ids in job.prompts or ()]
        seed = self._seeds.randrange(2**32) if batch[0].seed is None else batch[0].seed
        blanks = [self._is_unanswerable(job, index) for job in batch for index in range(len(job.prompts or ()))]
        prompts = [self._continued(job, index, ids) for job in batch for index, ids in enumerate(job.prompts or ())]
        outputs: list[Any] = []
        while (start := len(outputs)) < len(rows):
            end = start + 1
            while end < len(rows) and self._rows_fit(rows[start : end + 1]):
                end += 1
            part = slice(start, end)
            outputs += self._generate_rows(rows[part], blanks[part], prompts[part], seed=seed, first=start)
        self.num_tokens += sum(num_tokens for _, num_tokens, *_ in outputs)
        remaining = iter(outputs)
        return [[next(remaining) for _ in job.prompts or ()] for job in batch]

    def _is_unanswerable(self, job: Job, index: int) -> bool:
        """Whether a prompt is a blank source, whose text is empty."""
        return not self._continues and not job.is_chat and is_blank(job.inputs[index])

    def _continued(self, job: Job, index: int, ids: list[int]) -> Continued | None:
        """Returns a prompt that is continued; None for one that is answered."""
        if job.is_chat or not self._continues:
            return None
        return Continued.of(cast(HFTokenizer, self.model.tokenizer), job.inputs[index], ids)

    def _generate_rows(
        self,
        rows: list[tuple[Job, list[int]]],
        blanks: list[bool],
        continued: list[Continued | None],
        *,
        seed: int,
        first: int,
    ) -> list[tuple[str, int, str, int]]:
        """Generates with one program; `first` is the number of the first row, which its samples depend on.

        The program has room for a power of two of new tokens, so that few programs are compiled; each row ends at its
        own maximum.
        """
        jobs, prompts = [job for job, _ in rows], [ids for _, ids in rows]
        prompt_length, longest = max(map(len, prompts)), max(job.max_tokens for job in jobs)
        length = _power_of_two(longest)
        limit = self._decoder.max_input_length(length)
        if limit is not None and prompt_length > limit:
            length = longest  # exactly, to leave room for the prompt
        driver = self._make_driver(jobs[0].sampling, self._rows)
        self._rows.start(jobs, blanks, continued, self.model.tokenizer, self.model.eos_ids)
        outputs = driver(self._decoder, prompts, max_new_tokens=lambda _: length, seed=seed, first=first)
        return [(*self._rows.finish(row, ids), len(prompts[row])) for row, ids in enumerate(outputs)]

    def _make_driver(self, sampling: Sampling, observer: "_Rows | None" = None) -> DecodeDriver:
        """Returns a driver of this search."""
        options: dict[str, Any] = {"eos_ids": self.model.eos_ids, "first_ids": self.model.first_ids}
        return DecodeDriver(self._graphdef, sampling, observer=observer, **options)

    def encode(self, job: Job) -> list[list[int]]:
        """Returns the token ids of each prompt of a request, which keeps them."""
        tokenizer: Any = self.model.tokenizer
        if job.prompts is None:
            if job.is_chat:
                job.prompts = [self.model.chat_template.encode(tokenizer, job.inputs)]
            elif self._continues:
                job.prompts = [tokenizer.encode_prompt(prompt) for prompt in job.inputs]
            else:
                job.prompts = [tokenizer.encode_source(prompt, None) for prompt in job.inputs]
        return job.prompts

    def max_input_length(self, max_tokens: int) -> int | None:
        """Returns how many tokens a prompt may have before `max_tokens` new ones; None without a limit."""
        return self._decoder.max_input_length(max_tokens)

    def _attend(self, batch: list[Job]) -> list[dict[str, str]]:
        """Returns the attention of an input: {"html": page} of text, {"png": base64, "answer": text} of an image."""
        (job,) = batch
        source, target = job.inputs
        if isinstance(source, bytes):
            return [self._attend_to_image(source)]
        self._check_attention_size(source, target)
        result: Any = attention(self.model, source, target)
        maps, pieces, target_pieces = result
        target_inputs = ["<s>", *target_pieces[:-1]] if pieces else target_pieces  # as `tfx-jax attend`
        return [{"html": AttentionView(maps, pieces, target_pieces, target_inputs=target_inputs).page}]

    def _check_attention_size(self, source: str, target: str | None) -> None:
        """Raises UserError if the attention of a text has too many weights."""
        tokenizer: Any = self.model.tokenizer
        config: Any = getattr(self.model.task, "model_config", None) or getattr(self.model.model, "config", None)
        num_maps = getattr(config, "num_heads", 0) * getattr(config, "num_layers", 0)
        if tokenizer is None or not num_maps:
            return
        num_tokens = len(tokenizer.encode(source)) + len(tokenizer.encode(target or ""))
        if target is None and getattr(config, "kind", None) == "encoder_decoder":
            num_tokens *= 2  # the model's output, about as long as its input
        if num_tokens**2 * num_maps > MAX_ATTENTION_WEIGHTS:
            limit = math.isqrt(MAX_ATTENTION_WEIGHTS // num_maps)
            raise UserError(
                f"the text has {num_tokens:,} tokens, but the attention maps of this model are drawn for at most "
                f"{limit:,}: shorten it"
            )

    def _attend_to_image(self, content: bytes) -> dict[str, str]:
        """Returns a picture of the attention over an image."""
        if self.suffixes == (".wav",):
            raise UserError("attention over sound cannot be drawn: send a text or an image to a model of these")
        task: Any = self.model.task
        size = task.model_config.image_size
        with _temporary_files([content], self.suffixes[0]) as (path,):
            if isinstance(task, CaptioningTask):
                image = read_image(path, size)
            else:
                image = read_center(path, size, task.model_config.num_channels)
        result: Any = attention(self.model, image)
        picture = io.BytesIO()
        plot_maps(image, result.titles, result.maps).savefig(picture, format="png", dpi=100)
        return {"png": base64.b64encode(picture.getvalue()).decode(), "answer": result.answer}


class _Rows:
    """Observer of a batch: streams each row to its request, and ends rows at stop strings, limits and lost clients.

    The final text of a row is made of the same characters as its streamed parts.
    """

    def start(
        self,
        jobs: Sequence[Job],
        blanks: Sequence[bool],
        continued: Sequence[Continued | None],
        tokenizer: Any,
        eos_ids: Sequence[int],
    ) -> None:
        """Begins a batch whose rows belong to these requests; texts of `blanks` are empty."""
        self._jobs, self._blanks, self._eos_ids = jobs, blanks, frozenset(eos_ids)
        self._texts = [GrowingText(tokenizer, job.stop, prompt) for job, prompt in zip(jobs, continued, strict=True)]

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Adds the newest token of each row, [B] int32, -1 if none; returns True for rows to stop, [B]."""
        is_finished = np.zeros(tokens.shape, bool)
        for row, (job, token) in enumerate(zip(self._jobs, tokens.tolist(), strict=False)):
            if token < 0 or token in self._eos_ids:
                continue
            if self._blanks[row]:
                is_finished[row] = True
                continue
            text = self._texts[row]
            if text.num_tokens < job.max_tokens:
                text.push(token)
            self._stream(row)
            is_finished[row] = text.is_stopped or job.is_cancelled or text.num_tokens >= job.max_tokens
        return is_finished

    def finish(self, row: int, ids: Sequence[int]) -> tuple[str, int, str]:
        """Streams the rest of a row with the new tokens `ids`; returns (text, number of tokens, finish reason)."""
        if self._blanks[row]:
            return "", 0, "stop"
        job, text = self._jobs[row], self._texts[row]
        if ids and ids[-1] in self._eos_ids:
            ids = ids[:-1]
        ids = ids[: job.max_tokens]
        for token in ids[text.num_tokens :]:  # the program does not show its last token
            text.push(token)
        text.finish()
        self._stream(row)
        return text.text, len(ids), "stop" if text.is_stopped or len(ids) < job.max_tokens else "length"

    def _stream(self, row: int) -> None:
        """Streams what is new and final of a row to its request."""
        job = self._jobs[row]
        if job.on_text is None or job.is_cancelled or not (part := self._texts[row].take()):
            return
        job.has_streamed = True
        try:
            job.on_text(part)
        except Exception:  # the client's event loop is closed; the other rows go on
            job.is_cancelled = True


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


@contextlib.contextmanager
def _temporary_files(contents: Sequence[bytes], suffix: str) -> Iterator[list[str]]:
    """Writes uploads to files; messages of errors inside do not show their paths."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f"{number}{suffix}") for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            pathlib.Path(path).write_bytes(content)
        try:
            yield paths
        except UserError as error:
            message = str(error)
            for path in sorted(paths, key=len, reverse=True):  # a path may begin with a shorter one
                message = message.replace(path, _UPLOAD)
            raise UserError(one_line(UserError(message))) from None
