"""What a compiled program says of itself: exchanges between devices, and where the compiler expects time to go.

XLA's text of a program is read, which is that of the very program that runs. Loops count as often as they turn; the
analyses of XLA itself count them once.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16}
_BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}

# What libtpu says of some operations that it does not estimate.
_NO_ESTIMATE = 10**12
# Most products are there: who calls them says more.
_CALLED_EVERYWHERE = ("/functional/linear.py", "/nn/linear.py")

# A line's name, result and operation.
_OPERATION = re.compile(r"\s*(?:ROOT )?%?(\S+) = (.*?) ([\w-]+)\(")

# What takes so long that an exchange hides behind it; of custom calls, libraries and kernels alone.
_COMPUTES = re.compile(
    r"\s*(?:ROOT )?%?\S+ = .*? (?:fusion|convolution|dot|while|call|conditional|sort|scatter)\("
    r'|.* custom-call\(.*custom_call_target="(?:__|tpu_custom_call)'
)


class Collective(NamedTuple):
    """An exchange between devices in a compiled program."""

    kind: str
    """One of KINDS."""
    devices: tuple[int, ...]
    """Who takes part, in the first of its groups."""
    num_bytes: int
    """Of its result on one device."""
    count: int
    """How often it is done."""
    is_async: bool
    """Whether the program computes something between its start and its end, in the order of its schedule."""
    source: str
    """The JAX operation it comes from."""

    @property
    def moved(self) -> float:
        """Bytes that leave each device in the usual algorithms on a ring, every time together."""
        n = len(self.devices)
        share = {
            "all-gather": (n - 1) / n,
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": n - 1,
            "all-to-all": (n - 1) / n,
            "collective-permute": 1,
        }
        return self.count * self.num_bytes * share[self.kind]


class Operation(NamedTuple):
    """A line of source code and the cycles that the compiler expects of what it became."""

    source: str
    """File, line and JAX operation, such as "tfx_jax/nn/layers.py:95 dot_general"; the operation where that is all."""
    cycles: int
    """Of one device in one run of the program."""


class Kernel(NamedTuple):
    """A kernel that was written by hand, as in Pallas, of which the compiler expects nothing.

    Its work is what its author says (`cost_estimate`). Where none does, it is read from shapes: every operand is read
    and every result written once, and an attention kernel (by its name: splash, flash) makes 2 products of all pairs,
    of its gradients 3 (dq) and 4 (dkv), causal or not. Others have no FLOPs then.
    """

    source: str
    """As of an `Operation`."""
    flops: int
    """Of one device in one run of the program."""
    num_bytes: int
    """That it reads and writes, likewise."""


class Program(NamedTuple):
    """What was read."""

    collectives: list[Collective]
    operations: list[Operation]
    """The slowest first; empty where the compiler estimates nothing, as for CPU and GPU."""
    kernels: list[Kernel]
    """Of Mosaic, the compiler of Pallas for TPUs."""

    @property
    def cycles(self) -> int:
        """Of all operations that one device does, exchanges left out."""
        return sum(operation.cycles for operation in self.operations)


def read_program(hlo: str) -> Program:
    """Reads the text of a compiled program; exchanges in which one device alone takes part are left out."""
    bodies = dict(_computations(hlo))
    sources = _Sources(hlo)
    exchanges: list[Collective] = []
    # libtpu starts and ends an exchange in fusions with what is computed meanwhile, and has it in each of them.
    fused: dict[str, int] = {}
    kernels: list[Kernel] = []
    cycles = collections.Counter[str]()

    def walk(name: str, times: int, *, is_fused: bool = False) -> None:
        for index, line in enumerate(bodies[name]):
            operation = _OPERATION.match(line)
            if operation is None:
                continue
            channel = re.search(r"channel_id=\d+", line) if is_fused else None
            if channel and channel[0] in fused:
                if name.startswith("async_collective_fusion"):
                    exchanges[fused[channel[0]]] = exchanges[fused[channel[0]]]._replace(is_async=True)
            elif found := _exchange(bodies[name], index, name):
                if channel:
                    fused[channel[0]] = len(exchanges)
                exchanges.append(found._replace(count=times, source=sources.operation(line)))
            if 'custom_call_target="tpu_custom_call"' in line:
                flops, num_bytes = _kernel_work(line)
                kernels.append(Kernel(sources.line(line), times * flops, times * num_bytes))
            # Inside a fusion every part has an estimate as well; that of the fusion covers them.
            estimate = None if is_fused else re.search(r'"estimated_cycles":"(\d+)"', line)
            if estimate and int(estimate[1]) < _NO_ESTIMATE:
                cycles[sources.line(line)] += int(estimate[1]) * times
            for called, turns in _called(line, operation[3], bodies):
                walk(called, times * turns, is_fused=is_fused or operation[3] == "fusion")

    walk(next(name for name in bodies if name.startswith("ENTRY ")), 1)
    return Program(exchanges, [Operation(*pair) for pair in cycles.most_common()], kernels)


def collectives(hlo: str) -> list[Collective]:
    """Reads the exchanges alone."""
    return read_program(hlo).collectives


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """The lines of each function of the program by its name; that of the entry has "ENTRY " before it."""
    name, lines = "", []
    for line in hlo.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            name, lines = (header[1] or "") + header[2], []
        elif line.startswith("}") and not line.startswith("}}"):
            yield name, lines
        elif line.startswith(" ") or not lines:
            lines.append(line)
        else:  # attributes of kernels have line breaks
            lines[-1] += line


def _called(line: str, operation: str, bodies: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
    if operation == "while":
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        parts = re.search(r"condition=%?([\w.-]+), body=%?([\w.-]+)", line)
        assert parts is not None
        yield parts[2], int(known[1]) if known else _turns(bodies, parts[1])
    elif operation in ("call", "fusion", "async", "async-start"):
        for name in re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", line):
            yield name, 1
    elif operation == "conditional":
        for names in re.findall(r"(?:branch_computations=\{|_computation=)([^,}]*(?:, %[^,}]*)*)", line):
            for name in names.split(", "):
                yield name.strip("% "), 1


def _turns(bodies: dict[str, list[str]], condition: str) -> int:
    """How often a loop turns of which libtpu says nothing: the constant that its counter is compared with, else 1."""
    lines = bodies[condition]
    for line in lines:
        if fused := re.search(r"ROOT .* calls=%?([\w.-]+)", line):
            lines = lines + bodies[fused[1]]
    limits = [found[1] for line in lines if (found := re.search(r"s32\[\]\S* constant\((\d+)\)", line))]
    is_counted = any("direction=LT" in line for line in lines)
    return int(limits[0]) if is_counted and len(limits) == 1 else 1


def _exchange(body: list[str], index: int, function: str) -> Collective | None:
    """What a line of a function exchanges, once; None if it does not, or one device alone takes part."""
    line, operation = body[index], _OPERATION.match(body[index])
    kind = "" if operation is None else operation[3].removesuffix("-start")
    if operation is None or kind not in KINDS or len(devices := _devices(line)) == 1:
        return None
    if operation[3] != kind:
        size = _result_bytes(operation[2], kind, len(devices))
        return Collective(kind, devices, size, 1, _is_hidden(operation[1], body[index + 1 :]), "")
    size = _num_bytes(operation[2])
    if function.startswith("all-reduce-scatter"):  # libtpu's fusion of a sum and the part that is kept of it
        kind, size = "reduce-scatter", size // len(devices)
    return Collective(kind, devices, size, 1, False, "")


def _is_hidden(name: str, following: list[str]) -> bool:
    """Whether something is computed before what was started by this name is waited for."""
    for line in following:
        if re.search(rf"-done\(.*%{re.escape(name)}[,)]", line):
            return False
        if _COMPUTES.match(line):
            return True
    return False


def _kernel_work(line: str) -> tuple[int, int]:
    """FLOPs and bytes of one call, see `Kernel`."""
    if stated := re.search(r'"cost_estimate":\s*\{(.*?)\}', line):
        work = {name: int(number) for name, number in re.findall(r'"(\w+)":\s*"?(\d+)', stated[1])}
        return work.get("flops", 0), work.get("bytes_accessed", 0)
    results, _, attributes = line.partition(" custom-call(")
    constraints = re.search(r"operand_layout_constraints=\{(.*?\})\}", attributes)
    operands = constraints[1] if constraints else ""
    num_bytes = _num_bytes(results) + _num_bytes(operands)
    kernel = re.search(r"splash\w*?_(dq|dkv)_|flash\w*?_(dq|dkv)_|splash|flash", line)
    arrays = [tuple(map(int, sizes.split(","))) for sizes in re.findall(r"\bb?f(?:16|32)\[([\d,]+)\]", operands)]
    arrays = [sizes for sizes in arrays if len(sizes) > 2]  # query [.., T, H], key [.., S, H]
    if kernel is None or len(arrays) < 2:
        return 0, num_bytes
    num_products = {"dq": 3, "dkv": 4}.get(kernel[1] or kernel[2], 2)
    return 2 * num_products * math.prod(arrays[0]) * arrays[1][-2], num_bytes


def _num_bytes(result: str) -> int:
    """Of a result such as "(f32[2,3]{1,0}, s32[])".

    >>> _num_bytes("(f32[2,3]{1,0}, s32[])")
    28
    """
    return sum(_sizes(result))


def _result_bytes(result: str, kind: str, num_devices: int) -> int:
    """Of an exchange that has only been started, whose value holds its operands, its results and some flags.

    >>> _result_bytes("(f32[2], f32[8], u32[])", "all-gather", 4)
    32
    >>> _result_bytes("(f32[8], f32[2])", "reduce-scatter", 4)
    8
    """
    both = sum(size for size in _sizes(re.sub(r"\b[su]32\[\]", "", result)))
    operands_per_result = {"all-gather": 1 / num_devices, "reduce-scatter": num_devices}.get(kind, 1)
    return round(both if kind == "all-reduce" else both / (1 + operands_per_result))


def _sizes(result: str) -> list[int]:
    return [
        _BITS[dtype] * int(np.prod([int(size) for size in sizes.split(",") if size], dtype=np.int64)) // 8
        for dtype, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
        if dtype in _BITS
    ]


def _devices(line: str) -> tuple[int, ...]:
    """The first group of devices that exchange something.

    >>> _devices("replica_groups={{0,2},{1,3}}, "), _devices("replica_groups=[2,2]<=[4], ")
    ((0, 2), (0, 1))
    >>> _devices("replica_groups=[4,2]<=[2,4]T(1,0), ")
    (0, 4)
    >>> _devices("replica_groups=mesh['a'=2,'b'=4] {'a'}, "), _devices("source_target_pairs={{0,4},{4,0},{1,5}}")
    ((0, 4), (0, 4))
    """
    if pairs := re.search(r"source_target_pairs=\{(\S*)\}", line):
        following = {int(one): int(other) for one, other in re.findall(r"\{(\d+),(\d+)\}", pairs[1] + "}")}
        ring = [next(iter(following))]
        while (device := following.get(ring[-1])) is not None and device not in ring:
            ring.append(device)
        return tuple(ring)
    if groups := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return tuple(map(int, groups[1].split(",")))
    if groups := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return tuple(_iota(groups[3], groups[4]).reshape(int(groups[1]), int(groups[2]))[0].tolist())
    groups = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", line
    )
    if groups is None:
        raise ValueError(f"cannot read which devices take part in {line.strip()[:200]}")
    axes = dict(re.findall(r"'(\w+)'=(\d+)", groups[1]))
    taking_part = re.findall(r"'(\w+)'", groups[4])
    ids = _iota(groups[2] or ",".join(axes.values()), groups[3]).reshape([int(size) for size in axes.values()])
    return tuple(ids[tuple(slice(None) if axis in taking_part else 0 for axis in axes)].ravel().tolist())


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Device numbers in the notation of XLA: counted in one shape, its axes then reordered."""
    shape = [int(size) for size in sizes.split(",")]
    ids = np.arange(np.prod(shape)).reshape(shape)
    return ids if order is None else ids.transpose([int(axis) for axis in order.split(",")])


class _Sources:
    """Where the lines of a program come from, by the tables at its beginning."""

    def __init__(self, hlo: str):
        head = hlo.partition("\n\n%")[0]
        self._files = dict(re.findall(r'^(\d+) "(.*/.*)"$', head, re.M))
        self._locations = {
            number: (file, line)
            for number, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+) ", head, re.M)
        }
        self._frames = {
            int(number): (location, int(parent) - 1)  # parents are counted from 1, which is none
            for number, location, parent in re.findall(
                r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", head, re.M
            )
        }

    def operation(self, line: str) -> str:
        """The JAX operation."""
        found = re.search(r'op_name="([^"]*)"', line)
        return found[1] if found else ""

    def line(self, line: str) -> str:
        """File, line and the last part of the operation; of several files, the innermost of ours that tells a place."""
        operation = self.operation(line).rpartition("/")[2]
        frame = re.search(r"stack_frame_id=(\d+)", line)
        places = list(self._places(int(frame[1]))) if frame else []
        if not places:
            return operation or "made by the compiler"
        ours = (place for place in places if "/tfx_jax/" in place[0] and not place[0].endswith(_CALLED_EVERYWHERE))
        path, number = next(ours, places[0])
        return f"{'/'.join(path.split('/')[-3:])}:{number} {operation}".strip()

    def _places(self, frame: int) -> Iterator[tuple[str, str]]:
        while frame in self._frames:
            location, frame = self._frames[frame]
            file, number = self._locations.get(location, ("", ""))
            yield self._files.get(file, "?"), number
