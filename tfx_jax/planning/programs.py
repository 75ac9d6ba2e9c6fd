"""Reads a compiled program: collectives between devices, and the compiler's estimates of execution time.

The source is XLA's text of the program that really runs. Operations in loops count once per iteration; XLA's own
analyses count them once.
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

# libtpu's value for some operations that it does not estimate.
_NO_ESTIMATE = 10**12
# Most matrix products are in these files: their callers are more informative.
_CALLED_EVERYWHERE = ("/functional/linear.py", "/nn/linear.py")

# Name, result and operation of a line.
_OPERATION = re.compile(r"\s*(?:ROOT )?%?(\S+) = (.*?) ([\w-]+)\(")

# Operations that take long enough to hide a collective; of custom calls only libraries and kernels.
_COMPUTES = re.compile(
    r"\s*(?:ROOT )?%?\S+ = .*? (?:fusion|convolution|dot|while|call|conditional|sort|scatter)\("
    r'|.* custom-call\(.*custom_call_target="(?:__|tpu_custom_call)'
)


class Collective(NamedTuple):
    """A collective between devices in a compiled program."""

    kind: str
    """One of KINDS."""
    devices: tuple[int, ...]
    """Participating devices, of the first group."""
    num_bytes: int
    """Bytes of the result on one device."""
    count: int
    """Number of executions per run of the program."""
    is_async: bool
    """Whether the schedule computes something between the start and the end of the collective."""
    source: str
    """The JAX operation it comes from."""

    @property
    def moved(self) -> float:
        """Bytes that leave each device in all executions, with the usual ring algorithms."""
        num_devices = len(self.devices)
        # Bytes that a device sends, divided by those of its result.
        sent_per_result = {
            "all-gather": (num_devices - 1) / num_devices,
            "all-reduce": 2 * (num_devices - 1) / num_devices,
            "reduce-scatter": num_devices - 1,
            "all-to-all": (num_devices - 1) / num_devices,
            "collective-permute": 1,
        }
        return self.count * self.num_bytes * sent_per_result[self.kind]


class Operation(NamedTuple):
    """A line of source code and the compiler's estimate of its cycles."""

    source: str
    """File, line and JAX operation, such as "tfx_jax/nn/layers.py:95 dot_general"; or only the operation."""
    cycles: int
    """Cycles on one device in one run of the program."""


class Kernel(NamedTuple):
    """A hand-written kernel, as in Pallas, for which the compiler has no estimate.

    Its work is the `cost_estimate` of its author. Without one, it is derived from shapes: every operand is read and
    every result written once. An attention kernel (named splash or flash) makes 2 matrix products over all pairs, its
    gradients 3 (dq) and 4 (dkv), causal or not. Other kernels then have 0 FLOPs.
    """

    source: str
    """Source line, as in `Operation`."""
    flops: int
    """FLOPs on one device in one run of the program."""
    num_bytes: int
    """Bytes read and written on one device in one run of the program."""


class Program(NamedTuple):
    """Contents of a compiled program."""

    collectives: list[Collective]
    operations: list[Operation]
    """Slowest first; empty if the compiler estimates nothing, as for CPU and GPU."""
    kernels: list[Kernel]
    """Kernels of Mosaic, the Pallas compiler for TPUs."""

    @property
    def cycles(self) -> int:
        """Estimated cycles of all operations on one device, without collectives."""
        return sum(operation.cycles for operation in self.operations)


def read_program(hlo: str) -> Program:
    """Reads collectives, kernels of libtpu and estimated cycles from the text of a compiled program.

    Each is counted as often as its line runs, in loops too. Collectives with a single participating device are left
    out.
    """
    bodies = dict(_computations(hlo))  # lines of each function by its name
    sources = _Sources(hlo)
    program_collectives: list[Collective] = []
    # libtpu starts and ends a collective in fusions with overlapping computation, and repeats it in each of them. Maps
    # the channel and chain of such a collective, which all its copies share, to its index in `program_collectives`. The
    # channel alone is not enough: where JAX compiles equal layers as calls of one function, they share their channels.
    fused: dict[str, int] = {}
    kernels: list[Kernel] = []
    cycles = collections.Counter[str]()

    def walk(name: str, times: int, *, is_fused: bool = False) -> None:
        """Collects the lines of the function `name`, which runs `times` times, and of the functions that it calls."""
        for index, line in enumerate(bodies[name]):
            operation = _OPERATION.match(line)
            if operation is None:
                continue
            kind = operation[3]  # such as "fusion" or "while"
            chain = " ".join(re.findall(r'\bchannel_id=\d+|\bchain_id="\d+"', line)) if is_fused else ""
            if chain in fused:  # a copy; one in such a fusion shows that computation goes on meanwhile
                if name.startswith("async_collective_fusion"):
                    copied = fused[chain]
                    program_collectives[copied] = program_collectives[copied]._replace(is_async=True)
            elif collective := _collective(bodies[name], index, name):
                if chain:
                    fused[chain] = len(program_collectives)
                program_collectives.append(collective._replace(count=times, source=sources.operation(line)))
            if 'custom_call_target="tpu_custom_call"' in line:
                flops, num_bytes = _kernel_work(line)
                kernels.append(Kernel(sources.line(line), times * flops, times * num_bytes))
            # Inside a fusion every part has an estimate as well; the fusion's own estimate covers them.
            estimate = None if is_fused else re.search(r'"estimated_cycles":"(\d+)"', line)
            if estimate and int(estimate[1]) < _NO_ESTIMATE:
                cycles[sources.line(line)] += int(estimate[1]) * times
            for called, num_calls in _called(line, kind, bodies):
                walk(called, times * num_calls, is_fused=is_fused or kind == "fusion")

    walk(next(name for name in bodies if name.startswith("ENTRY ")), 1)
    operations = [Operation(source, estimate) for source, estimate in cycles.most_common()]
    return Program(program_collectives, operations, kernels)


def collectives(hlo: str) -> list[Collective]:
    """Reads only the collectives of a compiled program."""
    return read_program(hlo).collectives


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """Yields name and lines of each function of the program; the name of the entry function begins with "ENTRY "."""
    name, lines = "", []
    for line in hlo.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            name, lines = (header[1] or "") + header[2], []
        elif line.startswith("}") and not line.startswith("}}"):
            yield name, lines
        elif line.startswith(" ") or not lines:
            lines.append(line)
        else:  # continues a line: attributes of kernels contain line breaks
            lines[-1] += line


def _called(line: str, operation: str, bodies: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
    """Yields pairs (function, number of calls) of the functions that an operation calls."""
    if operation == "while":
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        parts = re.search(r"condition=%?([\w.-]+), body=%?([\w.-]+)", line)
        assert parts is not None
        yield parts[2], int(known[1]) if known else _num_iterations(bodies, parts[1])
    elif operation in ("call", "fusion", "async", "async-start"):
        for name in re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", line):
            yield name, 1
    elif operation == "conditional":
        # "branch_computations={%first, %second}", or "true_computation=%first, false_computation=%second".
        for names in re.findall(r"(?:branch_computations=\{|_computation=)([^,}]*(?:, %[^,}]*)*)", line):
            for name in names.split(", "):
                yield name.strip("% "), 1


def _num_iterations(bodies: dict[str, list[str]], condition: str) -> int:
    """Returns the iterations of a loop without a known trip count: the limit in its `condition`, or 1 if unknown."""
    lines = bodies[condition]
    for line in lines:
        if fused := re.search(r"ROOT .* calls=%?([\w.-]+)", line):
            lines = lines + bodies[fused[1]]
    limits = [limit[1] for line in lines if (limit := re.search(r"s32\[\]\S* constant\((\d+)\)", line))]
    is_counted = any("direction=LT" in line for line in lines)
    return int(limits[0]) if is_counted and len(limits) == 1 else 1


def _collective(body: list[str], index: int, function: str) -> Collective | None:
    """Returns the collective in line `index` of the function's `body`, with count 1 and without source.

    None if the line has no collective, or one with a single device.
    """
    match = _OPERATION.match(body[index])
    if match is None:
        return None
    name, result, operation = match.groups()
    kind = operation.removesuffix("-start")
    if kind not in KINDS or len(devices := _devices(body[index])) == 1:
        return None
    if operation != kind:  # the start of an asynchronous collective
        size = _result_bytes(result, kind, len(devices))
        is_async = _is_hidden(name, body[index + 1 :])
        return Collective(kind, devices, num_bytes=size, count=1, is_async=is_async, source="")
    size = _num_bytes(result)
    if function.startswith("all-reduce-scatter"):  # libtpu's fusion of an all-reduce and a slice of its result
        kind, size = "reduce-scatter", size // len(devices)
    return Collective(kind, devices, num_bytes=size, count=1, is_async=False, source="")


def _is_hidden(name: str, following: list[str]) -> bool:
    """Returns whether something is computed between the start of the collective `name` and its end."""
    for line in following:
        if re.search(rf"-done\(.*%{re.escape(name)}[,)]", line):
            return False
        if _COMPUTES.match(line):
            return True
    return False


def _kernel_work(line: str) -> tuple[int, int]:
    """Returns the pair (FLOPs, bytes) of one call of the kernel in a line of the program, see `Kernel`."""
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
    (query_shape, key_shape, *_) = arrays
    return 2 * num_products * math.prod(query_shape) * key_shape[-2], num_bytes  # 2 H FLOPs for each pair and product


def _num_bytes(result: str) -> int:
    """Returns the bytes of a result such as "(f32[2,3]{1,0}, s32[])".

    >>> _num_bytes("(f32[2,3]{1,0}, s32[])")
    28
    """
    return sum(_sizes(result))


def _result_bytes(result: str, kind: str, num_devices: int) -> int:
    """Returns the result bytes of the start of a collective, whose value holds operands, results and some flags.

    >>> _result_bytes("(f32[2], f32[8], u32[])", "all-gather", 4)
    32
    >>> _result_bytes("(f32[8], f32[2])", "reduce-scatter", 4)
    8
    """
    total = sum(_sizes(re.sub(r"\b[su]32\[\]", "", result)))  # without flags, which are integers of shape []
    if kind == "all-reduce":  # its value holds no operands
        return total
    # Bytes of the operands divided by those of the results.
    operands_per_result = {"all-gather": 1 / num_devices, "reduce-scatter": num_devices}.get(kind, 1)
    return round(total / (1 + operands_per_result))


def _sizes(result: str) -> list[int]:
    """Returns the bytes of each array in a result; see `_num_bytes`."""
    num_bytes = []
    for dtype, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result):  # such as ("f32", "2,3")
        if dtype in _BITS:
            num_elements = math.prod(int(size) for size in sizes.split(",") if size)
            num_bytes.append(_BITS[dtype] * num_elements // 8)
    return num_bytes


def _devices(line: str) -> tuple[int, ...]:
    """Returns the first group of participating devices.

    >>> _devices("replica_groups={{0,2},{1,3}}, "), _devices("replica_groups=[2,2]<=[4], ")
    ((0, 2), (0, 1))
    >>> _devices("replica_groups=[4,2]<=[2,4]T(1,0), ")
    (0, 4)
    >>> _devices("replica_groups=mesh['a'=2,'b'=4] {'a'}, "), _devices("source_target_pairs={{0,4},{4,0},{1,5}}")
    ((0, 4), (0, 4))
    """
    # A permutation lists pairs (source, target): follow them from the first source until they return to it or end.
    if pairs := re.search(r"source_target_pairs=\{(\S*)\}", line):
        target_of = {int(source): int(target) for source, target in re.findall(r"\{(\d+),(\d+)\}", pairs[1] + "}")}
        ring = [next(iter(target_of))]
        while (device := target_of.get(ring[-1])) is not None and device not in ring:
            ring.append(device)
        return tuple(ring)
    # Groups are explicit, {{0,2},{1,3}}; or the rows of a reshaped and transposed range, [4,2]<=[2,4]T(1,0); or devices
    # that differ along some axes of a mesh, mesh['a'=2,'b'=4] {'a'}.
    if groups := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return tuple(map(int, groups[1].split(",")))
    if groups := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        num_groups, group_size, sizes, order = groups.groups()
        return tuple(_iota(sizes, order).reshape(int(num_groups), int(group_size))[0].tolist())
    groups = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", line
    )
    if groups is None:
        raise ValueError(f"cannot read which devices take part in {line.strip()[:200]}")
    mesh, id_sizes, order, names = groups.groups()
    axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))  # size of each axis, as text
    varying_axes = re.findall(r"'(\w+)'", names)
    ids = _iota(id_sizes or ",".join(axes.values()), order).reshape([int(size) for size in axes.values()])
    # The first group: all devices along the varying axes, and number 0 along the others.
    first_group = ids[tuple(slice(None) if axis in varying_axes else 0 for axis in axes)]
    return tuple(first_group.ravel().tolist())


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Returns device numbers in XLA's notation: counted in one shape, whose axes are then transposed."""
    shape = [int(size) for size in sizes.split(",")]
    ids = np.arange(np.prod(shape)).reshape(shape)
    return ids if order is None else ids.transpose([int(axis) for axis in order.split(",")])


class _Sources:
    """Source locations of the lines of a program, from the tables of files, locations and frames at its beginning."""

    def __init__(self, hlo: str):
        head = hlo.partition("\n\n%")[0]
        self._files = dict(re.findall(r'^(\d+) "(.*/.*)"$', head, re.M))
        self._locations = {
            number: (file, line)
            for number, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+) ", head, re.M)
        }
        self._frames = {
            int(number): (location, int(parent) - 1)  # parent numbers are offset by 1; 1 means no parent
            for number, location, parent in re.findall(
                r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", head, re.M
            )
        }

    def operation(self, line: str) -> str:
        """Returns the name of the JAX operation of a line."""
        match = re.search(r'op_name="([^"]*)"', line)
        return match[1] if match else ""

    def line(self, line: str) -> str:
        """Returns file, line and last part of the operation; of several frames, the innermost useful one in tfx_jax."""
        operation = self.operation(line).rpartition("/")[2]
        frame = re.search(r"stack_frame_id=(\d+)", line)
        locations = list(self._stack(int(frame[1]))) if frame else []
        if not locations:
            return operation or "made by the compiler"
        informative = (
            location
            for location in locations
            if "/tfx_jax/" in location[0] and not location[0].endswith(_CALLED_EVERYWHERE)
        )
        path, number = next(informative, locations[0])
        return f"{'/'.join(path.split('/')[-3:])}:{number} {operation}".strip()

    def _stack(self, frame: int) -> Iterator[tuple[str, str]]:
        """Yields pairs (path, line number) of a stack frame and the frames that called it, innermost first."""
        while frame in self._frames:
            location, frame = self._frames[frame]
            file, number = self._locations.get(location, ("", ""))
            yield self._files.get(file, "?"), number
