"""The thread that answers the requests of `tfx-jax serve`: batches what waits, one program at a time."""

import base64
import dataclasses
import io
import os
import queue
import random
import sys
import tempfile
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tfx_jax.cli.support.attention_view import AttentionView
from tfx_jax.data.sources.audio import read_wav
from tfx_jax.data.sources.images import read_center, read_image
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.errors import UserError, one_line
from tfx_jax.functional.audio import WHISPER_SAMPLE_RATE
from tfx_jax.generation import Generator, Sampling, Transcriber
from tfx_jax.nn.decoding import DecodingModel
from tfx_jax.tasks.vision.captioning import CaptioningTask
from tfx_jax.training import LoadedModel, attention
from tfx_jax.training.reporting.image_plot import plot_maps

MAX_WAITING = 512  # requests; more are refused
MAX_BATCH = 64  # requests answered by one call of the model
_MAX_PROGRAMS = 4  # generators that are kept: each holds compiled programs
_NO_FILE = "the file"  # what messages call an uploaded file


class BusyError(Exception):
    """Too many requests wait."""


@dataclasses.dataclass
class Job:
    """One request.

    Attributes:
      kind: "predict", "generate" or "attend".
      inputs: what is answered: inputs of `predict`, prompts or a conversation, or the input of `attention`.
      result: the answer, or the error.
      sampling: how tokens are chosen.
      max_tokens: maximum number of new tokens.
      stop: strings that end a text.
      seed: sampling seed; None leaves it to the server.
      is_chat: whether `inputs` are the messages of one conversation.
      on_text: called, in the worker's thread, with each new part of the text.
      is_cancelled: whether no one waits for the answer any longer.
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

    def key(self) -> Any:
        """Returns what the requests of a batch have in common; a unique value for one that is answered alone."""
        is_seeded = self.seed is not None and self.sampling.temperature != 0  # samples depend on the row's number
        if self.kind == "attend" or is_seeded:
            return id(self)
        return self.kind, self.sampling, 1 << (self.max_tokens - 1).bit_length()


class ModelWorker:
    """Answers requests with one model in one thread; those that wait meanwhile are the next batch.

    Attributes:
      model: the model.
      suffixes: ends of the names of files that are inputs; () for a model of text.
      inputs: names of the parts of an input of `predict`; () if the model generates instead.
      generates: whether the model continues or answers texts, and has no other task.
      max_positions: number of tokens that it takes, prompt and new ones together; None if that is not limited.
      num_batches: number of batches so far.
      num_inputs: number of requests in these batches.
      num_tokens: number of generated tokens.
    """

    def __init__(self, model: LoadedModel, transcriber: Transcriber | None = None):
        """Starts the thread.

        Args:
          model: the model.
          transcriber: what transcribes, if the model is a Whisper.

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
            decoder = model.model.decoder()
            self._continues, self.max_positions = decoder.continues_inputs, decoder.max_input_length(0)
        self.num_batches = self.num_inputs = self.num_tokens = 0
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._kept: list[Job] = []  # taken from the queue, for a later batch
        self._generators: OrderedDict[Any, tuple[Generator, _Rows]] = OrderedDict()
        self._seeds = random.SystemRandom()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return self._jobs.qsize() + len(self._kept)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> Job:
        """Adds a request; raises BusyError if too many wait."""
        if self.num_waiting >= MAX_WAITING:
            raise BusyError
        self._jobs.put(job)
        return job

    def close(self, timeout: float = 60.0) -> None:
        """Answers what waits, then ends the thread."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        """Answers batches until `close`."""
        is_closed = False
        while not is_closed or self._kept:
            try:
                while True:  # all that wait now
                    job = self._jobs.get(block=not self._kept and not is_closed)
                    is_closed |= job is None
                    self._kept += [] if job is None else [job]
                    if self._jobs.empty():
                        break
            except queue.Empty:
                pass
            waiting = [job for job in self._kept if not job.is_cancelled]
            batch = [job for job in waiting if job.key() == waiting[0].key()][:MAX_BATCH]
            chosen = set(map(id, batch))
            self._kept = [job for job in waiting if id(job) not in chosen]
            # No result may be set for a request that is cancelled; from here on, none can be.
            if batch := [job for job in batch if job.result.set_running_or_notify_cancel()]:
                self._answer(batch)

    def _answer(self, batch: list[Job]) -> None:
        """Answers a batch; if an input of it is bad, each request by itself."""
        self.num_batches, self.num_inputs = self.num_batches + 1, self.num_inputs + len(batch)
        try:
            answers = getattr(self, f"_{batch[0].kind}")(batch)
        except Exception as error:
            if len(batch) > 1:
                for job in batch:
                    self._answer([job])
                return
            if not isinstance(error, UserError):
                traceback.print_exc(file=sys.stderr)
            batch[0].result.set_exception(error)
            return
        for job, answer in zip(batch, answers, strict=True):
            job.result.set_result(answer)

    def _predict(self, batch: list[Job]) -> list[Any]:
        """Returns the predictions of each request."""
        if self._transcriber is not None:
            return [[{"transcript": self._transcribe(item)} for item in job.inputs] for job in batch]
        inputs = [item for job in batch for item in job.inputs]
        if not self.suffixes:
            predictions = iter(self.model.predict(inputs))
        else:
            with tempfile.TemporaryDirectory() as folder:
                paths = [os.path.join(folder, f"{number}{self.suffixes[0]}") for number in range(len(inputs))]
                for path, item in zip(paths, inputs, strict=True):
                    with open(path, "wb") as file:
                        file.write(item)
                try:
                    found = self.model.predict(paths)
                except UserError as error:
                    raise UserError(_without(str(error), paths)) from None
                predictions = iter([{k: v for k, v in answer.items() if k != "file"} for answer in found])
        return [[next(predictions) for _ in job.inputs] for job in batch]

    def _transcribe(self, content: bytes) -> str:
        """Returns what is said in a WAV file, by a Whisper."""
        assert self._transcriber is not None
        samples = read_wav(content, WHISPER_SAMPLE_RATE, name=_NO_FILE) / np.float32(32_768)
        return self._transcriber(samples)

    def _generate(self, batch: list[Job]) -> list[Any]:
        """Returns (text, number of tokens of the prompt, number of new tokens, reason of the end) of each text."""
        tokenizer: Any = self.model.tokenizer
        encoded = [self._encode(job) for job in batch]
        generator, rows = self._generator(batch, max(len(ids) for prompts in encoded for ids in prompts))
        jobs = [job for job, prompts in zip(batch, encoded, strict=True) for _ in prompts]
        rows.start(jobs, tokenizer)
        seed = self._seeds.randrange(2**32) if batch[0].seed is None else batch[0].seed
        outputs = generator([ids for prompts in encoded for ids in prompts], seed=seed)
        texts = []
        for row, (job, ids) in enumerate(zip(jobs, outputs, strict=True)):
            ids = ids[: job.max_tokens]
            text = tokenizer.decode(ids)
            cut = _until(text, job.stop)
            self.num_tokens += len(ids)
            rows.finish(row, cut)
            is_over = len(ids) < job.max_tokens or cut != text
            texts.append((cut, len(ids), "stop" if is_over else "length"))
        remaining = iter(texts)
        answers = [[(*next(remaining), len(ids)) for ids in prompts] for prompts in encoded]
        for job, answer in zip(batch, answers, strict=True):
            if not self._continues and not job.is_chat:  # a blank source has no answer
                for index, prompt in enumerate(job.inputs):
                    if is_blank(prompt):
                        answer[index] = ("", 0, "stop", answer[index][3])
        return answers

    def _generator(self, batch: list[Job], prompt_length: int) -> tuple[Generator, "_Rows"]:
        """Returns the generator for the options of a batch, and the observer of its rows.

        Its texts have room for a power of two of tokens, so that few programs are compiled; each row ends at its own
        maximum.
        """
        longest = max(job.max_tokens for job in batch)
        length = 1 << (longest - 1).bit_length()
        if self.max_positions is not None and prompt_length + length > self.max_positions:
            length = longest  # exactly, to leave room for the prompt
        key = batch[0].sampling, length
        if key not in self._generators:
            rows, model = _Rows(), self.model
            options: dict[str, Any] = {"eos_ids": model.eos_ids, "first_ids": model.first_ids}
            options |= {"search": batch[0].sampling, "max_new_tokens": length, "observer": rows}
            while len(self._generators) >= _MAX_PROGRAMS:
                self._generators.popitem(last=False)
            self._generators[key] = Generator(model.model, **options), rows
        self._generators.move_to_end(key)
        return self._generators[key]

    def _encode(self, job: Job) -> list[list[int]]:
        """Returns the token ids of each prompt of a request."""
        tokenizer: Any = self.model.tokenizer
        if job.is_chat:
            return [self.model.chat_template.encode(tokenizer, job.inputs)]
        if not self._continues:
            return [tokenizer.encode_source(prompt, None) for prompt in job.inputs]
        return [tokenizer.encode_prompt(prompt) for prompt in job.inputs]

    def _attend(self, batch: list[Job]) -> list[dict[str, str]]:
        """Returns the attention of an input: {"html": page} of text, {"png": base64, "answer": text} of an image."""
        (job,) = batch
        source, target = job.inputs
        if isinstance(source, bytes):
            return [self._attend_to_image(source)]
        found: Any = attention(self.model, source, target)
        maps, pieces, target_pieces = found
        target_inputs = ["<s>", *target_pieces[:-1]] if pieces else target_pieces  # as `tfx-jax attend`
        return [{"html": AttentionView(maps, pieces, target_pieces, target_inputs=target_inputs).page}]

    def _attend_to_image(self, content: bytes) -> dict[str, str]:
        """Returns a picture of the attention over an image."""
        if self.suffixes == (".wav",):
            raise UserError("attention over sound cannot be drawn: send a text or an image to a model of these")
        task: Any = self.model._task
        size = task.model_config.image_size
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, f"0{self.suffixes[0]}")
            with open(path, "wb") as file:
                file.write(content)
            try:
                if isinstance(task, CaptioningTask):
                    image = read_image(path, size)
                else:
                    image = read_center(path, size, task.model_config.num_channels)
            except UserError as error:
                raise UserError(_without(str(error), [path])) from None
        result: Any = attention(self.model, image)
        picture = io.BytesIO()
        plot_maps(image, result.titles, result.maps).savefig(picture, format="png", dpi=100)
        return {"png": base64.b64encode(picture.getvalue()).decode(), "answer": result.answer}


class _Rows:
    """Observer of a batch: streams each row to its request, and ends rows at stop strings, limits and lost clients."""

    def start(self, jobs: Sequence[Job], tokenizer: Any) -> None:
        """Begins a batch whose rows belong to these requests."""
        self._jobs = jobs
        self._streams = [tokenizer.stream() for _ in jobs]
        self._texts, self._counts, self._num_shown = [""] * len(jobs), [0] * len(jobs), [0] * len(jobs)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Adds the newest token of each row, [B] int32, -1 if none; returns True for rows to stop, [B]."""
        is_finished = np.zeros(tokens.shape, bool)
        for row, (job, token) in enumerate(zip(self._jobs, tokens.tolist(), strict=False)):
            if token < 0:
                continue
            self._counts[row] += 1
            if self._counts[row] <= job.max_tokens:
                self._texts[row] += self._streams[row].push(token)
            is_over = _until(self._texts[row], job.stop) != self._texts[row]
            is_finished[row] = is_over or job.is_cancelled or self._counts[row] >= job.max_tokens
            # The last characters may be the beginning of a stop string.
            self._show(row, _until(self._texts[row], job.stop), max(map(len, job.stop), default=1) - 1)
        return is_finished

    def finish(self, row: int, text: str) -> None:
        """Streams the rest of a row."""
        self._show(row, text, 0)

    def _show(self, row: int, text: str, num_withheld: int) -> None:
        """Streams what is new of a text, but its last `num_withheld` characters."""
        on_text, start, end = self._jobs[row].on_text, self._num_shown[row], len(text) - num_withheld
        if on_text is not None and end > start:
            on_text(text[start:end])
            self._num_shown[row] = end


def _until(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string."""
    return text[: min((index for stop in stops if (index := text.find(stop)) >= 0), default=len(text))]


def _without(message: str, paths: Sequence[str]) -> str:
    """Replaces the names of temporary files, longest first, in a message."""
    for path in sorted(paths, key=len, reverse=True):
        message = message.replace(path, _NO_FILE)
    return one_line(UserError(message))
