r"""A campaign of faults: what happens to trainings, folders, command lines and texts, and whether the library holds.

    python -m experiments.benchmarks.faults --kinds=kills,damage --seed=0 --count=100 --output=DIR

makes `--count` faults of each of these kinds (of all but the last, unless told) and writes faults.md into DIR: the
table, and of each failure what was done and how to do it again. Run again, it goes on where it stopped; a larger
`--count` tries more. Kinds, a file each:

* kills: SIGKILL at any moment, also in saves; all checkpoints must equal those of a training without, bit for bit.
* damage: a bit flipped, a file cut, gone, another's; a verb answers as before, says what it passed over, or refuses.
* commands: command lines by a grammar of verbs, flags and fields, with values that are wrong in any way.
* folders: Hugging Face folders with other fields, tensors, headers, tokenizers: read alike, or refused.
* lines: a thousand lines at a time of any characters; as many come out.
* trainings: dearer ones in processes of their own: full disks, two trainers, one process of two that dies.

A trial is the "same" as without its fault, a "line" that refuses, or bad: a "loss" of what was saved; "silent", other
results without a word; "traceback", or a process that died; "raw", a control character or a status that says nothing;
"hang", 30 seconds of a core; "memory", 2 GiB more than before. One process at a time, JAX imported once.

Measured with `--seed=0` on two cores that others had too, in parts, after what it found was mended:

| kind | tried | same | line | bad | MiB at most |
|---|--:|--:|--:|--:|--:|
| folders | 500 | 80 | 420 | 0 | 0 |
| damage | 227 | 138 | 89 | 0 | 180 |
| commands | 148 | 20 | 128 | 0 | 1,789 |
| kills | 31 | 31 | 0 | 0 | 3 |
"""
