"""The short convolution against conv1d, and its window as an exact state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d, pad

from kalman_attention.nn.short_conv import ShortConv, distinct_windows
from kalman_attention.ops import cpu

D, K = 5, 4


def make(kernel_size=K, dtype=torch.float64):
    torch.manual_seed(0)
    return ShortConv(D, kernel_size).to(dtype)


def tokens(B, T, dtype=torch.float64):
    return torch.randn(B, T, D, dtype=dtype)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 17])
def test_equals_conv1d(kernel_size, T):
    conv, x = make(kernel_size), tokens(2, T)
    padded = pad(x.transpose(1, 2), (kernel_size - 1, 0))
    expected = conv1d(padded, conv.weight.T.unsqueeze(1), conv.bias, groups=D).transpose(1, 2)
    torch.testing.assert_close(conv(x)[0], expected)


@pytest.mark.parametrize("T", [1, 2, 3, 5])
def test_gradients(T):
    conv = make()
    x, window = tokens(2, T).requires_grad_(), tokens(2, K - 1).requires_grad_()

    def run(x, window, weight, bias):
        return torch.func.functional_call(conv, {"weight": weight, "bias": bias}, (x, window))

    assert torch.autograd.gradcheck(run, (x, window, conv.weight, conv.bias))


@pytest.mark.parametrize("T", [2, 3])
def test_gradients_with_padding_and_with_packing(T):
    conv = make()
    x, window = tokens(2, T).requires_grad_(), tokens(2, K - 1).requires_grad_()
    mask = torch.tensor([[True] * (T - 1) + [False], [False] + [True] * (T - 1)])
    assert torch.autograd.gradcheck(lambda x, w: conv(x, w, mask), (x, window))
    row = x[:1].detach().requires_grad_()
    borders = torch.tensor([0, 1, T])
    assert torch.autograd.gradcheck(lambda x, w: conv(x, w, None, borders), (row, window))


@pytest.mark.parametrize("T", [1, 2, 3, 40])
@pytest.mark.parametrize("V", [1, 3])
def test_a_table_of_few_tokens(V, T):
    conv, table = make(), torch.randn(V, D + 2, dtype=torch.float64)
    ids = torch.randint(V, (40, T), generator=torch.Generator().manual_seed(1)) * (
        torch.arange(T) % 9 == 0
    )
    x = table[ids]
    u, window = conv(x[..., :D])
    found = conv.along(table, ids)
    assert found.ids is not None
    assert len(found.u) < ids.numel() / 4
    torch.testing.assert_close(found.u[found.ids], u)
    torch.testing.assert_close(found.x[found.ids], x)
    torch.testing.assert_close(found.window, window)
    plain = conv.along(
        table, ids, window=conv.init_window(40, x)
    )  # a given window is not looked at
    assert plain.ids is None
    torch.testing.assert_close(plain.u, u)
    torch.testing.assert_close(plain.x, x)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**31))
def test_distinct_windows(V, K, T, seed):
    ids = torch.randint(V, (40, T), generator=torch.Generator().manual_seed(seed))
    found = distinct_windows(ids, V, K)
    windows = pad(ids, (K - 1, 0), value=V).unfold(1, K, 1)
    count = len(windows.flatten(0, 1).unique(dim=0))
    if 4 * count > ids.numel():  # too many to be worth it
        assert found is None
    else:
        assert found is not None
        assert torch.equal(found.windows[found.ids], windows)
        assert len(found.windows) == count


def test_no_tokens_have_no_windows():
    assert distinct_windows(torch.zeros(4, 0, dtype=torch.int64), 3, 4) is None


def test_a_vocabulary_too_large_to_number_its_windows():
    assert distinct_windows(torch.zeros(4, 40, dtype=torch.int64), 2**16, 4) is None
    assert distinct_windows(torch.zeros(4, 40, dtype=torch.int64), 2**15, 4) is not None


def test_no_tokens():
    conv, window = make(), tokens(2, K - 1)
    y, after = conv(tokens(2, 0), window)
    assert y.shape == (2, 0, D)
    torch.testing.assert_close(after, window)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_any_chunks_equal_the_whole(sizes):
    conv, x = make(), tokens(2, sum(sizes))
    whole, last = conv(x)
    window, parts = None, []
    for part in x.split(sizes, 1):
        y, window = conv(part, window)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(window, last)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.booleans())
def test_padding_anywhere_is_not_seen(real, with_window):
    conv, mask = make(), torch.tensor([real])
    window = tokens(1, K - 1) if with_window else None
    x = tokens(1, len(real)).masked_fill(~mask.unsqueeze(-1), torch.nan)
    y, after = conv(x, window, mask)
    expected, last = conv(x[:, mask[0]], window)
    torch.testing.assert_close(y[:, mask[0]], expected)
    torch.testing.assert_close(after, last)
    assert bool((y[:, ~mask[0]] == 0).all())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.booleans())
def test_packed_documents_are_isolated(lengths, with_window):
    conv, x = make(), tokens(1, sum(lengths))
    window = tokens(len(lengths), K - 1) if with_window else None
    borders = torch.tensor([0, *lengths]).cumsum(0)
    y, after = conv(x, window, cu_seqlens=borders)
    for i, document in enumerate(x.split(lengths, 1)):
        alone, last = conv(document, None if window is None else window[i : i + 1])
        torch.testing.assert_close(y[:, borders[i] : borders[i + 1]], alone)
        torch.testing.assert_close(after[i : i + 1], last)


def test_step_equals_forward():
    conv, x = make(), tokens(3, 6)
    mask = torch.rand(3, 6) > 0.3
    expected, last = conv(x, mask=mask)
    window = conv.init_window(3, x)
    for t in range(6):
        y, window = conv(x[:, t], window, mask[:, t])
        torch.testing.assert_close(y, expected[:, t])
    torch.testing.assert_close(window, last)


def test_shorter_types_accumulate_in_float32():
    conv = make(dtype=torch.float32)
    x = tokens(2, 9, torch.bfloat16)
    y = conv.bfloat16()(x)[0]
    exact = conv.double()(x.double())[0]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, exact.bfloat16(), rtol=0.0, atol=1e-2)


def test_window_of_other_rows_is_refused():
    with pytest.raises(ValueError, match=r"one row per\s+sequence"):
        make()(tokens(2, 3), tokens(3, K - 1))
    with pytest.raises(ValueError, match="at least 1"):
        ShortConv(D, 0)


def test_without_a_bias():
    torch.manual_seed(0)
    plain, biased = ShortConv(3, bias=False), ShortConv(3)
    biased.load_state_dict({**plain.state_dict(), "bias": torch.zeros(3)})
    x, window = torch.randn(2, 5, 3), torch.randn(2, 3, 3)
    assert [name for name, _ in plain.named_parameters()] == ["weight"]
    torch.testing.assert_close(plain(x, window), biased(x, window))
    torch.testing.assert_close(plain(x[:, 0], window), biased(x[:, 0], window))


@pytest.mark.skipif(cpu.why_not() is not None, reason="needs the native library")
@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7])
@pytest.mark.parametrize("T", [0, 1, 3, 255, 256, 257, 700])
def test_the_native_pass_is_the_same_convolution(kernel_size, T):
    torch.manual_seed(T)
    channels = 530  # more than one block of channels
    exact = ShortConv(channels, kernel_size).double()
    native = ShortConv(channels, kernel_size)
    native.load_state_dict(exact.state_dict())
    exact.load_state_dict(native.state_dict())
    x = torch.randn(2, T, 2 * channels)[..., 3 : 3 + channels]
    window, dy = torch.randn(2, kernel_size - 1, channels), torch.randn(2, T, channels)
    assert cpu.can_convolve(x, window, native.weight, native.bias)
    results = []
    for conv in (native, exact):
        dtype = conv.weight.dtype
        given = [x.to(dtype).requires_grad_(), window.to(dtype).requires_grad_()]
        y, _ = conv(*given)
        leaves = [*given, conv.weight, conv.bias]
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(dtype))])
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5 * max(T, 1) ** 0.5)


@pytest.mark.skipif(cpu.why_not() is not None, reason="needs the native library")
def test_threads_change_no_bit():
    conv = ShortConv(300)
    x = torch.randn(3, 1500, 300).requires_grad_()
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        y, _ = conv(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, conv.weight, conv.bias])])
    torch.set_num_threads(before)
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True))
