"""The tasks again, slowly: targets from inputs alone, and the generating procedures in plain loops.

Nothing here uses the package beyond the options of a task.
"""

import functools
import itertools

from scipy.stats import chi2_contingency

IGNORE = -100


def recall_targets(row, num_keys, num_values):
    """Test targets of one row of recall; a value that contradicts an earlier one is an error."""
    bound, targets = {}, [IGNORE] * len(row)
    for t in range(0, len(row), 2):
        key, value = row[t], row[t + 1] if t + 1 < len(row) else None
        if key >= num_keys + num_values:  # noise: two tokens of it
            assert value >= num_keys + num_values
            continue
        assert key < num_keys
        if key in bound:
            targets[t] = bound[key]
            assert value in (None, bound[key])
        else:
            assert num_keys <= value < num_keys + num_values
            bound[key] = value
    return targets


def recall_row(task, rng):
    """The tokens of one row of recall, drawn as the task is described."""
    pairs, bound, shown, row = task.seq_len // 2, {}, [], []
    protected = rng.integers(pairs)
    for slot in range(pairs - 1):
        if slot != protected and rng.random() < task.noise:
            row += list(task.num_keys + task.num_values + rng.integers(task.noise_vocab, size=2))
            continue
        key = rng.integers(task.num_keys)
        if key not in bound:
            bound[key] = task.num_keys + rng.integers(task.num_values)
            shown.append(key)
        row += [key, bound[key]]
    key = shown[rng.integers(len(shown))]
    return [int(token) for token in (*row, key, bound[key])]


def fuzzy_pairs(row, num_keys, pad):
    """Padding and pairs (place of the key, key, value) of one row of fuzzy recall."""
    pads = next(i for i, token in enumerate(row) if token != pad)
    pairs, t = [], pads
    assert pad not in row[pads:]
    while t < len(row):
        start = t
        while t < len(row) and row[t] < num_keys:
            t += 1
        middle = t
        while t < len(row) and row[t] >= num_keys:
            t += 1
        pairs.append((start, tuple(row[start:middle]), tuple(row[middle:t])))
    return pads, pairs


def fuzzy_targets(row, num_keys, pad):
    """Test targets of one row; None if the last key was not shown before, which has no answer."""
    _, pairs = fuzzy_pairs(row, num_keys, pad)
    bound, targets = {}, [IGNORE] * len(row)
    for i, (start, key, value) in enumerate(pairs):
        last = i == len(pairs) - 1
        if key in bound:
            value = bound[key]
            first = start + len(key) - 1
            targets[first : first + len(value)] = value
        elif last:
            return None
        assert key not in bound or last or pairs[i][2] == bound[key]
        bound[key] = value
    return targets


@functools.cache
def motifs(letters, size):
    """All ordered choices of different letters."""
    return list(itertools.permutations(letters, size))


def fuzzy_row(task, split, rng):
    """The tokens of one row of fuzzy recall before padding, drawn as the task is described."""
    sizes = range(1, task.key_motif + 1) if split == "train" else [task.key_motif]
    letters = range(task.num_keys), range(task.num_keys, task.num_keys + task.num_values)

    def draw(letters, sizes):
        every = motifs(letters, sizes[rng.integers(len(sizes))])
        return every[rng.integers(len(every))]

    def draw_value():
        return draw(letters[1], range(1, task.value_motif + 1))

    probe, answer = draw(letters[0], sizes), draw_value()
    length = len(probe) + len(answer)
    place, placed = rng.integers(task.seq_len - 2 * length), False
    row, bound = [], {}
    while len(row) < task.seq_len - length - task.key_motif - task.value_motif:
        key = probe if len(row) >= place and not placed else draw(letters[0], sizes)
        if key == probe:
            bound[key], placed = answer, True
        elif key not in bound:
            bound[key] = draw_value()
        row += [*key, *bound[key]]
    return [*row, *probe, *answer]


def copying_row(task, rng):
    """The inputs of one row of selective copying, drawn as the task is described."""
    blank = task.vocab_size - 2
    content = [int(c) for c in rng.integers(blank, size=task.num_copied)]
    gaps = [0] * task.num_copied
    for _ in range(task.seq_len - 2 * task.num_copied - 1):
        gaps[rng.integers(task.num_copied)] += 1
    row = []
    for gap, token in zip(gaps, content, strict=True):
        row += [blank] * gap + [token]
    return [*row, blank + 1, *[blank] * task.num_copied]


def agree(ours, theirs, least=8):
    """Whether two samples of categories come from one distribution (chi-squared, p > 1e-4)."""
    categories = sorted({*ours, *theirs})
    counts = [[sample.count(c) for c in categories] for sample in (list(ours), list(theirs))]
    pooled, rest = [], [0, 0]
    for column in zip(*counts, strict=True):
        if sum(column) >= least:
            pooled.append(list(column))
        else:
            rest = [rest[0] + column[0], rest[1] + column[1]]
    if sum(rest) >= least:
        pooled.append(rest)
    if len(pooled) < 2:
        return True
    return chi2_contingency([list(row) for row in zip(*pooled, strict=True)]).pvalue > 1e-4
