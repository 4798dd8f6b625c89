"""The one compiled step-time function of all latency families, and the compiled inverse.

A model hands over all its parameters as one read-only float64 block (`packed`): a header, then the tables the header
points at. `step_time_packed(packed, shape)` is called inside the simulator's compiled step, so it allocates nothing.
Readable twins: `reference` of each family in `latency.py`, `latency_families.py` and `latency_tables.py`.
"""

from __future__ import annotations

from slacktide.core.kernels import compiled
from slacktide.core.packing import (
    AFFINE,
    AFFINE_VALUES,
    DECODE_GRID,
    DENSE,
    EXTENDED,
    EXTENDED_FLOOR,
    EXTENDED_KNOTS,
    EXTENDED_WEIGHTS,
    FAMILY,
    HOST_PER_SEQUENCE,
    HOST_PER_STEP,
    INCREMENT_GRID,
    INTERFERENCE,
    KV_SECONDS,
    MONOTONE,
    PER_SEQUENCE,
    POTENTIAL,
    PREFILL_GRID,
    PREFILL_LAUNCH,
    ROOFLINE,
    ROOFLINE_VALUES,
    SEVEN_FEATURE,
    SEVEN_VALUES,
    SKEW,
)
from slacktide.core.types import FloatArray, IntArray


@compiled
def curve_packed(packed: FloatArray, slot: int, x: float) -> float:
    """Value at x >= 0 of a uniform curve; `slot` holds (offset, count, step). Linear beyond both the last points."""
    offset = int(packed[slot])
    count = int(packed[slot + 1])
    position = x / packed[slot + 2]
    i = min(int(position), count - 2)
    low = packed[offset + i]
    return low + (position - i) * (packed[offset + i + 1] - low)  # type: ignore[no-any-return]


@compiled
def cell_packed(packed: FloatArray, offset: int, count: int, x: float) -> int:
    """Index i, 0..count-2, of the grid cell that holds x (the first or last cell for an x outside)."""
    low = 0
    high = count - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if packed[offset + middle] <= x:
            low = middle
        else:
            high = middle
    return low


@compiled
def grid2_packed(packed: FloatArray, slot: int, x: float, y: float) -> float:
    """Bilinear value of a grid; `slot` holds (offset, nx, ny), block = x nodes, y nodes, values[nx, ny].

    Held at the first node below the grid, linear beyond the last.
    """
    offset = int(packed[slot])
    nx = int(packed[slot + 1])
    ny = int(packed[slot + 2])
    nodes_y = offset + nx
    i = cell_packed(packed, offset, nx, x)
    j = cell_packed(packed, nodes_y, ny, y)
    fx = max((x - packed[offset + i]) / (packed[offset + i + 1] - packed[offset + i]), 0.0)
    fy = max((y - packed[nodes_y + j]) / (packed[nodes_y + j + 1] - packed[nodes_y + j]), 0.0)
    at = nodes_y + ny + i * ny + j
    low = packed[at] + fy * (packed[at + 1] - packed[at])
    high = packed[at + ny] + fy * (packed[at + ny + 1] - packed[at + ny])
    return low + fx * (high - low)  # type: ignore[no-any-return]


@compiled
def increment_packed(packed: FloatArray, chunk: float, cached: float, n: float, context: float) -> float:
    """What n decodes at a mean context add to the attention of a prefill chunk, from the measured mixed kernel.

    Multilinear over the four; chunk and cached are held at the ends of the grid, n and context run on linearly.
    """
    offset = int(packed[INCREMENT_GRID])
    nc = int(packed[INCREMENT_GRID + 1])
    nu = int(packed[INCREMENT_GRID + 2])
    nn = int(packed[INCREMENT_GRID + 3])
    nd = int(packed[INCREMENT_GRID + 4])
    base_u = offset + nc
    base_n = base_u + nu
    base_d = base_n + nn
    values = base_d + nd
    i = cell_packed(packed, offset, nc, chunk)
    j = cell_packed(packed, base_u, nu, cached)
    k = cell_packed(packed, base_n, nn, n)
    m = cell_packed(packed, base_d, nd, context)
    fc = (chunk - packed[offset + i]) / (packed[offset + i + 1] - packed[offset + i])
    fu = (cached - packed[base_u + j]) / (packed[base_u + j + 1] - packed[base_u + j])
    fc = min(max(fc, 0.0), 1.0)
    fu = min(max(fu, 0.0), 1.0)
    fn = max((n - packed[base_n + k]) / (packed[base_n + k + 1] - packed[base_n + k]), 0.0)
    fd = max((context - packed[base_d + m]) / (packed[base_d + m + 1] - packed[base_d + m]), 0.0)
    total = 0.0
    for a in range(2):
        wa = fc if a == 1 else 1.0 - fc
        for b in range(2):
            wb = wa * (fu if b == 1 else 1.0 - fu)
            at = values + (((i + a) * nu + j + b) * nn + k) * nd + m
            low = packed[at] + fd * (packed[at + 1] - packed[at])
            high = packed[at + nd] + fd * (packed[at + nd + 1] - packed[at + nd])
            total += wb * (low + fn * (high - low))
    return total


@compiled
def prefill_attention_packed(packed: FloatArray, shape: FloatArray, tokens: float, cached: float) -> float:
    """Attention of the chunks of a batch: from the potential, or from the measured (chunk, cached) grid.

    `cached` is the cached length that gives ONE chunk of `tokens` the attended pairs of the batch; negative when the
    batch has fewer pairs than a single prompt of that length, whose cost is then scaled by pairs.
    """
    if packed[PREFILL_GRID] == 0.0:
        return packed[PREFILL_LAUNCH] + shape[11]  # type: ignore[no-any-return]
    if cached >= 0.0:
        return grid2_packed(packed, PREFILL_GRID, tokens, cached)
    launch = packed[PREFILL_LAUNCH]
    share = 1.0 + 2.0 * cached / tokens
    return launch + max(grid2_packed(packed, PREFILL_GRID, tokens, 0.0) - launch, 0.0) * share  # type: ignore[no-any-return]


@compiled
def attention_packed(packed: FloatArray, shape: FloatArray) -> float:
    """Attention of all layers of a batch, seconds (family `tables`)."""
    tokens = shape[3]
    decodes = shape[8]
    total = 0.0
    cached = 0.0
    if tokens > 0.0:
        cached = (shape[5] - 0.5 * shape[6]) / tokens - 0.5 * tokens
        total = prefill_attention_packed(packed, shape, tokens, cached)
        # Many short chunks over long caches: no kernel is done before all their KV has been read.
        total = max(total, packed[KV_SECONDS] * (shape[4] + tokens))
    if decodes > 0.0:
        mean = shape[9] / decodes
        context = mean + packed[SKEW] * (shape[10] - mean)
        if tokens == 0.0:
            total += grid2_packed(packed, DECODE_GRID, decodes, context)
        elif packed[INCREMENT_GRID] == 0.0:
            total += packed[INTERFERENCE] * grid2_packed(packed, DECODE_GRID, decodes, context)
        else:
            total += increment_packed(packed, tokens, cached, decodes, context)
    return total


@compiled
def seven_feature_packed(packed: FloatArray, shape: FloatArray) -> float:
    """Linear expert of the batch's scene (decode, prefill, mixed), not below the floor."""
    at = SEVEN_VALUES + 1
    if shape[3] > 0.0:
        at += 8 if shape[8] == 0.0 else 16
    time = packed[at]
    time += packed[at + 1] * shape[5] + packed[at + 2] * shape[6] + packed[at + 3] * (shape[4] + shape[9])
    time += (
        packed[at + 4] * shape[8] + packed[at + 5] * shape[9] + packed[at + 6] * shape[3] + packed[at + 7] * shape[7]
    )
    return max(time, packed[SEVEN_VALUES])  # type: ignore[no-any-return]


@compiled
def extended_packed(packed: FloatArray, shape: FloatArray) -> float:
    """A piecewise-linear curve of the step's tokens plus linear terms, one expert per scene, not below the floor."""
    knots = int(packed[EXTENDED_KNOTS])
    count = int(packed[EXTENDED_KNOTS + 1])
    at = int(packed[EXTENDED_WEIGHTS])
    if shape[3] > 0.0:
        at += (1 if shape[8] == 0.0 else 2) * (count + 8)
    time = packed[at]
    n = shape[0]
    for i in range(count):
        low = packed[knots + i]
        if n <= low:
            break
        high = packed[knots + i + 1] if i + 1 < count else n
        time += packed[at + 1 + i] * (min(n, high) - low)
    at += count
    time += packed[at + 1] * shape[1] + packed[at + 2] * (shape[5] - 0.5 * shape[6]) + packed[at + 3] * shape[4]
    time += packed[at + 4] * shape[9] + packed[at + 5] * shape[8] + packed[at + 6] * shape[7]
    return max(time + packed[at + 7] * shape[2], packed[EXTENDED_FLOOR])  # type: ignore[no-any-return]


@compiled
def extended_features_packed(packed: FloatArray, shape: FloatArray, out: FloatArray) -> None:
    """What `extended_packed` weighs, as in `latency_extended.extended_features`: one step's into float64[8 + k]."""
    knots = int(packed[EXTENDED_KNOTS])
    count = int(packed[EXTENDED_KNOTS + 1])
    n = shape[0]
    out[0] = 1.0
    for i in range(count):
        low = packed[knots + i]
        high = packed[knots + i + 1] if i + 1 < count else max(n, low)
        out[1 + i] = max(min(n, high) - low, 0.0)
    at = count + 1
    out[at] = shape[1]
    out[at + 1] = shape[5] - 0.5 * shape[6]
    out[at + 2] = shape[4]
    out[at + 3] = shape[9]
    out[at + 4] = shape[8]
    out[at + 5] = shape[7]
    out[at + 6] = shape[2]


@compiled
def affine_packed(packed: FloatArray, shape: FloatArray) -> float:
    """alpha + beta n by scene; in a mixed batch n (1-r) r kappa = kappa * decodes * prefill tokens / n."""
    at = AFFINE_VALUES
    n = shape[0]
    prefill = shape[3]
    decodes = shape[8]
    if decodes == 0.0:
        return packed[at] + packed[at + 1] * n  # type: ignore[no-any-return]
    if prefill == 0.0:
        return packed[at + 2] + packed[at + 3] * n  # type: ignore[no-any-return]
    linear = packed[at + 1] * prefill + packed[at + 3] * decodes
    return packed[at + 4] + linear + packed[at + 5] * (decodes * prefill / n)  # type: ignore[no-any-return]


@compiled
def roofline_packed(packed: FloatArray, shape: FloatArray) -> float:
    """max(weight read, arithmetic) + element-wise + attention + host."""
    at = ROOFLINE_VALUES
    n = shape[0]
    arithmetic = packed[at + 2] * n + packed[at + 3] * shape[1]
    time = packed[at] + packed[at + 4] * shape[1] + max(packed[at + 1], arithmetic) + packed[at + 5] * n
    pairs = shape[5] - 0.5 * shape[6]
    prefill = max(packed[at + 6] * pairs, packed[at + 7] * (shape[4] + shape[3]))
    decode = packed[at + 7] * (shape[9] + shape[8])
    if shape[3] > 0.0:
        decode *= packed[at + 8]
    return time + prefill + decode  # type: ignore[no-any-return]


@compiled
def step_time_packed(packed: FloatArray, shape: FloatArray) -> float:
    """Seconds that a step takes for a batch of this shape (`core.shape`); 0 for an empty batch."""
    if shape[0] <= 0.0:
        return 0.0
    family = packed[FAMILY]
    if family == SEVEN_FEATURE:
        return seven_feature_packed(packed, shape)
    if family == EXTENDED:
        return extended_packed(packed, shape)
    if family == AFFINE:
        return affine_packed(packed, shape)
    if family == ROOFLINE:
        return roofline_packed(packed, shape)
    time = packed[HOST_PER_STEP] + packed[HOST_PER_SEQUENCE] * shape[1]
    time += curve_packed(packed, DENSE, shape[0]) + curve_packed(packed, PER_SEQUENCE, shape[1])
    return time + attention_packed(packed, shape)  # type: ignore[no-any-return]


@compiled
def potential_packed(packed: FloatArray, position: float) -> float:
    """V(position): attention cost in seconds of a prompt up to that position; 0 for a model without."""
    if packed[POTENTIAL] == 0.0:
        return 0.0
    return curve_packed(packed, POTENTIAL, position)


@compiled
def step_times_packed(packed: FloatArray, shapes: FloatArray, out: FloatArray) -> None:
    """`step_time_packed` of every row of shapes[m, 12] into out[m]."""
    for i in range(shapes.shape[0]):
        out[i] = step_time_packed(packed, shapes[i])


@compiled
def fill_packed(
    packed: FloatArray,
    prefill: float,
    remaining: IntArray,
    computed: IntArray,
    shape: FloatArray,
) -> None:
    """Set the prefill entries of `shape` to those of the queue filled in order with `prefill` tokens.

    The decode entries [8], [9], [10] stay; [0] and [1] are made to match.
    """
    for k in range(2, 8):
        shape[k] = 0.0
    shape[11] = 0.0
    left = prefill
    for i in range(remaining.size):
        if left <= 0.0:
            break
        c = min(float(remaining[i]), left)
        if c <= 0.0:
            continue
        left -= c
        u = float(computed[i])
        shape[2] += 1.0
        shape[3] += c
        shape[4] += u
        shape[5] += c * (u + c)
        shape[6] += c * c
        shape[7] = max(shape[7], c)
        if packed[POTENTIAL] != 0.0:
            shape[11] += potential_packed(packed, u + c) - potential_packed(packed, u)
    shape[0] = shape[3] + shape[8]
    shape[1] = shape[2] + shape[8]


@compiled
def max_tokens_packed(
    packed: FloatArray,
    time: float,
    num_decodes: int,
    decode_context: float,
    decode_max_context: float,
    remaining: IntArray,
    computed: IntArray,
    limit: int,
    shape: FloatArray,
) -> int:
    """Largest budget b in [num_decodes, limit] whose running-maximum time is <= time; 0 when the decodes do not fit.

    `shape` is scratch, float64[12]. A monotone model is bisected; another is walked token by token, because a dip in
    measured times must not hide a smaller budget that is too slow.
    """
    shape[8] = num_decodes
    shape[9] = decode_context
    shape[10] = decode_max_context
    fill_packed(packed, 0.0, remaining, computed, shape)
    if num_decodes > limit or not step_time_packed(packed, shape) <= time:
        return 0
    total = 0
    for i in range(remaining.size):
        total += max(remaining[i], 0)
    high = min(limit - num_decodes, total)
    fits = 0
    if packed[MONOTONE] != 0.0:
        while fits < high:
            middle = (fits + high + 1) >> 1
            fill_packed(packed, float(middle), remaining, computed, shape)
            if step_time_packed(packed, shape) <= time:
                fits = middle
            else:
                high = middle - 1
    else:
        fits = walk_packed(packed, time, high, remaining, computed, shape)
    return limit if fits == total else num_decodes + fits


@compiled
def walk_packed(
    packed: FloatArray, time: float, high: int, remaining: IntArray, computed: IntArray, shape: FloatArray
) -> int:
    """Most prefill tokens, at most `high`, before the first budget whose time exceeds `time`.

    Adds one token at a time to the shape left by the decodes alone, so that a budget costs one evaluation.
    """
    fits = 0
    i = 0
    while fits < high:
        while remaining[i] <= 0:
            i += 1
        u = float(computed[i])
        before = potential_packed(packed, u)
        potential = shape[11]
        shape[2] += 1.0
        shape[1] += 1.0
        shape[4] += u
        for c in range(1, min(remaining[i], high - fits) + 1):
            shape[0] += 1.0
            shape[3] += 1.0
            shape[5] += u + 2.0 * c - 1.0
            shape[6] += 2.0 * c - 1.0
            shape[7] = max(shape[7], float(c))
            if packed[POTENTIAL] != 0.0:
                shape[11] = potential + (potential_packed(packed, u + c) - before)
            if not step_time_packed(packed, shape) <= time:
                return fits
            fits += 1
        i += 1
    return fits
