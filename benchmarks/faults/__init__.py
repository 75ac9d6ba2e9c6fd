r"""A fault campaign: seeded faults in runs, folders, command lines, texts and environments, counted by outcome.

    python -m benchmarks.faults --kinds=kills,damage --seed=0 --count=100 --output=DIR

makes `--count` faults of each kind (default: every kind except trainings) and writes DIR/faults.md: a table of outcomes
and, for each failure, what was done and the command that repeats it. Run the command again to resume; a larger
`--count` adds trials. Each kind is one file. The table lists the last run with `--seed=0` on a machine with two cores
shared with other jobs, after its findings were fixed. One trial of lines is 1,000 lines.

| kind | fault, and the expected outcome | count | bad |
|---|---|--:|--:|
| kills | SIGKILL at any moment, also during saves; checkpoints must equal those of an undisturbed run | 1,000 | 0 |
| damage | a flipped bit; a truncated, missing or swapped file; verbs answer as before or report it | 1,000 | 0 |
| commands | command lines from a grammar of verbs, flags and fields with wrong values | 1,803 | 0 |
| folders | Hugging Face folders with edited fields, tensors, headers or tokenizers; read alike or rejected | 500 | 0 |
| lines | lines of arbitrary characters; each verb writes as many lines as it reads | 100 | 0 |
| configurations | hostile values in config.json; rejected, unless the field allows the value | 1,000 | 0 |
| workdirs | pipes, devices, links and endless files in a workdir; read alike or rejected | 1,000 | 0 |
| environments | locales, variables, limits and redirections around verbs; the same answer or one line | 1,000 | 0 |
| texts | byte order marks, line ends, normalization, invalid UTF-8; the same text gives the same answer | 1,000 | 0 |
| trainings | faults of whole runs: full disks, two trainers, one of two processes dies | 0 | - |

Outcomes: "same" as without the fault, one "line" that rejects it, or bad. Bad outcomes are "loss" of saved data;
"silent", a different result without a message; "traceback", or a dead process; "raw", a control character, an exit
status without meaning, or a message about something else; "hang", more than 30 seconds of CPU time; "memory", 2 GiB
more than before. JAX is imported once, and one process runs at a time.

What "same" compares: workdirs, environments and texts compare standard output with that of the undisturbed verb
(environments do not where the output is redirected, nor for `attend`, which draws; workdirs accept another output if
standard error says why). Configurations do not compare outputs, since an allowed value may change them: they require a
rejection where the value has another type, changes a size of the parameters or names another tokenizer.
"""
