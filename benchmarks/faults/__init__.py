r"""A campaign of faults: what happens to trainings, folders, command lines and texts, and whether the library holds.

    python -m benchmarks.faults --kinds=kills,damage --seed=0 --count=100 --output=DIR

makes `--count` faults of each of these kinds (of all but the last, unless told) and writes faults.md into DIR: a table
of what came of them, and of each failure what was done and how to do it again. Run again, it goes on where it stopped;
a larger `--count` tries more. Kinds, a file each, with what was tried by `--seed=0` on two cores that others had too,
in parts, after what it found was fixed; of lines, a trial is a thousand:

| kind | what is done, and what must come of it | count | bad |
|---|---|--:|--:|
| kills | SIGKILL at any moment, also in saves; all checkpoints must equal those without, bit for bit | 1,000 | 0 |
| damage | a bit flipped, a file cut, gone or another's; verbs answer as before, or say what they met | 1,000 | 0 |
| commands | command lines by a grammar of verbs, flags and fields, with values that are wrong in any way | 1,803 | 0 |
| folders | Hugging Face folders with other fields, tensors, headers, tokenizers: read alike, or refused | 500 | 0 |
| lines | lines of any characters through the verbs that read them; as many come out | 100 | 0 |
| configurations | fields of config.json with hostile values: refused, or a value that the field may have | 40 | 15 |
| workdirs | pipes, devices, links and endless files in a workdir: read alike, or refused | 40 | 0 |
| environments | locales, variables, limits and redirections around verbs: answer as without, or say why not | 27 | 1 |
| texts | byte order marks, line ends, normalization, invalid UTF-8: as many lines out, the same text alike | 40 | 2 |
| trainings | in processes of their own: full disks, two trainers, one process of two that dies | 0 | - |

Configurations, workdirs, environments and texts have the figures of their first run, without any fix for what they
found: fields of another type were read, a byte order mark on standard input was text, and compiling took longer than a
verb was given. A trial is the "same" as without its fault, a "line" that refuses, or bad: a "loss" of what was saved;
"silent", other results without a word; "traceback", or a process that died; "raw", a control character or a status that
says nothing; "hang", 30 seconds of a core; "memory", 2 GiB more than before. One process at a time, JAX imported once.
"""
